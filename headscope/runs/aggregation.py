"""Means over documents with 95 % confidence intervals, helpers to form them, and verdicts on claims from them.

The interval of a mean is Student's t over three or more documents; one or two documents give no interval (NaN). Ratios
and effective lengths are averaged as logarithms. `docs/intervals.md` has the measured coverage.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import ndtr, ndtri, stdtr, stdtrit

from headscope.base.bins import in_last_octave
from headscope.base.heads import EXACT, method_column
from headscope.base.heads import HEAD_KEYS as HEAD_KEYS

BOOTSTRAP_DRAWS = 2000
MAX_RESAMPLED_VALUES = 2**20
"""Values of a sample that a bootstrap resamples at once."""
MIN_DOCUMENTS = 3
"""Fewest documents for an interval or a test."""
MIN_RESAMPLED = 5
"""Fewest values of a sample that is resampled: the range of four covers their median in 87.5 % of samples only."""
MIN_SUMMED_UNITS = 60
"""Fewest units, such as KV groups, for the interval of a share of a sum [ours]: a smaller sample hides its skewness."""
UNSEEN_UNITS = 3
"""By the rule of three."""
SIGNIFICANCE = 0.05
"""False discovery rate at which an effect or a change counts as different from zero."""
NORMAL_QUANTILE = 1.959963984540054
"""The 97.5 % quantile of the normal distribution."""
Ends = tuple[float, float, float]
"""A value with the lower and the upper end of its interval."""
SAMPLES_SUFFIX = "_by_doc"
"""End of the name of a column with the `Samples` of a mean."""


class Samples(NamedTuple):
    """The values [documents] whose mean is one value.

    Of a mean of logarithms they are linear around the mean, so that a difference has the interval of the delta method.
    """

    documents: pd.Index
    values: npt.NDArray[np.float64]


def confidence_interval(values: npt.NDArray[np.float64], choices: int = 1) -> npt.NDArray[np.float64]:
    """95 % confidence interval [2, units] of the mean of `values` [units, documents], by Student's t.

    NaN below three documents. For the largest of many means, `choices` is their number: the interval is so wide that
    those of all of them hold their true means at once in 95 % of tables (Bonferroni).
    """
    units, documents = values.shape
    if documents < MIN_DOCUMENTS:
        return np.full((2, units), np.nan)
    half_width = stdtrit(documents - 1, 1 - 0.025 / choices) * values.std(axis=1, ddof=1) / np.sqrt(documents)
    return np.asarray([values.mean(axis=1) - half_width, values.mean(axis=1) + half_width])


def wilson_interval(share: Any, trials: Any, choices: int = 1) -> tuple[Any, Any]:
    """Lower and upper ends of the 95 % confidence intervals (Wilson) of shares of trials, 0 .. 1: numbers or arrays.

    NaN below three trials. `choices` as in `confidence_interval`.
    """
    quantile = NORMAL_QUANTILE if choices == 1 else ndtri(1 - 0.025 / choices)
    centre = share + quantile**2 / (2 * trials)
    half_width = quantile * np.sqrt(share * (1 - share) / trials + quantile**2 / (4 * trials**2))
    scale = (1 + quantile**2 / trials) * np.where(np.asarray(trials) < MIN_DOCUMENTS, np.nan, 1.0)
    return np.maximum((centre - half_width) / scale, 0), np.minimum((centre + half_width) / scale, 1)


def difference_interval(first: Ends, second: Ends) -> tuple[float, float]:
    """95 % confidence interval of `first` minus `second`, two independent values with their intervals.

    Square-and-add: method 10 of Newcombe (1998) for shares with Wilson intervals, Zou and Donner (2008) for others.
    """
    (one, one_low, one_high), (other, other_low, other_high) = first, second
    low = one - other - math.hypot(one - one_low, other_high - other)
    return low, one - other + math.hypot(one_high - one, other - other_low)


def ratio_interval(
    numerators: npt.NDArray[np.float64], denominators: npt.NDArray[np.float64], choices: int = 1
) -> tuple[Any, Any]:
    """95 % confidence interval of the ratio of two means over the same samples (Fieller 1954, with Student's t).

    Both are [.., samples]; the ends are numbers or arrays. -inf to inf below three samples and unless the mean of
    `denominators` is surely positive. `choices` as in `confidence_interval`.
    """
    count = numerators.shape[-1]
    top, bottom = numerators.mean(-1), denominators.mean(-1)
    if count < MIN_DOCUMENTS:
        return np.full_like(top, -math.inf)[()], np.full_like(top, math.inf)[()]
    scale = stdtrit(count - 1, 1 - 0.025 / choices) ** 2 / (count * (count - 1))
    errors = [part - part.mean(-1, keepdims=True) for part in (numerators, denominators)]
    top_variance, covariance, bottom_variance = (
        scale * (one * other).sum(-1) for one, other in ((errors[0], errors[0]), errors, (errors[1], errors[1]))
    )
    square = bottom**2 - bottom_variance
    is_bounded = (bottom > 0) & (square > 0)
    middle = top * bottom - covariance
    root = np.sqrt(np.maximum(middle**2 - square * (top**2 - top_variance), 0.0))
    divisor = np.where(is_bounded, square, 1.0)
    low, high = ((middle + sign * root) / divisor for sign in (-1, 1))
    return np.where(is_bounded, low, -math.inf)[()], np.where(is_bounded, high, math.inf)[()]


def linearise_ratios(
    numerators: npt.NDArray[np.float64], denominators: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Values [units, samples] whose mean over samples is the ratio of means R = sum(numerators) / sum(denominators).

    They are R + (numerator - R denominator) / mean(denominators): to first order what each sample adds. Both arguments
    are [units, samples]; samples whose numerator is NaN are left out. A row is NaN if its denominators sum to 0.
    """
    known = np.where(np.isnan(numerators), np.nan, denominators)
    total = np.nansum(known, axis=1, keepdims=True)
    total[total == 0] = np.nan
    ratio = np.nansum(numerators, axis=1, keepdims=True) / total
    samples = (~np.isnan(numerators)).sum(1, keepdims=True)
    return np.asarray(ratio + (numerators - ratio * known) * samples / total)


def ratio_of_means_interval(
    linearised: npt.NDArray[np.float64], denominators: npt.NDArray[np.float64], choices: int = 1
) -> npt.NDArray[np.float64]:
    """95 % confidence interval [2, units] of ratios of means (Fieller), from `linearise_ratios` and its denominators.

    NaN without one: below three samples, or if the mean denominator is not clearly different from 0.
    """
    ends = np.asarray(ratio_interval(*_fractions(linearised, denominators), choices))
    return np.where(np.isfinite(ends), ends, np.nan)


def ratio_test(linearised: npt.NDArray[np.float64], denominators: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Two-sided p-values of a ratio of means of 0, which are those of the numerators; NaN below three samples."""
    return t_test(_fractions(linearised, denominators)[0])


def _fractions(
    linearised: npt.NDArray[np.float64], denominators: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Numerators and denominators [units, samples] behind values of `linearise_ratios`, with a positive mean of the
    denominators."""
    mean, ratio = denominators.mean(1, keepdims=True), linearised.mean(1, keepdims=True)
    sign = np.where(mean < 0, -1.0, 1.0)
    return sign * ((linearised - ratio) * mean + ratio * denominators), sign * denominators


def share_interval_of_units(parts: npt.NDArray[np.float64], wholes: npt.NDArray[np.float64]) -> tuple[float, float]:
    """95 % confidence interval of sum(parts) / sum(wholes) over the units of a model, which a few units may decide.

    A sample of skewed values lacks the rarest ones. Up to 3 / n of the units may be more extreme than all n (95 %), so
    each end counts the most adverse unit three times more (`UNSEEN_UNITS`). NaN below `MIN_SUMMED_UNITS`.
    """
    if len(parts) < MIN_SUMMED_UNITS:
        return math.nan, math.nan
    excess = parts - wholes * (parts.sum() / wholes.sum())
    lowest, highest = ([int(unit)] * UNSEEN_UNITS for unit in (excess.argmin(), excess.argmax()))
    ends = [
        ratio_interval(np.append(parts, parts[unit]), np.append(wholes, wholes[unit])) for unit in (lowest, highest)
    ]
    return max(ends[0][0], 0.0), min(ends[1][1], 1.0)


def t_test(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Two-sided p-values of mean 0 over documents for each row of [units, documents]; NaN below three documents."""
    units, documents = values.shape
    if documents < MIN_DOCUMENTS:
        return np.full(units, np.nan)
    with np.errstate(divide="ignore", invalid="ignore"):
        t = values.mean(axis=1) / (values.std(axis=1, ddof=1) / np.sqrt(documents))
    return np.asarray(np.where(np.isnan(t), 1.0, 2 * stdtr(documents - 1, -np.abs(t))))


def adjust_p_values(p: pd.Series) -> pd.Series:
    """Benjamini-Hochberg adjusted p-values, which bound the false discovery rate; NaN where p is NaN.

    Units without a p-value (estimates, which selected the others) count as tests with p = 1: they scale the other
    adjusted p-values and do nothing else.
    """
    if p.isna().all():
        return p
    from scipy.stats import false_discovery_control  # takes a second to import

    measured = p.dropna()
    adjusted = np.minimum(false_discovery_control(measured) * (len(p) / len(measured)), 1)
    return pd.Series(adjusted, measured.index).reindex(p.index)


def statistic_interval(
    statistic: Callable[..., npt.NDArray[np.float64]], *samples: npt.NDArray[Any]
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of a statistic over the last axis of separately resampled samples.

    The percentiles are expanded for small samples (Hesterberg 2015): those of Student's t instead of the normal
    distribution, and of a spread with n - 1 instead of n. NaN if a sample has fewer than five values. It holds for
    quantities of one trained model, over its heads.
    """
    size = min(map(len, samples))
    if size < MIN_RESAMPLED:
        return np.nan, np.nan
    generators = _generators_by_sample([len(sample) for sample in samples])
    draws_at_once = max(1, MAX_RESAMPLED_VALUES // max(map(len, samples)))
    results = []
    for start in range(0, BOOTSTRAP_DRAWS, draws_at_once):
        draws = min(draws_at_once, BOOTSTRAP_DRAWS - start)
        resampled = [
            sample[rng.integers(len(sample), size=(draws, len(sample)))]
            for sample, rng in zip(samples, generators, strict=True)
        ]
        results.append(statistic(*resampled))
    tail = ndtr(-math.sqrt(size / (size - 1)) * stdtrit(size - 1, 0.975))
    low, high = np.nanquantile(np.concatenate(results), [tail, 1 - tail])
    return float(low), float(high)


def _generators_by_sample(sizes: Sequence[int]) -> list[np.random.Generator]:
    """A generator for each sample of a bootstrap, which continues after the draws of the samples before it.

    The resampled values are so the same however many draws are made at once.
    """
    rng = np.random.default_rng(0)
    generators = []
    for size in sizes:
        generators.append(deepcopy(rng))
        for _ in range(BOOTSTRAP_DRAWS if len(sizes) > 1 else 0):
            rng.integers(size, size=size)
    return generators


def rank_correlations(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Spearman's rank correlation of values [2, ..., n] over the last axis; 0 if one of the two is constant."""
    from scipy.stats import rankdata  # takes a second to import

    ranks = rankdata(values, axis=-1)
    ranks = ranks - ranks.mean(-1, keepdims=True)
    norms = np.linalg.norm(ranks, axis=-1).prod(0)
    return np.asarray((ranks[0] * ranks[1]).sum(-1) / np.where(norms > 0, norms, np.inf))


def plain_types(frame: pd.DataFrame) -> pd.DataFrame:
    """Labels as strings, so that no empty groups appear, and floats as float64 for sums."""
    floats = {name: "float64" for name in frame if frame[name].dtype == "float32"}
    return _plain_labels(frame.astype(floats))


def _plain_labels(frame: pd.DataFrame) -> pd.DataFrame:
    return frame.assign(**{str(name): _label_texts(frame[name]) for name in frame if frame[name].dtype == "category"})


def _label_texts(labels: pd.Series) -> pd.Series:
    """A categorical column as strings; several times as fast as `astype`, which converts every row."""
    texts = pd.Series(labels.cat.categories, dtype="str").array
    return pd.Series(texts.take(labels.cat.codes.to_numpy(), allow_fill=True), labels.index)


def rows_at_longest_length(frame: pd.DataFrame, by: Sequence[str] = ("model",)) -> pd.DataFrame:
    """The rows at the longest context length of each group of these columns, by default of each model."""
    if frame["context_length"].nunique() == 1:
        return frame
    return frame[frame["context_length"] == frame.groupby([*by])["context_length"].transform("max")]


def number_groups(frame: pd.DataFrame, by: Sequence[str]) -> tuple[npt.NDArray[np.integer], pd.Index]:
    """The number of each row's group by these columns, and the groups in order, with labels as strings.

    Equal neighbours are grouped once: stored tables are sorted, so that a group of many rows is one or a few stretches.
    """
    is_first = np.zeros(len(frame), bool)
    is_first[:1] = True
    for name in by:
        values = frame[name].array
        is_first[1:] |= np.asarray(values[1:] != values[:-1], bool)
    starts = np.flatnonzero(is_first)
    groups = _plain_labels(frame[[*by]].take(starts)).groupby([*by])
    numbers = np.repeat(groups.ngroup().to_numpy(), np.diff(starts, append=len(frame)))
    return numbers, groups.size().index


def last_octave_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of the last four bins of visible keys that the head's layer fills, at each length."""
    numbers, _ = number_groups(frame, [*HEAD_KEYS, "context_length"])
    top = frame["visible"].groupby(numbers).transform("max")
    rows: pd.DataFrame = frame[in_last_octave(frame["visible"], top)]
    return rows


def last_octave_means(frame: pd.DataFrame, columns: Sequence[str], weight: str = "population") -> pd.DataFrame:
    """Means of binned row means over the last octave of visible keys, by head, length and document.

    The last octave consists of the last four bins that the head's layer fills. Bins are weighted by the column
    `weight`, by default their number of query rows in the document, so that every row of the octave counts once.
    """
    last_rows = last_octave_rows(frame)
    numbers, index = number_groups(last_rows, [*HEAD_KEYS, "context_length", "doc"])
    weights = last_rows[weight].to_numpy()
    with np.errstate(invalid="ignore"):
        means = {
            name: np.bincount(numbers, last_rows[name].to_numpy(np.float64) * weights) / np.bincount(numbers, weights)
            for name in columns
        }
    return pd.DataFrame(means, index)


def mean_losses(rows: pd.DataFrame, by: Sequence[str]) -> pd.Series:
    """Mean loss in nats/token by these columns: `nll` of the position bins (float64), weighted by `tokens`."""
    sums = rows.assign(nll=rows["nll"] * rows["tokens"]).groupby([*by], observed=True)[["nll", "tokens"]].sum()
    mean: pd.Series = sums["nll"] / sums["tokens"]
    return mean


def mean_with_interval(
    values: pd.Series,
    name: str,
    low: float = -np.inf,
    high: float = np.inf,
    weights: pd.Series | None = None,
    is_logarithmic: bool = False,
) -> pd.DataFrame:
    """Mean over documents of `values` (the last index level is doc): name, name_low, name_high, name_by_doc.

    The interval is clipped to the range of the values, `low` to `high`. `weights` are the denominators of values that
    are ratios, with the index of `values`; the mean is then the ratio of means. Of logarithms, mean and ends are the
    exponentials. name_by_doc has the `Samples` of each mean, by which checks pair two runs; the tables of heads and
    models leave it out, as `without_samples` does.
    """
    blocks = []
    keys = values.index.to_frame(index=False)[["model", "doc"]]
    documents = keys.drop_duplicates().groupby("model")["doc"].agg(frozenset)
    for _, block in values.groupby(keys["model"].map(documents.to_dict()).to_numpy(), sort=False):
        table = block.unstack("doc")  # of models with the same documents
        if weights is not None:
            denominators = weights.loc[block.index].unstack("doc").to_numpy(np.float64)
            table[:] = linearise_ratios(table.to_numpy(np.float64) * denominators, denominators)
        numbers = table.to_numpy(dtype=np.float64)
        ends = confidence_interval(numbers) if weights is None else ratio_of_means_interval(numbers, denominators)
        mean, (lower, upper) = numbers.mean(axis=1), ends.clip(low, high)
        if is_logarithmic:
            deviations = numbers - mean[:, None]
            mean, lower, upper = np.exp([mean, lower, upper])
            numbers = (1 + deviations) * mean[:, None]
        columns: dict[str, Any] = {name: mean, f"{name}_low": lower, f"{name}_high": upper}
        columns[f"{name}{SAMPLES_SUFFIX}"] = [Samples(table.columns, row) for row in numbers]
        blocks.append(pd.DataFrame(columns, index=table.index))
    return blocks[0] if len(blocks) == 1 else pd.concat(blocks).sort_index()


def without_samples(means: pd.DataFrame) -> pd.DataFrame:
    """The table of means without its columns name_by_doc."""
    samples = {f"{name}{SAMPLES_SUFFIX}" for name in means}
    return means[[name for name in means if name not in samples]]


def with_method(means: pd.DataFrame, methods: pd.Series) -> pd.DataFrame:
    """The columns of `mean_with_interval` and <name>_method: that of all values in a mean, or "mixed".

    `methods` has the index of `means`, with repetitions. Means that are not exact have no interval: an interval covers
    the spread over documents, but not the unknown error of an estimate.
    """
    name, low, high, samples = means.columns
    by_head = methods.groupby(level=[*range(methods.index.nlevels)])
    method = by_head.first().where(by_head.nunique() == 1, "mixed").reindex(means.index)
    bounds = means[[low, high]].where(method == EXACT)
    return pd.concat([means[name], bounds, method.rename(method_column(name)), means[samples]], axis=1)


def group_members(models: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """The query heads of every KV group: model, layer, kv_group, member. `models` are the entries of run.json."""
    blocks = []
    for model in models:
        geometry = model["geometry"]
        numbers = geometry.get("numbers", range(geometry["layers"]))
        head_counts = geometry.get("layer_heads", [geometry["heads"]] * len(numbers))
        group_counts = geometry.get("layer_kv_groups", [geometry["kv_groups"]] * len(numbers))
        for layer, count, groups in zip(numbers, head_counts, group_counts, strict=True):
            heads = np.arange(count)
            group = heads // (len(heads) // groups)
            keys = {"model": model["label"], "layer": layer, "kv_group": group, "member": heads}
            blocks.append(pd.DataFrame(keys))
    return pd.concat(blocks)


# Verdicts on claims: an interval against a threshold that was written before the results were seen -------------------

Verdict = Literal["", "supported", "partly supported", "not supported", "inconclusive"]
"""Verdict on a claim; "" for what is no claim."""


def verdict_above(low: float, high: float, threshold: float = 0.0) -> Verdict:
    """Verdict on the claim that a quantity is above `threshold`, from its interval `low` to `high`.

    "supported" if the whole interval is above the threshold, "not supported" if it is below, else "inconclusive". An
    interval of NaN (too few documents) is inconclusive.
    """
    return "supported" if low > threshold else "not supported" if high < threshold else "inconclusive"


def verdict_below(low: float, high: float, threshold: float = 0.0) -> Verdict:
    """Verdict on the claim that a quantity is below `threshold`, as `verdict_above` for one that is above it."""
    return verdict_above(-high, -low, -threshold)


def verdict_of_parts(verdicts: Iterable[Verdict]) -> Verdict:
    """Verdict on a claim of several parts: all must be supported, and one that is not supported refutes it."""
    parts = {*verdicts}
    return "not supported" if "not supported" in parts else parts.pop() if len(parts) == 1 else "inconclusive"
