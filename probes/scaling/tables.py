"""Table of the scaling probe: effective lengths of sampled rows and their targets."""

from headscope.runs.columns import LENGTH, Column, Table, key

SCHEME = key("scheme", "label", "", "means of the logits: nope (constant) or rope (Proposition 1)", None)
SEED = key("seed", "index32", "", "seed of the row's noise")

SCALING = Table(
    "scaling",
    "effective length of Gaussian logits under the logit scale of the scaling theorems",
    (
        SCHEME,
        key(
            "regime",
            "label",
            "",
            "case of Theorems 4 and 5: i above the critical exponent, ii at it, iii target 1",
            None,
        ),
        key("exponent", "value", "", "exponent of the target ESS*(L) = L^exponent", 0, 1),
        key("beta", "value", "", "order of ESS", 0),
        LENGTH,
        SEED,
        Column("scale", "value", "", "lambda(L), the factor on the logits", 0),
        Column("target", "value", "tokens", "ESS*(L)", 1),
        Column("ess", "value", "tokens", "ESS of one sampled row", 1),
        Column("ratio", "value", "", "ess / target; approaches 1 as L grows", 0),
    ),
)

TABLES = (SCALING,)
