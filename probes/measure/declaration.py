"""Options, stored tables and statistics of the measure probe."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import Field, field_validator

from headscope.runs.column_metadata import Statistic
from headscope.runs.columns import (
    DISTANCE,
    DOC,
    GROUP,
    HEAD,
    LAYER,
    LENGTH,
    MODEL,
    PAIR,
    ROW_COUNTS,
    SINK_COUNTS,
    VISIBLE,
    Column,
    Table,
    key,
)
from headscope.study.config import Lengths, PromptOptions

TableName = Literal["attention", "pairs", "distance", "nll"]

MAX_ROWS = 2**20
"""Most query rows that are sampled per document."""


class MeasureOptions(PromptOptions):
    """What to measure over texts."""

    lengths: Lengths = Field(default=[512, 2048], description="context lengths in tokens")
    tables: list[TableName] = Field(
        default=["attention", "pairs", "distance", "nll"],
        min_length=1,
        description="tables to store",
        json_schema_extra={"flags": ["--measure"]},
    )
    rows: int | Literal["exact"] = Field(
        default=64, description="query rows sampled per head and document; exact: all rows, and the largest logit"
    )

    @field_validator("rows")
    @classmethod
    def _check_row_count(cls, rows: int | str) -> int | str:
        if isinstance(rows, int) and rows < 2:
            raise ValueError(f"{rows} rows are too few. Give at least 2, or exact")
        if isinstance(rows, int) and rows > MAX_ROWS:
            raise ValueError(f"{rows} rows are too many. Give at most {MAX_ROWS}, or exact")
        return rows


BIN_COLUMNS = (*(MODEL, LENGTH, DOC, LAYER, HEAD, GROUP, VISIBLE), *ROW_COUNTS)

ATTENTION = Table(
    "attention",
    "statistics of each head's attention rows, binned by the number of visible keys",
    (
        *BIN_COLUMNS,
        *SINK_COUNTS,
        Column(
            "ess2",
            "value",
            "tokens",
            "mean effective length ESS_2 = 1 / sum_j alpha_ij^2; with a learned sink, alpha is divided by the weight "
            "that the sink leaves, here, in ess1 and in mean_distance",
            1,
        ),
        Column("log_ess2", "value", "nats", "mean of ln ESS_2; its exp is the typical effective length", 0),
        Column("ess1", "value", "tokens", "mean ESS_1 = exp(entropy of the row)", 1),
        Column("max_weight", "value", "", "mean of the row's largest weight", 0, 1),
        Column(
            "sink_mass",
            "value",
            "",
            "mean weight on key 0, over the rows that see it",
            0,
            1,
        ),
        Column("local_mass", "value", "", "mean weight on the last 32 keys, own position included", 0, 1),
        Column("mean_distance", "value", "tokens", "mean of sum_j alpha_ij (i - j)", 0),
    ),
)

LEARNED_SINK = Table(
    "learned_sink",
    "weight of each head on the learned attention sink; only for models that have one",
    (
        *BIN_COLUMNS,
        Column("share", "value", "", "mean weight on the learned sink", 0, 1),
    ),
)

MAX_LOGIT = Table(
    "max_logit",
    "largest attention logit of each head over all causal pairs (i, j), exact; only if all rows are measured",
    (
        *(MODEL, LENGTH, DOC, LAYER, HEAD, GROUP),
        Column("max_logit", "value", "logits", "largest scaled logit, after the soft cap; learned sinks do not count"),
        Column("query", "index32", "tokens", "position i of its query", 0),
        Column("key", "index32", "tokens", "position j of its key", 0),
    ),
)

PAIRS = Table(
    "pairs",
    "contribution of each rotary pair to the head's logits",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        PAIR,
        Column("theta", "value", "rad/token", "rotation frequency of the pair", 0),
        Column(
            "mean_abs",
            "value",
            "logits",
            "E |c_f|, mean absolute dot product, over causal pairs (i, j); query rows are sampled from strata "
            "with equally many such pairs [ours]",
            0,
        ),
        Column(
            "mean_abs_se",
            "value",
            "logits",
            "standard error of mean_abs over its sampled rows; 0 if every row was used",
            0,
        ),
        Column("mean_signed", "value", "logits", "E c_f over all causal pairs (i, j), exact"),
        Column("rms", "value", "logits", "sqrt(E c_f^2) over all causal pairs (i, j), exact", 0),
        Column("norm_product", "value", "logits", "E |q_f| |k_f| over all causal pairs (i, j), exact", 0),
    ),
)

DISTANCE_PROFILES = Table(
    "distance",
    "contribution of each rotary pair to the logits by distance, over all documents",
    (
        MODEL,
        LENGTH,
        LAYER,
        HEAD,
        GROUP,
        PAIR,
        DISTANCE,
        Column("mean_signed", "value", "logits", "E c_f over all (i, i - D), exact"),
        Column("n", "count", "pairs", "number of (i, j) that were averaged", 1),
    ),
    mean_over_cells="n",
)

NLL = Table(
    "nll",
    "next-token loss by position",
    (
        MODEL,
        LENGTH,
        DOC,
        key("position", "index32", "tokens", "last predicted token of the bin of positions"),
        Column("nll", "value", "nats/token", "mean next-token loss over the bin", 0),
        Column("tokens", "count", "tokens", "predicted tokens in the bin", 1),
    ),
)

TABLES = (ATTENTION, LEARNED_SINK, MAX_LOGIT, PAIRS, DISTANCE_PROFILES, NLL)

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
"""Columns of the per-head and the per-model table, with what they are."""
