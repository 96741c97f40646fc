"""Text as a page shows it piece by piece: on one line, and whatever cannot be seen as a sign."""

import unicodedata

CONTROL_SYMBOLS = {"\r": "", "\n": "⏎", "\t": "⇥"}
INVISIBLE_JOINERS = "\u200c\u200d"
"""Invisible characters that belong to the letters and pictures around them."""


def to_visible_line(text: str) -> str:
    """Text on one line, and what is not to be seen as a sign."""
    return "".join(CONTROL_SYMBOLS.get(character, _visible_character(character)) for character in text)


def to_visible_token(token_text: str) -> str:
    """A token as something to see and to click: a mark without its letter on a circle, nothing as a box."""
    if not token_text:
        return "▯"
    return f"◌{token_text}" if unicodedata.category(token_text[0]).startswith("M") else token_text


def _visible_character(character: str) -> str:
    if character.isspace():
        return " "
    return character if character.isprintable() or character in INVISIBLE_JOINERS else "\ufffd"
