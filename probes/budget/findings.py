"""Findings of the budget probe: the largest share within the bound, the best order against random, and the memory."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd

from headscope.report.blocks import Finding, FindingData, Overview, Term
from headscope.report.text import format_percent
from headscope.runs.aggregation import MIN_DOCUMENTS, confidence_interval, plain_types, verdict_above, verdict_below
from headscope.runs.run import Run
from probes.budget import PROBE
from probes.budget.analysis import (
    LOWER_IS_BETTER,
    answer_changes,
    best_order,
    cache_sizes,
    complete_curve,
    summaries,
    task_scores,
)
from probes.budget.labels import describe_window, format_bytes, format_interval, order_label
from probes.budget.schema import ANSWERS, LOSS, RANDOM, SETTINGS, STABILITY, TASKS

GLOSSARY = (
    Term(
        "Streaming KV group and budget",
        "A streaming KV group keeps the keys and values of the first S and the last R tokens only, in their own "
        "positions (StreamingLLM, Xiao et al. 2024); the other groups keep all. KV groups start to stream in an order, "
        "the lowest scores first. The area under the curve of the change of the loss over the share that streams "
        "compares orders: lower is better. Measured orders: each half of the documents is judged with the order from "
        "the scores of the other half.",
        "query i sees keys j < S or i - j < R",
        (LOSS.name,),
    ),
)


def findings(run: Run) -> Iterator[Finding]:
    """Per model and context length: the largest share, the order against random orders; answers; memory."""
    if LOSS.name not in run.tables:
        return
    settings = plain_types(run.table(SETTINGS.name)).set_index("model")
    table = run.derived(summaries)
    groups: Any = table.groupby(["model", "context_length"], sort=False)
    for (model, length), rows in groups:
        best = best_order(rows)
        yield _share_finding(model, length, best, settings.loc[model])
        if RANDOM in set(rows["order"]) and best["order"] != RANDOM:
            yield _comparison_finding(model, length, best)
        if length == table.loc[table["model"] == model, "context_length"].max():
            yield from _memory_finding(run, model, best, settings.loc[model])
            yield from _stability_finding(run, model, best)
    if ANSWERS.name in run.tables:
        yield from _answer_findings(run)
    if TASKS.name in run.tables:
        yield from _task_findings(run)


def overview(run: Run) -> Overview | None:
    """One row per model, context length and order."""
    if LOSS.name not in run.tables:
        return None
    table = run.derived(summaries)
    records = [
        {
            "model": row["model"],
            "length": f"{row['context_length']:,}",
            "order": order_label(row["order"]),
            "documents": row["n"],
            "area (nats/token)": f"{row['area']:.4f}",
            "largest share within the bound": format_percent(row["largest_share"]),
        }
        for row in table.to_dict("records")
    ]
    return Overview("budget", PROBE.title, table, records)


def _share_finding(model: str, length: int, row: pd.Series, settings: pd.Series) -> Finding:
    order = "random orders"
    if row["order"] != RANDOM:
        order = f"the measured order with the smallest area ({order_label(row['order'])})"
    groups, window = int(settings["groups"]), describe_window(settings)
    text = f"{model}, {length:,} tokens: in {order}, "
    if row["largest_share"] == 1:
        text += (
            f"all {groups} KV groups can keep only {window}: the loss does not rise by more than "
            f"{settings['bound']:g} nats per token at any measured share"
        )
    else:
        text += (
            f"{format_percent(row['largest_share'])} of the {groups} KV groups can keep only {window} before the "
            f"loss rises by more than {settings['bound']:g} nats per token"
        )
    text += f"{format_interval(row, 'largest_share', format_percent)}."
    data = FindingData(row["largest_share"], row["largest_share_low"], row["largest_share_high"], int(row["n"]))
    return Finding(PROBE.title, text, model, data=data)


def _comparison_finding(model: str, length: int, row: pd.Series) -> Finding:
    """Whether the best order beats random orders, paired by document."""
    low, high = float(row["area_vs_random_low"]), float(row["area_vs_random_high"])
    verdict: str = verdict_below(low, high)
    if row["n"] < MIN_DOCUMENTS:
        count = "1 document is" if row["n"] == 1 else f"{int(row['n'])} documents are"
        verdict = f"inconclusive, because {count} too few ({MIN_DOCUMENTS} are needed)"
    text = (
        f"{model}, {length:,} tokens: the order by {order_label(row['order'])} costs less than random orders: "
        f"{verdict}. The areas under their curves differ by {row['area_vs_random']:+.4f} nats per token"
        f"{format_interval(row, 'area_vs_random', '{:+.4f}'.format)}. It was selected as the best of the measured "
        "orders, so the difference is somewhat optimistic."
    )
    data = FindingData(row["area_vs_random"], low, high, int(row["n"]))
    return Finding(PROBE.title, text, model, data=data)


def _memory_finding(run: Run, model: str, best: pd.Series, settings: pd.Series) -> Iterator[Finding]:
    """The size of the KV cache at the measured share nearest to the largest one, at the longest length, if any group
    can stream."""
    sizes = run.derived(cache_sizes)
    rows = sizes[(sizes["model"] == model) & (sizes["order"] == best["order"])]
    rows = rows[rows["context_length"] == rows["context_length"].max()]
    row = rows.iloc[int((rows["share"] - best["largest_share"]).abs().argmin())]
    if row["share"] == 0:
        return
    text = (
        f"{model}: if {format_percent(row['share'])} of the KV groups stream, the KV cache of "
        f"{int(row['context_length']):,} tokens takes {format_bytes(row['cache_bytes'])} instead of "
        f"{format_bytes(row['full_bytes'])} (computed)."
    )
    yield Finding(PROBE.title, text, model, data=FindingData(row["cache_bytes"]))


def _stability_finding(run: Run, model: str, best: pd.Series) -> Iterator[Finding]:
    """Whether the streaming KV groups depend on the sampled query rows, at the share nearest to the largest one."""
    if STABILITY.name not in run.tables:
        return
    rows = plain_types(run.table(STABILITY.name))
    rows = rows[(rows["model"] == model) & (rows["order"] == best["order"])]
    if rows.empty:
        return
    means = rows.groupby("share")[["kept", "same_set"]].mean()
    share = min(means.index, key=lambda measured: abs(measured - best["largest_share"]))
    kept, same = means.loc[share]
    text = (
        f"{model}: where {format_percent(share)} of the KV groups stream in the order by {order_label(best['order'])}, "
        f"{format_percent(kept)} of them would stream as well if other query rows of the same documents had been "
        f"sampled; the set would be exactly the same in {format_percent(same)} of the samples (simulated from the "
        "errors of the scores). Use more --rows, or --rows exact, for a more stable set."
    )
    if kept == 1:
        text = (
            f"{model}: where {format_percent(share)} of the KV groups stream in the order by "
            f"{order_label(best['order'])}, the same groups stream whatever query rows of these documents are sampled."
        )
    yield Finding(PROBE.title, text, model, data=FindingData(kept))


def _answer_findings(run: Run) -> Iterator[Finding]:
    """Right answers without streaming and with half of the KV groups streaming, in each order."""
    groups: Any = answer_changes(run, "success").groupby(["model", "prompts"], sort=False)
    for (model, prompts), block in groups:
        whole, changes, share, count = _scores_at_half(block, "prompt", are_shares=True)
        yield Finding(
            PROBE.title,
            f"{model}, {prompts}, {count}: {whole} of the answers are right without streaming. If "
            f"{format_percent(share)} of the KV groups stream, by order: {changes}",
            model,
        )


def _task_findings(run: Run) -> Iterator[Finding]:
    """Scores on tasks without streaming and with half of the KV groups streaming: in each order, and the verdict on
    the order whose loss rises least."""
    losses = run.derived(summaries)
    groups: Any = task_scores(run).groupby(["model", "task"], sort=False)
    for (model, task), block in groups:
        whole, changes, share, count = _scores_at_half(block, "document")
        yield Finding(
            PROBE.title,
            f"{model}, {task}, {count}: the score is {whole} without streaming. If {format_percent(share)} of the KV "
            f"groups stream, by order: {changes}",
            model,
        )
        of_model = losses[losses["model"] == model]
        best = best_order(of_model[of_model["context_length"] == of_model["context_length"].max()])["order"]
        yield from _task_verdict(model, task, best, complete_curve(block).xs(best, level="order"), share)


def _task_verdict(model: str, task: str, order: str, scores: pd.DataFrame, share: float) -> Iterator[Finding]:
    """Whether streaming worsens the score of a task, paired by document; nothing if there are too few documents for an
    interval.

    The order is selected by the loss on documents, not by the scores that are judged here.
    """
    changes = (scores[share] - scores[0.0]).to_numpy()
    (low,), (high,) = confidence_interval(changes[None])
    if np.isnan(low):
        return
    verdict = (verdict_above if task.endswith(LOWER_IS_BETTER) else verdict_below)(low, high)
    text = (
        f"{model}, {task}: streaming {format_percent(share)} of the KV groups ({order_label(order)}) makes the "
        f"score worse: {verdict}. The score changes by {changes.mean():+.3f} (95 % confidence interval "
        f"{low:+.3f} to {high:+.3f}, n = {len(changes)})."
    )
    yield Finding(
        PROBE.title, text, model, data=FindingData(float(changes.mean()), float(low), float(high), len(changes))
    )


def _scores_at_half(scores: pd.DataFrame, noun: str, are_shares: bool = False) -> tuple[str, str, float, str]:
    """The mean score without streaming; those of each order at the share next to one half, with the change and its
    confidence interval, paired by item; that share, and the number of items, each a `noun`.

    Scores that are shares are in per cent, and their changes in percentage points.
    """
    format_score: Callable[[float], str] = format_percent if are_shares else "{:.3f}".format
    scale, decimals, unit = (100, 0, " percentage points") if are_shares else (1, 2, "")
    block = complete_curve(scores)
    middle = min(block.columns, key=lambda share: abs(share - 0.5))
    parts, note = [], f"Too few {noun}s for confidence intervals."
    for order, rows in block.groupby("order", sort=False):
        changes = scale * (rows[middle] - rows[0.0]).to_numpy()
        (low,), (high,) = confidence_interval(changes[None])
        interval = ""
        if not np.isnan(low):
            interval = f" ({low:+.{decimals}f} to {high:+.{decimals}f})"
            note = f"In parentheses: 95 % confidence intervals over {noun}s."
        change = f"{changes.mean():+.{decimals}f}{unit}{interval}"
        parts.append(f"{order_label(order)} {format_score(rows[middle].mean())}, change {change}")
    whole = format_score(block.xs(block.index[0][2], level="order")[0.0].mean())
    count = len(block.index.unique(-1))
    return whole, f"{'; '.join(parts)}. {note}", float(middle), f"{count} {noun}{'s' if count > 1 else ''}"
