"""Options of the detectors probe: length and number of the repeated random token sequences."""

from typing import Annotated

from pydantic import Field

from headscope.study.config import Options, sorted_lengths

MIN_PERIOD = 8
"""For shorter periods the chance level is high and the kinds of key overlap."""


class DetectorsOptions(Options):
    """Heads that attend to the previous token, a duplicate or the token after it, on a repeated random token
    sequence."""

    periods: Annotated[list[int], sorted_lengths(MIN_PERIOD, "period")] = Field(
        default=[128, 512], description="length of the repeated random token sequence; a context is twice as long"
    )
    sequences: int = Field(8, ge=1, le=10_000, description="random sequences per period")
