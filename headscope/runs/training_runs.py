"""Which models of a run are checkpoints of the same training."""

import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import pandas as pd

STEP_IN_NAME = re.compile(r"(?:(?:step|checkpoint|ckpt|iter)[-_]?\d+|^\d+)(?:\.safetensors)?$", re.IGNORECASE)


def training_checkpoints(models: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The models with a training step: columns label, training, step.

    A training is named by the folder of its checkpoints or adapters. Models measured in memory have no folder and are
    named by what follows " \u00b7 " in the labels of combined runs. An adapter without a step in its name stands alone.
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
    adapter = re.search(r"adapter=([^,]+)", str(model["scheme"]))
    for path in (str(model["checkpoint"]), adapter[1] if adapter else ""):
        if STEP_IN_NAME.search(PurePath(path).name):
            repository, colon, _ = path.rpartition(":")
            return (PurePath(repository).name if colon else PurePath(path).parent.name) or "training"
    if adapter:
        return None
    return str(model["label"]).partition(" \u00b7 ")[2] or "training"
