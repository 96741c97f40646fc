"""How long the random tokens are that come twice, and how many sequences of them."""

from pydantic import Field, field_validator

from headscope.studies.config import Options

SHORTEST = 8
"""Below, chance is large and the kinds of key fall together."""


class DetectorsConfig(Options):
    """Heads that look at the previous token, a duplicate or what followed it, on random tokens that come twice."""

    periods: list[int] = Field(
        default=[128, 512], description="how many random tokens come twice; a context is twice as long"
    )
    sequences: int = Field(8, ge=1, le=10_000, description="random sequences a period")

    @field_validator("periods")
    @classmethod
    def _long_enough(cls, periods: list[int]) -> list[int]:
        if not periods:
            raise ValueError("give a period")
        if min(periods) < SHORTEST:
            raise ValueError(f"period {min(periods)} is too short: give at least {SHORTEST} tokens")
        return sorted(set(periods))
