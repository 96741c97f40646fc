"""Files of a run on disk: JSON that is read or refused, writes that survive a power cut, digests."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headscope.errors import BadRun

MEND = "copy the run again from where it was made, or measure it again"
"""What to do about a damaged file."""
DEEPEST = 50
"""How deep a JSON file may be nested."""


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write the object so that it is on the disk before this returns."""
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    fsync(file)


def fsync(path: Path) -> None:
    """Have what was written to a file, or what a folder lists, on the disk before this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(file: Path, mend: str = MEND) -> dict[str, Any]:
    """The JSON object of the file. Raises BadRun where it is none, nested too deep, or cannot be printed."""
    try:
        value = json.loads(read_bytes(file, mend=mend).decode())
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate could be neither printed nor written
    except (ValueError, RecursionError) as error:
        raise BadRun(f"{file} cannot be read: {error}; {mend}") from error
    if not isinstance(value, dict):
        raise BadRun(f"{file} does not hold a JSON object; {mend}")
    if _depth(value) > DEEPEST:
        raise BadRun(f"{file} cannot be read: it is nested more than {DEEPEST} deep; {mend}")
    return value


def read_bytes(file: Path, digest: str | None = None, mend: str = MEND) -> bytes:
    """What the file holds. Raises BadRun when it cannot be read, or when `digest` is given and is not its sha256.

    `mend` says what to do about it.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise BadRun(f"{file} is damaged: {error.strerror}; {mend}") from error
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise BadRun(f"{file} is damaged: its sha256 is not the one written down; {mend}")
    return data


def tellable(name: str) -> str:
    """A file's name as any page can show it: bytes that are no text as escapes."""
    return os.fsencode(name).decode(errors="backslashreplace")


def sha256(file: Path) -> str:
    """The digest of what the file holds, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        inside = [each.values() if isinstance(each, dict) else each for each in level if isinstance(each, dict | list)]
        depth, level = depth + 1, [item for each in inside for item in each]
    return depth
