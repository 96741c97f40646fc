"""Classes of tokens by the characters that they cover: delimiters, brackets, newlines, digits, regular expressions."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from headscope.base.user_input import quote
from headscope.errors import did_you_mean
from headscope.prompts.spans import RESERVED_NAMES

BoolArray = npt.NDArray[np.bool_]

TOKEN_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "delimiter": r"^[^\w\n]*[.,;:!?][^\w\n]*$",
        "bracket": r"^\W*[()\[\]{}]\W*$",
        "newline": r"\n",
        "digit": r"\d",
    }
)
"""Name -> regular expression that is searched in the text of a token [ours]."""
SAME, MATCHING = "same", "matching"
RELATIONS: Mapping[str, str] = MappingProxyType(
    {
        SAME: "earlier tokens with the id of the query's token",
        MATCHING: "the token with the bracket that the last closing bracket of the query's token closes",
    }
)
"""Classes of keys that depend on the query."""
_CLOSES = {")": "(", "]": "[", "}": "{"}


def parse_classes(entries: Sequence[str]) -> dict[str, str]:
    """Regular expressions by name, "" for a relation, of entries NAME or NAME=REGEX.

    Raises ValueError for an unknown name, a name that headscope uses itself or that is given twice, or an invalid
    expression.
    """
    classes: dict[str, str] = {}
    for entry in entries:
        name, separator, pattern = entry.partition("=")
        name = name.strip()
        if not separator:
            known = [*TOKEN_CLASSES, *RELATIONS]
            if name not in known:
                raise ValueError(
                    f"unknown class {quote(name)}{did_you_mean(name, known)}. Use {', '.join(known)} or NAME=REGEX"
                )
            pattern = TOKEN_CLASSES.get(name, "")
        elif not name or name in RESERVED_NAMES or not pattern:
            raise ValueError(f"invalid class {quote(entry)}. Use NAME=REGEX with another name and an expression")
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"class '{name}' is no regular expression ({error}): {quote(pattern)}. Change it"
            ) from error
        if name in classes:
            raise ValueError(f"class '{name}' is given twice. Name each class once")
        classes[name] = pattern
    return classes


def class_masks(texts: Sequence[str], is_special: Sequence[bool], classes: Mapping[str, str]) -> dict[str, BoolArray]:
    """Which of the tokens with these texts belong to each class, by name. A special token belongs to none."""
    ordinary = ~np.asarray(is_special, dtype=bool)
    return {
        name: ordinary & np.array([bool(re.search(pattern, text)) for text in texts], dtype=bool)
        for name, pattern in classes.items()
        if pattern
    }


def matching_brackets(texts: Sequence[str], is_special: Sequence[bool]) -> npt.NDArray[np.int64]:
    """For each token the position of the token with the opening bracket that its last closing bracket closes; or -1.

    Brackets pair in order. A closing bracket of another kind than the last open one, and a pair within one token, count
    as no pair.
    """
    matches = np.full(len(texts), -1, np.int64)
    opened: list[tuple[str, int]] = []
    for position, (text, special) in enumerate(zip(texts, is_special, strict=True)):
        for character in "" if special else text:
            if character in _CLOSES.values():
                opened.append((character, position))
            elif character in _CLOSES and opened and opened[-1][0] == _CLOSES[character]:
                start = opened.pop()[1]
                matches[position] = start if start < position else -1
    return matches
