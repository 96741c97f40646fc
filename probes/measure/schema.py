"""Options and stored tables of the measure probe."""

from typing import Literal

from pydantic import Field, field_validator

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
            "mean weight on key 0, over the rows that see it; runs of earlier versions averaged it over all rows",
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
