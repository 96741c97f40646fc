"""Entries of run.json for tests without a model."""

from typing import Any

from headscope.base.model_spec import ModelSpec, SchemeSpec


def model_entry(label: str, checkpoint: str, scheme: str = "base", step: int | None = None) -> dict[str, Any]:
    """The fields of a model that name its checkpoint, scheme and training."""
    spec = ModelSpec(checkpoint, scheme=SchemeSpec.parse(scheme))
    return {
        "label": label,
        "checkpoint": checkpoint,
        "scheme": scheme,
        "scheme_options": spec.scheme.options,
        "training": spec.training_run,
        "step": step,
    }
