"""Which needles to hide, and where."""

from typing import Literal

from pydantic import Field, model_validator

from headscope.prompts.needle_grid import even_depths
from headscope.study.config import Options

MAX_LENGTHS = 100
"""A larger number of context lengths was meant as a length."""
MAX_DEPTHS = 1000


class NeedleOptions(Options):
    """Needle-in-a-Haystack: lengths x depths x needles x seeds, every head scored on every answer."""

    lengths: int | list[int] = Field(
        4, description="how many, evenly spaced up to max_length; or the lengths in tokens"
    )
    max_length: int = Field(2048, ge=1, description="longest context in tokens, where lengths is a number")
    depths: int | list[float] = Field(5, description="how many, evenly spaced from 0 to 1; or the depths")
    needles: int = Field(6, ge=1, description="how many of the needles of a kind to hide, from the first")
    kind: Literal["literal", "indirect", "both"] = Field(
        "literal", description="needles asked for in their own words, in others (bakery, park, ...), or both"
    )
    file: str | None = Field(
        None, description="JSON lines of your own needles: name, question, opening, fact; cue, if in other words"
    )
    seeds: int = Field(1, ge=1, le=10_000, description="haystacks: documents of the source, in its seeded order")
    mode: Literal["strict", "wu"] = Field("strict", description="how copies count: exactly, or as the public code does")
    template: Literal["prefix", "plain", "chat"] = Field(
        "prefix", description="after the question: the needle's opening words, nothing, or the model's chat template"
    )
    attribution: bool = Field(
        False, description="also what each head adds to the logits of the answer, through the needle and otherwise"
    )
    ablate_top: list[int] = Field(
        [], description="numbers of heads to silence together, the top ones against random ones: 1,2,4,8,16,32"
    )
    rank_by: Literal["copies", "attribution"] = Field(
        "copies", description="by which score heads are the top ones of a knock-out: by copies, or through the needle"
    )
    ablation: list[Literal["zero", "mean"]] = Field(
        ["zero"], description="what silenced heads put out: nothing, or their mean over the haystack"
    )
    draws: int = Field(5, ge=1, le=1000, description="random sets of heads of each size, matched by layer")

    @model_validator(mode="after")
    def _check_grid(self) -> "NeedleOptions":
        numbers = (self.lengths, self.depths)
        if any(isinstance(number, int) and number < 1 for number in numbers) or [] in numbers:
            raise ValueError("give at least one length and one depth")
        if isinstance(self.lengths, int) and self.lengths > MAX_LENGTHS:
            raise ValueError(
                f"lengths {self.lengths} asks for that many context lengths; for one of {self.lengths} tokens give a "
                f"list, '--lengths {self.lengths},' or [{self.lengths}] in a study file"
            )
        if isinstance(self.depths, int) and self.depths > MAX_DEPTHS:
            raise ValueError(f"depths {self.depths} asks for that many depths; give at most {MAX_DEPTHS}, or a list")
        if wrong := [depth for depth in self.grid_depths if not 0 <= depth <= 1]:
            raise ValueError(f"depth {wrong[0]:g} lies outside 0 (start of the haystack) to 1 (its end)")
        if len({f"{depth:.4f}" for depth in self.grid_depths}) < len(self.grid_depths):
            raise ValueError("depths lie at least 0.0001 apart")
        if min(self.grid_lengths) < 1:
            raise ValueError(f"context length {min(self.grid_lengths)} is too short")
        return self

    @model_validator(mode="after")
    def _check_combinations(self) -> "NeedleOptions":
        if self.file is not None and self.kind != "literal":
            raise ValueError("kind chooses among the built-in needles: leave it out where there is a file")
        if self.mode == "wu" and (self.kind != "literal" or self.attribution):
            raise ValueError("mode wu counts copies of literal needles alone: use mode strict")
        if self.ablate_top and min(self.ablate_top) < 1:
            raise ValueError(f"knockout {min(self.ablate_top)} silences no head: give numbers of at least 1")
        if self.ablate_top and self.needles < 2:
            raise ValueError("a knock-out ranks heads on half of the needles: give at least 2 needles")
        if self.ablate_top and self.mode == "wu":
            raise ValueError("knock-outs are of exact trials: use mode strict")
        if self.rank_by == "attribution" and not self.attribution:
            raise ValueError("rank_by 'attribution' needs the attribution table. Add attribution: true")
        if not self.ablation:
            raise ValueError("ablation has no value. Use zero, mean or both")
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
        return even_depths(self.depths)
