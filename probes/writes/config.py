"""How long the contexts are."""

from pydantic import Field, field_validator

from headscope.studies.config import Options


class WritesConfig(Options):
    """What each head adds to the logit of the next token."""

    lengths: list[int] = Field(default=[2048], description="context lengths in tokens")

    @field_validator("lengths")
    @classmethod
    def _long_enough(cls, lengths: list[int]) -> list[int]:
        if not lengths:
            raise ValueError("give a length")
        if min(lengths) < 2:
            raise ValueError(f"context length {min(lengths)} is too short: give at least 2 tokens")
        return sorted(set(lengths))
