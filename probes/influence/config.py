"""What to reset or to take away, whose loss to look at, and how to find what that does."""

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from headscope.studies.config import Options
from probes.influence import bands


class Influence(Options):
    """Head influence: the loss when the position parameters of one unit are reset, or something is taken from it."""

    models: list[str] | None = Field(None, min_length=1, description="labels of the models to sweep; default all")
    lengths: list[Annotated[int, Field(ge=2)]] = Field([1024], min_length=1, description="context lengths in tokens")
    components: list[
        Literal["joint", "freq", "scale", "z-zero", "z-mean", "q-uniform"] | Annotated[str, AfterValidator(bands.read)]
    ] = Field(
        ["joint", "freq", "scale"],
        description="what is reset, or what is taken away, which needs no adapter: the output (z-zero, z-mean), the "
        "choice of keys (q-uniform), or rotary pairs A to B: their part of the logit (pairs-zero:A-B) or only their "
        "rotation (pairs-still:A-B); short, middle, long name pairs by wavelength, eighths and wavelengths all bands",
    )
    objectives: list[Literal["text", "answer"]] = Field(
        ["text"],
        min_length=1,
        description="whose loss: of every token of the documents, or of the answer about a fact hidden in them",
    )
    depths: int = Field(3, ge=1, le=100, description="places of the fact in each document, evenly spaced, for answer")
    needles: int = Field(4, ge=1, description="how many facts to hide, one at a time, for answer")
    targets: list[Literal["init", "base"]] = Field(["init"], min_length=1, description="what parameters go back to")
    unit: Literal["auto", "group", "head"] = Field(
        "auto", description="auto: KV groups for freq and joint, heads for the others; head un-ties one query head"
    )
    method: Literal["exact", "screen", "verify"] = Field("verify", description="evaluate, estimate, or both")
    order: int = Field(2, ge=1, le=2, description="order of the estimate; 2 adds the curvature of the loss")
    top: int = Field(10, ge=1, description="units of largest estimate that verify evaluates")
    random: int = Field(10, ge=0, description="random other units that verify evaluates")
    curve: bool = Field(
        True, description="change the top 1, 2, 4, ... units together, too; of bands of pairs all units, anyway"
    )
    draws: int = Field(2, ge=0, description="random sets beside each top set of the curve")
    memory: int = Field(2048, ge=0, description="MiB of residual streams kept in memory; others go to disk")
