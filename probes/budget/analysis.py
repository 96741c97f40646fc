"""Analysis of budgets: change of the loss by share, area under the curve, largest share within the bound, answers.

All values are differences to the pass without streaming, paired by document. Random orders are averaged within a
document first, so that n is the number of documents.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.results.effects.sweep import Sweep, effects_table, sweep_effects
from headscope.runs.aggregation import mean_losses, plain_types
from headscope.runs.column_metadata import Statistic, exceeds, is_statistic, statistic
from headscope.runs.run_tables import RunTables
from probes.budget.declaration import ANSWERS, CACHE, EVERY_ORDER, LOSS, ORDERS, RANDOM, SETTINGS, TASKS
from probes.budget.streaming_order import streaming_count

ORDER_LABELS = {
    "effective-length": "effective length",
    "local-mass": "local mass",
    "far-mass": "far mass",
    RANDOM: "random order",
    EVERY_ORDER: "every order",
}


def order_label(order: str) -> str:
    """The name of an order in text: of a column of a run, the label of its statistic."""
    if order in ORDER_LABELS:
        return ORDER_LABELS[order]
    column = order.removeprefix("-")
    label = statistic(column).label if is_statistic(column) else column
    return f"{label}, highest first" if column != order else label


def describe_window(settings: pd.Series) -> str:
    """The tokens that a streaming KV group keeps: "the first 64 and last 256 tokens"."""
    return f"the first {int(settings['sink']):,} and last {int(settings['recent']):,} tokens"


LOWER_IS_BETTER = " (lower is better)"
"""End of the name of such a metric."""
CURVE_KEYS = ["model", "context_length", "order"]
SUMMARY_SWEEP = Sweep(keys=("model", "context_length", "order"), sample="doc", value="value", units=("statistic",))
"""The statistics of every document in an order (`document_summaries`)."""
STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "streaming_share": Statistic(
            "largest streaming share",
            "",
            "largest share of the KV groups that can stream, in the best order, before the loss rises by more than the "
            "bound",
            number_format=".0%",
            by_length=True,
        )
    }
)


def loss_changes(run: RunTables) -> pd.DataFrame:
    """Change of the loss (nats/token) by model, context_length, order, doc (index) and share (columns).

    Random orders are averaged over draws. A share that another run measured is NaN, see `complete_curve`.
    """
    rows = _rows(run, LOSS.name)
    losses = mean_losses(rows, ["model", "context_length", "doc", "order", "draw", "share"]).loc[
        [*rows["model"].unique()]
    ]
    return _changes(losses.rename("value"), ["model", "context_length", "doc"]).reorder_levels([*CURVE_KEYS, "doc"])


def answer_changes(run: RunTables, column: str) -> pd.DataFrame:
    """`nll` (change, nats/token) or `success` (0 to 1) of answers by model, prompts, order, pair (index) and share."""
    rows = _rows(run, ANSWERS.name)
    values = rows.astype({column: "float64"}).set_index(["model", "prompts", "pair", "order", "draw", "share"])[column]
    keys = ["model", "prompts", "pair"]
    changes = _changes(values.rename("value"), keys, subtract=column == "nll")
    return changes.reorder_levels(["model", "prompts", "order", "pair"])


def task_scores(run: RunTables) -> pd.DataFrame:
    """Scores on tasks of the harness by model, task (with its metric and filter), order, document (index) and share."""
    rows = _rows(run, TASKS.name)
    keys = ["model", "task", "document", "order", "draw", "share"]
    values = rows.assign(task=_metric_names(rows)).astype({"score": "float64"}).set_index(keys)["score"].rename("value")
    changes = _changes(values, ["model", "task", "document"], subtract=False)
    return changes.reorder_levels(["model", "task", "order", "document"])


def _metric_names(rows: pd.DataFrame) -> pd.Series:
    """The name of each row's task and metric: "arc_easy acc", with a filter and the direction where they matter."""
    filters = rows["filter"].where(rows["filter"] != "none", "").radd(" ").str.rstrip()
    lower = np.where(rows["higher_is_better"], "", LOWER_IS_BETTER)
    return rows["task"] + " " + rows["metric"] + filters + lower


def loss_changes_by_position(run: RunTables, model: str, context_length: int, order: str) -> pd.DataFrame:
    """Mean change of the loss over documents of one order: index position, columns share."""
    rows = _rows(run, LOSS.name)
    rows = rows[(rows["model"] == model) & (rows["context_length"] == context_length)]
    values = rows.set_index(["position", "doc", "order", "draw", "share"])["nll"].rename("value")
    changes = _changes(values, ["position", "doc"])
    return pd.DataFrame(changes.xs(order, level="order")).groupby("position").mean()


def curves(changes: pd.DataFrame) -> pd.DataFrame:
    """Mean of every curve with its 95 % confidence interval: the keys of the curve, share, mean, low, high, n."""
    *keys, sample = map(str, changes.index.names)
    sweep = Sweep(keys=tuple(keys), sample=sample, value="change", units=("share",))
    rows = changes.reset_index().melt([*keys, sample], value_name="change").dropna()
    table = effects_table(sweep_effects(rows, sweep, [*changes.index.unique("model")]))
    return table.rename(columns={"effect": "mean"})[[*keys, "share", "mean", "low", "high", "n"]]


def document_summaries(run: RunTables) -> pd.DataFrame:
    """By model, context_length, order and doc (index): area under the curve of the change of the loss, its difference
    to random orders (area_vs_random), and the largest share within the bound (largest_share)."""
    changes, bounds = run.derived(loss_changes), _rows(run, SETTINGS.name).set_index("model")["bound"]
    blocks = []
    groups: Any = changes.groupby(["model", "context_length"], sort=False)
    for (model, _), rows_of_length in groups:
        block = complete_curve(rows_of_length)
        areas = pd.Series(np.trapezoid(block.to_numpy(), block.columns.to_numpy(dtype=np.float64), axis=1), block.index)
        table = pd.DataFrame({"area": areas, "largest_share": largest_shares(block, float(bounds[model]))})
        by_order = areas.unstack("order")
        table["area_vs_random"] = np.nan
        if RANDOM in by_order and len(by_order.columns) > 1:
            differences = by_order.drop(columns=RANDOM).sub(by_order[RANDOM], axis=0).stack()
            table["area_vs_random"] = differences.reorder_levels(block.index.names)
        blocks.append(table)
    return pd.concat(blocks)


def summaries(run: RunTables) -> pd.DataFrame:
    """One row per model, context_length and order: the mean over documents of each column of `document_summaries`,
    with `_low` and `_high`, and n."""
    table = run.derived(document_summaries)
    groups: Any = table.groupby(CURVE_KEYS, sort=False)
    rows = table.reset_index().melt([*CURVE_KEYS, "doc"], var_name="statistic").dropna()
    units = effects_table(sweep_effects(rows, SUMMARY_SWEEP, [*table.index.unique("model")])).set_index(CURVE_KEYS)
    columns = [groups.size().rename("n")]
    for name in table:
        of_column = units.loc[units["statistic"] == name, ["effect", "low", "high"]]
        columns.append(of_column.set_axis([name, f"{name}_low", f"{name}_high"], axis=1))
    summary = pd.DataFrame(pd.concat(columns, axis=1))
    ends = ["largest_share_low", "largest_share_high"]
    summary[ends] = summary[ends].clip(0, 1)
    return summary.reset_index()


def model_statistics(run: RunTables) -> pd.DataFrame | None:
    """`streaming_share_<L>` with `_low` and `_high` by model: the largest share in the best order at each length."""
    if LOSS.name not in run.tables:
        return None
    values: dict[str, dict[str, float]] = {}
    groups: Any = run.derived(summaries).groupby(["model", "context_length"], sort=False)
    for (model, length), rows in groups:
        best = best_order(rows)
        columns = {
            f"streaming_share_{length}{end}": float(best[f"largest_share{end}"]) for end in ("", "_low", "_high")
        }
        values.setdefault(model, {}).update(columns)
    return pd.DataFrame.from_dict(values, orient="index")


def best_order(rows: pd.DataFrame) -> pd.Series:
    """The measured order (not random, if there is another) of the smallest area, from the summaries of one curve."""
    others = rows[rows["order"] != RANDOM]
    return (others if len(others) else rows).sort_values("area", kind="stable").iloc[0]


def streaming_groups(run: RunTables, rows: pd.DataFrame) -> tuple[pd.Series, list[pd.DataFrame]]:
    """The largest measured share that can stream in the best order of one curve, whose summaries are `rows`, and its
    KV groups.

    Returns the point of the curve at that share (share, mean, low, high), and the KV groups (layer, kv_group) of the
    order of each half of the documents.
    """
    best = best_order(rows)
    points = curves(run.derived(loss_changes))
    points = points[(points[CURVE_KEYS] == best[CURVE_KEYS]).all(axis=1)]
    point = points[points["share"] <= best["largest_share"] + 1e-6].sort_values("share").iloc[-1]
    ranks = plain_types(run.table(ORDERS.name))
    ranks = ranks[(ranks["model"] == best["model"]) & (ranks["order"] == best["order"]) & (ranks["draw"] == 0)]
    halves = [half.loc[half["rank"] < round(point["share"] * len(half))] for _, half in ranks.groupby("half")]
    return point, [half[["layer", "kv_group"]].sort_values(["layer", "kv_group"]) for half in halves]


def largest_shares(changes: pd.DataFrame, bound: float) -> npt.NDArray[np.float64]:
    """For each document (row), the largest measured share up to which the loss never rises by more than the bound."""
    within = np.logical_and.accumulate((~exceeds(changes, bound)).to_numpy(), axis=1)
    shares = changes.columns.to_numpy(dtype=np.float64)
    return np.asarray(shares[within.sum(axis=1) - 1])  # a share of 0 changes nothing


def cache_sizes(run: RunTables) -> pd.DataFrame:
    """Size of the KV cache: model, context_length, order, share, and the means over draws and halves of the documents
    of cache_bytes and full_bytes."""
    rows = _rows(run, CACHE.name)
    keys = [*CURVE_KEYS, "share"]
    return rows.groupby(keys, sort=False)[["groups", "cache_bytes", "full_bytes"]].mean().reset_index()


def _changes(values: pd.Series, keys: list[str], subtract: bool = True) -> pd.DataFrame:
    """Values by (*keys, order) and share: those of all orders (`EVERY_ORDER`) at 0 and 1 belong to each order.

    Draws are averaged; with `subtract`, the value at share 0 is subtracted.
    """
    means = values.groupby([*keys, "order", "share"], sort=False).mean()
    models_in_order = pd.MultiIndex.from_frame(means.reset_index()[[*keys, "order"]].drop_duplicates())
    table = means.unstack("share").reindex(models_in_order)  # unstack sorts
    ends = table.xs(EVERY_ORDER, level="order")
    table = table.drop(EVERY_ORDER, level="order") if len(table.index.unique("order")) > 1 else table
    index = table.reset_index("order").index
    for share in (0.0, 1.0):
        if share in ends:
            table[share] = ends[share].reindex(index).to_numpy()
    table = table.reindex(columns=sorted(table.columns))
    return table.sub(table[0.0], axis=0) if subtract else table


def complete_curve(changes: pd.DataFrame) -> Any:
    """The shares (columns) at which one model was measured, and the rows that have a value at all of them.

    Models of combined runs differ in shares.
    """
    return changes.dropna(axis=1, how="all").dropna()


def _rows(run: RunTables, table: str) -> pd.DataFrame:
    """The rows of a table with shares rounded to the digits that float32 keeps."""
    rows = plain_types(run.table(table))
    return rows.assign(share=rows["share"].round(6)) if "share" in rows else rows


def loss_by_kept_keys(run: RunTables) -> pd.DataFrame | None:
    """The table of `Probe.loss_by_kept_keys`, a rule `budget ORDER:SHARE` for each order and share of the KV groups.

    A head that does not stream keeps all earlier keys; a streaming one keeps the first and last tokens of the setting,
    of rows that see as many.
    """
    if LOSS.name not in run.tables:
        return None
    rows = run.derived(loss_changes).reset_index().melt([*CURVE_KEYS, "doc"], var_name="share", value_name="change")
    rows = rows[(rows["share"] > 0) & (rows["share"] < 1)].dropna()
    rows = rows.merge(run.table(SETTINGS.name).astype({"model": "str"}), on="model")
    visible = (rows["context_length"] + 1) / 2
    limits = zip(rows["context_length"], rows["sink"] + rows["recent"], strict=True)
    streaming = [np.minimum(np.arange(1, length + 1), most).mean() for length, most in limits]
    counts = [streaming_count(share, groups) for share, groups in zip(rows["share"], rows["groups"], strict=True)]
    share = np.array(counts) / rows["groups"]
    rows["rule"] = [f"budget {order}:{size:g}" for order, size in zip(rows["order"], rows["share"], strict=True)]
    return rows.assign(kept=(1 - share) * visible + share * streaming, visible=visible)
