"""Positions of a sequence by number: a token (`3`, `-1`) or a range without its end (`3:7`, `-4:`, `:5`)."""

import re
from typing import Any

from headscope.errors import BadInput

LAST_SPAN = "last"
"""The last token of the prompt."""
ALL_TOKENS = "all"
"""Every token of the prompt."""
NUMBER = "-?[0-9]{1,10}"
"""A position in a text: no text has more tokens than ten digits count."""


def parse_positions(name: str) -> slice | None:
    """The positions as a slice; None if the text names no numbers. Negative numbers count from the end."""
    if name == LAST_SPAN:
        return slice(-1, None)
    if re.fullmatch(NUMBER, name):
        return slice(int(name), int(name) + 1 or None)
    if match := re.fullmatch(f"({NUMBER})?:({NUMBER})?", name):
        start, stop = (None if text is None else int(text) for text in match.groups())
        return slice(start, stop)
    return None


def describe_positions(name: str) -> str:
    """Positions by number as sentences name them, such as "tokens 3 to 6"; a named span is returned as it is."""
    positions = parse_positions(name)
    if name == LAST_SPAN or positions is None:
        return name
    if ":" not in name:
        return f"token {name}"
    last = "the last" if positions.stop is None else f"{positions.stop - 1}"
    return f"tokens {positions.start or 0} to {last}"


def resolve_positions(name: str, positions: slice, length: int, place: str) -> range:
    """The positions in a sequence of `length` tokens. Raises BadInput, naming the `place`, for tokens beyond it."""
    resolved = range(length)[positions]
    ends = [end for end in (positions.start, positions.stop) if end is not None]
    if not resolved or max(ends, default=0) > length or min(ends, default=0) < -length:
        raise BadInput(
            f"{place}: positions '{name}' are not in its {length} tokens. Use tokens from 0 to {length - 1}, or -1 to "
            f"{-length} from the end"
        )
    return resolved


def position_name(value: Any) -> Any:
    """A token index, a range or a slice as text, such as 3:7, or all if it has no ends; any other value unchanged."""
    if value in (":", "0:"):
        return ALL_TOKENS
    if isinstance(value, bool) or not isinstance(value, int | range | slice):
        return value
    if isinstance(value, int):
        return str(value)
    if value.step not in (None, 1):
        raise ValueError(f"positions {value} have a step. Use a range of neighbouring tokens")
    return position_name(":".join("" if end is None else str(end) for end in (value.start, value.stop)))


def position_names(value: Any) -> Any:
    """A list of such values, or one of them, as a list of texts."""
    values = [value] if isinstance(value, str | int | range | slice) else value
    return [position_name(item) for item in values] if isinstance(values, list | tuple) else value
