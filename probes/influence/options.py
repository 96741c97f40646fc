"""What to reset or to take away, whose loss to look at, and how to find what that does."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from headscope import user_input
from headscope.study.config import Options
from probes.influence import bands


class InfluenceOptions(Options):
    """Head influence: the loss when the position parameters of one unit are reset, or something is taken from it."""

    models: list[str] | None = Field(None, min_length=1, description="labels of the models to sweep; default all")
    lengths: list[Annotated[int, Field(ge=2)]] = Field([1024], min_length=1, description="context lengths in tokens")
    components: list[
        Literal["joint", "freq", "scale", "zero", "mean", "uniform"]
        | Annotated[str, AfterValidator(bands.check_band_component)]
    ] = Field(
        ["joint", "freq", "scale"],
        description="what is reset, or what is taken away, which needs no adapter: the output (zero, mean), the "
        "choice of keys (uniform), or rotary pairs A to B: their part of the logit (pairs-zero:A-B) or only their "
        "rotation (pairs-unrotated:A-B); short, middle, long name pairs by wavelength, eighths and wavelengths "
        "all bands",
    )
    objectives: list[Literal["text", "answer"]] = Field(
        ["text"],
        min_length=1,
        description="whose loss: of every token of the documents, or of the answer about a fact hidden in them",
    )
    depths: int = Field(3, ge=1, le=100, description="places of the fact in each document, evenly spaced, for answer")
    needles: int = Field(4, ge=1, description="how many facts to hide, one at a time, for answer")
    reset_to: list[Literal["init", "base"]] = Field(["init"], min_length=1, description="what parameters go back to")
    heads: dict[str, list[str]] | None = Field(
        None,
        min_length=1,
        description="named sets of heads, induction=L5H1,L6H3;sinks=L0H2 or a mapping: instead of curves each set is "
        "changed together, and each of its heads alone, where exact instead of all others",
    )
    unit: Literal["auto", "group", "head"] = Field(
        "auto", description="auto: KV groups for freq and joint, heads for the others; head un-ties one query head"
    )
    method: Literal["exact", "estimate", "verify"] = Field("verify", description="evaluate, estimate, or both")
    estimate_order: int = Field(2, ge=1, le=2, description="order of the estimate; 2 adds the curvature of the loss")
    top: int = Field(10, ge=1, description="units of largest estimate that verify evaluates")
    random: int = Field(10, ge=0, description="random other units that verify evaluates")
    curve: bool = Field(
        True, description="change the top 1, 2, 4, ... units together, too; of bands of pairs all units, anyway"
    )
    draws: int = Field(2, ge=0, description="random sets beside each top set of the curve")
    memory: int = Field(2048, ge=0, description="MiB of residual streams kept in memory; others go to disk")

    @field_validator("heads", mode="before")
    @classmethod
    def _parse_head_sets(cls, value: Any) -> Any:
        """The sets as the flag has them."""
        if not isinstance(value, str):
            return value
        named = [each.partition("=") for each in value.split(";") if each.strip()]
        names = [name.strip() for name, _, _ in named]
        if twice := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"the set '{twice[0]}' is given twice")
        return {name.strip(): [head.strip() for head in heads.split(",") if head.strip()] for name, _, heads in named}

    @field_validator("heads")
    @classmethod
    def _normalize_head_sets(cls, value: dict[str, list[str]] | None) -> dict[str, list[str]] | None:
        """Every head as L18H6, once in each set."""
        return None if value is None else {name: _normalize_heads(name, told) for name, told in value.items()}

    @model_validator(mode="after")
    def _check_unit(self) -> "InfluenceOptions":
        if self.heads and self.unit == "group":
            raise ValueError("heads names heads, so that unit cannot be group: leave one of the two out")
        return self


def _normalize_heads(set_name: str, head_names: list[str]) -> list[str]:
    if not set_name or not head_names:
        raise ValueError(f"a set of heads needs a name and heads, as in induction=L5H1,L6H3; '{set_name}' has not both")
    places = []
    for each in head_names:
        layer, head, whole = user_input.unit(each)
        if whole:
            raise ValueError(f"'{each}' of the set '{set_name}' is a key group: name its heads")
        places.append(f"L{layer}H{head}")
    return [*dict.fromkeys(places)]
