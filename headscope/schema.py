"""Every stored table and column, as data: name, dtype, unit, range, meaning.

The pyarrow schemas, the column reference in the docs and `headscope validate` are all derived from
`TABLES`. Choices made where the paper is silent are marked "[ours]".
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import pyarrow as pa

FORMAT_VERSION = 1
"""Major version of the run directory. Readers refuse a newer one by name."""

Kind = Literal["label", "index16", "index32", "count", "value", "flag", "text"]

ARROW_TYPES: Mapping[Kind, pa.DataType] = MappingProxyType(
    {
        "label": pa.dictionary(pa.int32(), pa.string()),
        "index16": pa.int16(),
        "index32": pa.int32(),
        "count": pa.int64(),
        "value": pa.float32(),
        "flag": pa.bool_(),
        "text": pa.string(),
    }
)


@dataclass(frozen=True)
class Column:
    """One stored column. `low` and `high` are inclusive bounds; None means unbounded."""

    name: str
    kind: Kind
    unit: str
    meaning: str
    low: float | None = None
    high: float | None = None
    key: bool = False


@dataclass(frozen=True)
class Table:
    """One stored table: key columns first, then values.

    `mean_over_cells` names the count column that weights the value columns when several cells
    (documents) contribute rows with the same key; None means that keys are unique as written.
    """

    name: str
    meaning: str
    columns: tuple[Column, ...]
    mean_over_cells: str | None = None

    @property
    def keys(self) -> list[str]:
        return [column.name for column in self.columns if column.key]

    @property
    def values(self) -> list[str]:
        return [column.name for column in self.columns if not column.key]

    @property
    def arrow(self) -> pa.Schema:
        """The table's pyarrow schema; units and meanings travel as field metadata."""
        return pa.schema(
            [
                pa.field(c.name, ARROW_TYPES[c.kind], nullable=False, metadata={"unit": c.unit, "meaning": c.meaning})
                for c in self.columns
            ],
            metadata={"headscope": f"{self.name}/{FORMAT_VERSION}"},
        )


def _key(name: str, kind: Kind, unit: str, meaning: str, low: float | None = 0, high: float | None = None) -> Column:
    return Column(name, kind, unit, meaning, low, high, key=True)


MODEL = _key("model", "label", "", "label of the model: a checkpoint under a position scheme", None)
LENGTH = _key("context_length", "index32", "tokens", "length of the context that was measured", 1)
DOC = _key("doc", "label", "", "document, as source/name", None)
LAYER = _key("layer", "index16", "", "decoder layer, from 0")
HEAD = _key("head", "index16", "", "query head within the layer, from 0")
GROUP = _key("kv_group", "index16", "", "query heads that share one key head; head // (heads / groups)")
PAIR = _key(
    "pair", "index16", "", "rotary 2-D plane f; dimensions that are not rotated follow as pairs with theta 0 [ours]"
)
VISIBLE = _key(
    "visible",
    "index32",
    "keys",
    "bin of query rows by the number of keys they see (i+1, at most the window), named by its upper edge; "
    "4 bins per octave from 16 [ours]",
    16,
)
DISTANCE = _key("distance", "index32", "tokens", "D = i - j; 0 and log-spaced, 4 per octave [ours]")

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
        _key("position", "index32", "tokens", "last predicted token of the bin of positions"),
        Column("nll", "value", "nats/token", "mean next-token loss over the bin", 0),
        Column("tokens", "count", "tokens", "predicted tokens in the bin", 1),
    ),
)

SCHEME = _key("scheme", "label", "", "positions of the probe's model: fixed RoPE, learned, partial or none", None)
WIDTH = _key("width", "index32", "tokens", "window width W: the answer is YES within W/2 of the centre", 1)
SEED = _key("seed", "index32", "", "seed of the initial weights")

WINDOW = Table(
    "window",
    "needle retrieval from a window: how well a one-layer, one-head model tells whether the needle lies in it",
    (
        SCHEME,
        WIDTH,
        _key("center", "index32", "tokens", "distance c at the window's centre", 1),
        SEED,
        Column("accuracy", "value", "", "balanced accuracy over every distance, exact [ours]", 0, 1),
        Column("loss", "value", "nats", "balanced cross-entropy after training", 0),
        Column("steps", "count", "steps", "training steps", 1),
        Column("frequency_mass", "value", "rad/token", "M = sum_f a_f theta_f, a_f = |q_f||k_f| / sum (Theorem 1)", 0),
        Column("dominant_theta", "value", "rad/token", "frequency of the pair with the largest a_f", 0),
    ),
)

WINDOW_PAIRS = Table(
    "window_pairs",
    "what each rotary pair of the trained model adds to the needle's logit at each distance",
    (
        SCHEME,
        WIDTH,
        SEED,
        PAIR,
        _key("distance", "index32", "tokens", "distance D of the needle from the query", 1),
        Column("logit", "value", "logits", "A_f cos(theta_f D + phi_f), exact"),
        Column("theta", "value", "rad/token", "frequency of the pair", 0),
    ),
)

SCALING = Table(
    "scaling",
    "effective length of Gaussian logits under the scale that the scaling theorems give for a target",
    (
        SCHEME,
        _key(
            "regime",
            "label",
            "",
            "case of Theorems 4 and 5: i above the critical exponent, ii at it, iii target 1",
            None,
        ),
        _key("exponent", "value", "", "the target is ESS*(L) = L^exponent", 0, 1),
        _key("beta", "value", "", "order of ESS", 0),
        LENGTH,
        SEED,
        Column("scale", "value", "", "lambda(L), the factor on the logits", 0),
        Column("target", "value", "tokens", "ESS*(L)", 1),
        Column("ess", "value", "tokens", "ESS of one sampled row", 1),
        Column("ratio", "value", "", "ess / target; approaches 1 as L grows", 0),
    ),
)

UNIT_HEAD = _key(
    "head", "index16", "", "query head within the layer, from 0; -1 where the unit is the whole KV group", -1
)
COMPONENT = _key(
    "component",
    "label",
    "",
    "what was reset: freq (log-frequencies), scale (tau, gamma), joint (both); or the intervention: z-zero, z-mean, "
    "q-uniform, a user's own",
    None,
)
TARGET = _key("target", "label", "", "what it was reset to: init or base; none where nothing is reset", None)

INFLUENCE = Table(
    "influence",
    "what the loss of a document becomes when the position parameters of one unit, a KV group or a head, are reset",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        UNIT_HEAD,
        GROUP,
        COMPONENT,
        TARGET,
        _key(
            "method",
            "label",
            "",
            "exact: evaluated; screen: first order in the head's output; curved: with its second order [ours]",
            None,
        ),
        Column("nll_before", "value", "nats/token", "mean next-token loss with nothing reset", 0),
        Column("delta_nll", "value", "nats/token", "loss after minus loss before; positive where the reset hurts"),
    ),
)

INFLUENCE_SETS = Table(
    "influence_sets",
    "the same for sets of units that are reset together: the most influential ones against random ones",
    (
        MODEL,
        LENGTH,
        DOC,
        COMPONENT,
        TARGET,
        _key("unit", "label", "", "what the set consists of: group or head", None),
        _key(
            "choice",
            "label",
            "",
            "top: the units of largest influence over all documents; random: as many from the same layers [ours]",
            None,
        ),
        _key("size", "index16", "units", "how many units are reset together", 1),
        _key("draw", "index16", "", "number of the random draw; 0 for the top set"),
        Column("nll_before", "value", "nats/token", "mean next-token loss with nothing reset", 0),
        Column("delta_nll", "value", "nats/token", "loss after minus loss before, evaluated exactly"),
    ),
)

TABLES: Mapping[str, Table] = MappingProxyType(
    {
        table.name: table
        for table in (
            ATTENTION,
            PAIRS,
            DISTANCES,
            POSITIONS,
            SCALES,
            NLL,
            INFLUENCE,
            INFLUENCE_SETS,
            WINDOW,
            WINDOW_PAIRS,
            SCALING,
        )
    }
)
