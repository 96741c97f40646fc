"""Analysis of ablations: mean change of the metric over prompts with intervals, and columns of the per-head table."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.runs.aggregation import HEAD_KEYS, confidence_interval, mean_with_interval, plain_types
from headscope.runs.column_metadata import Statistic
from headscope.runs.run_tables import RunTables
from probes.ablation.schema import ABLATION, KINDS

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        f"ablation_{kind}": Statistic(
            f"{kind} ablation on prompts",
            "logits or nats",
            f"change of the answer's metric under {kind} ablation of the head, mean over the prompts of all sets",
            number_format="+.3g",
        )
        for kind in KINDS
    }
)
SweepKey = tuple[str, str, str, str]
"""(model, prompts, metric, kind)."""


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """Columns `ablation_<kind>` by (model, layer, head, kv_group), each with its confidence interval over prompts."""
    if ABLATION.name not in run.tables:
        return None
    rows = with_change(run.table(ABLATION.name))
    rows = rows.assign(doc=rows["prompts"] + "/" + rows["pair"])
    groups: Any = rows.groupby("kind", sort=False)
    return pd.concat(
        [
            mean_with_interval(block.set_index([*HEAD_KEYS, "doc"])["change"], f"ablation_{kind}")
            for kind, block in groups
        ],
        axis=1,
    )


def sweeps(run: RunTables) -> list[tuple[SweepKey, pd.DataFrame]]:
    """Every sweep with one row per head: layer, head, kv_group, `name`, `change` (mean over prompts), `low`, `high`
    (95 % interval), `prompt_count`."""
    groups: Any = with_change(run.table(ABLATION.name)).groupby(["model", "prompts", "metric", "kind"], sort=False)
    result = []
    for key, rows in groups:
        table = rows.pivot_table(index=["layer", "head", "kv_group"], columns="pair", values="change")
        low, high = confidence_interval(table.to_numpy(dtype="float64"))
        means = {"change": table.mean(axis=1), "low": low, "high": high, "prompt_count": table.shape[1]}
        heads = pd.DataFrame(means).reset_index()
        names = [f"layer {layer}, head {head}" for layer, head in zip(heads["layer"], heads["head"], strict=True)]
        result.append((key, heads.assign(name=names)))
    return result


def with_change(table: pd.DataFrame) -> pd.DataFrame:
    """The rows with `change`: metric after minus metric before."""
    rows = plain_types(table)
    return rows.assign(change=rows["metric_after"] - rows["metric_before"])


def prompt_metrics(run: RunTables) -> dict[tuple[str, str, str], npt.NDArray[np.float64]]:
    """The metric of the unchanged run of every prompt, by (model, prompts, metric)."""
    keys = ["model", "prompts", "metric"]
    rows = plain_types(run.table(ABLATION.name)[[*keys, "pair", "metric_before"]].drop_duplicates([*keys, "pair"]))
    groups: Any = rows.groupby(keys, sort=False)
    return {key: group["metric_before"].to_numpy(np.float64) for key, group in groups}
