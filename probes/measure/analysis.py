"""Statistics of the probe `measure`: columns of the per-head and per-model tables, and roles of heads.

Effective lengths are exp(mean ln ESS2) over the query rows in the last octave of visible keys: the last four bins that
the head's layer fills [ours]. Every row counts once.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from headscope.base.bins import BINS_PER_OCTAVE, bin_center
from headscope.runs.aggregation import (
    HEAD_KEYS,
    last_octave_means,
    last_octave_rows,
    mean_losses,
    mean_with_interval,
    number_groups,
    plain_types,
    rows_at_longest_length,
)
from headscope.runs.column_metadata import Role, columns_by_length, exceeds, falls_below
from headscope.runs.run_tables import RunTables
from headscope.runs.summary import longest_ess_column, models_with_same_tokens, same_text_mask
from probes.measure.declaration import ATTENTION

MIN_GROWTH_KEYS = 64
"""Minimum bin center, in visible keys, of the rows that the growth exponent is fitted to."""
LOCAL_LENGTH = 8
"""Effective length, in tokens, below which a head has the role local [ours]."""
RETRIEVAL_GROWTH, AGGREGATION_GROWTH = 0.25, 0.75
"""Growth exponents below and above which a head has the role constant or widening [ours]."""
SINK_MASS = 0.5
"""Weight on the first token above which a head has the role sink [ours]."""
LAST_OCTAVE_COLUMNS = tuple(
    column.name for column in ATTENTION.columns if column.kind == "value" and column.name != "ess2"
)
"""Columns of `attention` that are averaged over the last octave of visible keys."""
READ_COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention": ("visible", "population", "sink_population", *LAST_OCTAVE_COLUMNS),
        "pairs": ("theta", "mean_abs", "rms", "norm_product"),
    }
)
"""What is read of the largest tables, besides their keys."""

ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "local": Role(
            f"effective length below {LOCAL_LENGTH} tokens at the longest length, and not the role sink",
            lambda h: falls_below(h[_effective_length_column(h)], LOCAL_LENGTH) & ~exceeds(h["sink_mass"], SINK_MASS),
            "local_mass",
            criterion=lambda h: _effective_length_column(h),
        ),
        "constant": Role(
            f"growth exponent below {RETRIEVAL_GROWTH}, as expected of retrieval heads",
            lambda h: falls_below(h["growth"], RETRIEVAL_GROWTH),
            "growth",
            True,
        ),
        "widening": Role(
            f"growth exponent above {AGGREGATION_GROWTH}, as expected of aggregation heads",
            lambda h: exceeds(h["growth"], AGGREGATION_GROWTH),
            "growth",
        ),
        "sink": Role(
            "more than half of the weight on the first token, in the rows that see it",
            lambda h: exceeds(h["sink_mass"], SINK_MASS),
            "sink_mass",
        ),
    }
)


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """Columns by (model, layer, head, kv_group) from the tables that the run has; None if it has none of them.

    From `attention`: `ess2_<L>` (tokens) for every measured length L; `growth`; and at the model's longest length
    `ess1`, `max_weight`, `sink_mass`, `local_mass`, `mean_distance`. From `learned_sink`: `learned_sink`. From
    `max_logit`, at the longest length: `max_logit`. From `pairs`, at the longest length: `cov`, `cov_rms`, `cov_norm`,
    `weighted_log_theta`. From `scales`: `tau`, `gamma`, `logit_scale`, `effective_base`, `mean_log_theta`.
    `ess2_<L>`, `growth` and `cov` come with `_low` and `_high`.
    """
    return run.derived(_head_statistics)


def _head_statistics(run: RunTables) -> pd.DataFrame | None:
    functions = {
        "attention": _attention_statistics,
        "learned_sink": _learned_sink_statistics,
        "max_logit": _largest_logits,
        "pairs": _pair_statistics,
        "scales": _position_statistics,
    }
    columns = [_by_blocks_of_layers(run, name, function) for name, function in functions.items() if name in run.tables]
    return pd.concat(columns, axis=1) if columns else None


def _by_blocks_of_layers(run: RunTables, name: str, function: Callable[[pd.DataFrame], pd.DataFrame]) -> pd.DataFrame:
    """`function` of blocks of whole layers: all rows of a large run at once would not fit into memory."""
    columns = [*HEAD_KEYS, "context_length", "doc", *READ_COLUMNS[name]] if name in READ_COLUMNS else None
    tables = [function(block) for block in run.blocks_of_layers(name, columns)]
    return tables[0] if len(tables) == 1 else pd.concat(tables).sort_index()


def model_statistics(run: RunTables) -> pd.DataFrame | None:
    """Columns by model: medians over heads of `ess2_<L>`, `growth` and `cov`, the largest `max_logit` of all heads, and
    the loss; None without their tables.

    `nll_<L>` (nats/token) is the mean over documents of the mean loss; `nll_<L>_diff` with `_low` and `_high` is its
    difference to the first model of the run, paired by document.
    """
    wide = head_statistics(run)
    rows = None
    if wide is not None:
        lengths = columns_by_length(map(str, wide), "ess2")
        summarised = [name for name in map(str, wide) if name in ("growth", "cov", *lengths)]
        by_model = wide.groupby("model")
        rows = by_model[summarised].median()
        if "max_logit" in wide:
            rows = rows.join(by_model["max_logit"].max())
    if "nll" in run.tables:
        losses = _loss_statistics(document_losses(run), loss_differences(run, run.models[0]))
        rows = losses if rows is None else rows.join(losses, how="outer")
    return rows


def _attention_statistics(frame: pd.DataFrame) -> pd.DataFrame:
    last_rows = last_octave_rows(frame)
    means = last_octave_means(last_rows, LAST_OCTAVE_COLUMNS)
    means["sink_mass"] = last_octave_means(last_rows, ["sink_mass"], "sink_population")
    columns: list[pd.DataFrame] = [
        mean_with_interval(block.droplevel("context_length"), f"ess2_{length}", low=0, is_logarithmic=True)
        for length, block in means["log_ess2"].groupby(level="context_length")
    ]
    columns.append(mean_with_interval(_growth_exponents(rows_at_longest_length(frame)), "growth"))
    names = [name for name in LAST_OCTAVE_COLUMNS if name != "log_ess2"]
    columns.append(rows_at_longest_length(means.reset_index()).groupby(HEAD_KEYS)[names].mean())
    return pd.concat(columns, axis=1)


def _learned_sink_statistics(frame: pd.DataFrame) -> pd.DataFrame:
    means = last_octave_means(rows_at_longest_length(frame), ["share"]).groupby(HEAD_KEYS).mean()
    return means.set_axis(["learned_sink"], axis=1)


def _largest_logits(frame: pd.DataFrame) -> pd.DataFrame:
    return rows_at_longest_length(plain_types(frame)).groupby(HEAD_KEYS)[["max_logit"]].max()


def _growth_exponents(frame: pd.DataFrame) -> pd.Series:
    """Least-squares slope of log_ess2 on ln n by head and document; NaN if the bins span less than an octave."""
    n = np.asarray(bin_center(frame["visible"], frame["context_length"]))
    numbers, index = number_groups(frame, [*HEAD_KEYS, "doc"])
    numbers, x, y = (
        values[n >= MIN_GROWTH_KEYS] for values in (numbers, np.log(n), frame["log_ess2"].to_numpy(np.float64))
    )
    bins = np.bincount(numbers, minlength=len(index))
    with np.errstate(invalid="ignore"):  # heads of short texts have no such bin
        x = x - (np.bincount(numbers, x, len(index)) / bins)[numbers]
        slopes = np.bincount(numbers, x * y, len(index)) / np.bincount(numbers, x**2, len(index))
    return pd.Series(np.where(bins >= BINS_PER_OCTAVE, slopes, np.nan), index)


def _pair_statistics(frame: pd.DataFrame) -> pd.DataFrame:
    frame = rows_at_longest_length(frame)
    numbers, index = number_groups(frame, [*HEAD_KEYS, "doc"])
    pairs = np.bincount(numbers)

    def variation(name: str) -> pd.Series:
        """Standard deviation over mean of the pairs of each head and document."""
        values = frame[name].to_numpy(np.float64)
        means = np.bincount(numbers, values) / pairs
        with np.errstate(invalid="ignore"):  # all may be 0
            return pd.Series(np.sqrt(np.bincount(numbers, (values - means[numbers]) ** 2) / pairs) / means, index)

    theta = frame["theta"].to_numpy(np.float64)
    usage = np.where(theta > 0, frame["mean_abs"].to_numpy(np.float64), 0.0)  # of the pairs that rotate
    with np.errstate(invalid="ignore"):  # none may rotate
        log_theta = np.bincount(numbers, usage * np.log(np.where(theta > 0, theta, 1))) / np.bincount(numbers, usage)
    values = {"cov_rms": variation("rms"), "cov_norm": variation("norm_product")}
    values["weighted_log_theta"] = pd.Series(log_theta, index)
    means = pd.DataFrame(values).groupby(HEAD_KEYS).mean()
    return pd.concat([mean_with_interval(variation("mean_abs"), "cov", low=0), means], axis=1)


def _position_statistics(frame: pd.DataFrame) -> pd.DataFrame:
    columns = ["tau", "gamma", "logit_scale", "effective_base", "mean_log_theta"]
    return rows_at_longest_length(plain_types(frame)).set_index(HEAD_KEYS)[columns]


def document_losses(run: RunTables) -> pd.Series:
    """Mean loss in nats/token by (model, context_length, doc), from the table `nll`."""
    return run.derived(_document_losses)


def loss_differences(run: RunTables, baseline: str) -> pd.Series:
    """Loss minus that of `baseline` in nats/token by (model, context_length, doc).

    Only documents with the same text under both models, and models with the same tokens; empty without `baseline`.
    """
    return run.derived(_loss_differences, baseline)


def _document_losses(run: RunTables) -> pd.Series:
    return mean_losses(plain_types(run.table("nll")), ["model", "context_length", "doc"])


def _loss_differences(run: RunTables, baseline: str) -> pd.Series:
    losses = document_losses(run)
    keys = losses.index.to_frame(index=False)
    if baseline not in {*keys["model"]}:
        return losses[:0]
    is_comparable = keys["model"].isin(models_with_same_tokens(run, baseline)) & same_text_mask(run, keys, baseline)
    compared = losses[is_comparable.to_numpy()]
    own = compared.reset_index(level="model")
    differences: pd.Series = compared - losses.xs(baseline, level="model").reindex(own.index).to_numpy()
    return differences.dropna()


def _loss_statistics(losses: pd.Series, differences: pd.Series) -> pd.DataFrame:
    """Mean losses by model at each context length, and mean differences with their intervals."""
    columns: list[pd.DataFrame | pd.Series] = []
    for length, block in losses.groupby(level="context_length"):
        columns.append(block.groupby(level="model").mean().rename(f"nll_{length}"))
        compared = differences[differences.index.get_level_values("context_length") == length]
        if len(compared):
            columns.append(mean_with_interval(compared.droplevel("context_length"), f"nll_{length}_diff"))
    return pd.concat(columns, axis=1)


def _effective_length_column(head_table: pd.DataFrame) -> str:
    return longest_ess_column(head_table) or "ess2"
