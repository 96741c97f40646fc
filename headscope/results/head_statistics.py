"""Statistics of heads that checks bound: of one head, a count of heads or their median, and the change between runs."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from headscope.base.heads import estimate_mask, parse_head
from headscope.errors import BadInput
from headscope.results.check_file import Check
from headscope.results.comparison import Change, change
from headscope.results.pairing import RunPair
from headscope.results.result import Result
from headscope.runs.column_metadata import exceeds, falls_below, parse_column, statistic
from headscope.runs.run import Run
from headscope.runs.summary import head_samples

HEAD_QUESTION = "check.statistic"
PLACES = 21
"""Places between the ends of the intervals of all heads at which their change is evaluated."""


def head_statistic(run: Run, check: Check, model: str) -> Result:
    """The statistic of the heads of a model as a result: the value of a head, a count or the median.

    The interval of a count goes from the heads whose whole interval is beyond the threshold to those whose interval
    reaches beyond it; that of a median is from the median of the lower ends to that of the upper ends. Intervals of
    single heads are not corrected for the number of heads.
    """
    name, table = str(check.statistic), _statistic_table(run, check, model)
    has_interval = f"{name}_low" in run.heads
    details = {"is_sampled": has_interval or parse_column(name).length is not None}
    shared: dict[str, Any] = {"question": HEAD_QUESTION, "model": model, "details": details}
    is_exact = bool(table["is_exact"].all())
    if check.head is not None:
        (layer, head), row = parse_head(check.head), table.iloc[0]
        return Result(
            **shared, value=row["value"], low=row["low"], high=row["high"], is_exact=is_exact, layer=layer, head=head
        )
    value, *ends = (_aggregate(check, table[name]) for name in ("value", "low", "high"))
    low, high = (math.nan, math.nan) if table["low"].isna().any() else sorted(ends)
    return Result(**shared, value=value, low=low, high=high, is_exact=is_exact)


def _statistic_table(run: Run, check: Check, model: str) -> pd.DataFrame:
    """Columns value, low, high, is_exact by (layer, head): of the heads that have the statistic, or of the named one.

    Raises BadInput if the named head has no value.
    """
    name = str(check.statistic)
    rows = run.heads[(run.heads["model"] == model) & run.heads[name].notna()]
    columns = {"value": name, "low": f"{name}_low", "high": f"{name}_high"}
    table = pd.DataFrame({new: rows.get(old, math.nan) for new, old in columns.items()}, rows.index).astype("float64")
    table["is_exact"] = ~estimate_mask(rows, name)
    table = table.set_axis(pd.MultiIndex.from_frame(rows[["layer", "head"]]))
    if check.head is None:
        return table
    if parse_head(check.head) not in table.index:
        raise BadInput(f"check '{check.title}': {model} has no {statistic(name).label} of head {check.head}")
    return table.loc[[parse_head(check.head)]]


def _aggregate(check: Check, values: pd.Series) -> float:
    """The count or median of the values."""
    if check.median:
        return float(np.median(values)) if len(values) else math.nan
    if check.count_above is not None:
        return float(exceeds(values, check.count_above).sum())
    assert check.count_below is not None
    return float(falls_below(values, check.count_below).sum())


def statistic_change(check: Check, before: Result, after: Result, runs: RunPair, share: float) -> Change:
    """The change of a statistic of heads: the later value minus `share` times the earlier one.

    Every head is paired with itself by document, if both runs have the same heads and at least three equal documents;
    otherwise the change is that of two independent values.
    """
    old, new = _statistic_table(runs.before, check, before.model), _statistic_table(runs.after, check, after.model)
    unpaired = change(before, after, runs, share)
    if not (before.is_exact and after.is_exact and old.index.equals(new.index)):
        return unpaired
    name = str(check.statistic)
    olds, news = _head_results(runs.before, name, before, old), _head_results(runs.after, name, after, new)
    share_of_head = 1.0 if check.head is None else share
    changes = [change(*pair, runs, share_of_head) for pair in zip(olds, news, strict=True)]
    counts = [item.n for item in changes if item.n is not None]
    if len(counts) < len(changes):
        return unpaired
    if check.head is not None:
        (low, high) = changes[0].low, changes[0].high
    else:
        ends = (pd.Series([getattr(item, end) for item in changes], old.index) for end in ("low", "high"))
        low, high = _interval_of_change(check, old, share, *ends)
    return replace(unpaired, low=low, high=high, n=min(counts))


def _interval_of_change(
    check: Check, before: pd.DataFrame, share: float, lows: pd.Series, highs: pd.Series
) -> tuple[float, float]:
    """The interval of the change of a count or median, from the intervals `lows` to `highs` of every head's change.

    The ends of the interval of a count or median itself belong to heads that are all at the lower, or all at the upper
    ends of their intervals. So the earlier values move together between these ends, and from each of these places all
    heads change by the lower or all by the upper ends of their changes.
    """
    changes = []
    for place in np.linspace(-1, 1, PLACES):
        end = before["low"] if place < 0 else before["high"]
        old = before["value"] + abs(place) * (end - before["value"])
        changes += [_aggregate(check, old + ends) - share * _aggregate(check, old) for ends in (lows, highs)]
    return min(changes), max(changes)


def _head_results(run: Run, name: str, result: Result, table: pd.DataFrame) -> list[Result]:
    """A result for every head of the table, with its values by document where they are known."""
    samples = _values_by_sample(run, name, result.model, table.index)
    shared: dict[str, Any] = {"question": result.question, "model": result.model}
    return [
        Result(**shared, value=value, low=low, high=high, layer=layer, head=head, by_sample=by_sample)
        for (layer, head), value, low, high, by_sample in zip(
            table.index.tolist(), table["value"], table["low"], table["high"], samples, strict=True
        )
    ]


def _values_by_sample(run: Run, name: str, model: str, heads: pd.Index) -> list[dict[str, float]]:
    """Values by the name of the document, whose means are the values of the heads; empty if they are not known."""
    table = run.derived(head_samples)
    if name not in table:
        return [{}] * len(heads)
    samples = table.loc[[model], name].droplevel(["model", "kv_group"]).reindex(heads)
    if samples.isna().any():
        return [{}] * len(heads)
    return [dict(zip(map(str, documents), values.tolist(), strict=True)) for documents, values in samples]
