"""How long the random tokens are that come twice, and how many sequences of them."""

from typing import Annotated

from pydantic import Field

from headscope.study.config import Options, sorted_lengths

MIN_PERIOD = 8
"""Below, chance is large and the kinds of key fall together."""


class DetectorsOptions(Options):
    """Heads that look at the previous token, a duplicate or what followed it, on random tokens that come twice."""

    periods: Annotated[list[int], sorted_lengths(MIN_PERIOD, "period")] = Field(
        default=[128, 512], description="how many random tokens come twice; a context is twice as long"
    )
    sequences: int = Field(8, ge=1, le=10_000, description="random sequences a period")
