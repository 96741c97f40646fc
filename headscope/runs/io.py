"""File access for runs: strict JSON, writes that survive a power cut, digests."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headscope.base.input_files import json_fault
from headscope.errors import BadRun, escape_controls

REPAIR_ADVICE = "Copy the run again from its origin, or measure it again"
"""Advice for a damaged file."""
MAX_DEPTH = 50
"""Deepest nesting of a JSON file."""


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    """Write the object and wait until it is on the disk."""
    data = f"{json.dumps(value, indent=1, ensure_ascii=False)}\n".encode()  # before the file exists: it may fail
    file.write_bytes(data)
    fsync(file)


def fsync(path: Path) -> None:
    """Wait until the content of a file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(file: Path, repair_advice: str = REPAIR_ADVICE) -> dict[str, Any]:
    """Read a JSON object. Raises BadRun for anything else, for deep nesting, and for text that cannot be printed."""
    try:
        value = json.loads(read_bytes(file, repair_advice=repair_advice).decode())
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate could be neither printed nor written
    except (ValueError, RecursionError) as error:
        raise BadRun(f"{file} cannot be read: {json_fault(error)}. {repair_advice}") from error
    if not isinstance(value, dict):
        raise BadRun(f"{file} does not contain a JSON object. {repair_advice}")
    if _depth(value) > MAX_DEPTH:
        raise BadRun(f"{file} cannot be read: it is nested more than {MAX_DEPTH} levels deep. {repair_advice}")
    return value


def read_bytes(
    file: Path, digest: str | None = None, repair_advice: str = REPAIR_ADVICE, offset: int = 0, length: int = -1
) -> bytes:
    """`length` bytes of a file from `offset`, by default all.

    Raises BadRun if they cannot be read, or if `digest` is given and is not their sha256; `repair_advice` ends the
    message.
    """
    try:
        with file.open("rb") as stream:
            stream.seek(offset)
            data = stream.read(length)
    except OSError as error:
        raise BadRun(f"{file} is damaged: {error.strerror}. {repair_advice}") from error
    if digest is not None and hashlib.sha256(data).hexdigest() != digest:
        raise BadRun(f"{file} is damaged: its sha256 differs from the recorded one. {repair_advice}")
    return data


def printable_name(name: str) -> str:
    """A file name that can always be printed on one line: undecodable bytes and control characters become escapes."""
    return escape_controls(os.fsencode(name).decode(errors="backslashreplace"))


def sha256(file: Path) -> str:
    """The sha256 of a file in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        inside = [
            container.values() if isinstance(container, dict) else container
            for container in level
            if isinstance(container, dict | list)
        ]
        depth, level = depth + 1, [item for container in inside for item in container]
    return depth
