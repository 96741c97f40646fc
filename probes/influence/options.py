"""Options of the influence probe: units, components, objectives and method."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from headscope.heads import HeadSet, format_head
from headscope.study.config import Options
from probes.influence import bands


class InfluenceOptions(Options):
    """Head influence: change of the loss when the position parameters of one unit are reset or the unit is ablated."""

    models: list[str] | None = Field(None, min_length=1, description="labels of the models to sweep; default all")
    lengths: list[Annotated[int, Field(ge=2)]] = Field([1024], min_length=1, description="context lengths in tokens")
    components: list[
        Literal["joint", "freq", "scale", "zero", "mean", "uniform"]
        | Annotated[str, AfterValidator(bands.check_band_component)]
    ] = Field(
        ["joint", "freq", "scale"],
        description="what to change. Reset AdaRoPE parameters: freq, scale, joint (both). Ablate, without an adapter: "
        "zero or mean (the output), uniform (the attention pattern), pairs-zero:BAND (logit contribution of rotary "
        "pairs) or pairs-unrotated:BAND (their rotation); BAND is A-B, short, middle, long, eighths or wavelengths",
    )
    objectives: list[Literal["text", "answer"]] = Field(
        ["text"],
        min_length=1,
        description="loss over which tokens: all of a document (text), or the answer about a hidden fact (answer)",
    )
    depths: int = Field(
        3, ge=1, le=100, description="for answer: number of evenly spaced depths of the fact in each document"
    )
    needles: int = Field(4, ge=1, description="for answer: number of facts to hide, one at a time")
    reset_to: list[Literal["init", "base"]] = Field(
        ["init"], min_length=1, description="reset to: training start (init) or checkpoint (base)"
    )
    heads: dict[str, list[str]] | None = Field(
        None,
        min_length=1,
        description="named sets of heads, as induction=L5H1,L6H3;sinks=L0H2 or a mapping. Each set is changed "
        "together, without a curve; with method exact, only their heads are swept",
    )
    unit: Literal["auto", "group", "head"] = Field(
        "auto",
        description="auto: KV groups for freq and joint, else heads; head: change one query head without the others "
        "in its KV group",
    )
    method: Literal["exact", "estimate", "verify"] = Field(
        "verify", description="exact: ablate every unit; estimate: from gradients; verify: estimate all, ablate the top"
    )
    estimate_order: int = Field(
        2, ge=1, le=2, description="order of the estimate in the change; 2 adds the curvature of the loss"
    )
    top: int = Field(10, ge=1, description="verify: number of units with the largest estimates to ablate")
    random: int = Field(10, ge=0, description="verify: number of random other units to ablate")
    curve: bool = Field(
        True, description="also change the top 1, 2, 4, ... units together (bands of pairs: always all units together)"
    )
    draws: int = Field(2, ge=0, description="number of random sets for each top set of the curve")
    memory: int = Field(2048, ge=0, description="MiB of residual streams to keep in memory; the rest is kept on disk")

    @field_validator("heads", mode="before")
    @classmethod
    def _parse_head_sets(cls, value: Any) -> Any:
        """Parse the sets as written on the command line."""
        if not isinstance(value, str):
            return value
        sets = [text.partition("=") for text in value.split(";") if text.strip()]
        names = [name.strip() for name, _, _ in sets]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ValueError(f"the set '{repeated[0]}' is given twice. Give it once")
        return {name.strip(): [head.strip() for head in heads.split(",") if head.strip()] for name, _, heads in sets}

    @field_validator("heads")
    @classmethod
    def _normalize_head_sets(cls, value: dict[str, list[str]] | None) -> dict[str, list[str]] | None:
        """Write every head as L18H6, once in each set."""
        return None if value is None else {name: _normalize_heads(name, heads) for name, heads in value.items()}

    @model_validator(mode="after")
    def _check_unit(self) -> "InfluenceOptions":
        if self.heads and self.unit == "group":
            raise ValueError("unit cannot be group for named sets of heads. Remove unit or heads")
        return self


def _normalize_heads(set_name: str, head_names: list[str]) -> list[str]:
    if not set_name or not head_names:
        raise ValueError(f"head set '{set_name}' lacks a name or heads. Write it as induction=L5H1,L6H3")
    try:
        return [format_head(*head) for head in HeadSet.parse(head_names).heads]
    except ValueError as error:
        raise ValueError(f"head set '{set_name}': {error}") from error
