"""The tokens that a loss is taken over: all tokens of a document, or the answer about a fact hidden in it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headscope.prompts.needle_grid import NeedleGrid, even_depths
from headscope.prompts.needles import read_needles
from headscope.prompts.texts import TokenDocument
from headscope.study.context import StudyContext
from probes.influence.schema import InfluenceOptions


@dataclass(frozen=True)
class ObjectiveText:
    """Token ids whose loss counts from position `first_scored` on, after a context of `length` tokens.

    `keys` are the key columns of its rows; `description` names it in cell ids.
    """

    ids: Sequence[int]
    first_scored: int
    length: int
    keys: Mapping[str, Any]
    description: str


def document_texts(documents: Sequence[TokenDocument], length: int) -> list[ObjectiveText]:
    """The first `length` tokens of every document; the loss counts from the second token on."""
    return [
        ObjectiveText(document.ids[:length], 1, length, {"doc": document.name}, f"document {number}")
        for number, document in enumerate(documents)
    ]


def answer_grid(options: InfluenceOptions, context: StudyContext) -> NeedleGrid:
    """The trials of the objective `answer`: literal needles, one haystack per document of the study."""
    return NeedleGrid(
        needles=read_needles(None, options.needles),
        lengths=sorted(set(options.lengths)),
        depths=even_depths(options.depths),
        haystack_count=context.study.texts.docs,
        source=context.study.texts.source,
        seed=context.seed,
    )


def answer_texts(grid: NeedleGrid, tokenizer: Any, documents: Sequence[TokenDocument]) -> list[ObjectiveText]:
    """The prompt of every trial followed by the answer, whose loss counts; shortest contexts first."""
    texts = []
    for trial in grid.trials(tokenizer):
        if trial.mode != "strict":
            continue
        for prompt, depth in zip(grid.prompts(tokenizer, trial), trial.depths, strict=True):
            fact, document = grid.needles[trial.needle].name, documents[trial.haystack].name
            ids = [*prompt.ids.tolist(), *prompt.ids[prompt.start : prompt.end].tolist()]
            description = f"document {trial.haystack}, fact {fact}, depth {depth:.4f}"
            keys = {"doc": document, "fact": fact, "depth": depth}
            texts.append(ObjectiveText(ids, len(prompt.ids), trial.length, keys, description))
    return sorted(texts, key=lambda text: text.length)
