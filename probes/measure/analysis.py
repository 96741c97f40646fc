"""Statistics of the probe `measure`: columns of the per-head and per-model tables, and roles of heads.

Effective lengths are exp(mean ln ESS2) over the query rows in the last octave of visible keys: the last four bins that
the head's layer fills [ours]. Every row counts once.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from headscope.bins import BINS_PER_OCTAVE, bin_center
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
from headscope.runs.column_metadata import Role, Statistic, columns_by_length, exceeds, falls_below
from headscope.runs.run_tables import RunTables
from headscope.runs.summary import longest_ess_column, models_with_same_tokens, same_text_mask

MIN_GROWTH_KEYS = 64
"""Minimum bin center, in visible keys, of the rows that the growth exponent is fitted to."""
LOCAL_LENGTH = 8
"""Effective length, in tokens, below which a head has the role local [ours]."""
RETRIEVAL_GROWTH, AGGREGATION_GROWTH = 0.25, 0.75
"""Growth exponents below and above which a head has the role constant or widening [ours]."""
SINK_MASS = 0.5
"""Weight on the first token above which a head has the role sink [ours]."""
LAST_OCTAVE_COLUMNS = ("log_ess2", "ess1", "max_weight", "sink_mass", "local_mass", "mean_distance")
"""Columns of `attention` that are averaged over the last octave of visible keys."""
READ_COLUMNS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention": ("visible", "population", "sink_population", *LAST_OCTAVE_COLUMNS),
        "pairs": ("theta", "mean_abs", "rms", "norm_product"),
    }
)
"""What is read of the largest tables, besides their keys."""

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "ess2": Statistic(
            "effective length",
            "tokens",
            "exp of the mean ln ESS2 over query rows in the last octave of visible keys",
            True,
            "ESS₂(i) = 1 / Σⱼ αᵢⱼ²",
            by_length=True,
        ),
        "growth": Statistic(
            "growth exponent",
            "",
            "slope of ln ESS2 on ln n, the visible keys, over bins with n >= 64 at the longest length [ours]; "
            "about 0 for a retrieval head, 1 for an aggregation head",
            formula="ln ESS₂(n) ≈ growth · ln n + const",
            explanation="0 if the effective length is constant, 1 if in proportion",
        ),
        "ess1": Statistic(
            "ESS1",
            "tokens",
            "mean exp(entropy) of the rows, last octave of visible keys",
            True,
            "ESS₁(i) = exp(−Σⱼ αᵢⱼ ln αᵢⱼ)",
        ),
        "max_weight": Statistic("largest weight", "", "mean of a row's largest weight, last octave of visible keys"),
        "max_logit": Statistic(
            "largest logit",
            "logits",
            "largest scaled logit over all causal pairs and documents at the longest length, exact; of a model: of all "
            "its heads",
            formula="max over i ≥ j of sᵢⱼ",
        ),
        "sink_mass": Statistic(
            "sink mass",
            "",
            "mean weight on key 0 over the rows that see it, last octave of visible keys",
            formula="αᵢ₀",
        ),
        "learned_sink": Statistic(
            "learned sink",
            "",
            "mean weight on the learned attention sink, last octave of visible keys",
            formula="exp(sink − lse)",
        ),
        "local_mass": Statistic(
            "local mass",
            "",
            "mean weight on the last 32 keys, last octave of visible keys",
            formula="Σ αᵢⱼ over i − j < 32",
        ),
        "mean_distance": Statistic(
            "mean distance",
            "tokens",
            "mean distance of the attended tokens, last octave of visible keys",
            True,
            "Σⱼ αᵢⱼ (i − j)",
        ),
        "cov": Statistic(
            "CoV of pairs",
            "",
            "spread of usage E|c_f| over rotary pairs; lower is more even",
            formula="CoV = std_f E|c_f| / mean_f E|c_f|, c_f = q_f · k_f",
            explanation="coefficient of variation of their use; 0 if a head uses all alike",
        ),
        "cov_rms": Statistic(
            "CoV of pairs (rms)",
            "",
            "spread of root mean squares over rotary pairs; lower is more even",
            formula="std_f / mean_f of √E c_f²",
        ),
        "cov_norm": Statistic(
            "CoV of pairs (norms)",
            "",
            "spread of norm products over rotary pairs; lower is more even",
            formula="std_f / mean_f of E|q_f||k_f|",
        ),
        "weighted_log_theta": Statistic(
            "weighted mean log-frequency",
            "ln rad/token",
            "mean of ln theta_f weighted by usage E|c_f|, over the pairs that rotate [ours]",
            formula="Σ_f E|c_f| ln θ_f / Σ_f E|c_f|",
        ),
        "mean_log_theta": Statistic("mean log-frequency", "ln rad/token", "mean of ln theta over rotary pairs"),
        "effective_base": Statistic("effective base", "", "base of the plain RoPE with the same mean ln theta", True),
        "tau": Statistic(
            "temperature tau",
            "",
            "temperature in the logit factor lambda(n) = (1/tau) ln(1 + max(n, L_ref)/L_ref)^gamma",
        ),
        "gamma": Statistic("logit growth gamma", "", "exponent of ln(1 + n/L_ref) in the logit factor lambda(n)"),
        "logit_scale": Statistic(
            "logit multiplier", "", "factor on all logits up to L_ref, relative to the checkpoint's own"
        ),
        "nll": Statistic(
            "loss",
            "nats/token",
            "mean over documents of the mean next-token loss",
            number_format=".3f",
            by_length=True,
            against_first=True,
        ),
    }
)

ROLES: Mapping[str, Role] = MappingProxyType(
    {
        "local": Role(
            f"effective length below {LOCAL_LENGTH} tokens at the longest length, and not the role sink",
            lambda h: falls_below(h[_effective_length_column(h)], LOCAL_LENGTH) & ~exceeds(h["sink_mass"], SINK_MASS),
            "local_mass",
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
        mean_with_interval(block.droplevel("context_length"), f"ess2_{length}", low=0).apply(np.exp)
        for length, block in means["log_ess2"].groupby(level="context_length")
    ]
    columns.append(mean_with_interval(_growth_exponents(rows_at_longest_length(frame)), "growth"))
    columns.append(rows_at_longest_length(means.reset_index()).groupby(HEAD_KEYS)[[*LAST_OCTAVE_COLUMNS[1:]]].mean())
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
