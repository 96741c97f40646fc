"""Which models of a run are checkpoints of which training: told by where they lie, and by their steps."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import pandas as pd

STEP_IN_NAME = re.compile(r"(?:(?:step|checkpoint|ckpt|iter)[-_]?\d+|^\d+)(?:\.safetensors)?$", re.IGNORECASE)


def training_checkpoints(models: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The models that carry a step: rows label, training, step.

    A training goes by the folder that its checkpoints or adapters lie in; one that was measured in memory has none, and
    goes by what follows " \u00b7 " in its labels, where several runs are read as one. An adapter whose name tells no
    step is one by itself, and not a point of a training.
    """
    rows = [
        {"label": model["label"], "training": training, "step": int(model["step"])}
        for model in models
        if model.get("step") is not None and (training := _training_name(model)) is not None
    ]
    return pd.DataFrame(rows, columns=["label", "training", "step"])


def latest_checkpoints(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """The labels of the models that are not an earlier checkpoint of a training."""
    course = training_checkpoints(models)
    last = course.sort_values("step", kind="stable").drop_duplicates("training", keep="last")["label"]
    before = {*course["label"]} - {*last}
    return [model["label"] for model in models if model["label"] not in before]


def _training_name(model: Mapping[str, Any]) -> str | None:
    adapter = re.search(r"adapter=([^,]+)", str(model["scheme"]))
    for place in (str(model["checkpoint"]), adapter[1] if adapter else ""):
        if STEP_IN_NAME.search(PurePath(place).name):
            repository, colon, _ = place.rpartition(":")
            return (PurePath(repository).name if colon else PurePath(place).parent.name) or "training"
    if adapter:
        return None
    return str(model["label"]).partition(" \u00b7 ")[2] or "training"
