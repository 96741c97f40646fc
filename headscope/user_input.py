"""What a user names: a path, a YAML file, a text. Whatever is wrong with it is told in one line."""

import os
import re
import unicodedata
from pathlib import Path
from typing import Any

import yaml

from headscope.errors import BadInput

SLUG = r"^[A-Za-z0-9][A-Za-z0-9_-]*$"
"""What a run may be called."""
SHOWN = 120
"""Characters of a value that a message repeats."""


def path(text: Path | str, what: str) -> Path:
    """The path with its "~" expanded; there need not be anything at it.

    Raises BadInput, calling it `what`, where the system cannot even look: a name too long, a folder closed to us.
    """
    try:
        found = Path(text).expanduser()
        found.stat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, RuntimeError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(f"{what} {shown(str(text))} cannot be looked up ({why}): check the path") from error
    return found


def folder(text: str) -> bool:
    """Whether the text, which may be no path at all, names a folder."""
    return os.path.isdir(os.path.expanduser(text))


def text(value: str) -> str:
    """The text, if it can be stored and shown as one line. Raises ValueError otherwise."""
    strange = next((c for c in value if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp")), None)
    if strange is not None:
        raise ValueError(f"{shown(value)} holds the character {strange!a}, which no name or path here may hold")
    return value


def unit(value: str) -> tuple[int, int, bool]:
    """Layer, number, and whether it is a key group's, of a head written L18H6 or 18.6, or a key group written 18.g2.

    Raises ValueError for anything else.
    """
    told = re.fullmatch(r"[lL]?([0-9]{1,5})(?:\.|[hH])(g?)([0-9]{1,5})", value)
    if told is None:
        raise ValueError(f"'{value[:60]}' names no head")
    return int(told[1]), int(told[3]), bool(told[2])


def shown(value: object) -> str:
    """A value as a message repeats it: quoted, on one line, not endless."""
    told = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return told if len(told) <= SHOWN else f"{told[:SHOWN]}..."


class _Strict(yaml.SafeLoader):
    """YAML as ever, but these are mistakes: a key that stands twice in a mapping, of which the last would win, and one
    without a value between braces, which is what a comma leaves of a value that is not quoted."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        lines: dict[str, int] = {}
        for key, value in node.value:
            if isinstance(key, yaml.ScalarNode):
                line = key.start_mark.line + 1
                if node.flow_style and value.start_mark.index == value.end_mark.index:
                    raise BadInput(
                        f"key {shown(key.value)} in line {line} has no value; quote a value with a comma in it"
                    )
                if key.value in lines:
                    raise BadInput(
                        f"key {shown(key.value)} stands twice, in lines {lines[key.value]} and {line}; keep one"
                    )
                lines[key.value] = line
        return node


def read_yaml(file: Path, where: str) -> Any:
    """The content of a YAML file. FileNotFoundError if it is not there, BadInput for anything else that is wrong."""
    try:
        return yaml.load(file.read_text(encoding="utf-8"), _Strict)
    except FileNotFoundError:
        raise
    except BadInput as error:
        raise BadInput(f"{where}: {error}") from error
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise BadInput(f"cannot read {where}: {' '.join(str(error).split())}") from error
    except RecursionError as error:
        raise BadInput(f"cannot read {where}: it is nested too deeply") from error
    except (ValueError, LookupError, AttributeError, TypeError) as error:  # PyYAML's, of a value that is not its tag's
        raise BadInput(f"cannot read {where}: a value does not fit its tag ({error})") from error
