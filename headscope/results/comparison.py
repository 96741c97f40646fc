"""Two runs compared: their results with equal keys side by side, and the heads that gained or lost a role."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import stdtr, stdtrit

from headscope.base.heads import Head
from headscope.results.collection import results_of_all_models
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

_TEXT_INPUTS = ("the texts", "the haystacks", "the needles", "the prompt", "the questions")
"""Beginnings of the names of inputs that are texts or prompts, in run.json."""


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
    labels = matching_labels(before, after)
    earlier = {result.key: result for result in _with_values(results_of_all_models(before))}
    later = {_key_in(result, labels): result for result in _with_values(results_of_all_models(after))}
    same = SameSamples(before, after, labels)
    changes = [change(earlier[key], later[key], same) for key in later if key in earlier]
    p = pd.Series([item.p for item in changes], dtype="float64")
    adjusted = adjust_p_values(p.dropna()).reindex(p.index)
    changes = [replace(item, p_adjusted=float(q)) for item, q in zip(changes, adjusted, strict=True)]
    order = p.sort_values(kind="stable").index
    return Comparison(
        tuple(changes[index] for index in order),
        tuple(_role_changes(before, after, labels)),
        tuple(result for key, result in earlier.items() if key not in later),
        tuple(result for key, result in later.items() if key not in earlier),
    )


def in_order_of_time(runs: Iterable[Run]) -> list[Run]:
    """The runs, the earliest start first."""
    return sorted(runs, key=lambda run: str(run.manifest.get("started", "")))


def matching_labels(before: Run, after: Run) -> Mapping[str, str]:
    """The label in the earlier run by that in the later one, where they differ: two runs of one model each."""
    (old, *more_old), (new, *more_new) = (before.models or [""]), (after.models or [""])
    return {} if more_old or more_new or old == new else {new: old}


def change(before: Result, after: Result, same: "SameSamples", share: float = 1.0) -> Change:
    """The later value minus `share` times the earlier one, with its interval.

    Values of two heads are not paired: each was selected as the largest, which its own interval allows for.
    """
    difference = after.value - share * before.value
    common = same.names(before, after) if before.unit == after.unit else []
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


class SameSamples:
    """Which documents, pairs or trials of two runs are the same, by the digests in their run.json.

    Samples without a digest count as different: runs of earlier versions stored none.
    """

    def __init__(self, before: Run, after: Run, labels: Mapping[str, str]) -> None:
        self._documents = tuple(_documents(run) for run in (before, after))
        prompts = _text_inputs(before, {})
        self._has_same_prompts = bool(prompts) and prompts == _text_inputs(after, labels)

    def names(self, before: Result, after: Result) -> list[str]:
        """The names of the samples that both results have and that are equal."""
        old, new = (
            documents.get(result.model, {}) for documents, result in zip(self._documents, (before, after), strict=True)
        )
        return [
            name
            for name in after.by_sample
            if name in before.by_sample
            and (old[name] == new[name] if name in old and name in new else self._has_same_prompts)
        ]


def _documents(run: Run) -> dict[str, dict[str, str]]:
    return {model["label"]: model.get("documents_sha256") or {} for model in run.manifest["models"]}


def _text_inputs(run: Run, labels: Mapping[str, str]) -> dict[str, str]:
    """Digests of the texts and prompts of a run, with the models by their labels in the earlier run."""
    inputs = {}
    for part in run.parts:
        for name, digest in (part.manifest.get("inputs") or {}).items():
            if name.startswith(_TEXT_INPUTS):
                renamed = name
                for new, old in labels.items():
                    renamed = renamed.replace(f"'{new}'", f"'{old}'")
                inputs[renamed] = digest
    return inputs


def _with_values(results: Iterable[Result]) -> Iterable[Result]:
    """The results that have a value, with their parts."""
    for result in results:
        if not math.isnan(result.value):
            yield result
        yield from _with_values(result.parts)


def _key_in(result: Result, labels: Mapping[str, str]) -> tuple[str, ...]:
    """The key of a result with the models by their labels in the earlier run."""
    names = {name: labels.get(getattr(result, name), getattr(result, name)) for name in ("model", "baseline")}
    return replace(result, **names).key


def _role_changes(before: Run, after: Run, labels: Mapping[str, str]) -> Iterable[RoleChange]:
    for model in after.models:
        old_label = labels.get(model, model)
        old, new = _heads_of(before, old_label), _heads_of(after, model)
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
