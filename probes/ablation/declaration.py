"""Options, stored tables and questions of the ablation probe."""

from dataclasses import replace
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from headscope.base.ablation_names import MEAN_OF_DOCUMENT, MEAN_OF_TEXT, ablation_name, kinds_help
from headscope.base.model_identity import WEIGHTS_OPTION, AcceptedWeights
from headscope.errors import OptionError
from headscope.prompts.token_positions import ALL_TOKENS
from headscope.results.answers import answer_questions
from headscope.results.effects.results import sweep_questions
from headscope.results.questions import Question
from headscope.runs.columns import ANSWER_METRIC, GROUP, HEAD, IS_COUNTED, LAYER, MODEL, Column, Table, key
from headscope.study.answer_options import (
    HEADS_HELP,
    METRIC_HELP,
    PLACES_HELP,
    AnswerMetric,
    AnswerOptions,
    HeadNames,
    PositionNames,
)
from headscope.study.config import MultilineOptions
from headscope.study.option_rules import Excludes, Needs

KINDS = ("zero", MEAN_OF_TEXT, MEAN_OF_DOCUMENT, "resample", "uniform", "streaming")
"""Kinds with a column of `run.heads`; streaming for any window, if a run has one."""
POSITIONS_MARK = " at "
"""What separates the stored kind of an ablation at some positions from their names."""


class AblationOptions(MultilineOptions, AnswerOptions):
    """Ablation of heads, one at a time and together, while the model answers a prompt."""

    option_rules = (
        Needs("prompt", "answer", "the text that continues it, with its leading space"),
        Excludes("answer wrong template", "pairs", "pairs have prompts and answers of their own"),
        Excludes("wrong", "metric=logprob|kl|nll|rank", "{wrong} is for logit_diff and prob_diff"),
        Needs("random_sets", "heads!=all", "random sets are a control for named heads"),
        Needs("draws", "kinds=resample"),
        Excludes("kinds=resample", "prompt", "resample takes head outputs from other prompts, of {pairs}"),
    )

    prompt: str | None = Field(
        None, min_length=1, description="prompt that the model continues; use either --prompt with --answer, or --pairs"
    )
    answer: str | None = Field(
        None, min_length=1, description="right continuation of the prompt, with its leading space"
    )
    wrong: str | None = Field(None, min_length=1, description="wrong answer, for the metrics logit_diff and prob_diff")
    template: bool = Field(False, description="put the prompt into the chat template of the tokenizer, as a message")
    heads: HeadNames = Field(
        ["all"],
        min_length=1,
        description=f"heads to ablate one at a time, such as L18H6; all: every head; {HEADS_HELP}. Named heads are "
        "also ablated together",
    )
    random_sets: int = Field(
        5,
        ge=0,
        le=1000,
        description="random sets per prompt, each with as many other heads of the same layers, that "
        "are ablated together as a control; 0: none",
    )
    weights: AcceptedWeights = Field("same", description=WEIGHTS_OPTION)
    kinds: list[Annotated[str, AfterValidator(ablation_name)]] = Field(["zero"], min_length=1, description=kinds_help())
    positions: PositionNames = Field(
        ["all"],
        min_length=1,
        description=f"tokens whose head outputs are ablated, together: all, {PLACES_HELP}",
    )
    draws: int = Field(
        4,
        ge=1,
        le=1000,
        description="number of other prompts, over which the metric is averaged; all if there are fewer",
    )
    metric: AnswerMetric = Field("logprob", description=METRIC_HELP)

    @model_validator(mode="after")
    def _check_prompts(self) -> "AblationOptions":
        if (self.prompt is None) == (self.pairs is None):
            raise OptionError("give either {prompt} with {answer}, or {pairs}")
        return self

    @model_validator(mode="after")
    def _check_positions(self) -> "AblationOptions":
        if ALL_TOKENS in self.positions and (others := [name for name in self.positions if name != ALL_TOKENS]):
            raise OptionError("{positions} has all beside '{other}'. Use one of them", other=others[0])
        return self


_KEYS = (
    MODEL,
    key("prompts", "label", "", "set of prompts: a generated set, the name of a file, or prompt", None),
    key("pair", "label", "", "name of the prompt within its set", None),
)
_KIND = key(
    "kind",
    "label",
    "",
    "ablation, as in --kinds: a mean names its source, mean:text (reference text, which is `mean` in runs of earlier "
    "versions) or mean:document (the same prompt); followed by the positions, as in `zero at last`, unless these are "
    "all",
    None,
)
_VALUES = (
    Column("metric_before", "value", "logits, nats", "metric of the unchanged run"),
    Column("metric_after", "value", "logits, nats", "metric of the run with the ablation; resample: mean over draws"),
    IS_COUNTED,
)
ABLATION = Table(
    "ablation",
    "metric of a prompt's answer when one head is ablated",
    (*_KEYS, LAYER, HEAD, GROUP, _KIND, ANSWER_METRIC, *_VALUES),
)
ABLATION_SETS = Table(
    "ablation_sets",
    "metric of a prompt's answer when all named heads, or as many random ones, are ablated together",
    (
        *_KEYS,
        _KIND,
        ANSWER_METRIC,
        Column(
            "draw",
            "index16",
            "",
            "0: the named heads; from 1: random heads, drawn for each prompt: as many other heads of each layer [ours]",
            0,
            key=True,
        ),
        Column("size", "index16", "heads", "number of heads", 1),
        *_VALUES,
    ),
)
TABLES = (ABLATION, ABLATION_SETS)


_SWEEP = "{change:capital} in {model}, {prompts}"
_SUBJECT = f"{_SWEEP}, one head at a time, change of the {{label}} ({{label_unit}})"

EFFECT = Question(
    name="ablation.head",
    sentence=f"{_SWEEP}: the {{label}} changes by {{value}} ({{label_unit}})",
    number="+.3g",
    samples="prompts",
)
"""The effect of one head."""

QUESTIONS = (
    *answer_questions("ablation"),
    Question(
        name="ablation.prompt",
        sentence=f"{_SWEEP}, [prompt {{pair}}][group {{group}}], one head at a time: the effect of largest size is "
        "that of {unit}, {value}[, followed by {next:+.3g}]; the {label} is {clean:.2f} in the unchanged model",
        headline="{change:capital}, {prompts}, [prompt {pair}][group {group}] ({label} {clean:.2f}): {unit} {value}"
        "[, {next:+.3g}]",
        number="+.3g",
        samples="prompts",
        level="row",
    ),
    *(
        question if question.name != "ablation.top" else replace(question, level="detail", headline="")
        for question in sweep_questions(
            "ablation", _SUBJECT, "{change:capital}, {prompts}", number="+.3g", samples="prompts"
        )
    ),
    Question(
        name="ablation.largest",
        sentence=f"{_SUBJECT}: the effect of largest size is that of {{unit}}, {{value}}",
        headline="{change:capital}, {prompts}, {label}: {unit} {leads} {value}",
        number="+.3g",
        samples="prompts",
        level="headline",
    ),
    EFFECT,
    Question(
        name="ablation.control",
        topic="Ablation on prompts",
        statement=f"{_SWEEP}: the {{label}} is {{comparative}} with these {{size:n heads}} ablated than with random "
        "heads of the same layers ablated",
        sentence="these {size:n heads} change it by {named:+.3g}[ ({named_low:+.3g} to {named_high:+.3g})] "
        "{label_unit}, as many random heads of the same layers by {random:+.3g}"
        "[ ({random_low:+.3g} to {random_high:+.3g})], a difference of {value}",
        headline="{change:capital}, {prompts}, {label}: {size:n heads} {named:+.3g}[ ({named_low:+.3g} to "
        "{named_high:+.3g})], {size} random of the same layers {random:+.3g}[ ({random_low:+.3g} to "
        "{random_high:+.3g})]; more than random: {verdict}",
        number="+.3g",
        samples="prompts",
        level="headline",
    ),
    Question(
        name="ablation.set",
        sentence=f"{_SWEEP}: with all {{size:n named heads}} ablated together, the {{label}} changes by {{value}} "
        "({label_unit}), from {before:.2f} to {after:.2f}[; {control}]",
        number="+.3g",
        samples="prompts",
    ),
)
