"""Which needles to hide, and where."""

from typing import Literal

from pydantic import Field, model_validator

from headscope.studies.config import Options

MOST_LENGTHS = 100
"""A larger number of context lengths was meant as a length."""
MOST_DEPTHS = 1000


class NeedleGrid(Options):
    """Needle-in-a-Haystack: lengths x depths x needles x seeds, every head scored on every answer."""

    lengths: int | list[int] = Field(
        4, description="how many, evenly spaced up to max_length; or the lengths in tokens"
    )
    max_length: int = Field(2048, ge=1, description="longest context in tokens, where lengths is a number")
    depths: int | list[float] = Field(5, description="how many, evenly spaced from 0 to 1; or the depths")
    needles: int = Field(6, ge=1, description="how many of the needles to hide, from the first")
    file: str | None = Field(None, description="JSON lines of your own needles: name, question, opening, fact")
    seeds: int = Field(1, ge=1, le=10_000, description="haystacks: documents of the source, in its seeded order")
    mode: Literal["strict", "wu"] = Field("strict", description="how copies count: exactly, or as the public code does")
    template: Literal["prefix", "plain", "chat"] = Field(
        "prefix", description="after the question: the needle's opening words, nothing, or the model's chat template"
    )

    @model_validator(mode="after")
    def _make_a_grid(self) -> "NeedleGrid":
        numbers = (self.lengths, self.depths)
        if any(isinstance(number, int) and number < 1 for number in numbers) or [] in numbers:
            raise ValueError("give at least one length and one depth")
        if isinstance(self.lengths, int) and self.lengths > MOST_LENGTHS:
            raise ValueError(
                f"lengths {self.lengths} asks for that many context lengths; for one of {self.lengths} tokens give a "
                f"list, '--lengths {self.lengths},' or [{self.lengths}] in a study file"
            )
        if isinstance(self.depths, int) and self.depths > MOST_DEPTHS:
            raise ValueError(f"depths {self.depths} asks for that many depths; give at most {MOST_DEPTHS}, or a list")
        if wrong := [depth for depth in self.grid_depths if not 0 <= depth <= 1]:
            raise ValueError(f"depth {wrong[0]:g} lies outside 0 (start of the haystack) to 1 (its end)")
        if min(self.grid_lengths) < 1:
            raise ValueError(f"context length {min(self.grid_lengths)} is too short")
        return self

    @property
    def grid_lengths(self) -> list[int]:
        """Context lengths in tokens, ascending."""
        if isinstance(self.lengths, list):
            return sorted(set(self.lengths))
        return sorted({round(self.max_length * n / self.lengths) for n in range(1, self.lengths + 1)})

    @property
    def grid_depths(self) -> list[float]:
        """Depths, ascending; a single one lies in the middle."""
        if isinstance(self.depths, list):
            return sorted(set(self.depths))
        return [0.5] if self.depths == 1 else [n / (self.depths - 1) for n in range(self.depths)]
