"""Options, stored tables and questions of the probe of circuits of heads."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from headscope.base.ablation_names import MEAN_OF_DOCUMENT, MEAN_OF_PROMPTS, MEAN_OF_TEXT
from headscope.base.model_identity import WEIGHTS_OPTION, AcceptedWeights
from headscope.errors import OptionError
from headscope.prompts.token_positions import ALL_TOKENS
from headscope.results.answers import answer_questions
from headscope.results.questions import Question
from headscope.runs.columns import ANSWER_METRIC, GROUP, HEAD, IS_COUNTED, LAYER, MODEL, Column, Table, key
from headscope.runs.head_names import head_names, names_of_heads
from headscope.study.answer_options import HEADS_HELP, PAIRS_HELP, PLACES_HELP, AnswerOptions, PairSource, PairSources
from headscope.study.option_rules import Excludes, Needs

WHOLE = "none"
"""The subset without heads, of which the row compares the circuit with the model."""


def _check_names(names: list[str]) -> list[str]:
    """The names. Raises ValueError for one that is no head or named twice, and for a head without positions after @."""
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the circuit has {repeated[0]} twice. Name every head once")
    for name in names:
        names_of_heads([split_positions(name)[0]])
        if name.endswith("@"):
            raise ValueError(f"'{name}' has no positions after @. Write {name}last, or remove @")
    return names


def _refuse_other_means(value: Any) -> Any:
    """The complement. Raises ValueError for means that are not over prompts, such as bare mean, which is mean:text."""
    if value in ("mean", MEAN_OF_TEXT, MEAN_OF_DOCUMENT):
        source = f"mean is {MEAN_OF_TEXT}, which" if value == "mean" else value
        raise ValueError(f"{source} is no mean over the prompts of a circuit: '{value}'. Use {MEAN_OF_PROMPTS}")
    return value


def split_positions(name: str) -> tuple[str, str]:
    """The head of a name such as L18H6@last, and its positions; "" for all, and for the name of a set of heads."""
    head, mark, positions = name.partition("@")
    if not mark or ":" in head:
        return name, ""
    return head, "" if positions == ALL_TOKENS else positions


class CircuitOptions(AnswerOptions):
    """Test a set of heads as a circuit: ablate all other heads, and subsets of the circuit."""

    option_rules = (
        Excludes("reference", "complement=zero", "zero ablation has no reference prompts"),
        Needs("by", f"complement={MEAN_OF_PROMPTS}"),
        Needs("draws", "complement=resample"),
    )

    pairs: PairSources = Field(["ioi"], min_length=1, description=f"{PAIRS_HELP}; their clean prompts are run")
    heads: Annotated[list[str], BeforeValidator(head_names), AfterValidator(_check_names)] = Field(
        min_length=1,
        description="the heads of the circuit, such as L18H6, at some positions only as in L18H6@last: "
        f"{PLACES_HELP}; {HEADS_HELP}",
    )
    complement: Annotated[Literal["mean:prompts", "resample", "zero"], BeforeValidator(_refuse_other_means)] = Field(
        "mean:prompts",
        description="outputs of the heads that are ablated: mean:prompts: their mean over the reference prompts; "
        "resample: those of one reference prompt of the same number of tokens, averaged over --draws; "
        "zero: 0",
    )
    reference: PairSource | None = Field(
        None,
        description="set of prompt pairs whose corrupted prompts are the reference prompts; by default the set that is "
        "run. A prompt itself is never among its reference prompts",
    )
    by: Literal["position", "span"] = Field(
        "position",
        description="position: over reference prompts with the same number of tokens, position by "
        "position; span: over all tokens of a named span, over the last tokens, and over all other tokens",
    )
    draws: int = Field(4, ge=1, le=1000, description="number of reference prompts; all if there are fewer")
    random_subsets: int = Field(
        10,
        ge=0,
        le=1000,
        description="distinct random subsets of the circuit that are removed to test completeness; all if there are "
        "fewer",
    )
    greedy: int = Field(
        3,
        ge=0,
        le=1000,
        description="largest greedy subset that is removed to test completeness: each step adds the head that "
        "separates circuit and model most, on half of the prompts; the other half tests it",
    )
    weights: AcceptedWeights = Field("same", description=WEIGHTS_OPTION)

    @model_validator(mode="after")
    def _refuse_all_heads(self) -> "CircuitOptions":
        if "all" in self.heads:
            raise OptionError("{heads} is 'all', whose complement is empty. Name the heads of the circuit")
        return self


_KEYS = (
    MODEL,
    key("prompts", "label", "", "set of prompts: a generated set, or the name of a file", None),
    key("pair", "label", "", "name of the prompt within its set", None),
    key(
        "complement",
        "label",
        "",
        "ablation of heads outside of the circuit: mean:prompts, resample or zero",
        None,
    ),
    ANSWER_METRIC,
)
CIRCUIT = Table(
    "circuit",
    "metric of a prompt's answer with a subset removed from a circuit of heads, and from the whole model",
    (
        *_KEYS,
        key(
            "subset",
            "label",
            "",
            "removed heads: none; random 1, random 2, ...; greedy 1 (one head), greedy 2, ...",
            None,
        ),
        Column("heads", "text", "", "the removed heads, joined by commas"),
        Column("size", "index16", "heads", "number of heads of the circuit", 1),
        Column(
            "reference_prompts",
            "index32",
            "prompts",
            "number of reference prompts in the prompt's mean, or drawn for it; 0 for zero ablation",
            0,
        ),
        Column("metric_circuit", "value", "logits, nats", "metric of the run with only the rest of the circuit intact"),
        Column("metric_model", "value", "logits, nats", "metric of the run with only these heads ablated"),
        Column("metric_empty", "value", "logits, nats", "metric of the run with all heads ablated"),
        Column("is_selecting", "flag", "", "whether the prompt chose the greedy subset, so that it does not test it"),
        IS_COUNTED,
    ),
)
CIRCUIT_MEMBERS = Table(
    "circuit_members",
    "metric of a prompt's answer with one head removed from a circuit of heads",
    (
        *_KEYS,
        LAYER,
        HEAD,
        GROUP,
        Column(
            "positions",
            "label",
            "",
            "positions at which the head is a member: all, a named span, a token or a range by number",
            key=True,
        ),
        Column("metric_circuit", "value", "logits, nats", "metric of the run with only the circuit intact"),
        Column("metric_without", "value", "logits, nats", "the same without the head"),
        IS_COUNTED,
    ),
)
TABLES = (CIRCUIT, CIRCUIT_MEMBERS)


_PLACE = "{model}, {prompts}, other heads {ablated}"

MEMBER = Question(
    name="circuit.member",
    sentence=f"{_PLACE}: {{member}} changes the {{label}} of the circuit by {{value}} ({{label_unit}})",
    number="+.2f",
    samples="prompts",
)
"""The minimality of one member."""
SUBSET = Question(
    name="circuit.random",
    sentence=f"{_PLACE}: of {{subsets:n random subsets}} of the circuit, {{subset}} ({{removed}}) separates model and "
    "circuit most: with it removed from both, the {label} of the model minus that of the circuit is {value} "
    "({label_unit}; {whole:+.2f} with nothing removed)",
    number="+.2f",
    samples="prompts",
)

QUESTIONS = (
    *answer_questions("circuit"),
    Question(
        name="circuit.prompt",
        sentence=f"{_PLACE}, prompt {{pair}}: the {{label}} of the circuit is {{value}}, that of the model "
        "{model_metric:.2f}, that of no head {empty:.2f} ({label_unit})",
        headline="{prompts}, {pair}, others {ablated}, {label}: circuit {value}, model {model_metric:.2f}, no head "
        "{empty:.2f}",
        number=".2f",
        level="row",
    ),
    Question(
        name="circuit.faithfulness",
        sentence=f"{_PLACE}: the faithfulness of the circuit of {{size:n heads}} is {{value}}: its mean {{label}} is "
        "{circuit:.2f}, that of the model {model_mean:.2f}, that of no head {empty:.2f} ({label_unit})",
        headline="circuit of {size:n heads}, {prompts}, others {ablated}: faithfulness {value}",
        number=".2f",
        samples="prompts",
        level="headline",
        better="higher",
    ),
    Question(
        name="circuit.undefined",
        sentence=f"{_PLACE}: the faithfulness is undefined, because ablating all heads changes the {{label}} by "
        "{number:+.2f} ({label_unit}), which is not clearly different from 0. Use more prompts "
        "(a larger --count) or others",
        number="+.2f",
        level="warning",
    ),
    Question(
        name="circuit.minimal",
        sentence=f"{_PLACE}: the {{label}} of the circuit clearly {{worsens}} without {{value}} of {{size:n members}} "
        "(false discovery rate {rate:percent})[; not clearly without {others}][; it clearly {improves} without "
        "{harmful} (harmful)]",
        headline="{prompts}, others {ablated}: {value} of {size:n members} are needed[; not clearly {others}]"
        "[; harmful: {harmful}]",
        number=".0f",
        level="headline",
    ),
    MEMBER,
    SUBSET,
    Question(
        name="circuit.greedy",
        sentence=f"{_PLACE}: completeness: with the greedy subset {{removed}} removed from both, the {{label}} of the "
        "model minus that of the circuit is {value} ({label_unit}; {whole:+.2f} with nothing removed), on the prompts "
        "that did not choose it",
        headline="{prompts}, others {ablated}: completeness: with {removed} removed from both, model minus circuit is "
        "{value}; {whole:+.2f} with nothing removed",
        number="+.2f",
        samples="prompts",
        level="headline",
    ),
)
