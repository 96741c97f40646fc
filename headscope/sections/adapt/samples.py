"""Training sequences: contiguous slices of whole documents, each drawn by (seed, step, number in the batch) alone."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.errors import BadInput
from headscope.studies.texts import first_tokens, read

WHOLE = 2**31
"""More tokens than a document has."""


class Slices:
    """All documents of some sources, except those held out, in tokens; nothing is joined, repeated or padded.

    A document is drawn in proportion to the slices it holds, so every token is about equally likely. A tokenizer's
    opening special tokens open every slice. Being stateless, a draw is the same in an interrupted and resumed training.
    """

    def __init__(self, sources: Sequence[str], tokenizer: Any, held_out: Sequence[str], seed: int):
        self.seed = seed
        self.opening: list[int] = []
        self.documents: dict[str, list[int]] = {}
        for document in (each for source in sources for each in read(source)):
            if document.name not in held_out:
                ids = first_tokens(document.text, tokenizer, WHOLE)
                plain = tokenizer(document.text[:64], add_special_tokens=False, verbose=False)["input_ids"]
                self.opening = ids[: ids.index(plain[0])] if plain else self.opening
                self.documents[document.name] = ids
        if not self.documents:
            raise BadInput(f"nothing to train on: every document of {', '.join(sources)} is held out; add a --train")

    def names(self, length: int) -> list[str]:
        """Documents that hold `length` tokens. Raises BadInput if none does."""
        fitting = [name for name, ids in self.documents.items() if len(ids) >= length]
        if not fitting:
            longest = max(self.documents, key=lambda name: len(self.documents[name]))
            raise BadInput(
                f"no training document holds {length} tokens; the longest, {longest}, has "
                f"{len(self.documents[longest])}: shorten the phase or add longer texts with --train"
            )
        return fitting

    def draw(self, length: int, step: int, number: int) -> Tensor:
        """Sequence `number` of a step's batch: ids [length]."""
        names = self.names(length)
        places = np.array([len(self.documents[name]) - length + 1 for name in names])
        place = np.random.default_rng([self.seed, step, number]).integers(places.sum())
        which = int(np.searchsorted(places.cumsum(), place, side="right"))
        start = int(place - places[:which].sum())
        ids = self.documents[names[which]][start : start + length]
        return torch.tensor(ids if start == 0 else self.opening + ids[: length - len(self.opening)])
