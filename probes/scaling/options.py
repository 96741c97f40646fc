"""Which rows to sample."""

from pydantic import Field, model_validator

from headscope.study.config import Options

MAX_LENGTH = 100_000_000
"""A row of this length takes a few GB."""


def regime(exponent: float, beta: float) -> str:
    """Which case of Theorems 4 and 5 the target ESS*(L) = L^exponent is."""
    edge = critical_exponent(beta)
    if exponent == 0:
        return "iii"
    return "i" if exponent > edge else "ii" if exponent == edge else "none"


def critical_exponent(beta: float) -> float:
    """The exponent of case ii, below which only 0 has a scale."""
    return 1 - min(beta, 1 / beta)


class ScalingOptions(Options):
    """Numerical check of the scaling theorems."""

    lengths: list[int] = Field([100, 1_000, 10_000, 100_000, 1_000_000], description="row lengths L in tokens")
    exponents: list[float] = Field([0.9, 0.8, 0.5, 0.0], description="targets ESS*(L) = L^exponent")
    betas: list[float] = Field([2.0], description="orders of ESS")
    seeds: int = Field(16, ge=2, le=10_000, description="sampled rows a length and target")

    @model_validator(mode="after")
    def _check_consistency(self) -> "ScalingOptions":
        if min(self.lengths, default=0) < 10 or max(self.lengths) > MAX_LENGTH:
            raise ValueError(f"give lengths of at least 10 and at most {MAX_LENGTH}")
        if not self.exponents or not all(0 <= exponent < 1 for exponent in self.exponents):
            raise ValueError("exponents lie in [0, 1)")
        if not self.betas or not all(beta > 0 and beta != 1 for beta in self.betas):
            raise ValueError("orders of ESS are positive and not 1")
        for beta in self.betas:
            if none := [exponent for exponent in self.exponents if regime(exponent, beta) == "none"]:
                least = f"{critical_exponent(beta):.4g}"
                raise ValueError(f"no scale gives exponent {none[0]:g} at order {beta:g}: use 0, or at least {least}")
        return self
