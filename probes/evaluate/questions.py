"""Questions that the evaluate probe answers: scores on tasks, and their means over tasks."""

from typing import Literal

from headscope.results.questions import Question


def _score(name: str, better: Literal["higher", "lower"]) -> Question:
    return Question(
        name=name,
        sentence="{task} at {context_length:,} tokens ({metric}): {model} scores {value}, with a standard error of "
        "{stderr:.3f}",
        headline="{task} at {context_length:,} tokens ({metric}): {value}",
        number=".3f",
        samples="documents",
        level="headline",
        better=better,
    )


QUESTIONS = (
    Question(
        name="tasks.mean_score",
        sentence="Mean {kind} of {tasks:n tasks} at {context_length:,} tokens: {model} scores {value}",
        headline="mean {kind} of {tasks:n tasks} at {context_length:,} tokens: {value}",
        number=".3f",
        level="headline",
        better="higher",
    ),
    _score("tasks.score", "higher"),
    _score("tasks.error", "lower"),
)
