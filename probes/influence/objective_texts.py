"""What a loss is taken of: documents token by token, or the answer about a fact that is hidden in one.

Prompts come through the door, from the installed section that hides facts in documents; it is known here by what it can
do, not by name. The answer is what such a prompt would have the model copy: the scored part of the fact.
"""

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from pydantic import ValidationError

from headscope import plugins
from headscope.errors import BadInput, Missing
from headscope.prompts.texts import TokenDocument
from headscope.study.context import StudyContext
from probes.influence.options import Influence


@dataclass(frozen=True)
class Passage:
    """Tokens, of which those from `first` on are predicted, after a context of `length` tokens; `names` are its key
    columns, `told` says in words which it is."""

    ids: Sequence[int]
    first: int
    length: int
    names: Mapping[str, Any]
    told: str


class Prompt(Protocol):
    """Tokens [L], and the span of them that an answer repeats."""

    @property
    def ids(self) -> npt.NDArray[np.int32]: ...
    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...


class Hides(Protocol):
    """A section that hides facts in documents and asks for them."""

    needles: Sequence[Any]

    def trials(self, label: str) -> Sequence[Any]: ...

    def prompts(self, label: str, trial: Any) -> Sequence[Prompt]: ...


def documents(found: Sequence[TokenDocument], length: int) -> list[Passage]:
    """The first `length` tokens of every document, all but the first of them predicted."""
    return [Passage(each.ids[:length], 1, length, {"doc": each.name}, f"document {n}") for n, each in enumerate(found)]


def hiding(config: Influence, materials: StudyContext) -> Hides:
    """The section that hides as many facts, at as many depths of as many documents as are asked for.

    What it notes of its own inputs is set apart from the study's, whose own section may hide others. Raises Missing
    where none is installed.
    """
    apart = copy.copy(materials)
    apart.input_digests = defaultdict(dict)
    for probe, section in plugins.load_parts("runner"):
        if all(hasattr(section, part) for part in ("trials", "prompts")):
            wanted, docs = plugins.load_part(probe, "options"), materials.study.texts.docs
            lengths = sorted(set(config.lengths))
            try:
                grid = wanted(lengths=lengths, depths=config.depths, needles=config.needles, seeds=docs)
            except ValidationError as error:
                raise BadInput(
                    f"influence: no answers to ask for: {error.errors()[0]['msg']}; ask for fewer"
                ) from error
            hides: Hides = section(grid, apart)
            return hides
    raise Missing("influence: nothing that is installed hides facts in documents; leave out the objective 'answer'")


def answers(hides: Hides, label: str, found: Sequence[TokenDocument]) -> list[Passage]:
    """The prompt of every trial, and the answer after it, which alone is predicted; short contexts first."""
    made = []
    for trial in hides.trials(label):
        if trial.mode != "strict":
            continue
        for prompt, depth in zip(hides.prompts(label, trial), trial.depths, strict=True):
            fact, doc = hides.needles[trial.needle].name, found[trial.haystack].name
            ids = [*prompt.ids.tolist(), *prompt.ids[prompt.start : prompt.end].tolist()]
            names = {"doc": doc, "fact": fact, "depth": depth}
            told = f"document {trial.haystack}, fact {fact}, depth {depth:.4f}"
            made.append(Passage(ids, len(prompt.ids), trial.length, names, told))
    return sorted(made, key=lambda passage: passage.length)
