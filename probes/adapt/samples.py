"""Training sequences: contiguous slices of whole documents, each drawn by (seed, step, number in the batch) alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.errors import BadInput
from headscope.prompts.texts import Document, first_tokens, opening, read

WHOLE = 2**31
"""More tokens than a document has."""


def without(held_out: Mapping[str, str], source: str) -> Iterator[Document]:
    """The documents of a source less those held out (name -> digest), which may be called otherwise there."""
    texts = {*held_out.values()}
    return (document for document in read(source) if document.digest not in texts)


class Slices:
    """All documents of some sources, except those held out (name -> digest), in tokens; nothing is joined or padded.

    A document is drawn in proportion to the slices it holds, so every token is about equally likely; with
    `sources_alike` the source is drawn first, each as likely as any other. A tokenizer's opening special tokens open
    every slice. Being stateless, a draw is the same in an interrupted and resumed training.
    """

    def __init__(
        self,
        sources: Sequence[str],
        tokenizer: Any,
        held_out: Mapping[str, str],
        seed: int,
        sources_alike: bool = False,
    ):
        self.seed = seed
        self.opening: list[int] = []
        self.documents: dict[str, list[int]] = {}
        self.digests: dict[str, str] = {}
        found: dict[str, list[str]] = {source: [] for source in sources}
        for source in sources:
            for document in without(held_out, source):
                if {**held_out, **self.digests}.get(document.name, document.digest) != document.digest:
                    raise BadInput(f"two different texts are called {document.name}: rename one, or leave one out")
                self.documents[document.name] = first_tokens(document.text, tokenizer, WHOLE)
                self.digests[document.name] = document.digest
                self.opening = self.opening or opening(document.text, tokenizer)
                found[source].append(document.name)
        self.groups = found if sources_alike else {", ".join(sources): list(self.documents)}
        for group, names in self.groups.items():
            if not names:
                raise BadInput(f"nothing to train on: every document of {group} is held out; add a --train")

    def check(self, length: int) -> None:
        """Raises BadInput unless a document holds `length` tokens, or, with sources alike, one of every source."""
        for group in self.groups:
            self._fitting(group, length)

    def _fitting(self, group: str, length: int) -> list[str]:
        fitting = [name for name in self.groups[group] if len(self.documents[name]) >= length]
        if not fitting:
            of = f" of {group}" if len(self.groups) > 1 else ""
            longest = max(self.groups[group], key=lambda name: len(self.documents[name]))
            raise BadInput(
                f"no training document{of} holds {length} tokens; the longest, {longest}, has "
                f"{len(self.documents[longest])}: shorten the phase or add longer texts with --train"
            )
        return fitting

    def draw(self, length: int, step: int, number: int) -> Tensor:
        """Sequence `number` of a step's batch: ids [length]."""
        chance, groups = np.random.default_rng([self.seed, step, number]), list(self.groups)
        names = self._fitting(groups[chance.integers(len(groups))] if len(groups) > 1 else groups[0], length)
        places = np.array([len(self.documents[name]) - length + 1 for name in names])
        place = chance.integers(places.sum())
        which = int(np.searchsorted(places.cumsum(), place, side="right"))
        start = int(place - places[:which].sum())
        ids = self.documents[names[which]][start : start + length]
        return torch.tensor(ids if start == 0 else self.opening + ids[: length - len(self.opening)])
