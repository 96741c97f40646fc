"""Random sampling of training sequences: contiguous slices of documents.

A sample depends only on (seed, step, index in the batch), so a resumed training draws the same sequences.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.errors import BadInput
from headscope.prompts.special_tokens import leading_special_tokens
from headscope.prompts.texts import (
    Document,
    TokenDocument,
    find_near_duplicate,
    first_tokens,
    read_documents,
)

log = logging.getLogger(__name__)

MAX_DOCUMENT_TOKENS = 2**31
"""More tokens than any document has."""


def exclude_validation_texts(validation_digests: Mapping[str, str], source: str) -> Iterator[Document]:
    """The documents of a source without the validation texts (name -> digest), whatever their names are there."""
    digests = {*validation_digests.values()}
    return (document for document in read_documents(source) if document.digest not in digests)


class SequenceSampler:
    """Sampler over the documents of some sources, without the validation documents (name -> digest), in tokens.

    A document's probability is proportional to the number of slices it has, so that all tokens are about equally
    likely. With `uniform_over_sources` a source is drawn first, uniformly. Documents are neither joined nor padded.
    Every slice begins with the special tokens that the tokenizer puts before a text. Documents that contain most of
    one of `validation_documents` are left out with a warning. Raises BadInput if no document is left.
    """

    def __init__(
        self,
        sources: Sequence[str],
        tokenizer: Any,
        validation_digests: Mapping[str, str],
        seed: int,
        uniform_over_sources: bool = False,
        validation_documents: Sequence[TokenDocument] = (),
    ):
        self.seed = seed
        self.opening_ids: list[int] = []
        self.documents: dict[str, list[int]] = {}
        self.digests: dict[str, str] = {}
        names_by_source: dict[str, list[str]] = {source: [] for source in sources}
        for source in sources:
            for document in exclude_validation_texts(validation_digests, source):
                if {**validation_digests, **self.digests}.get(document.name, document.digest) != document.digest:
                    raise BadInput(f"two different texts have the name {document.name}. Rename or remove one of them")
                ids = first_tokens(document.text, tokenizer, MAX_DOCUMENT_TOKENS)
                if validation_document := find_near_duplicate(validation_documents, ids):
                    log.warning(
                        "%s is not used for training: it is a near-copy of %s", document.name, validation_document.name
                    )
                    continue
                self.documents[document.name] = ids
                self.digests[document.name] = document.digest
                self.opening_ids = self.opening_ids or leading_special_tokens(document.text, tokenizer)
                names_by_source[source].append(document.name)
        self.document_groups = names_by_source if uniform_over_sources else {", ".join(sources): list(self.documents)}
        for group, names in self.document_groups.items():
            if not names:
                raise BadInput(
                    f"no training text left: every document of {group} is a validation document. Add another "
                    "--training-texts"
                )

    def check_length(self, length: int) -> None:
        """Raise BadInput unless a document has `length` tokens; with uniform sources, one of every source."""
        for group in self.document_groups:
            self._documents_of_length(group, length)

    def _documents_of_length(self, group: str, length: int) -> list[str]:
        long_enough = [name for name in self.document_groups[group] if len(self.documents[name]) >= length]
        if not long_enough:
            of_group = f" of {group}" if len(self.document_groups) > 1 else ""
            longest = max(self.document_groups[group], key=lambda name: len(self.documents[name]))
            raise BadInput(
                f"no training document{of_group} has {length} tokens: the longest, {longest}, has "
                f"{len(self.documents[longest])}. Shorten the phase or add longer texts with --training-texts"
            )
        return long_enough

    def sample_sequence(self, length: int, step: int, batch_index: int) -> Tensor:
        """Sequence `batch_index` of a step's batch: ids [length]."""
        rng, groups = np.random.default_rng([self.seed, step, batch_index]), list(self.document_groups)
        names = self._documents_of_length(groups[rng.integers(len(groups))] if len(groups) > 1 else groups[0], length)
        slice_counts = np.array([len(self.documents[name]) - length + 1 for name in names])
        slice_index = rng.integers(slice_counts.sum())
        document = int(np.searchsorted(slice_counts.cumsum(), slice_index, side="right"))
        start = int(slice_index - slice_counts[:document].sum())
        ids = self.documents[names[document]][start : start + length]
        return torch.tensor(ids if start == 0 else self.opening_ids + ids[: length - len(self.opening_ids)])
