"""Training sequences: contiguous slices of whole documents, each drawn by (seed, step, number in the batch) alone."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.errors import BadInput
from headscope.prompts.texts import Document, first_tokens, leading_special_tokens, read_documents

MAX_DOCUMENT_TOKENS = 2**31
"""More tokens than a document has."""


def exclude_held_out(held_out_digests: Mapping[str, str], source: str) -> Iterator[Document]:
    """The documents of a source less those held out (name -> digest), which may be called otherwise there."""
    texts = {*held_out_digests.values()}
    return (document for document in read_documents(source) if document.digest not in texts)


class SequenceSampler:
    """All documents of some sources, except those held out (name -> digest), in tokens; nothing is joined or padded.

    A document is drawn in proportion to the slices it holds, so every token is about equally likely; with
    `sources_alike` the source is drawn first, each as likely as any other. A tokenizer's opening special tokens open
    every slice. Being stateless, a draw is the same in an interrupted and resumed training.
    """

    def __init__(
        self,
        sources: Sequence[str],
        tokenizer: Any,
        held_out_digests: Mapping[str, str],
        seed: int,
        uniform_over_sources: bool = False,
    ):
        self.seed = seed
        self.opening_ids: list[int] = []
        self.documents: dict[str, list[int]] = {}
        self.digests: dict[str, str] = {}
        found: dict[str, list[str]] = {source: [] for source in sources}
        for source in sources:
            for document in exclude_held_out(held_out_digests, source):
                if {**held_out_digests, **self.digests}.get(document.name, document.digest) != document.digest:
                    raise BadInput(f"two different texts are called {document.name}: rename one, or leave one out")
                self.documents[document.name] = first_tokens(document.text, tokenizer, MAX_DOCUMENT_TOKENS)
                self.digests[document.name] = document.digest
                self.opening_ids = self.opening_ids or leading_special_tokens(document.text, tokenizer)
                found[source].append(document.name)
        self.document_groups = found if uniform_over_sources else {", ".join(sources): list(self.documents)}
        for group, names in self.document_groups.items():
            if not names:
                raise BadInput(f"nothing to train on: every document of {group} is held out; add a --train")

    def check_length(self, length: int) -> None:
        """Raises BadInput unless a document holds `length` tokens, or, with sources alike, one of every source."""
        for group in self.document_groups:
            self._documents_of_length(group, length)

    def _documents_of_length(self, group: str, length: int) -> list[str]:
        fitting = [name for name in self.document_groups[group] if len(self.documents[name]) >= length]
        if not fitting:
            of = f" of {group}" if len(self.document_groups) > 1 else ""
            longest = max(self.document_groups[group], key=lambda name: len(self.documents[name]))
            raise BadInput(
                f"no training document{of} holds {length} tokens; the longest, {longest}, has "
                f"{len(self.documents[longest])}: shorten the phase or add longer texts with --train"
            )
        return fitting

    def sample_sequence(self, length: int, step: int, batch_index: int) -> Tensor:
        """Sequence `number` of a step's batch: ids [length]."""
        chance, groups = np.random.default_rng([self.seed, step, batch_index]), list(self.document_groups)
        names = self._documents_of_length(groups[chance.integers(len(groups))] if len(groups) > 1 else groups[0], length)
        places = np.array([len(self.documents[name]) - length + 1 for name in names])
        place = chance.integers(places.sum())
        which = int(np.searchsorted(places.cumsum(), place, side="right"))
        start = int(place - places[:which].sum())
        ids = self.documents[names[which]][start : start + length]
        return torch.tensor(ids if start == 0 else self.opening_ids + ids[: length - len(self.opening_ids)])
