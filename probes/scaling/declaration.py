"""Options and stored table of the scaling probe."""

from typing import Annotated

from pydantic import Field, model_validator

from headscope.runs.columns import LENGTH, Column, Table, key
from headscope.study.config import Options

MAX_LENGTH = 100_000_000
"""A row of this length needs a few GB of memory."""


def theorem_case(exponent: float, beta: float) -> str:
    """Case of Theorems 4 and 5 (i, ii or iii) of the target ESS*(L) = L^exponent; "none" if they cover no such
    target."""
    critical = critical_exponent(beta)
    if exponent == 0:
        return "iii"
    return "i" if exponent > critical else "ii" if exponent == critical else "none"


def critical_exponent(beta: float) -> float:
    """The exponent of case ii; of the smaller ones only 0 can be reached."""
    return 1 - min(beta, 1 / beta)


class ScalingOptions(Options):
    """Numerical check of the scaling theorems."""

    lengths: list[int] = Field([100, 1_000, 10_000, 100_000, 1_000_000], description="row lengths L in tokens")
    exponents: list[Annotated[float, Field(ge=0, lt=1)]] = Field(
        [0.9, 0.8, 0.5, 0.0], min_length=1, description="exponents of the targets ESS*(L) = L^exponent"
    )
    betas: list[Annotated[float, Field(gt=0, le=1000)]] = Field(
        [2.0], min_length=1, description="Rényi orders of the effective sample size"
    )
    seeds: int = Field(16, ge=2, le=10_000, description="sampled rows per length and target")

    @model_validator(mode="after")
    def _check_consistency(self) -> "ScalingOptions":
        if min(self.lengths, default=0) < 10 or max(self.lengths) > MAX_LENGTH:
            raise ValueError(f"invalid lengths {self.lengths}. Use lengths of at least 10 and at most {MAX_LENGTH}")
        if 1 in self.betas:
            raise ValueError(f"invalid betas {self.betas}. Use positive orders other than 1")
        for beta in self.betas:
            if unreachable := [exponent for exponent in self.exponents if theorem_case(exponent, beta) == "none"]:
                critical = f"{critical_exponent(beta):.4g}"
                raise ValueError(
                    f"exponent {unreachable[0]:g} is not attainable at order {beta:g}. Use 0, or at least {critical}"
                )
        return self


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
