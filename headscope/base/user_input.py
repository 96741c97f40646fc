"""Validation of user input: paths, names, texts. Every mistake becomes a one-line message."""

import os
import re
import unicodedata
from collections.abc import Iterable, Sized
from numbers import Number
from pathlib import Path
from typing import Any

from headscope.errors import BadInput

RUN_NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$"
"""Pattern of run names; the folder of a run adds a time and a digest to it."""
MAX_QUOTED = 120
"""Characters of a value that a message quotes."""
MAX_SEED = 2**31 - 1
MAX_DOCUMENTS = 1_000_000
MAX_WORKERS = 10_000
"""Most workers, and most GPUs."""
MAX_LENGTH = 2**31 - 1
"""Longest context in tokens: stored tables hold it in 32 bits."""
MAX_ITEMS = 2**20
"""Most values in a list."""


def check_path(value: object, argument_name: str) -> Path:
    """The path, with "~" expanded.

    Raises BadInput, naming it `argument_name`, for a value that is no path, see `is_path`, for an empty text, and for
    the home of an unknown user.
    """
    if not is_path(value):
        raise BadInput(f"{argument_name} is {quote(value)}, not a path. Give a text or a Path")
    try:
        return Path(str(value)).expanduser()
    except RuntimeError as error:
        raise BadInput(f"{argument_name} {quote(str(value))} has no home folder ({error}). Check the path") from error


def check_possible_path(value: object, argument_name: str) -> Path:
    """The path, with "~" expanded. It need not exist.

    Raises BadInput as `check_path` and `expand_path` do, and for a path below a file, which cannot exist.
    """
    path = expand_path(check_path(value, argument_name), argument_name)
    if file := next((parent for parent in path.parents if parent.is_file()), None):
        raise BadInput(f"{argument_name} {quote(str(path))} cannot exist: {quote(str(file))} is a file. Check the path")
    return path


def is_path(value: object) -> bool:
    """Whether the value is a Path, or a text that the system can take as a path."""
    try:
        return isinstance(value, str | Path) and value != "" and b"\0" not in os.fsencode(value)
    except UnicodeEncodeError:
        return False


def is_text(value: object) -> bool:
    """Whether the value is a text that can be stored; it may have several lines."""
    try:
        return isinstance(value, str) and bool(check_text(re.sub(r"[\t\n\r]", " ", value)) or True)
    except ValueError:
        return False


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


def check_index(index: int, count: int, noun: str, place: str = "") -> int:
    """The index of one of `count` things, from 0. Raises BadInput, with noun and place, for any other number."""
    if not 0 <= index < count:
        raise BadInput(f"no {noun} {index}{place}. Use 0 to {count - 1}")
    return index


def is_folder(text: str) -> bool:
    """Whether the text is the path of a folder."""
    return os.path.isdir(os.path.expanduser(text))


def check_text(value: str) -> str:
    """The text, if it can be stored and shown on one line. Raises ValueError otherwise."""
    control = next((c for c in value if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")), None)
    if control is not None:
        raise ValueError(f"{quote(value)} contains the control character {control!a}. Remove it")
    return value


def is_too_long(value: object) -> bool:
    """Whether a value has more items than any argument needs; a text has none."""
    try:
        return isinstance(value, Sized) and not isinstance(value, str) and len(value) > MAX_ITEMS
    except (OverflowError, TypeError) as error:  # range(10**30), or an array without axes
        return isinstance(error, OverflowError)


def quote(value: object) -> str:
    """A value as messages quote it: on one line, shortened if it is long."""
    try:
        written = format if isinstance(value, Number) else repr  # of a number of numpy the digits only
        text = ascii(value) if isinstance(value, str) and not value.isprintable() else written(value)
    except Exception:  # a number of thousands of digits, or an object of the user without a text
        text = f"<{type(value).__name__}>"
    text = re.sub(r"\s*\n\s*", " ", text)
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."


def check_arguments(arguments: Iterable[str]) -> None:
    """Raise BadInput for an argument of the command line that is not UTF-8: it can be neither stored nor shown."""
    for argument in arguments:
        if any(unicodedata.category(character) == "Cs" for character in argument):
            raise BadInput(f"argument {quote(argument)} is not UTF-8. Rename the file, or type the argument again")
