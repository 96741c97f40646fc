"""Options of the pretrain probe: trainings, model size, data, and optimisation.

Betas, epsilon, base 10,000, L_ref = 64, the warm-up, stable, decay schedule, and the default learning rates of the
weights and of xi are the paper's (Detailed Setting, Pretraining). The paper leaves the rest open. Ours: tau and gamma
use the learning rate of the weights and start at 1 and 0, so that AdaRoPE starts as RoPE; the initial weights are
transformers' defaults; the weight decay.
"""

import re
from dataclasses import replace
from typing import Literal, NamedTuple, get_args

from pydantic import Field, field_validator, model_validator

from headscope.base.user_input import MAX_LENGTH
from headscope.prompts.shakespeare import DEFAULT_SOURCE
from headscope.results.questions import CLAIMS_TOPIC, Question
from headscope.study.config import Options, TextSource

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
"""Position schemes: RoPE, schemes without learned parameters, AdaRoPE, and AdaRoPE's ablations."""
HALF_OCTAVE_START = 64
"""Checkpoints are saved every octave of steps before this step, and every half octave from it on."""

MAX_STEPS, MAX_RATE = 1_000_000, 100.0
"""Largest number of steps, and largest learning rate and weight decay."""
MAX_SIZE = 2**20
"""Largest number of layers, heads, dimensions, or sequences per step."""
BYTES_PER_PARAMETER = 16
"""A float32 weight, its gradient and the two moments of AdamW."""
ACTIVATIONS_PER_LAYER = 8
"""Residual streams of a layer that its backward pass keeps, at least."""


class TrainingKey(NamedTuple):
    """Variant and seed of one training; the seed sets its weights and batches."""

    variant: str
    seed: int

    @property
    def name(self) -> str:
        """Name of the training in tables and folders, e.g. "rope-s0"."""
        return f"{self.variant}-s{self.seed}"


class PretrainOptions(Options):
    """Training of small models from random weights. The study's texts are the validation texts."""

    trainings: list[str] = Field(
        ["rope", "prope", "alibi", "nope", "adarope", "no-freq", "no-scale", "shared-freq", "rope:1", "adarope:1"],
        min_length=1,
        description="models to train, as VARIANT[:SEED]; the seed sets initial weights and batches",
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
    vocabulary: int = Field(
        4096, ge=300, le=2**17, description="size of the byte-pair vocabulary, trained on --training-texts"
    )
    architecture: Literal["llama", "qwen3", "olmoe"] = Field("llama", description="model class in transformers")
    layers: int = Field(4, ge=1, le=MAX_SIZE, description="number of decoder layers")
    width: int = Field(192, ge=4, le=MAX_SIZE, description="dimensions of the residual stream")
    heads: int = Field(8, ge=1, le=MAX_SIZE, description="query heads per layer; a head has width / heads dimensions")
    kv_groups: int = Field(4, ge=1, le=MAX_SIZE, description="KV heads per layer")
    feed_forward: int = Field(512, ge=4, le=MAX_SIZE, description="MLP dimensions (olmoe: sum over the active experts)")
    length: int = Field(512, ge=4, le=MAX_LENGTH, description="tokens per sequence")
    batch: int = Field(8, ge=1, le=MAX_SIZE, description="sequences per step")
    steps: int = Field(2048, ge=1, le=MAX_STEPS, description="optimiser steps")
    learning_rate: float = Field(3e-4, gt=0, le=MAX_RATE, description="learning rate of the weights")
    frequency_learning_rate: float = Field(
        3e-3, gt=0, le=MAX_RATE, description="learning rate of the log-frequencies (xi)"
    )
    scale_learning_rate: float = Field(
        3e-4, gt=0, le=MAX_RATE, description="learning rate of temperature (tau) and growth (gamma)"
    )
    weight_decay: float = Field(
        0.01, ge=0, le=MAX_RATE, description="weight decay of the weights; xi, tau and gamma have none"
    )
    warmup: int = Field(
        100, ge=0, le=MAX_STEPS, description="warm-up steps; the rates decay over the last tenth of all steps"
    )
    checkpoints: list[int] = Field(
        [], description="steps to save as checkpoints; none: log-spaced, with 0 and the last step"
    )
    save_every: int = Field(
        64, ge=1, le=MAX_STEPS, description="number of steps between validations, which are also resume points"
    )
    validation_length: int = Field(512, ge=2, le=MAX_LENGTH, description="tokens of each validation document")
    measure_checkpoints: bool = Field(
        False, description="also measure the heads at every saved checkpoint, into one more run per training"
    )

    @field_validator("trainings")
    @classmethod
    def _check_trainings(cls, trainings: list[str]) -> list[str]:
        for training in trainings:
            variant, _, seed = training.partition(":")
            if variant not in get_args(Variant) or not re.fullmatch("[0-9]{1,6}", seed or "0"):
                raise ValueError(
                    f"invalid training '{training}'. Use VARIANT or VARIANT:SEED, with VARIANT one of "
                    f"{', '.join(get_args(Variant))}"
                )
        parsed = [_parse_training(training) for training in trainings]
        if repeated := [training for number, training in enumerate(trainings) if parsed[number] in parsed[:number]]:
            raise ValueError(
                f"training '{repeated[0]}' is listed twice (a variant without a seed has seed 0). Remove one of the two"
            )
        return trainings

    @model_validator(mode="after")
    def _check_consistency(self) -> "PretrainOptions":
        if self.width % self.heads or self.heads % self.kv_groups or self.width // self.heads % 2:
            raise ValueError(
                f"width {self.width} must be a multiple of 2 x heads ({self.heads}), and heads a multiple of kv_groups "
                f"({self.kv_groups}). Change one of them"
            )
        if outside := [step for step in self.checkpoints if not 0 <= step <= self.steps]:
            raise ValueError(f"invalid checkpoint {outside[0]}. Use steps between 0 and {self.steps}")
        return self

    @property
    def least_bytes(self) -> int:
        """A lower bound of the memory of a step, in bytes: weights, optimiser and the activations of the batch."""
        attention = 2 * self.width * self.width * (1 + self.kv_groups / self.heads)
        parameters = self.layers * (attention + 3 * self.width * self.feed_forward)
        activations = self.batch * self.length * self.width * ACTIVATIONS_PER_LAYER * self.layers * 4
        return int(BYTES_PER_PARAMETER * parameters) + activations

    @property
    def parsed_trainings(self) -> list[tuple[str, int]]:
        """(variant, seed) of every training, sorted by seed."""
        return sorted(map(_parse_training, self.trainings), key=lambda training: training[1])

    @property
    def checkpoint_steps(self) -> list[int]:
        """Steps after which a checkpoint is saved, ascending."""
        if self.checkpoints:
            return sorted(self.checkpoints)
        half_octaves = [round(2 ** (n / 2)) for n in range(2 * self.steps.bit_length())]
        octaves = [2**n for n in range(self.steps.bit_length())]
        steps = {0, self.steps, *octaves, *(step for step in half_octaves if step >= HALF_OCTAVE_START)}
        return sorted(step for step in steps if step <= self.steps)

    @property
    def segment_bounds(self) -> list[int]:
        """Steps after which a training is validated and from which it can be resumed, ascending."""
        return sorted({*self.checkpoint_steps, *range(0, self.steps, self.save_every), self.steps})


def _parse_training(training: str) -> tuple[str, int]:
    variant, _, seed = training.partition(":")
    return variant, int(seed or 0)


REPEATED = Question(
    name="pretrain.repeated",
    topic="Models",
    level="warning",
    sentence="{model} and {chosen}, from two folders, are the variant {variant} with seed {training_seed}; the claims "
    "are about that of {chosen} alone",
)
_LOSS_EVIDENCE = (
    "in contexts of {context_length:,} tokens, {parts}[; the paper has no ablation {untested:words}, so it is not part "
    "of this claim]"
)
_LOSS_CRITERION = "by more than {margin:.3f} nats/token, twice {noise_source}"

CLAIMS = (
    Question(
        name="pretrain.claim.cov",
        statement="AdaRoPE uses the rotary pairs more evenly than RoPE and partial RoPE",
        sentence="{parts}",
        criterion="its CoV is at least 5 % lower",
    ),
    Question(
        name="pretrain.claim.effective_base",
        statement="The effective base grows with depth",
        sentence="{parts}",
        criterion="the rank correlation is above 0.3",
    ),
    Question(
        name="pretrain.claim.gamma",
        statement="Gamma is largest in the first layer and between 0 and 0.2 in the other layers",
        sentence="{parts}",
        criterion="largest by at least 0.05",
    ),
    Question(
        name="pretrain.claim.lengths",
        statement="AdaRoPE has a wider range of effective lengths than RoPE, and gamma falls as the effective length "
        "rises",
        sentence="{parts}",
        criterion="at least 1.2 times as wide, and a rank correlation below -0.3",
    ),
    Question(
        name="pretrain.claim.used_frequencies",
        statement="Used frequencies have a wider spread under AdaRoPE than under RoPE and follow the learned "
        "frequencies",
        sentence="{parts}",
        criterion="at least 1.2 times as wide, and a correlation r above 0.8",
    ),
    Question(
        name="pretrain.claim.ablations",
        statement="Each tested ablation of AdaRoPE ({tested:words}) has a higher loss than AdaRoPE",
        sentence=_LOSS_EVIDENCE,
        criterion=_LOSS_CRITERION,
    ),
    Question(
        name="pretrain.claim.schemes",
        statement="AdaRoPE has a lower loss than every other position scheme",
        sentence=_LOSS_EVIDENCE,
        criterion=_LOSS_CRITERION,
    ),
)


def _part(name: str, subject: str, number: str) -> Question:
    """A statistic of one training, or of one of each of two schemes, and its mean over seeds."""
    return Question(
        name=f"pretrain.{name}",
        sentence=f"{subject} is {{value}} ({{by_seed:{number}}})",
        number=number,
        samples="seeds",
        topic=CLAIMS_TOPIC,
    )


PARTS = (
    _part("cov_difference", "the difference of AdaRoPE's median CoV from that of {other}, relative to it,", "+percent"),
    replace(_part("base_by_depth", "the rank correlation of the effective base with depth", "+.2f"), limits=(-1, 1)),
    _part("first_layer_gamma", "the lead of the first layer in mean gamma", "+.3f"),
    _part("lowest_gamma", "the mean gamma of the lowest later layer", "+.3f"),
    _part("highest_gamma", "the mean gamma of the highest later layer", "+.3f"),
    replace(
        _part(
            "length_range",
            "the 90th percentile of the effective length divided by the 10th, as a ratio of AdaRoPE to {other},",
            ".2f",
        ),
        is_ratio=True,
    ),
    replace(_part("gamma_by_length", "the rank correlation of gamma with effective length", "+.2f"), limits=(-1, 1)),
    replace(
        _part(
            "frequency_spread",
            "the standard deviation of the mean ln theta, weighted by usage, as a ratio of AdaRoPE to {other},",
            ".2f",
        ),
        is_ratio=True,
    ),
    replace(
        _part("used_by_learned", "the correlation r of the used with the learned mean ln theta", "+.2f"), limits=(-1, 1)
    ),
    replace(
        _part("loss_gap", "the validation loss of {other} minus that of AdaRoPE", "+.3f"),
        value_unit="nats/token",
    ),
)

QUESTIONS = (REPEATED, *CLAIMS, *PARTS)
