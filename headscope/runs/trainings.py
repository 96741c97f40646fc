"""Trainings: which models of a run are checkpoints of one, and the step from which each head has a role."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from headscope.base.model_spec import ModelSpec, SchemeSpec, normalized_scheme, shortest_distinct_names
from headscope.runs.column_metadata import columns_by_length, heads_with_role, measured_role_mask


def training_checkpoints(models: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """The models with a training step: columns label, training, step.

    Checkpoints in memory have no folder that names their training: they are named by what follows " \u00b7 " in the
    labels of combined runs. An AdaRoPE adapter whose name has no step belongs to no training. Checkpoints count as one
    training for each position scheme; the name of a training ends with the scheme if there are several. If two folders
    have the same name, the names of their trainings have more of the path.
    """
    rows = [
        {"label": model["label"], "training": training, "step": int(model["step"]), **_training_keys(model, training)}
        for model in models
        if model.get("step") is not None and (training := _training_name(model)) is not None
    ]
    if not rows:  # most runs of a folder, which the app searches
        return pd.DataFrame(columns=["label", "training", "step"])
    table = pd.DataFrame(rows)
    folders = table.groupby("training")["folder"].unique()
    for name in folders.index[folders.map(len) > 1]:
        has_name = table["training"] == name
        table.loc[has_name, "training"] = table["folder"][has_name].map(shortest_distinct_names([*folders[name]]))
    has_schemes = (table.groupby("training")["scheme"].transform("nunique") > 1) & (table["scheme"] != "base")
    table.loc[has_schemes, "training"] += " " + table["scheme"]
    return table[["label", "training", "step"]]


def latest_checkpoints(models: Sequence[Mapping[str, Any]]) -> list[str]:
    """Labels of all models except earlier checkpoints of a training."""
    checkpoints = training_checkpoints(models)
    last = checkpoints.sort_values("step", kind="stable").drop_duplicates("training", keep="last")["label"]
    earlier = {*checkpoints["label"]} - {*last}
    return [model["label"] for model in models if model["label"] not in earlier]


def measured_checkpoints(heads: pd.DataFrame, checkpoints: pd.DataFrame) -> pd.DataFrame:
    """The checkpoints (label, training, step) with heads, of trainings that have several steps of these."""
    measured = checkpoints[checkpoints["label"].isin(heads["model"].unique())]
    return measured[measured.groupby("training")["step"].transform("nunique") > 1]


def has_mixed_lengths(heads: pd.DataFrame) -> bool:
    """Whether the models were measured at different context lengths."""
    columns = columns_by_length(map(str, heads), "ess2")
    is_measured = heads[columns].notna()
    return bool(columns) and len(is_measured.groupby(heads["model"], observed=True).any().drop_duplicates()) > 1


def with_training_steps(heads: pd.DataFrame, checkpoints: pd.DataFrame) -> pd.DataFrame:
    """The heads of the models with a training step, by step, with the columns of `training_checkpoints`."""
    rows = heads.astype({"model": "str"}).merge(checkpoints, left_on="model", right_on="label", how="inner")
    return rows.sort_values("step", kind="stable")


def role_onsets(heads: pd.DataFrame, checkpoints: pd.DataFrame, roles: Sequence[str]) -> pd.DataFrame:
    """The step from which each head has a role: the first step from which it has the role at all later steps.

    Columns: training, role, layer, head, step, and `is_first`, whether that is the first step at which the role was
    measured. Steps at which it was measured for no head are left out, and so are trainings with one such step. A head
    without the role, or for which it was not measured, at the last step has no row.
    """
    rows = with_training_steps(heads, checkpoints)
    keys = rows[["training", "layer", "head", "step"]]
    onsets = [keys.head(0).assign(role="", is_first=False)]
    for role in roles:
        outcomes = keys.assign(has_role=heads_with_role(rows, role))[measured_role_mask(rows, role)]
        for training, of_training in outcomes.groupby("training"):
            by_head = of_training.groupby(["layer", "head", "step"])["has_role"].last().unstack("step")
            # A head for which the role was not measured at one of the steps counts as one without it there.
            lacks_role = ~by_head.fillna(False).to_numpy(dtype=bool)
            count, last_without = lacks_role.shape[1], np.argmax(lacks_role[:, ::-1], axis=1)
            first_places = np.where(lacks_role.any(axis=1), count - last_without, 0)
            has_role_at_end = first_places < count
            steps = by_head.columns.to_numpy()[first_places[has_role_at_end]]
            if count > 1 and len(steps):
                places = by_head.index[has_role_at_end].to_frame(index=False)
                is_first = steps == by_head.columns[0]
                onsets.append(places.assign(training=training, role=role, step=steps, is_first=is_first))
    columns = ["training", "role", "layer", "head", "step", "is_first"]
    return pd.concat(onsets[1:] or onsets, ignore_index=True)[columns]


def _training_keys(model: Mapping[str, Any], training: str) -> dict[str, str]:
    """The folder of the checkpoints of a training, and the position scheme of all of them."""
    text, options = str(model["scheme"]), model["scheme_options"]
    scheme = SchemeSpec(text, text.partition(":")[0], options)  # that of GPT-2, learned, is none that a user can name
    spec = ModelSpec(str(model["checkpoint"]), scheme=scheme)
    # AdaRoPE that is trained with the checkpoint, or is the checkpoint, has another adapter at every step.
    varies = spec.has_step_in_adapter or scheme.options.get("adapter", "").startswith(f"{spec.checkpoint}/")
    name = scheme.name if varies else normalized_scheme(scheme.text)
    return {"folder": spec.training_folder or training, "scheme": name}


def _training_name(model: Mapping[str, Any]) -> str | None:
    if model["training"] is not None or "adapter" in model["scheme_options"]:
        name: str | None = model["training"]
        return name
    return str(model["label"]).partition(" \u00b7 ")[2] or "training"
