"""Results of the budget probe: largest shares, orders against random ones, memory, answers and scores on tasks."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from headscope.rendering.blocks import Overview
from headscope.results.result import Bound, Result, Scalar
from headscope.results.samples import allow_for_choice, mean_result
from headscope.results.verdicts import judge
from headscope.runs.aggregation import plain_types
from headscope.runs.run import Run
from probes.budget.analysis import (
    CURVE_KEYS,
    LOWER_IS_BETTER,
    answer_changes,
    best_order,
    cache_sizes,
    complete_curve,
    document_summaries,
    order_label,
    summaries,
    task_scores,
)
from probes.budget.declaration import ANSWERS, LOSS, RANDOM, SETTINGS, STABILITY, TASKS

ORDER_QUESTIONS = {
    "area": "budget.area",
    "area_vs_random": "budget.area_vs_random",
    "largest_share": "budget.share_in_order",
}
"""Column of the summaries -> question about one order."""


def results(run: Run) -> Iterator[Result]:
    """Per model and context length: the largest share, the order against random orders, every order; memory at the
    longest length; answers; tasks."""
    if LOSS.name not in run.tables:
        return
    table = run.derived(summaries)
    groups: Any = table.groupby(["model", "context_length"], sort=False)
    for (model, length), rows in groups:
        best = best_order(rows)
        yield largest_share(run, rows)
        if RANDOM in set(rows["order"]) and best["order"] != RANDOM:
            yield _order_gain(run, rows)
        for row in rows.to_dict("records"):
            yield from order_results(run, row).values()
        if length == table.loc[table["model"] == model, "context_length"].max():
            yield from _cache_size(run, best)
            yield from _stability(run, best)
    if ANSWERS.name in run.tables:
        yield from _answer_results(run)
    if TASKS.name in run.tables:
        yield from _task_results(run)


def largest_share(run: Run, rows: pd.DataFrame) -> Result:
    """The largest share in the best order, from the summaries of one model and length."""
    best = best_order(rows)
    settings = plain_types(run.table(SETTINGS.name)).set_index("model").loc[best["model"]]
    measured = _measured_orders(rows)
    details: dict[str, Any] = {name: int(settings[name]) for name in ("groups", "sink", "recent")}
    details |= {"max_rise": settings["bound"], "orders": measured if measured > 1 else None}
    return _summary_result(run, "budget.largest_share", best.to_dict(), "largest_share", details)


def _measured_orders(rows: pd.DataFrame) -> int:
    return int((rows["order"] != RANDOM).sum())


def _order_gain(run: Run, rows: pd.DataFrame) -> Result:
    """Whether the best order costs less than random orders; its interval allows for the choice of the order."""
    orders = _measured_orders(rows)
    result = _summary_result(run, "budget.order_gain", best_order(rows).to_dict(), "area_vs_random")
    return judge(allow_for_choice(result, orders, (-math.inf, math.inf)), Bound("below"))


def order_results(run: Run, row: Mapping[Any, Any]) -> dict[str, Result]:
    """Area, its difference from that of random orders, and largest share of one order, by column of the summaries."""
    columns = {name: question for name, question in ORDER_QUESTIONS.items() if not np.isnan(row[name])}
    return {
        name: _summary_result(run, question, row, name, where={"order": row["order"]})
        for name, question in columns.items()
    }


def _summary_result(
    run: Run,
    question: str,
    row: Mapping[Any, Any],
    column: str,
    details: Mapping[str, Any] | None = None,
    where: Mapping[str, Scalar] | None = None,
) -> Result:
    """A column of one row of the summaries."""
    table = run.derived(document_summaries).reset_index()
    is_curve = (table[CURVE_KEYS] == [row[name] for name in CURVE_KEYS]).all(axis=1)
    return mean_result(
        question,
        table[is_curve].set_index("doc")[column].dropna(),
        (0, 1) if column == "largest_share" else (-math.inf, math.inf),
        model=row["model"],
        where={"context_length": int(row["context_length"]), **(where or {})},
        details={"order_label": order_label(row["order"]), **(details or {})},
    )


def _cache_size(run: Run, best: pd.Series) -> Iterator[Result]:
    """The size of the KV cache at the measured share nearest to the largest one, at the longest length, if any group
    can stream."""
    sizes = run.derived(cache_sizes)
    rows = sizes[(sizes["model"] == best["model"]) & (sizes["order"] == best["order"])]
    rows = rows[rows["context_length"] == rows["context_length"].max()]
    row = rows.iloc[int((rows["share"] - best["largest_share"]).abs().argmin())]
    if row["share"] > 0:
        where = {"context_length": int(row["context_length"])}
        details = {"share": row["share"], "full": row["full_bytes"]}
        yield Result(
            question="budget.cache_size", model=best["model"], value=row["cache_bytes"], where=where, details=details
        )


def _stability(run: Run, best: pd.Series) -> Iterator[Result]:
    """Whether the streaming KV groups depend on the sampled query rows, at the share nearest to the largest one."""
    if STABILITY.name not in run.tables:
        return
    rows = plain_types(run.table(STABILITY.name))
    rows = rows[(rows["model"] == best["model"]) & (rows["order"] == best["order"])]
    if rows.empty:
        return
    means = rows.groupby("share")[["kept", "same_set"]].mean()
    share = min(means.index, key=lambda measured: abs(measured - best["largest_share"]))
    kept, same = means.loc[share]
    details = {"share": share, "same": same, "order_label": order_label(best["order"])}
    unstable = 1 - kept if kept < 1 else None
    yield Result(
        question="budget.stability", model=best["model"], value=kept, details={**details, "unstable": unstable}
    )


def _answer_results(run: Run) -> Iterator[Result]:
    """Right answers with half of the KV groups streaming, in each order."""
    groups: Any = answer_changes(run, "success").groupby(["model", "prompts"], sort=False)
    for (model, prompts), block in groups:
        yield from changes_at_half("budget.right_answers", model, {"prompts": prompts}, block)


def _task_results(run: Run) -> Iterator[Result]:
    """Scores on tasks with half of the KV groups streaming, and the verdict on the order whose loss rises least.

    That order is selected by the loss on documents, not by the scores that are judged here.
    """
    losses = run.derived(summaries)
    groups: Any = task_scores(run).groupby(["model", "task"], sort=False)
    for (model, task), block in groups:
        of_model = losses[losses["model"] == model]
        best = best_order(of_model[of_model["context_length"] == of_model["context_length"].max()])["order"]
        worse = Bound("above" if task.endswith(LOWER_IS_BETTER) else "below")
        for result in changes_at_half("budget.task_score", model, {"task": task}, block):
            yield judge(result, worse) if result.where["order"] == best else result


def changes_at_half(question: str, model: str, where: Mapping[str, Scalar], scores: pd.DataFrame) -> Iterator[Result]:
    """For each order, the change of the mean score at the share next to one half, paired by item."""
    block = complete_curve(scores)
    middle = float(min(block.columns, key=lambda share: abs(share - 0.5)))
    for order, rows in block.groupby("order", sort=False):
        changes = (rows[middle] - rows[0.0]).droplevel([*range(block.index.nlevels - 1)])
        yield mean_result(
            question,
            changes,
            model=model,
            where={**where, "order": order, "share": middle},
            details={
                "order_label": order_label(order),
                "streaming": rows[middle].mean(),
                "whole": rows[0.0].mean(),
            },
        )


def overview(run: Run) -> Overview | None:
    """Summaries by model, context length and order, for JSON."""
    return Overview("budget", run.derived(summaries)) if LOSS.name in run.tables else None
