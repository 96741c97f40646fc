"""What to reset, and how to find what that does."""

from typing import Annotated, Literal

from pydantic import Field

from headscope.studies.config import Options


class Influence(Options):
    """Head influence: the loss when the position parameters of one unit are reset."""

    models: list[str] | None = Field(None, min_length=1, description="labels of the models to sweep; default all")
    lengths: list[Annotated[int, Field(ge=2)]] = Field([1024], min_length=1, description="context lengths in tokens")
    components: list[Literal["joint", "freq", "scale", "z-zero", "z-mean", "q-uniform"]] = Field(
        ["joint", "freq", "scale"], description="what is reset, or a named ablation, which needs no adapter"
    )
    targets: list[Literal["init", "base"]] = Field(["init"], min_length=1, description="what parameters go back to")
    unit: Literal["auto", "group", "head"] = Field(
        "auto", description="auto: KV groups for freq and joint, heads for the others; head un-ties one query head"
    )
    method: Literal["exact", "screen", "verify"] = Field("verify", description="evaluate, estimate, or both")
    order: int = Field(2, ge=1, le=2, description="order of the estimate; 2 adds the curvature of the loss")
    top: int = Field(10, ge=1, description="units of largest estimate that verify evaluates")
    random: int = Field(10, ge=0, description="random other units that verify evaluates")
    curve: bool = Field(True, description="reset the top 1, 2, 4, ... units together, too")
    draws: int = Field(2, ge=0, description="random sets beside each top set of the curve")
    memory: int = Field(2048, ge=0, description="MiB of residual streams kept in memory; others go to disk")
