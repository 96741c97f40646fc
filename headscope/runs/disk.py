"""Files of a run on disk: JSON that is read or refused, writes that survive a power cut, digests."""

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headscope.errors import BadRun


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    fsync(file)


def fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise BadRun(f"{file} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise BadRun(f"{file} does not hold a JSON object")
    return value


def sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
