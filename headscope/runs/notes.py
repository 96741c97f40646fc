"""A note and tags on a run, in the file `notes.json` beside its tables. They are no part of what was measured."""

import os
import unicodedata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headscope.base.user_input import quote
from headscope.errors import BadInput, BadRun, CannotWrite
from headscope.runs.io import read_json, write_json

NOTES_FILE = "notes.json"
MAX_NOTE, MAX_TAG, MAX_TAGS = 4000, 40, 20
"""Longest note and tag in characters, and most tags."""


@dataclass(frozen=True)
class RunNotes:
    """What a user wrote about a run."""

    note: str = ""
    tags: Sequence[str] = ()

    @classmethod
    def parse(cls, note: str, tags: str) -> "RunNotes":
        """Notes from a text, and tags between commas. Raises BadInput if they are too long or too many, or
        hold characters that UTF-8 cannot encode."""
        if surrogate := next((char for char in f"{note}{tags}" if unicodedata.category(char) == "Cs"), None):
            raise BadInput(f"the note or a tag has the character {surrogate!a}, which cannot be stored. Remove it")
        names = tuple(dict.fromkeys(tag.strip() for tag in tags.split(",") if tag.strip()))
        if len(note) > MAX_NOTE:
            raise BadInput(f"the note has {len(note):,} characters. Use at most {MAX_NOTE:,}")
        if len(names) > MAX_TAGS:
            raise BadInput(f"{len(names)} tags are too many. Use at most {MAX_TAGS}")
        if long := [name for name in names if len(name) > MAX_TAG]:
            raise BadInput(f"the tag {quote(long[0])} is too long. Use at most {MAX_TAG} characters")
        return cls(note.strip(), names)


def read_notes(run_folder: Path) -> RunNotes:
    """The notes on a run; empty without a readable file."""
    try:
        content = read_json(run_folder / NOTES_FILE)
    except BadRun:
        return RunNotes()
    note, tags = content.get("note", ""), content.get("tags", [])
    return RunNotes(str(note), tuple(map(str, tags)) if isinstance(tags, list) else ())


def write_notes(run_folder: Path, notes: RunNotes) -> None:
    """Store the notes on a run, in one step. Raises CannotWrite if its folder cannot be written."""
    draft = run_folder / f".{NOTES_FILE}"
    try:
        write_json(draft, asdict(notes))
        os.rename(draft, run_folder / NOTES_FILE)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise CannotWrite(f"cannot write notes to {run_folder}: {reason}. Check its permissions") from error
