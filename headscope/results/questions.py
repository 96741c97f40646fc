"""Questions that results answer, declared as data by the probes: a sentence with places for the numbers.

A template has places such as {value}, {model}, {unit} (the head), {n}, and every name of the result's `where` and
`details`, which must differ from the others. A place may have a format: one of Python's, or one of `words.FORMATS`. A
part in square brackets is left out if one of its places has no value: "the score is {value}[; without the needle it is
{control:.3f}]".
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

from headscope import plugins
from headscope.probe import Probe

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


@cache
def questions() -> Mapping[str, Question]:
    """All questions by name: those of every probe, with their topics, the notes on models, and ranks of heads."""
    from headscope.results import model_notes, ranks

    shared = (*model_notes.QUESTIONS, *ranks.QUESTIONS)
    declared = {question.name: question for question in shared}
    for probe, probe_questions in plugins.call_parts(Probe.questions):
        for question in probe_questions:
            topic = question.topic or (CLAIMS_TOPIC if question.is_claim else probe.title)
            declared[question.name] = replace(question, topic=topic)
    return declared
