"""The training runs whose checkpoints a run compares."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd


def training_checkpoints(models: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The models with a training step: columns label, training, step.

    Checkpoints in memory have no folder that names their training: they are named by what follows " \u00b7 " in the
    labels of combined runs. An AdaRoPE adapter whose name has no step belongs to no training.
    """
    rows = [
        {"label": model["label"], "training": training, "step": int(model["step"])}
        for model in models
        if model.get("step") is not None and (training := _training_name(model)) is not None
    ]
    return pd.DataFrame(rows, columns=["label", "training", "step"])


def latest_checkpoints(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Labels of all models except earlier checkpoints of a training."""
    checkpoints = training_checkpoints(models)
    last = checkpoints.sort_values("step", kind="stable").drop_duplicates("training", keep="last")["label"]
    earlier = {*checkpoints["label"]} - {*last}
    return [model["label"] for model in models if model["label"] not in earlier]


def _training_name(model: Mapping[str, Any]) -> str | None:
    if model["training"] is not None or "adapter" in model["scheme_options"]:
        name: str | None = model["training"]
        return name
    return str(model["label"]).partition(" \u00b7 ")[2] or "training"
