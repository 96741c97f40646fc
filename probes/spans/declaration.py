"""Options, stored tables and questions of the spans probe."""

from collections.abc import Mapping
from typing import Any

from pydantic import Field, field_validator, model_validator

from headscope.base.model_identity import WEIGHTS_OPTION, AcceptedWeights
from headscope.errors import OptionError
from headscope.prompts.token_classes import RELATIONS, TOKEN_CLASSES, parse_classes
from headscope.results.questions import Question
from headscope.runs.columns import DOC, GROUP, HEAD, IS_COUNTED, LAYER, LENGTH, MODEL, Column, Table, key
from headscope.study.answer_options import HEADS_HELP, HeadNames
from headscope.study.config import Lengths, PromptOptions
from headscope.study.option_rules import Excludes, Needs

WHOLE_PROMPT = "prompt"
"""Name of the whole prompt in the table of lookback ratios."""
LOGPROB, LEAD = "logprob", "lead"
"""Metrics of steering: mean log-probability per token, and the lead over the wrong continuation."""


class SpansOptions(PromptOptions):
    """Attention between named parts of prompts, and between classes of tokens."""

    option_rules = (
        Needs("heads weights keep_failing", "steer"),
        Needs("steer", "prompts", "a file of prompts with a continuation"),
        Excludes("prompts", "prompt prompt_file"),
        Excludes("lengths", "prompts", "prompts are read whole"),
    )

    prompts: str | None = Field(
        None,
        min_length=1,
        description="file of prompts with named spans: JSON lines with segments, messages or text with marks, and "
        "optional name, group, continuation, generate; or hf:DATASET:SPLIT:COLUMN,COLUMN with a span per column",
    )
    lengths: Lengths = Field(default=[2048], description="context lengths in tokens of ordinary texts")
    classes: list[str] = Field(
        default=[],
        description=f"classes of tokens that count as spans: {', '.join([*TOKEN_CLASSES, *RELATIONS])} or NAME=REGEX, "
        r"searched in the text of a token (write \x2c for a comma)",
    )
    query: str | None = Field(
        None,
        min_length=1,
        description="query span of the per-head table: a span, last (the last token of the prompt), generated or all; "
        "default: generated if there is such text, else last, or all in ordinary texts",
    )
    key: str | None = Field(
        None, min_length=1, description="key span of the per-head table; default: the first named span, or first class"
    )

    steer: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="also score the continuations while heads are steered to the key span: their weights on all other "
        "keys are multiplied by this factor, such as 0.01 (PASTA)",
    )
    heads: HeadNames = Field(
        ["all"],
        min_length=1,
        description=f"heads that are steered together, such as L18H6; all: every head; {HEADS_HELP}",
    )
    weights: AcceptedWeights = Field("same", description=WEIGHTS_OPTION)
    keep_failing: bool = Field(
        False,
        description="keep prompts in means of steering to which the model without steering does not give the "
        "continuation (lead over the wrong one: not above 0; log-probability: less than 1 % per token). Attention "
        "masses have no right answer: they keep all prompts",
    )

    @classmethod
    def replacement_of_texts(cls, values: Mapping[str, Any]) -> str:
        return "prompts with spans" if values.get("prompts") else super().replacement_of_texts(values)

    @field_validator("classes")
    @classmethod
    def _check_classes(cls, value: list[str]) -> list[str]:
        parse_classes(value)
        return value

    @model_validator(mode="after")
    def _check_sources(self) -> "SpansOptions":
        if self.prompts is None and self.prompt is None and self.prompt_file is None and not self.classes:
            raise OptionError(
                "no spans. Give {prompts}, {prompt} with marks such as [[context]]...[[/context]], or {classes}"
            )
        return self


QUERY = key(
    "query",
    "label",
    "",
    "query span: a named span, role, message or class; template (text of the chat template), rest (tokens of no span), "
    "generated (tokens after the prompt, without an end-of-text token that the model writes at its end), last (the "
    "last token of the prompt), all",
    None,
)
KEY_MEANING = (
    "key span: first (the first token), template, a named span, role, message or class, generated, rest; same (earlier "
    "tokens with the id of the query), matching (the opening bracket of the query's closing bracket); the first token "
    "is in first only"
)
KEY = key("key", "label", "", KEY_MEANING, None)
MASS = Column("mass", "value", "", "mean over the rows of the sum of the weights on the keys", 0, 1)
ROWS = Column("rows", "count", "rows", "query rows in the mean", 1)

SPAN_PROMPTS = Table(
    "span_prompts",
    "the prompts and texts, and the pair of spans that the per-head table shows",
    (
        MODEL,
        LENGTH,
        DOC,
        Column("number", "index32", "", "number of the prompt in its file or of the text, from 0", 0),
        Column("group", "label", "", "label of the prompt; empty without one"),
        Column("query", "label", "", "query span of the per-head table"),
        Column("key", "label", "", "key span of the per-head table"),
        Column("prompt_tokens", "count", "tokens", "tokens before the continuation or generated text", 1),
        Column("is_prompt", "flag", "", "whether it is a prompt with spans, not an ordinary text"),
    ),
    describes_inputs=True,
)
SPANS = Table(
    "spans",
    "attention mass from the rows of a query span on the keys of a key span, per head and prompt",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        QUERY,
        KEY,
        MASS,
        Column("chance", "value", "", "the mass of uniform weights over the keys that the layer sees", 0, 1),
        ROWS,
        Column("hidden_rows", "count", "rows", "rows of the query span that see no key of the span, left out", 0),
    ),
)
SPAN_STEPS = Table(
    "span_steps",
    "attention mass of the generated text on each key span, by step",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        key(
            "step", "index32", "tokens", "last step of the bin; steps 1, 2, 3 to 4, 5 to 8, ...: one bin per octave", 1
        ),
        KEY,
        MASS,
        ROWS,
    ),
)
SPAN_LOOKBACK = Table(
    "span_lookback",
    "lookback ratio of each head (Chuang et al. 2024): mean weight per key of a span, over its sum with the mean "
    "weight per generated token, in the rows of generated tokens",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        key("key", "label", "", "span of the prompt; prompt: the whole prompt, as published", None),
        Column("ratio", "value", "", "mean lookback ratio over the rows", 0, 1),
        ROWS,
    ),
)
SPAN_TOKENS = Table(
    "span_tokens",
    "the tokens of the first prompt and their spans",
    (
        MODEL,
        DOC,
        key("position", "index32", "tokens", "position of the token, from 0"),
        Column("text", "text", "", "what the token adds to the text; a special token is stored by its name"),
        Column("special", "flag", "", "whether it is a special token"),
        Column("span", "label", "", "the span of the partition that it belongs to"),
    ),
)
SPAN_WEIGHTS = Table(
    "span_weights",
    "mean weight of the rows of the shown query span on each token of the first prompt, per head",
    (
        MODEL,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        key("position", "index32", "tokens", "position of the key, from 0"),
        Column("weight", "value", "", "mean attention weight", 0, 1),
    ),
)
SPAN_STEERING = Table(
    "span_steering",
    "the continuation of each prompt, without and with heads steered to a span",
    (
        MODEL,
        LENGTH,
        DOC,
        key("key", "label", "", "span that heads are steered to", None),
        key(
            "metric",
            "label",
            "",
            "logprob: mean log-probability of the continuation's tokens, nats/token; lead: log-probability of the "
            "continuation minus that of the wrong one, nats",
            None,
        ),
        Column("alpha", "value", "", "factor of the weights on other keys", 0, 1),
        Column("plain", "value", "nats", "the metric without steering"),
        Column("steered", "value", "nats", "the metric with steering"),
        IS_COUNTED,
    ),
)
TABLES = (SPAN_PROMPTS, SPANS, SPAN_STEPS, SPAN_LOOKBACK, SPAN_TOKENS, SPAN_WEIGHTS, SPAN_STEERING)


QUESTIONS = (
    Question(
        name="spans.missing",
        sentence="In {model}, no row of {query} sees a key of {key}: no text has both, or the layers hide it. Show "
        "another pair with --query and --key",
        level="warning",
    ),
    Question(
        name="spans.incomplete",
        sentence="Texts of {model} that lack the pair {query} to {key}: {number:.0f} of {n}; heads left out, because "
        "their layers hide the pair in another text: {left_out} of {heads}",
        number=".0f",
        level="warning",
    ),
    Question(
        name="spans.top_head",
        sentence="From {query} to {key}, {unit} in {model} has the largest attention mass: {value}; that of uniform "
        "weights is {chance:percent1}, that of the median head {median:percent1}[. {key} is 1 of "
        "{spans} named spans; --key {other} shows another]",
        headline="From {query} to {key}, {unit} has most mass: {value} (chance {chance:percent1})",
        answer="The largest attention mass of a head is {values}; that of uniform weights is {chance:percent1}",
        number="percent",
        samples="texts",
        level="headline",
    ),
    Question(
        name="spans.groups",
        sentence="In {model}, the mass from {query} to {key} differs between {first} and {second} in {number:.0f} of "
        "{n:n heads} (false discovery rate 5 %; {prompts} prompts)",
        headline="{number:.0f} of {n:n heads} differ between {first} and {second}",
        number=".0f",
        level="headline",
    ),
    Question(
        name="spans.separating_head",
        sentence="In {model}, {unit} separates {second} from {first} best: AUROC {value}",
        number=".2f",
        samples="prompts",
    ),
    Question(
        name="spans.held_out",
        sentence="In {model}, the {chosen} heads that one half of the prompts chose separate {second} from {first} in "
        "the other half with AUROC {number:.2f} (mean of {splits} splits; lowest {lowest:.2f}, highest {highest:.2f}; "
        "{n} prompts)",
        headline="Held out, chosen heads separate {second} from {first} with AUROC {number:.2f}",
        number=".2f",
        level="headline",
    ),
    Question(
        name="spans.steering_failing",
        sentence="{model}, steered to {key}: {number:.0f} of {n:n prompts} are left out of the mean {label} "
        "({label_unit}), because without steering {reason}: {names:+.2f}[ and {more} more]. Use other prompts, or "
        "--keep-failing",
        number=".0f",
        level="warning",
    ),
    Question(
        name="spans.steering_uncounted",
        sentence="{model}, steered to {key}: no prompt counts[ in {every}], so there is no mean {label} ({label_unit})"
        "[. Without steering {reason} in {failing} of {n:n prompts}: {names:+.2f}][ and {more} more]. Use other "
        "prompts, or --keep-failing",
        level="warning",
    ),
    Question(
        name="spans.steered_prompt",
        sentence="Steered to {key}, {heads} of {model} change the mean log-probability of the continuation of prompt "
        "{prompt} by {value} nats per token, from {plain:.2f} to {steered:.2f}[; its lead over the wrong one goes from "
        "{plain_lead:+.2f} to {steered_lead:+.2f} nats][. The prompt is left out of {left_out}]",
        headline="{prompt}, steered to {key}: {plain:.2f} to {steered:.2f} nats/token[, lead {plain_lead:+.2f} to "
        "{steered_lead:+.2f}][; left out of {left_out}]",
        number="+.2f",
        level="row",
    ),
    Question(
        name="spans.steered",
        sentence="Steered to {key}, {heads} of {model} change the mean log-probability of the continuation from "
        "{plain:.2f} to {steered:.2f} nats per token: by {value} (factor {alpha:g})[. Left out: {left_out:n prompts}]",
        headline="Steered to {key}, log-probability changes by {value} nats/token[; {left_out} left out]",
        number="+.2f",
        samples="prompts",
        level="headline",
    ),
    Question(
        name="spans.steered_share",
        sentence="Steered to {key}, {model} prefers the continuation to the wrong one in {steered:percent} of "
        "{n:n prompts} instead of {plain:percent}, a difference of {value} (factor {alpha:g})",
        headline="Steered to {key}, the continuation leads in {steered:percent} of {n:n prompts}, not {plain:percent}",
        number="points",
        value_unit="percentage points",
        samples="prompts",
        level="headline",
    ),
    Question(
        name="spans.steered_choice",
        sentence="Steered to {key}, {model} changes the lead of the continuation over the wrong one by {value} nats, "
        "from {plain:+.2f} to {steered:+.2f} (factor {alpha:g})[. Left out: {left_out:n prompts}]",
        headline="Steered to {key}, lead changes by {value} nats[; {left_out} left out]",
        number="+.2f",
        samples="prompts",
        level="headline",
    ),
    Question(
        name="spans.lookback",
        sentence="Among the heads of {model}, {unit} has the largest lookback ratio: {value}; the median head has "
        "{median:.2f}",
        number=".2f",
        samples="texts",
    ),
    Question(
        name="spans.head",
        sentence="From {query} to {key}, its attention mass in {model} is {value}; chance is {chance:percent1}",
        number="percent",
        samples="texts",
    ),
)
