"""Questions that results answer, declared as data by the probes: a sentence with places for the numbers.

A template has places such as {value}, {model}, {unit} (the head), {n}, and every name of the result's `where` and
`details`, which must differ from the others. A place may have a format: one of Python's, or one of `words.FORMATS`. A
part in square brackets is left out if one of its places has no value: "the score is {value}[; without the needle it is
{control:.3f}]".
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from headscope.base import plugins

Level = Literal["warning", "row", "headline", "detail"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that results answer, with the templates of their sentences."""

    name: str
    """Its key, "area.quantity", such as "loss.difference". It stays the same across versions."""
    sentence: str
    """Template of a sentence, without the full stop at its end. For a claim: the evidence."""
    headline: str = ""
    """Template of one line of at most 100 characters, by default `sentence`. The model precedes it in the list."""
    answer: str = ""
    """Template of a sentence about several models, for a card of the overview: {values} is the list of their values."""
    statement: str = ""
    """Template of the statement that the verdict is about: a claim of a paper, or ours if the question has a topic."""
    criterion: str = ""
    """Template of our own threshold, if the statement names none."""
    number: str = "number"
    """Format of the value and of both ends of its interval."""
    value_unit: str = ""
    """Unit of measure that follows the value, such as "tokens"."""
    samples: str = ""
    """The independent samples that the interval is over, as a plural noun: "documents"; "" if the value needs none."""
    limits: tuple[float, float] = (-math.inf, math.inf)
    """Smallest and largest possible value, at which an interval ends."""
    is_ratio: bool = False
    """Whether the value is a ratio: its interval is symmetric on the log scale."""
    level: Level = "detail"
    """A warning is also printed after measuring; rows, in their order, and headlines are shown first."""
    topic: str = ""
    """Heading of the sentence in reports, by default the title of the probe."""
    better: Literal["", "higher", "lower"] = ""
    """The direction that is an improvement, for comparisons and checks."""

    @property
    def is_claim(self) -> bool:
        """Whether its results are verdicts on a statement of a paper; one of ours has a topic of its own."""
        return bool(self.statement) and self.topic in ("", CLAIMS_TOPIC)


CLAIMS_TOPIC = "Comparison with the paper"
MODELS_TOPIC = "Models"

_NOTES_ON_MODELS = {
    "models.omitted": "Sentences and charts show {shown} of {models:n models}; {omitted} omitted. The tables have all "
    "models; the app can show others",
    "models.earlier_checkpoints": "Sentences and charts show the last checkpoint of each of {trainings} trainings; "
    "{omitted} omitted. The tables have all models; the app can show others",
    "models.versions": "The run was resumed with other versions: {versions}. Numbers may differ slightly between them",
    "models.tokenizers": "The tokenizer of {others:words} differs from that of {baseline}, so the same number of "
    "tokens covers a different text. Differences between heads mix the effect of the model with that of the tokens",
    "models.bos": "Prompts and texts of {model} begin with {opening}, those of {baseline} with {baseline_opening}. "
    "Differences between these models mix the effect of the model with that of the first token",
    "models.beyond_native_context": "{model} was measured at {context_length:,} tokens, but was trained for "
    "{native_context:,}, without a position scheme that extends its context. Its results at {context_length:,} tokens "
    "are outside its trained range",
    "models.contexts": "{model} was measured inside {contexts:words}, so its results are those of the changed model",
    "models.compatibility_mode": "{model} is a TransformerBridge in compatibility mode: TransformerLens folded and "
    "centred its weights. Logits, patching and ablation are those of the original model up to a constant; norms and "
    "matrices of its weights are not",
    "models.hooks": "{model} ran with {hooks:words}: hooks and functions of the user, which may change its results",
    "models.int8": "{model} is quantised by LLM.int8, which rounds the activations of a whole pass together: the same "
    "prompt gives different logits in another pass. Small differences are noise",
    "models.other_weights": "{model}: {source} belongs to a model with other weights ({origin}), which weights=any "
    "allows",
    "models.equal": "{model} and {baseline} are the same weights under the same position scheme[{rounding}]. All that "
    "differs between them comes from texts, tokenizers or rounding[{limit}][. The run does not record their "
    "{unknown:words}]",
    "models.equal_weights": "{model} and {baseline} have the same weights[{rounding}], but differ in "
    "{differences:words}[. The run does not record their {unknown:words}]",
    "models.text_parts": "{pieces} of {documents:n documents} are parts of {texts:n texts}. Parts of one text are "
    "alike, so confidence intervals over documents may be too narrow",
    "models.texts": "Measured on different texts from {baseline}, or on another sample of them: {others:words}. "
    "Differences between these models mix the effect of the model with that of the texts",
}
SHARED_QUESTIONS = (
    *(Question(name=name, sentence=sentence, topic=MODELS_TOPIC) for name, sentence in _NOTES_ON_MODELS.items()),
    Question(
        name="models.unread_tables",
        sentence="No installed probe reads the tables {tables:words}, so results and charts leave them out. Install "
        "their package, or a newer headscope",
        topic=MODELS_TOPIC,
        level="warning",
    ),
    Question(name="heads.ranks", sentence="Rank by {statistic}: {parts}", topic="Heads"),
    Question(
        name="heads.rank",
        sentence="{number:,.0f} of {n:,} in {model} ([{estimate}]{score:number})",
        number=",.0f",
        topic="Heads",
    ),
)
"""Those that no probe declares: the notes on models, and ranks of heads."""


class QuestionParts:
    """Contract of the part of a probe with its questions."""

    def questions(self) -> Sequence[Question]:
        """The questions that its results answer."""
        return ()


@cache
def questions() -> Mapping[str, Question]:
    """All questions by name: the shared ones, and those of every probe with their topics."""
    declared = {question.name: question for question in SHARED_QUESTIONS}
    for probe, probe_questions in plugins.call_parts(QuestionParts.questions):
        for question in probe_questions:
            topic = question.topic or (CLAIMS_TOPIC if question.is_claim else probe.title)
            declared[question.name] = replace(question, topic=topic)
    return declared
