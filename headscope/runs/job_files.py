"""The files of finished jobs of an unfinished run: their headers and their tables."""

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from headscope.errors import BadRun
from headscope.runs import arrow
from headscope.runs.io import read_bytes


@dataclass(frozen=True)
class StoredTable:
    """One table in the file of a finished job."""

    file: Path
    offset: int
    length: int
    digest: str

    def read(self) -> bytes:
        """Its bytes. Raises BadRun if they are damaged."""
        return read_bytes(self.file, self.digest, repair_advice(self.file), self.offset, self.length)

    def read_table(self) -> pa.Table:
        """The table. Raises BadRun if it is damaged."""
        return arrow.from_bytes(self.read())


def read_header(job_file: Path) -> dict[str, Any]:
    """The header of a finished job; key "end" is the offset of the first table in bytes.

    Raises BadRun if it is damaged.
    """
    try:
        with job_file.open("rb") as stream:
            line = stream.readline()
    except OSError as error:
        raise BadRun(f"{job_file} is damaged: {error.strerror}. {repair_advice(job_file)}") from error
    digest, _, header = line.rstrip(b"\n").partition(b" ")
    if data_digest(header).encode() != digest:
        raise BadRun(
            f"{job_file} is damaged: the sha256 of its first line differs from the recorded one. "
            f"{repair_advice(job_file)}"
        )
    contents: dict[str, Any] = {**json.loads(header), "end": len(line)}
    if "inputs" not in contents:  # nothing to compare with the present inputs
        raise BadRun(f"{job_file} was stored by an earlier version. Delete {job_file.parent.parent} to start again")
    return contents


def read_tables(job_file: Path) -> dict[str, StoredTable]:
    """The tables of a finished job, by name. Raises BadRun if the first line of its file is damaged."""
    header = read_header(job_file)
    tables, offset = {}, header["end"]
    for name, (length, table_digest) in header["tables"].items():
        tables[name] = StoredTable(job_file, offset, length, table_digest)
        offset += length
    return tables


def data_digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def repair_advice(job_file: Path) -> str:
    return f"Delete {job_file} and add --resume to measure it again"
