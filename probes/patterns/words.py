"""Tokens as they are shown: in their context, on one line, and in their own direction."""

import unicodedata

from headscope.report.text import to_visible_line, to_visible_token
from probes.patterns.analysis import TokenizedText

RIGHT_TO_LEFT_CLASSES = ("R", "AL", "AN")


def to_display_line(text: str) -> str:
    """A stretch of text on one line, text from right to left kept from turning what stands beside it."""
    told = to_visible_token(line) if (line := to_visible_line(text)) else ""
    turned = any(unicodedata.bidirectional(character) in RIGHT_TO_LEFT_CLASSES for character in told)
    return f"\u2068{told}\u2069" if turned else told


def mark_token(text: TokenizedText, position: int, before: int = 6, after: int = 3) -> str:
    """A token between ‹ and › with what stands around it."""
    left, token, right = text.split_at(position, before, after)
    return f"{to_display_line(left)}‹{to_display_line(token)}›{to_display_line(right)}".strip()
