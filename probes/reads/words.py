"""Tokens as they are shown: in their context, on one line, in their own direction, and never as anything but text."""

import unicodedata

from probes.reads.found import Text

SIGNS = {"\r": "", "\n": "⏎", "\t": "⇥"}
JOINERS = "\u200c\u200d"
"""Invisible characters that belong to the letters and pictures around them."""
RIGHT_TO_LEFT = ("R", "AL", "AN")


def shown(text: str) -> str:
    """A stretch of text on one line, text from right to left kept from turning what stands beside it."""
    told = visible_alone(line) if (line := one_line(text)) else ""
    turned = any(unicodedata.bidirectional(character) in RIGHT_TO_LEFT for character in told)
    return f"\u2068{told}\u2069" if turned else told


def one_line(text: str) -> str:
    """Text on one line, and what is not to be seen as a sign."""
    return "".join(SIGNS.get(character, _visible(character)) for character in text)


def visible_alone(told: str) -> str:
    """A token as something to see and to click: a mark without its letter on a circle, nothing as a box."""
    if not told:
        return "▯"
    return f"◌{told}" if unicodedata.category(told[0]).startswith("M") else told


def marked(text: Text, position: int, before: int = 6, after: int = 3) -> str:
    """A token between ‹ and › with what stands around it."""
    left, token, right = text.around(position, before, after)
    return f"{shown(left)}‹{shown(token)}›{shown(right)}".strip()


def _visible(character: str) -> str:
    if character.isspace():
        return " "
    return character if character.isprintable() or character in JOINERS else "\ufffd"
