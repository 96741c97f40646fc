"""Which models of a run are checkpoints of trainings from scratch: told by the folders that they were opened from."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from headscope.runs.run import Run
from probes.pretrain.options import Variant

CHECKPOINT_FOLDER_PATTERN = re.compile(rf"(?:^|/)({'|'.join(get_args(Variant))})-s(\d+)/step-(\d+)/?$")


class TrainingKey(NamedTuple):
    """One training: what was trained, and the seed of its weights and batches."""

    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}-s{self.seed}"


def checkpoint_labels(run: Run) -> dict[TrainingKey, dict[int, str]]:
    """The models of each training: step -> label, in the order of the run."""
    found: dict[TrainingKey, dict[int, str]] = {}
    for model in run.manifest["models"]:
        if told := CHECKPOINT_FOLDER_PATTERN.search(model["checkpoint"]):
            found.setdefault(TrainingKey(told[1], int(told[2])), {})[int(told[3])] = model["label"]
    return found


def final_checkpoint_labels(run: Run) -> dict[TrainingKey, str]:
    """The label of the last model of each training, of those trainings that have come as far as the furthest."""
    every = checkpoint_labels(run)
    end = max((max(steps) for steps in every.values()), default=0)
    return {training: steps[end] for training, steps in every.items() if end in steps}


def native_context(run: Run, label: str) -> int:
    """The length in tokens that a model was trained on."""
    model: Mapping[str, Any] = next(each for each in run.manifest["models"] if each["label"] == label)
    return int(model["geometry"].get("native_context", 0))
