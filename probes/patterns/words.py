"""Tokens as they are shown: in their context, on one line, and in their own direction."""

import unicodedata

from headscope.report.token_text import to_visible_line, to_visible_token
from probes.patterns.analysis import Text

RIGHT_TO_LEFT = ("R", "AL", "AN")


def shown(text: str) -> str:
    """A stretch of text on one line, text from right to left kept from turning what stands beside it."""
    told = to_visible_token(line) if (line := to_visible_line(text)) else ""
    turned = any(unicodedata.bidirectional(character) in RIGHT_TO_LEFT for character in told)
    return f"\u2068{told}\u2069" if turned else told


def marked(text: Text, position: int, before: int = 6, after: int = 3) -> str:
    """A token between ‹ and › with what stands around it."""
    left, token, right = text.around(position, before, after)
    return f"{shown(left)}‹{shown(token)}›{shown(right)}".strip()
