"""Which models of a run are checkpoints of trainings from scratch: told by the folders that they were opened from."""

import re
from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from headscope.runs.run import Run
from probes.pretrain.options import Variant

FOLDER = re.compile(rf"(?:^|/)({'|'.join(get_args(Variant))})-s(\d+)/step-(\d+)/?$")


class Training(NamedTuple):
    """One training: what was trained, and the seed of its weights and batches."""

    variant: str
    seed: int

    @property
    def name(self) -> str:
        return f"{self.variant}-s{self.seed}"


def checkpoints(run: Run) -> dict[Training, dict[int, str]]:
    """The models of each training: step -> label, in the order of the run."""
    found: dict[Training, dict[int, str]] = {}
    for model in run.manifest["models"]:
        if told := FOLDER.search(model["checkpoint"]):
            found.setdefault(Training(told[1], int(told[2])), {})[int(told[3])] = model["label"]
    return found


def last(run: Run) -> dict[Training, str]:
    """The label of the last model of each training, of those trainings that have come as far as the furthest."""
    every = checkpoints(run)
    end = max((max(steps) for steps in every.values()), default=0)
    return {training: steps[end] for training, steps in every.items() if end in steps}


def native(run: Run, label: str) -> int:
    """The length in tokens that a model was trained on."""
    model: Mapping[str, Any] = next(each for each in run.manifest["models"] if each["label"] == label)
    return int(model["geometry"].get("native_context", 0))
