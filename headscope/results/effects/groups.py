"""Groups: random controls of a set of units, and how well each unit separates two groups of samples."""

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import ndtri

from headscope.runs.aggregation import MIN_DOCUMENTS, adjust_p_values

Unit = TypeVar("Unit", bound=tuple[int, ...])


def random_controls(
    units: Collection[Unit], candidates: Collection[Unit], seeds: Iterable[Sequence[int]]
) -> list[list[Unit]]:
    """A random set for each seed, with as many units of each layer as `units` has there; all others are equally likely.

    The candidates are all units of the same kind, with or without those of the set. Returns no sets if a layer has too
    few others: see `missing_control`.
    """
    if missing_control(units, candidates):
        return []
    counts, by_layer = Counter(layer for layer, *_ in sorted(units)), defaultdict[int, list[Unit]](list)
    for unit in sorted(candidates):
        by_layer[unit[0]].append(unit)
    controls = []
    for seed in seeds:
        generator, control = np.random.default_rng(seed), list[Unit]()
        for layer, count in counts.items():
            order = (by_layer[layer][number] for number in generator.permutation(len(by_layer[layer])))
            control += sorted([unit for unit in order if unit not in units][:count])
        controls.append(control)
    return controls


def missing_control(
    units: Collection[Unit], candidates: Collection[Unit], layer_numbers: Sequence[int] | None = None
) -> str:
    """Why a set has no control: the first layer with fewer others than units of the set. Empty if it has one.

    `layer_numbers` are the numbers of layers that units name by index.
    """
    others = Counter(layer for layer, *_ in {*candidates} - {*units})
    for layer, count in Counter(layer for layer, *_ in sorted(units)).items():
        if others[layer] < count:
            number = layer if layer_numbers is None else layer_numbers[layer]
            return f"layer {number} has {count} of them and {others[layer]} others"
    return ""


FloatArray = npt.NDArray[np.float64]
SPLITS = 20
"""Stratified splits into two halves."""
CHOSEN_UNITS = 10
"""Units that one half of the samples chooses."""
MIN_GROUP = 4
"""Fewest samples of a group for a split into halves of two [ours]."""
BISECTIONS = 60


def auroc(scores: FloatArray, is_second: npt.NDArray[np.bool_]) -> FloatArray:
    """Area under the ROC curve of each row of scores [.., samples]: the probability that a sample of the second group
    scores higher than one of the first, ties counted half. NaN without samples of a group."""
    from scipy.stats import rankdata  # takes a second to import

    second = int(is_second.sum())
    first = len(is_second) - second
    if not first or not second:
        return np.full(scores.shape[:-1], np.nan)
    ranks = rankdata(scores, axis=-1)
    return np.asarray((ranks[..., is_second].sum(-1) - second * (second + 1) / 2) / (first * second))


def auroc_interval(area: npt.ArrayLike, first: int, second: int, choices: int = 1) -> tuple[FloatArray, FloatArray]:
    """95 % confidence interval of an AUROC of groups of these sizes, 0..1; NaN if a group has fewer than three samples.

    Method 5 of Newcombe (2006): the areas t with |area - t| <= 1.96 sqrt(V(t)), where V is Hanley and McNeil's variance
    with both group sizes in its terms replaced by their mean. It does not shrink to a point at an area of 0 or 1.
    `choices`: see `aggregation.confidence_interval`.
    """
    values = np.asarray(area, dtype=np.float64)
    if min(first, second) < MIN_DOCUMENTS:
        return np.full(values.shape, np.nan), np.full(values.shape, np.nan)

    quantile = ndtri(1 - 0.025 / choices)

    def is_outside(t: FloatArray) -> npt.NDArray[np.bool_]:
        spread = 1 + ((first + second) / 2 - 1) * ((1 - t) / (2 - t) + t / (1 + t))
        return np.asarray(np.abs(values - t) > quantile * np.sqrt(t * (1 - t) * spread / (first * second)))

    ends = []
    for limit in (0.0, 1.0):
        inside, outside = values.copy(), np.full(values.shape, limit)
        for _ in range(BISECTIONS):
            middle = (inside + outside) / 2
            beyond = is_outside(middle)
            inside, outside = np.where(beyond, inside, middle), np.where(beyond, middle, outside)
        ends.append(inside)
    return ends[0], ends[1]


def compare_groups(scores: pd.DataFrame, is_second: npt.NDArray[np.bool_]) -> pd.DataFrame:
    """One row per row of scores [units, samples]: `auroc`, `difference` of means (second minus first), both with _low
    and _high, and `p_adjusted`.

    The difference has Welch's interval, p is that of the two-sided Mann-Whitney test after Benjamini-Hochberg over the
    units. Intervals and p are NaN if a group has fewer than three samples.
    """
    values = scores.to_numpy(np.float64)
    first, second = values[:, ~is_second], values[:, is_second]
    area, sizes = auroc(values, is_second), (first.shape[1], second.shape[1])
    low, high = auroc_interval(area, *sizes)
    difference = second.mean(1) - first.mean(1)
    half_width, p = np.full((2, len(values)), np.nan)
    if min(sizes) >= MIN_DOCUMENTS:
        from scipy.stats import mannwhitneyu, t  # takes a second to import

        p = mannwhitneyu(first, second, axis=1).pvalue
        errors = np.array([part.var(1, ddof=1) / part.shape[1] for part in (first, second)])
        total = np.maximum(errors.sum(0), np.finfo(float).tiny)
        freedom = total**2 / np.maximum(errors[0] ** 2 / (sizes[0] - 1) + errors[1] ** 2 / (sizes[1] - 1), 1e-300)
        half_width = t.ppf(0.975, np.maximum(freedom, 1)) * np.sqrt(total)
    columns = {"auroc": area, "auroc_low": low, "auroc_high": high, "difference": difference}
    columns |= {"difference_low": difference - half_width, "difference_high": difference + half_width}
    adjusted = adjust_p_values(pd.Series(p, scores.index))
    return pd.DataFrame({**columns, "p_adjusted": adjusted.to_numpy()}, index=scores.index)


@dataclass(frozen=True, eq=False)
class HeldOut:
    """Units chosen on one half of the samples and judged on the other, over `SPLITS` stratified splits.

    `aurocs` [splits] are those of the judged halves. `scores` [samples] is the mean score of a sample over the splits
    that judged it, in standard deviations of the choosing half, so that the second group scores higher. `times_chosen`
    [units] counts the splits that chose a unit.
    """

    aurocs: FloatArray
    scores: FloatArray
    times_chosen: npt.NDArray[np.int64]

    @property
    def auroc(self) -> float:
        """The mean over splits. They share samples, so their spread is no standard error."""
        return float(self.aurocs.mean())


def judge_held_out(scores: FloatArray, is_second: npt.NDArray[np.bool_], seed: int = 0) -> HeldOut | None:
    """Choose units on halves of the samples of scores [units, samples]; None if a group has fewer than four samples.

    A half chooses the `CHOSEN_UNITS` units of largest |AUROC - 0.5|. A sample's score is their mean standardised score,
    negated for units that are higher in the first group.
    """
    if min(is_second.sum(), (~is_second).sum()) < MIN_GROUP:
        return None
    rng = np.random.default_rng(seed)
    aurocs, times_chosen = np.zeros(SPLITS), np.zeros(len(scores), np.int64)
    sums, counts = np.zeros((2, len(is_second)))
    for split in range(SPLITS):
        choosing = _stratified_half(is_second, rng)
        half = scores[:, choosing]
        areas = auroc(half, is_second[choosing])
        chosen = np.argsort(-np.abs(areas - 0.5), kind="stable")[:CHOSEN_UNITS]
        spread = half[chosen].std(1, ddof=1)
        standard = (scores[chosen] - half[chosen].mean(1)[:, None]) / np.where(spread > 0, spread, math.inf)[:, None]
        mean_score = (standard * np.sign(areas[chosen] - 0.5)[:, None]).mean(0)
        aurocs[split] = auroc(mean_score[~choosing], is_second[~choosing])
        times_chosen[chosen] += 1
        sums[~choosing] += mean_score[~choosing]
        counts[~choosing] += 1
    judged = np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)
    return HeldOut(aurocs, judged, times_chosen)


def _stratified_half(is_second: npt.NDArray[np.bool_], rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """A random half of the samples of each group; of an odd number the smaller half."""
    chosen = np.zeros(len(is_second), dtype=bool)
    for group in (False, True):
        members = rng.permutation(np.flatnonzero(is_second == group))
        chosen[members[: len(members) // 2]] = True
    return chosen
