"""Every stored table and column, as data: name, dtype, unit, range, meaning.

The pyarrow schemas, the column reference in the docs and `headscope validate` are all derived from
`TABLES`. Choices made where the paper is silent are marked "[ours]".
"""

from collections.abc import Mapping
from types import MappingProxyType

from headscope.columns import (
    ARROW_TYPES,
    DISTANCE,
    DOC,
    FORMAT_VERSION,
    GROUP,
    HEAD,
    LAYER,
    LENGTH,
    MODEL,
    PAIR,
    VISIBLE,
    Column,
    Table,
    key,
)
from headscope.probe_tables import INFLUENCE, INFLUENCE_SETS, NEEDLES, RETRIEVAL, SCALING, WINDOW, WINDOW_PAIRS

__all__ = ["ARROW_TYPES", "FORMAT_VERSION", "TABLES", "Column", "Table"]

ATTENTION = Table(
    "attention",
    "what each head's attention rows look like, binned by the number of visible keys",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        VISIBLE,
        Column("rows", "count", "rows", "query rows that were averaged", 1),
        Column("ess2", "value", "tokens", "mean effective length ESS_2 = 1 / sum_j alpha_ij^2", 1),
        Column("log_ess2", "value", "nats", "mean of ln ESS_2; its exp is the typical effective length", 0),
        Column("ess1", "value", "tokens", "mean ESS_1 = exp(entropy of the row)", 1),
        Column("max_weight", "value", "", "mean of the row's largest weight", 0, 1),
        Column("sink_mass", "value", "", "mean weight on key 0; 0 where key 0 is outside the window", 0, 1),
        Column("local_mass", "value", "", "mean weight on the last 32 keys, own position included", 0, 1),
        Column("mean_distance", "value", "tokens", "mean of sum_j alpha_ij (i - j)", 0),
    ),
)

PAIRS = Table(
    "pairs",
    "how much each rotary pair contributes to the head's logits",
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
            "that hold equally many such pairs [ours]",
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

DISTANCES = Table(
    "distance",
    "each pair's contribution as a function of distance, over all documents",
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

POSITIONS = Table(
    "positions",
    "the rotation frequencies of each model",
    (
        MODEL,
        LAYER,
        GROUP,
        PAIR,
        Column("theta", "value", "rad/token", "rotation frequency", 0),
        Column("log_theta", "value", "ln rad/token", "ln theta; -inf where theta is 0"),
        Column(
            "log_theta_init",
            "value",
            "ln rad/token",
            "ln theta that learning started from (log_theta where nothing is learned)",
        ),
        Column("log_theta_base", "value", "ln rad/token", "ln theta of the checkpoint's own scheme"),
    ),
)

SCALES = Table(
    "scales",
    "the logit temperature of each head and one-number summaries of its frequencies",
    (
        MODEL,
        LAYER,
        HEAD,
        GROUP,
        Column("tau", "value", "", "temperature; lambda(n) = (1/tau) ln(1 + max(n, L_ref)/L_ref)^gamma", 0),
        Column("gamma", "value", "", "growth exponent of lambda; 0 where the scheme has none"),
        Column("reference_length", "count", "tokens", "L_ref, the length below which lambda is constant", 1),
        Column(
            "logit_scale",
            "value",
            "",
            "what logits are multiplied by, beyond the checkpoint's own scaling, at n <= L_ref",
            0,
        ),
        Column(
            "effective_base",
            "value",
            "",
            "Theta = exp(-4/(r-2) sum_f ln theta_f) over the r/2 rotary pairs; inf where a rotary pair has theta 0",
            0,
        ),
        Column("mean_log_theta", "value", "ln rad/token", "mean of ln theta over rotary pairs; -inf where one is 0"),
    ),
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

ADAPTER = key("adapter", "label", "", "name of what is being learned: the study's name", None)
STEP = key("step", "index32", "steps", "optimiser steps taken; 0 is the untrained start")

TRAINING = Table(
    "training",
    "what each optimiser step of a training saw",
    (
        ADAPTER,
        STEP,
        Column("context_length", "index32", "tokens", "length of the step's sequences", 1),
        Column("tokens", "count", "tokens", "tokens of the step's batch", 1),
        Column("loss", "value", "nats/token", "mean next-token loss of the batch, before the step", 0),
        Column("rate", "value", "", "factor on every learning rate: warm-up, stable, decay", 0, 1),
    ),
)

VALIDATION = Table(
    "validation",
    "next-token loss by position on held-out documents, during a training",
    (
        ADAPTER,
        STEP,
        LENGTH,
        DOC,
        key("position", "index32", "tokens", "last predicted token of the bin of positions"),
        Column("nll", "value", "nats/token", "mean next-token loss over the bin", 0),
        Column("tokens", "count", "tokens", "predicted tokens in the bin", 1),
    ),
)

TABLES: Mapping[str, Table] = MappingProxyType(
    {
        table.name: table
        for table in (
            *(ATTENTION, PAIRS, DISTANCES, POSITIONS, SCALES, NLL),
            *(TRAINING, VALIDATION),
            *(NEEDLES, RETRIEVAL),
            *(INFLUENCE, INFLUENCE_SETS),
            *(WINDOW, WINDOW_PAIRS, SCALING),
        )
    }
)
