"""Text as a page shows it piece by piece: on one line, and whatever cannot be seen as a sign."""

import unicodedata

SIGNS = {"\r": "", "\n": "⏎", "\t": "⇥"}
JOINERS = "\u200c\u200d"
"""Invisible characters that belong to the letters and pictures around them."""


def one_line(text: str) -> str:
    """Text on one line, and what is not to be seen as a sign."""
    return "".join(SIGNS.get(character, _visible(character)) for character in text)


def visible_alone(told: str) -> str:
    """A token as something to see and to click: a mark without its letter on a circle, nothing as a box."""
    if not told:
        return "▯"
    return f"◌{told}" if unicodedata.category(told[0]).startswith("M") else told


def _visible(character: str) -> str:
    if character.isspace():
        return " "
    return character if character.isprintable() or character in JOINERS else "\ufffd"
