"""Options, stored tables and questions of the adapt probe."""

import re
from itertools import accumulate
from typing import Any, Literal

from pydantic import Field, model_validator

from headscope.base.user_input import MAX_LENGTH
from headscope.prompts.shakespeare import DEFAULT_SOURCE
from headscope.results.questions import CLAIMS_TOPIC, Question
from headscope.runs.columns import DOC, LENGTH, Column, Table, key
from headscope.study.config import Options, TextSource
from headscope.study.option_rules import Excludes, Needs

Variant = Literal["full", "no-freq", "no-scale", "shared-freq", "fixed-log", "learned-base"]
Strategy = Literal["adarope", "yarn-lora", "joint", "adarope-lora", "adarope-joint"]

MAX_STEPS, MAX_BATCH, MAX_RATE = 1_000_000, 65_536, 100.0
"""Largest number of steps of a phase, of sequences per step, and largest learning rate."""


class Phase(Options):
    """Training steps of one sequence length and batch size."""

    length: int = Field(ge=2, le=MAX_LENGTH, description="tokens per sequence")
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
    adapter: str | None = Field(None, min_length=1, description="adapter to continue training")
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
    validation_length: int = Field(4096, ge=2, le=MAX_LENGTH, description="tokens of each validation document")
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


_LENGTHS_CRITERION = (
    "“longer” is a median ratio above {longer:.3f}, “unchanged” one from {shorter:.3f} to {longer:.3f}; small-ESS and "
    "large-ESS heads are the lower and the upper third of heads by effective length in {baseline}"
)
_LENGTHS_EVIDENCE = "at {context_length:,} tokens, {parts}"

QUESTIONS = (
    Question(
        name="adapt.validation_loss",
        sentence="The validation loss of {training} changes by {value} in {step:n steps}, from {start:.4f} to "
        "{last:.4f}; it is lowest at step {best_step} ({best:.4f})",
        headline="{training}: the validation loss changes by {value} in {step:n steps}",
        number="+.4f",
        value_unit="nats/token",
        samples="documents",
        level="headline",
        topic="Training",
        better="lower",
    ),
    Question(
        name="adapt.claim.loss",
        statement="AdaRoPE has a lower loss than YaRN at every position of the extended context",
        sentence="{model}: the loss is below YaRN's in {below} of {bins:n position bins}[, in {certain} of them with "
        "an interval below 0]; in the last bin the difference is {value}",
        number="+.3f",
        value_unit="nats/token",
        samples="documents",
    ),
    Question(
        name="adapt.loss_at_position",
        sentence="in the position bin that ends at {position:,}, the loss of {model} minus that of {baseline} is "
        "{value}",
        number="+.3f",
        value_unit="nats/token",
        samples="documents",
        topic=CLAIMS_TOPIC,
        better="lower",
    ),
    Question(
        name="adapt.claim.slow_pairs",
        statement="Frequencies change mostly in the low-frequency pairs",
        sentence="{model}: the slower half of the pairs accounts for [{value} of ]the squared change of the "
        "log-frequencies; the RMS change is {slow:.3f} there and {fast:.3f} in the faster half",
        criterion="more than two thirds",
        number="percent",
        samples="KV groups",
    ),
    Question(
        name="adapt.claim.depth",
        statement="Early layers move to lower frequencies, deeper layers to higher ones",
        sentence="{model}: {parts}[; the rank correlation of the change with depth is {correlation:+.2f}]",
    ),
    Question(
        name="adapt.frequency_change",
        sentence="the mean change of the log-frequency is {value} in the {layers} of the layers",
        number="+.4f",
        samples="KV groups",
        topic=CLAIMS_TOPIC,
    ),
    Question(
        name="adapt.claim.tau",
        statement="The median tau is near 1 (the paper also reports a mild right tail, which is not tested)",
        sentence="{model}: the median is {median:.3f}, at a distance of {value} from 1; the 10th and 90th percentiles "
        "are {low_tau:.3f} and {high_tau:.3f}; {near_one:percent} of heads are within {threshold} of 1[. Training "
        "starts from YaRN's temperature, tau = {yarn_tau:.3f}, and not from 1]",
        criterion="a distance below {threshold}",
        number=".3f",
        samples="heads",
    ),
    Question(
        name="adapt.claim.gamma",
        statement="gamma is mostly positive",
        sentence="{model}: the share of heads with positive gamma is {value}, and the median gamma is {median:+.4f}. "
        "Up to the reference length L_ref, gamma only rescales the logits (by (ln 2)^gamma), so its sign reflects both "
        "the temperature up to L_ref and the growth beyond it",
        criterion="more than {threshold:percent}",
        number="percent",
        samples="heads",
    ),
    Question(
        name="adapt.claim.lengths_without_factor",
        statement="YaRN without its attention factor lengthens large-ESS heads, but also changes the effective length "
        "of small-ESS heads",
        sentence=f"{_LENGTHS_EVIDENCE}; the paper's text and its caption swap this result and the next",
        criterion=_LENGTHS_CRITERION,
    ),
    Question(
        name="adapt.claim.lengths_yarn",
        statement="YaRN with its attention factor keeps small-ESS heads as they are and does not lengthen large-ESS "
        "heads",
        sentence=_LENGTHS_EVIDENCE,
        criterion=_LENGTHS_CRITERION,
    ),
    Question(
        name="adapt.claim.lengths_adarope",
        statement="AdaRoPE keeps small-ESS heads as they are and lengthens large-ESS heads",
        sentence=_LENGTHS_EVIDENCE,
        criterion=_LENGTHS_CRITERION,
    ),
    Question(
        name="adapt.length_ratio",
        sentence="the median ratio of effective lengths, {model} to {baseline}, is {value} in {heads} heads",
        number=".2f",
        is_ratio=True,
        samples="heads",
        topic=CLAIMS_TOPIC,
    ),
    Question(
        name="adapt.claim.evenness",
        statement="AdaRoPE uses the rotary pairs more evenly (lower CoV; the paper's claim is about pretraining)",
        sentence="{model}: the median CoV by model is {medians:.3f}[; the training started from {baseline}, and the "
        "ratio to it is {value}]",
        criterion="a ratio below {threshold}",
        number=".3f",
        samples="heads",
    ),
    Question(
        name="adapt.claim.base_by_depth",
        statement="The effective base grows with depth (the paper's claim is about pretraining)",
        sentence="{model}: the rank correlation with the layer is {value}; the values range from {lowest:,.0f} to "
        "{highest:,.0f}",
        criterion="above {threshold}",
        number="+.2f",
        samples="KV groups",
    ),
)
