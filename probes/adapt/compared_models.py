"""Models that an AdaRoPE model of a run is compared with: its checkpoint, and YaRN, from which the training started."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headscope.runs.run import Run
from headscope.runs.trainings import latest_checkpoints


@dataclass(frozen=True)
class ComparedModels:
    """Labels of the models that an AdaRoPE model is compared with; None if the run does not have them."""

    base: str
    yarn: str | None
    yarn_unscaled: str | None
    adarope: str

    @classmethod
    def find_in(cls, run: Run) -> "Iterator[ComparedModels]":
        """One comparison for every AdaRoPE model whose checkpoint the run also measured under its own positions.

        Of the adapters that one training saved, only the last counts. YaRN is the model with the frequencies from which
        the training started.
        """
        last = latest_checkpoints(run.manifest["models"])
        for model in run.manifest["models"]:
            adarope = model["label"]
            if adarope not in last or model["scheme_name"] != "adarope":
                continue
            schemes = {
                other["label"]: str(other["scheme"])
                for other in run.manifest["models"]
                if other["checkpoint"] == model["checkpoint"]
            }
            bases = [label for label, scheme in schemes.items() if scheme.startswith("base")]
            starts = {label: scheme for label, scheme in schemes.items() if scheme.startswith("yarn:")}
            starts = {label: scheme for label, scheme in starts.items() if _started_from(run, adarope, label)}
            yarn = next((label for label, scheme in starts.items() if "attention_factor" not in scheme), None)
            unscaled = next((label for label, scheme in starts.items() if "attention_factor=1" in scheme), None)
            if bases:
                yield cls(bases[0], yarn, unscaled, adarope)


def _started_from(run: Run, adarope: str, start_model: str) -> bool:
    """Whether the training of `adarope` started from the frequencies of `start_model`."""
    by_model = run.positions.groupby("model", observed=True)
    initial = by_model.get_group(adarope)["log_theta_init"]
    candidate = by_model.get_group(start_model)["log_theta"]
    return len(initial) == len(candidate) and np.allclose(initial, candidate, atol=1e-4)
