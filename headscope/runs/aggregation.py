"""Means over documents with 95 % confidence intervals, helpers to form them, and verdicts on claims from them.

With 30 or more documents the interval is a bias-corrected and accelerated bootstrap over documents (BCa, Efron 1987;
2000 seeded draws), with three to 29 it is Student's t. One or two documents give no interval (NaN).
`docs/intervals.md` has the measured coverage of both.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.special import ndtr, ndtri, stdtrit

from headscope.bins import in_last_octave

HEAD_KEYS = ["model", "layer", "head", "kv_group"]
"""Key columns of the per-head table."""

BOOTSTRAP_DRAWS = 2000
MIN_DOCUMENTS, MIN_BOOTSTRAP_DOCUMENTS = 3, 30
"""Fewest documents for an interval or a test, and fewest for the bootstrap."""


def confidence_interval(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """95 % confidence interval [2, units] of the mean of `values` [units, documents]; NaN below three documents.

    All units share the bootstrap draws, so intervals of units measured on the same documents are comparable.
    """
    units, documents = values.shape
    if documents < MIN_DOCUMENTS:
        return np.full((2, units), np.nan)
    if documents >= MIN_BOOTSTRAP_DOCUMENTS:
        return _bootstrap_interval(values)
    half_width = stdtrit(documents - 1, 0.975) * values.std(axis=1, ddof=1) / np.sqrt(documents)
    return np.asarray([values.mean(axis=1) - half_width, values.mean(axis=1) + half_width])


def _bootstrap_interval(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """BCa interval [2, units] of the mean of each row; a constant row has the interval of width 0."""
    documents = values.shape[1]
    draws = np.random.default_rng(0).multinomial(documents, np.full(documents, 1 / documents), size=BOOTSTRAP_DRAWS)
    mean, means = values.mean(axis=1, keepdims=True), np.sort(values @ draws.T / documents, axis=1)
    centred = values - mean
    spread = (centred**2).sum(axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        bias = ndtri(((means < mean).mean(axis=1) + (means <= mean).mean(axis=1)) / 2)
        acceleration = (centred**3).sum(axis=1) / (6 * spread**1.5)
        shifted = bias + ndtri([[0.025], [0.975]])
        levels = ndtr(bias + shifted / (1 - acceleration * shifted))
    places = np.where(spread > 0, levels, 0.5) * (BOOTSTRAP_DRAWS - 1)
    low = np.clip(np.floor(places).astype(int), 0, BOOTSTRAP_DRAWS - 2)
    units = np.arange(len(values))
    share = places - low
    bounds: npt.NDArray[np.float64] = means[units, low] * (1 - share) + means[units, low + 1] * share
    return bounds


def statistic_interval(
    statistic: Callable[..., npt.NDArray[np.float64]], *samples: npt.NDArray[Any]
) -> tuple[float, float]:
    """95 % percentile bootstrap interval of a statistic over the last axis of separately resampled samples.

    NaN if a sample has fewer than three values. It holds for quantities of one trained model, over its heads.
    """
    if min(map(len, samples)) < MIN_DOCUMENTS:
        return np.nan, np.nan
    rng = np.random.default_rng(0)
    resampled = [sample[rng.integers(len(sample), size=(BOOTSTRAP_DRAWS, len(sample)))] for sample in samples]
    low, high = np.nanquantile(statistic(*resampled), [0.025, 0.975])
    return float(low), float(high)


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
    labels = {name: "str" for name in frame if frame[name].dtype == "category"}
    return frame.astype({**floats, **labels})


def rows_at_longest_length(frame: pd.DataFrame, by: Sequence[str] = ("model",)) -> pd.DataFrame:
    """The rows at the longest context length of each group of these columns, by default of each model."""
    return frame[frame["context_length"] == frame.groupby([*by])["context_length"].transform("max")]


def last_octave_means(frame: pd.DataFrame, columns: Sequence[str], weight: str = "population") -> pd.DataFrame:
    """Means of binned row means over the last octave of visible keys, by head, length and document.

    The last octave are the last four bins that the head's layer fills. Bins are weighted by the column `weight`, by
    default their number of query rows in the document, so that every row of the octave counts once.
    """
    top = frame.groupby([*HEAD_KEYS, "context_length"])["visible"].transform("max")
    last_rows = frame[in_last_octave(frame["visible"], top)]
    unit = [*HEAD_KEYS, "context_length", "doc"]
    total = last_rows[unit].join(last_rows[[*columns]].mul(last_rows[weight], axis=0)).groupby(unit).sum()
    return total.div(last_rows.groupby(unit)[weight].sum(), axis=0)


def mean_losses(rows: pd.DataFrame, by: Sequence[str]) -> pd.Series:
    """Mean loss in nats/token by these columns: `nll` of the position bins (float64), weighted by `tokens`."""
    sums = rows.assign(nll=rows["nll"] * rows["tokens"]).groupby([*by], observed=True)[["nll", "tokens"]].sum()
    mean: pd.Series = sums["nll"] / sums["tokens"]
    return mean


def mean_with_interval(values: pd.Series, name: str, low: float = -np.inf, high: float = np.inf) -> pd.DataFrame:
    """Mean over documents of `values` (the last index level is doc) with its interval: name, name_low, name_high.

    The interval is clipped to the range of the values, `low` to `high`.
    """
    blocks = []
    keys = values.index.to_frame(index=False)[["model", "doc"]]
    documents = keys.drop_duplicates().groupby("model")["doc"].agg(frozenset)
    for _, block in values.groupby(keys["model"].map(documents.to_dict()).to_numpy(), sort=False):
        table = block.unstack("doc")  # of models with the same documents
        numbers = table.to_numpy(dtype=np.float64)
        lower, upper = confidence_interval(numbers).clip(low, high)
        columns = {name: numbers.mean(axis=1), f"{name}_low": lower, f"{name}_high": upper}
        blocks.append(pd.DataFrame(columns, index=table.index))
    return blocks[0] if len(blocks) == 1 else pd.concat(blocks).sort_index()


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


def verdict_above(low: float, high: float, threshold: float = 0.0) -> str:
    """Verdict on the claim that a quantity is above `threshold`, from its interval `low` to `high`.

    "supported" if the whole interval is above the threshold, "not supported" if it is below, else "inconclusive". An
    interval of NaN (too few documents) is inconclusive.
    """
    return "supported" if low > threshold else "not supported" if high < threshold else "inconclusive"


def verdict_below(low: float, high: float, threshold: float = 0.0) -> str:
    """Verdict on the claim that a quantity is below `threshold`, as `verdict_above` for one that is above it."""
    return verdict_above(-high, -low, -threshold)


def verdict_of_parts(verdicts: Iterable[str]) -> str:
    """Verdict on a claim of several parts: all must be supported, and one that is not supported refutes it."""
    parts = {*verdicts}
    return "not supported" if "not supported" in parts else parts.pop() if len(parts) == 1 else "inconclusive"
