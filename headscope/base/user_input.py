"""Validation of user input: paths, names, texts. Every mistake becomes a one-line message."""

import os
import re
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from headscope.errors import BadInput

RUN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$"
"""Pattern of run names; the folder of a run adds a time and a digest to it."""
MAX_QUOTED = 120
"""Characters of a value that a message quotes."""


def check_path(value: object, argument_name: str) -> Path:
    """The path, with "~" expanded.

    Raises BadInput, naming it `argument_name`, for a value that is neither text nor a path, for an empty text, and for
    the home of an unknown user.
    """
    if not isinstance(value, str | Path) or value == "":
        raise BadInput(f"{argument_name} is {quote(value)}, not a path. Give a text or a Path")
    try:
        return Path(value).expanduser()
    except RuntimeError as error:
        raise BadInput(f"{argument_name} {quote(str(value))} has no home folder ({error}). Check the path") from error


def check_flag(value: object, argument_name: str) -> bool:
    """The value. Raises BadInput, naming it `argument_name`, for anything but True and False."""
    if not isinstance(value, bool):
        raise BadInput(f"{argument_name} must be True or False: {quote(value)}")
    return value


def expand_path(text: Path | str, argument_name: str) -> Path:
    """The path with "~" expanded. The file need not exist.

    Raises BadInput, naming it `argument_name`, if the system cannot look it up: a name too long, a folder without
    permission.
    """
    try:
        expanded = Path(text).expanduser()
        expanded.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise BadInput(f"{argument_name} {quote(str(text))} cannot be accessed ({reason}). Check the path") from error
    return expanded


def working_directory() -> str:
    """The working directory, for messages about relative paths."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "a working directory that was deleted"


def parse_index(value: Any) -> int:
    """A number from 0, also as text. Raises ValueError for anything else, and for 00, which would be a second 0."""
    if isinstance(value, bool) or not re.fullmatch("0|[1-9][0-9]{0,8}", str(value)):
        raise ValueError(f"{quote(value)} is not a whole number of at least 0")
    return int(value)


def is_folder(text: str) -> bool:
    """Whether the text is the path of a folder."""
    return os.path.isdir(os.path.expanduser(text))


def check_text(value: str) -> str:
    """The text, if it can be stored and shown on one line. Raises ValueError otherwise."""
    control = next((c for c in value if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")), None)
    if control is not None:
        raise ValueError(f"{quote(value)} contains the control character {control!a}. Remove it")
    return value


def quote(value: object) -> str:
    """A value as messages quote it: on one line, shortened if it is long."""
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."


def check_arguments(arguments: Iterable[str]) -> None:
    """Raise BadInput for an argument of the command line that is not UTF-8: it can be neither stored nor shown."""
    for argument in arguments:
        if any(unicodedata.category(character) == "Cs" for character in argument):
            raise BadInput(f"argument {quote(argument)} is not UTF-8. Rename the file, or type the argument again")
