"""Convert a GGUF file once, atomically, to a safetensors folder in the cache, and check the folder when it is opened.

The cache is HEADSCOPE_CACHE, by default ~/.cache/headscope.
"""

import glob
import hashlib
import io
import json
import logging
import os
import shutil
import tempfile
from contextlib import redirect_stderr, suppress
from functools import cache
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from headscope.errors import BadInput, CannotWrite, HeadscopeError, first_line
from headscope.models.gguf_check import check_model
from headscope.models.gguf_config import gguf_config
from headscope.models.gguf_file import copy_weights_without_suffix, read_gguf

log = logging.getLogger("headscope")

CONVERSION_VERSION = 3
"""Part of a converted folder's name. Version 1 could hold random numbers for missing weights, version 2 the positions
of the transformers class in place of the file's."""
DIGESTS_FILE = "headscope_digests.json"
"""Content digests of the other files of a converted folder, by name."""
SOURCE_FILE = "headscope_source.json"
"""Path and status of the GGUF file that a folder was converted from, so that the file need not be read again."""
SourceRecord = list[str | int]
"""The path of a GGUF file, its inode, size, and times of last change."""
BLOCK_WORDS = 4096
"""Words of 8 bytes whose sum enters a content digest."""


def cache_folder() -> Path:
    """The folder of converted checkpoints: HEADSCOPE_CACHE, else a folder in the user's cache."""
    base = os.environ.get("HEADSCOPE_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "headscope"
    return Path(base).expanduser()


def file_digest(file: Path) -> bytes:
    """SHA-256 of a file. A process reads a file once, and again only after it has changed."""
    return _digest_unchanged(file.resolve(), *_status(file))


@cache
def _digest_unchanged(file: Path, *_status: int) -> bytes:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").digest()


def _status(file: Path) -> tuple[int, ...]:
    status = file.stat()
    return status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def convert_gguf(gguf: Path) -> Path:
    """The safetensors folder of a GGUF file, named by the file's digest and converted on first use, atomically.

    A folder whose files differ from their digests is converted again, with a warning. Raises BadInput for a file that
    cannot be read, UnsupportedModel for one that transformers cannot represent, CannotWrite if the cache cannot be
    written.
    """
    source = _source_record(gguf)
    target = _recorded_folder(gguf, source) or _folder_of_digest(gguf)
    if target.is_dir():
        damaged = _damaged_file(target)
        if damaged is None:
            _record_source(gguf, source, target)
            return target
        log.warning("the converted copy of %s is damaged (%s). Converting it again", gguf.name, damaged)
    shutil.rmtree(target, ignore_errors=True)
    target = _folder_of_digest(gguf)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    except OSError as error:
        raise CannotWrite(
            f"cannot make the cache folder '{target.parent}' ({error.strerror}). "
            "Set HEADSCOPE_CACHE to a writable folder"
        ) from error
    log.info("converting %s to safetensors (once)", gguf.name)
    try:
        _write_converted(gguf, scratch)
        if _source_record(gguf) != source:
            raise BadInput(f"GGUF file '{gguf}' changed while it was converted. Open it again when it is complete")
        digests = {file.name: _content_digest(file, *_status(file)) for file in sorted(scratch.iterdir())}
        (scratch / DIGESTS_FILE).write_text(json.dumps(digests, indent=1), encoding="utf-8")
        try:
            scratch.rename(target)
        except OSError:
            # Another process may have finished the same conversion first.
            if not target.is_dir():
                raise
    except OSError as error:
        raise CannotWrite(
            f"cannot write the converted checkpoint to '{target.parent}' ({error.strerror}). "
            "Free disk space, or set HEADSCOPE_CACHE"
        ) from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    _record_source(gguf, source, target)
    return target


def _folder_of_digest(gguf: Path) -> Path:
    return cache_folder() / f"{gguf.stem}-{file_digest(gguf).hex()[:12]}-{CONVERSION_VERSION}"


def _recorded_folder(gguf: Path, source: SourceRecord) -> Path | None:
    """The folder that this file, unchanged since, was converted to; None if no folder records it."""
    for folder in cache_folder().glob(f"{glob.escape(gguf.stem)}-*-{CONVERSION_VERSION}"):
        with suppress(OSError, ValueError):
            if json.loads((folder / SOURCE_FILE).read_text(encoding="utf-8")) == source:
                return folder
    return None


def _record_source(gguf: Path, source: SourceRecord, folder: Path) -> None:
    """Record that a folder is the conversion of a file. A cache that cannot be written stays as it is."""
    if _recorded_folder(gguf, source) != folder:
        with suppress(OSError):
            (folder / SOURCE_FILE).write_text(json.dumps(source), encoding="utf-8")


def _source_record(gguf: Path) -> SourceRecord:
    return [str(gguf.resolve()), *_status(gguf)]


def _damaged_file(folder: Path) -> str | None:
    """The name of a file of a converted folder that is missing or differs from its digest, None if all are intact."""
    name = DIGESTS_FILE
    try:
        for name, digest in dict(json.loads((folder / DIGESTS_FILE).read_text(encoding="utf-8"))).items():
            if _content_digest(folder / name, *_status(folder / name)) != digest:
                return str(name)
    except (OSError, ValueError, TypeError):
        return name
    return None


@cache
def _content_digest(file: Path, *_status: int) -> str:
    """SHA-256 of the sums of blocks of a file, 10 times faster than that of all bytes.

    It misses only changes that cancel in the sum of a block. A process reads an unchanged file once.
    """
    content = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.zeros(0, np.uint8)
    whole = len(content) // (8 * BLOCK_WORDS) * 8 * BLOCK_WORDS
    sums = content[:whole].view(np.uint64).reshape(-1, BLOCK_WORDS).sum(1)
    return hashlib.sha256(sums.tobytes() + content[whole:].tobytes()).hexdigest()


def _write_converted(gguf: Path, folder: Path) -> None:
    try:
        file = read_gguf(gguf)
        config = gguf_config(file)
        with redirect_stderr(io.StringIO()):  # a progress bar per tensor, which no setting of transformers disables
            module, loading = AutoModelForCausalLM.from_pretrained(
                gguf.parent,
                gguf_file=gguf.name,
                config=config,
                dtype=torch.float32,
                trust_remote_code=False,
                output_loading_info=True,
            )
        if missing := sorted(copy_weights_without_suffix(module, file, loading["missing_keys"])):
            raise BadInput(
                f"GGUF file '{gguf}' lacks weights, e.g. {', '.join(missing[:3])} ({len(missing)} in all). Download it "
                "again"
            )
        check_model(module, file, loading["unexpected_keys"])
        # For Gemma 4, AutoTokenizer ends with this class too, but first fails on settings that are lists by layer.
        tokenizer_class = PreTrainedTokenizerFast if file.architecture == "gemma4" else AutoTokenizer
        tokenizer = tokenizer_class.from_pretrained(gguf.parent, gguf_file=gguf.name, trust_remote_code=False)
    except HeadscopeError:
        raise
    except Exception as error:  # the gguf reader raises many kinds of errors for a broken file
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise BadInput(f"cannot read GGUF file '{gguf}' ({reason}). It may be truncated. Download it again") from error
    # transformers marks the model as quantized although its weights are dequantized.
    if hasattr(module, "hf_quantizer"):
        del module.hf_quantizer
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config
    module.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
