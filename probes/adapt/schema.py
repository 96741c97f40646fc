"""Options and stored tables of the adapt probe."""

import re
from itertools import accumulate
from typing import Any, Literal

from pydantic import Field, model_validator

from headscope.prompts.shakespeare import DEFAULT_SOURCE
from headscope.runs.columns import DOC, LENGTH, Column, Table, key
from headscope.study.config import Options, TextSource
from headscope.study.option_rules import Excludes, Needs

Variant = Literal["full", "no-freq", "no-scale", "shared-freq", "fixed-log", "learned-base"]
Strategy = Literal["adarope", "yarn-lora", "joint", "adarope-lora", "adarope-joint"]

MAX_STEPS, MAX_BATCH, MAX_RATE = 1_000_000, 65_536, 100.0
"""Largest number of steps of a phase, of sequences per step, and largest learning rate."""


class Phase(Options):
    """Training steps of one sequence length and batch size."""

    length: int = Field(ge=2, description="tokens per sequence")
    steps: int = Field(ge=1, le=MAX_STEPS, description="optimiser steps")
    batch: int = Field(
        1, ge=1, le=MAX_BATCH, description="sequences per step; their gradients are accumulated one by one"
    )

    def __str__(self) -> str:
        return f"{self.length}:{self.steps}:{self.batch}"

    @model_validator(mode="before")
    @classmethod
    def _parse_shorthand(cls, value: Any) -> Any:
        """Parse LENGTH:STEPS[:BATCH], the form of the flag."""
        if not isinstance(value, str):
            return value
        parts = value.split(":")
        if len(parts) not in (2, 3) or not all(re.fullmatch("[0-9]+", part) for part in parts):
            raise ValueError(f"invalid phase '{value}'. Use LENGTH:STEPS or LENGTH:STEPS:BATCH, e.g. 2048:26:4")
        return dict(zip(("length", "steps", "batch"), map(int, parts), strict=False))


class AdaptOptions(Options):
    """Training of AdaRoPE, and optionally a LoRA, on a frozen checkpoint.

    The study's texts are the validation texts.
    """

    option_rules = (
        Needs("strategy=adarope-lora|adarope-joint", "adapter", "the strategy continues a training"),
        Excludes("strategy=yarn-lora|joint", "adapter", "the strategy cannot continue an adapter"),
        Excludes("start", "adapter", "an adapter has its own start"),
        Excludes("factor", "start adapter", "{factor} is for the default start"),
        Excludes("strategy=yarn-lora|adarope-lora", "variant!=full", "the strategy does not train positions"),
        Excludes("lora_learning_rate lora_rank lora_alpha", "strategy=adarope", "the strategy does not train a LoRA"),
        Excludes("variant=fixed-log", "adapter", "the variant resets every scale"),
    )

    factor: float = Field(
        8.0, ge=1, le=1e6, description="context extension factor: training starts from YaRN with this factor"
    )
    training_texts: list[TextSource] = Field(
        [DEFAULT_SOURCE],
        min_length=1,
        validate_default=True,
        description="text sources to train on; the validation documents (--text) are excluded from training",
    )
    sample_by: Literal["tokens", "sources"] = Field(
        "tokens",
        description="what sampling is uniform over: all tokens of --training-texts, or its sources",
    )
    phases: list[Phase] = Field(
        [
            Phase(length=2048, steps=26, batch=4),
            Phase(length=4096, steps=16, batch=2),
            Phase(length=8192, steps=6, batch=1),
            Phase(length=10240, steps=4, batch=1),
        ],
        description="phases of the curriculum in order, each LENGTH:STEPS[:BATCH]; the paper uses one, 65536:62:8",
    )
    variant: Variant = Field(
        "full",
        description="trainable parameters: all (full), or those of an ablation (docs/adarope-training.md)",
    )
    strategy: Strategy = Field(
        "adarope", description="adarope: train positions only (stage 1); the others also train a LoRA (stage 2)"
    )
    start: str | None = Field(
        None, min_length=1, description="position scheme to start from, e.g. base; default: YaRN with the factor"
    )
    adapter: str | None = Field(
        None, min_length=1, description="adapter to continue training; adarope-lora and adarope-joint need one"
    )
    frequency_learning_rate: float = Field(
        3e-2, gt=0, le=MAX_RATE, description="learning rate of the log-frequencies (xi)"
    )
    scale_learning_rate: float = Field(
        3e-3, gt=0, le=MAX_RATE, description="learning rate of temperature (tau) and growth (gamma)"
    )
    lora_learning_rate: float = Field(3e-4, gt=0, le=MAX_RATE, description="learning rate of the LoRA")
    lora_rank: int = Field(16, ge=1, le=4096, description="rank of the LoRA")
    lora_alpha: int = Field(16, ge=1, le=2**20, description="alpha of the LoRA")
    warmup: int = Field(20, ge=0, le=MAX_STEPS, description="warm-up steps")
    save_every: int = Field(
        10,
        ge=1,
        le=MAX_STEPS,
        description="number of steps between saved adapters, which are also validated and are resume points",
    )
    validation_length: int = Field(4096, ge=2, description="tokens of each validation document")
    checkpoint_activations_above: int = Field(
        0,
        ge=0,
        le=2**31,
        description="activation checkpointing for sequences longer than this many tokens: less memory, but slower",
    )

    measure_checkpoints: bool = Field(
        False, description="also measure the heads at every saved adapter, into a second run"
    )

    @model_validator(mode="after")
    def _check_consistency(self) -> "AdaptOptions":
        if not self.phases:
            raise ValueError("no phases. Give at least one, e.g. 2048:26:4")
        return self

    @property
    def total_steps(self) -> int:
        """Optimiser steps of all phases."""
        return sum(phase.steps for phase in self.phases)

    def phase_at(self, step: int) -> Phase:
        """The phase of a step; steps count from 0."""
        ends = accumulate(phase.steps for phase in self.phases)
        return next(phase for phase, end in zip(self.phases, ends, strict=True) if step < end)


ADAPTER = key("adapter", "label", "", "name of the training: the study's name", None)
STEP = key("step", "index32", "steps", "optimiser steps taken; 0 is before training")

TRAINING = Table(
    "training",
    "batch and loss of each optimiser step of a training",
    (
        ADAPTER,
        STEP,
        Column("context_length", "index32", "tokens", "length of the step's sequences", 1),
        Column("tokens", "count", "tokens", "tokens of the step's batch", 1),
        Column("loss", "value", "nats/token", "mean next-token loss of the batch, before the step", 0),
        Column("rate", "value", "", "factor on every learning rate: warm-up, stable, decay", 0, 1),
    ),
)

VALIDATION = Table(
    "validation",
    "next-token loss by position on validation documents, during a training",
    (
        ADAPTER,
        STEP,
        LENGTH,
        DOC,
        key("position", "index32", "tokens", "last predicted token of the bin of positions"),
        Column("nll", "value", "nats/token", "mean next-token loss over the bin", 0),
        Column("tokens", "count", "tokens", "predicted tokens in the bin", 1),
    ),
)

TABLES = (TRAINING, VALIDATION)
