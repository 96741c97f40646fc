"""Two runs compared: their results with equal keys side by side, and the heads that gained or lost a role."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtr, stdtrit

from headscope.base.heads import Head
from headscope.results.collection import results_with_parts
from headscope.results.pairing import RunPair
from headscope.results.questions import questions
from headscope.results.result import Result
from headscope.runs.aggregation import (
    MIN_DOCUMENTS,
    SIGNIFICANCE,
    adjust_p_values,
    confidence_interval,
    difference_interval,
    wilson_interval,
)
from headscope.runs.column_metadata import heads_with_role, is_role_measured, roles
from headscope.runs.run import Run

FloatArray = npt.NDArray[np.float64]
Direction = Literal["better", "worse", "higher", "lower", "no clear change", "unknown"]


@dataclass(frozen=True)
class Change:
    """A result in two runs: the later value minus the earlier one, with its 95 % confidence interval.

    `n` is the number of equal documents, pairs or trials over which the difference is paired; None if it is unpaired.
    Without an interval, low and high are NaN.
    """

    before: Result
    after: Result
    difference: float
    low: float
    high: float
    n: int | None = None
    p_adjusted: float = math.nan
    """`p`, adjusted by Benjamini-Hochberg over all changes of a comparison; NaN outside of one."""

    @property
    def p(self) -> float:
        """Two-sided p-value of no change, from the half of the interval that faces 0; NaN without an interval.

        Intervals are read as those of Student's t over the samples, the fewer if unpaired. This is the paired t-test
        for means, and for the others gives p = 0.05 where the interval ends at 0 and else errs towards no change.
        """
        if not math.isfinite(self.low):
            return math.nan
        half = self.difference - self.low if self.difference > 0 else self.high - self.difference
        if half == 0 or self.difference == 0:
            return float(self.difference == 0)
        sizes = [n for n in (self.n or self.before.n, self.n or self.after.n) if n]
        freedom = max(min(sizes) - 1, 1) if sizes else math.inf
        return float(2 * stdtr(freedom, -abs(self.difference) / half * stdtrit(freedom, 0.975)))

    @property
    def is_clear(self) -> bool:
        """Whether the value changed, at a false discovery rate of 5 % over all changes of the comparison."""
        return self.p_adjusted < SIGNIFICANCE

    @property
    def direction(self) -> Direction:
        """Whether the value clearly changed, and whether it improved if the question has a better direction."""
        if math.isnan(self.low):
            return "unknown"
        if not self.is_clear:
            return "no clear change"
        direction: Direction = "higher" if self.difference > 0 else "lower"
        better = questions()[self.after.question].better
        return direction if not better else "better" if direction == better else "worse"


@dataclass(frozen=True)
class RoleChange:
    """The heads of a model that gained or lost a role between two runs."""

    role: str
    model: str
    gained: tuple[Head, ...]
    lost: tuple[Head, ...]
    before: int
    """Number of heads with the role in the earlier run."""
    after: int


@dataclass(frozen=True)
class Comparison:
    """What two runs have in common and what changed: the clearest changes first."""

    changes: tuple[Change, ...]
    roles: tuple[RoleChange, ...]
    only_before: tuple[Result, ...]
    """Results of the earlier run to which the later one has no answer."""
    only_after: tuple[Result, ...]

    @property
    def compared(self) -> int:
        """Number of results whose difference has an interval."""
        return sum(math.isfinite(change.low) for change in self.changes)


def compare(before: Run, after: Run) -> Comparison:
    """Compare the results of two runs with equal keys, and the roles of heads.

    Differences are paired by document, pair or trial where both runs have the same ones (by digest), else unpaired.
    Models are matched by label; two runs of one model each are compared whatever the labels are. Changes are corrected
    for their number: at most 5 % of the clear ones are expected to be due to chance (Benjamini-Hochberg).
    """
    runs = RunPair(before, after)
    earlier, later = ([result for result in results_with_parts(run) if result.has_value] for run in (before, after))
    pairs = [(runs.partner(result), result) for result in later]
    changes = [change(old, new, runs) for old, new in pairs if old is not None and old.has_value]
    p = pd.Series([item.p for item in changes], dtype="float64")
    adjusted = adjust_p_values(p.dropna()).reindex(p.index)
    changes = [replace(item, p_adjusted=float(q)) for item, q in zip(changes, adjusted, strict=True)]
    order = p.sort_values(kind="stable").index
    return Comparison(
        tuple(changes[index] for index in order),
        tuple(_role_changes(runs)),
        _without([item.before for item in changes], earlier),
        _without([item.after for item in changes], later),
    )


def _without(compared: Iterable[Result], results: Iterable[Result]) -> tuple[Result, ...]:
    keys = {result.key for result in compared}
    return tuple(result for result in results if result.key not in keys)


def in_order_of_time(runs: Iterable[Run]) -> list[Run]:
    """The runs, the earliest start first."""
    return sorted(runs, key=lambda run: str(run.manifest.get("started", "")))


def change(before: Result, after: Result, runs: RunPair, share: float = 1.0) -> Change:
    """The later value minus `share` times the earlier one, with its interval.

    Values of two heads are not paired: each was selected as the largest, which its own interval allows for.
    """
    difference = after.value - share * before.value
    common = runs.same_samples(before, after) if before.unit == after.unit else []
    if len(common) >= MIN_DOCUMENTS and before.is_exact and after.is_exact:
        old, new = (np.array([result.by_sample[name] for name in common], float) for result in (before, after))
        low, high = _paired_interval(old, new, share)
        return Change(before, after, float((new - share * old).mean()), low, high, len(common))
    low, high = _unpaired_interval(before, after, share)
    return Change(before, after, difference, low, high)


def _paired_interval(old: FloatArray, new: FloatArray, share: float) -> tuple[float, float]:
    """Interval of the mean of new - share * old, over at least three samples.

    Student's t on the differences. Outcomes that are all 0 or 1 can be equal in every sample, where Student's t has no
    width: their difference of proportions has the interval of `_paired_proportions_interval`.
    """
    if np.isin([old, new], (0, 1)).all():
        return _paired_proportions_interval(old, new, share)
    (low,), (high,) = confidence_interval((new - share * old)[None])
    return float(low), float(high)


def _paired_proportions_interval(old: FloatArray, new: FloatArray, share: float) -> tuple[float, float]:
    """Interval of a difference of two proportions of the same samples (method 10 of Newcombe 1998).

    Square-and-add of Wilson's intervals with the correlation of the outcomes, which is corrected for continuity.
    """
    n = len(old)
    (old_mean, old_low, old_high), (new_mean, new_low, new_high) = (
        (mean, *map(float, wilson_interval(mean, n))) for mean in (float(old.mean()), float(new.mean()))
    )
    scale = n**2 * math.sqrt(old_mean * (1 - old_mean) * new_mean * (1 - new_mean))
    association = n * float(old @ new) - float(old.sum() * new.sum())
    if association > 0:
        association = max(association - n / 2, 0.0)
    correlation = association / scale if scale else 0.0

    def add(first: float, second: float) -> float:
        return math.sqrt(max(first**2 - 2 * correlation * first * second + second**2, 0.0))

    difference = new_mean - share * old_mean
    low = difference - add(new_mean - new_low, share * (old_high - old_mean))
    high = difference + add(new_high - new_mean, share * (old_mean - old_low))
    return low, high


def _unpaired_interval(before: Result, after: Result, share: float) -> tuple[float, float]:
    """Interval of a difference of two independent values from their own intervals; NaN if one has none."""
    if not (before.has_interval and after.has_interval):
        return math.nan, math.nan
    earlier = (share * before.value, share * before.low, share * before.high)
    return difference_interval((after.value, after.low, after.high), earlier)


def _role_changes(runs: RunPair) -> Iterable[RoleChange]:
    for model in runs.after.models:
        old, new = _heads_of(runs.before, runs.earlier_label(model)), _heads_of(runs.after, model)
        for role in roles():
            if len(old) and len(new) and is_role_measured(old, role) and is_role_measured(new, role):
                earlier, later = _members(old, role), _members(new, role)
                if earlier != later:
                    gained, lost = tuple(sorted(later - earlier)), tuple(sorted(earlier - later))
                    yield RoleChange(role, model, gained, lost, len(earlier), len(later))


def _heads_of(run: Run, model: str) -> pd.DataFrame:
    return run.heads[run.heads["model"] == model]


def _members(heads: pd.DataFrame, role: str) -> set[Head]:
    rows = heads.loc[heads_with_role(heads, role), ["layer", "head"]]
    return {(int(layer), int(head)) for layer, head in rows.itertuples(index=False, name=None)}
