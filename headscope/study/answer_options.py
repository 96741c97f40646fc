"""Options that the commands about answers to prompts share: sets of prompts, metric, which prompts count, positions."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, WrapValidator, model_validator

from headscope.base.user_input import quote
from headscope.errors import OptionError
from headscope.prompts.pair_sets import GENERATED_SETS, SETS_OF_ANY_LENGTH, check_source
from headscope.prompts.pairs import stored_metric_name
from headscope.prompts.token_positions import position_names
from headscope.runs.head_names import head_names, names_of_heads
from headscope.study.config import Options
from headscope.study.option_rules import Needs, Rule


def _accept_function(value: Any, parse: Any) -> Any:
    return value if callable(value) else parse(value)


ACCEPTS_FUNCTION = WrapValidator(_accept_function)
STORES_NAME = PlainSerializer(stored_metric_name, return_type=str)
"""Annotations of such an option, as in Annotated[Literal[...], ACCEPTS_FUNCTION, STORES_NAME]."""
ACCEPTS_POSITIONS = BeforeValidator(position_names)
"""Annotation of a list of positions that may be a single one, or hold numbers, ranges and slices."""


PAIRS_HELP = (
    "sets of prompt pairs: ioi (with one corruption: ioi:other, ioi:swap, ioi:abc), greater-than, induction, needle, "
    "or a JSON lines file with the keys name, clean, corrupted, answer, wrong, group, spans, corrupted_answer"
)
METRIC_HELP = (
    "logit_diff: logit of the answer minus logit of the wrong answer; logprob: log-probability of the answer in nats; "
    "kl: KL(clean || run) at the last prompt token in nats; nll: mean loss of the answer's tokens in nats/token, for "
    "answers of one or several tokens; prob_diff: probability of the answer minus that of the wrong answer; rank: "
    "number of tokens with a larger logit than the answer, without a gradient. In Python also a function of the logits "
    "and the pair"
)
HEADS_HELP = (
    "file:FILE: the heads of a file, a head set or a list of another tool; run:FOLDER:STATISTIC:COUNT[:MODEL]: the top "
    "heads of a run"
)
PLACES_HELP = "a named span of every pair such as subject or last, a token such as 3 or -1, or a range such as -4:"
"""How positions are named."""

GENERATED = "|".join(GENERATED_SETS)
OF_ANY_LENGTH = "|".join(SETS_OF_ANY_LENGTH)
"""Generated sets, and those that have prompts of any length, as values in rules of options."""

PairSource = Annotated[str, Field(min_length=1), AfterValidator(check_source)]
PairSources = list[PairSource]
AnswerMetric = Annotated[
    Literal["logit_diff", "logprob", "kl", "nll", "prob_diff", "rank"], ACCEPTS_FUNCTION, STORES_NAME
]


HeadNames = Annotated[list[str], BeforeValidator(head_names), AfterValidator(names_of_heads)]
PositionNames = Annotated[list[Annotated[str, Field(min_length=1)]], ACCEPTS_POSITIONS]


class PromptSetOptions(Options):
    """Sets of prompts with answers, and which of their prompts count."""

    option_rules: ClassVar[tuple[Rule, ...]] = (
        Needs("count", f"pairs={GENERATED} reference={GENERATED}", "a file or a prompt is used whole"),
        Needs("keep_failing", "pairs"),
    )

    @model_validator(mode="after")
    def _check_answers_differ(self) -> Self:
        answer = getattr(self, "answer", None)
        if answer is not None and answer == getattr(self, "wrong", None):
            raise OptionError("{answer} and {wrong} are both {text}. Change one", text=quote(answer))
        return self

    pairs: PairSources | None = Field(None, min_length=1, description=f"instead of a prompt, {PAIRS_HELP}")
    count: int = Field(32, ge=1, le=1_000_000, description="number of pairs of a generated set")
    keep_failing: bool = Field(
        False,
        description="keep prompts in means to which the unchanged model does not give the answer (logit_diff and "
        "prob_diff: not above 0; logprob and nll: less than 1 % per token), and pairs whose two prompts prefer the "
        "same answer",
    )


class AnswerOptions(PromptSetOptions):
    """Sets of prompts of some length, and the metric of their answers."""

    option_rules: ClassVar[tuple[Rule, ...]] = (
        Needs("length", f"pairs={OF_ANY_LENGTH} reference={OF_ANY_LENGTH}", "a file or a prompt has its own length"),
    )

    length: int = Field(128, ge=4, le=2**20, description="tokens of a prompt of the sets induction and needle")
    metric: AnswerMetric = Field("logit_diff", description=METRIC_HELP)
