"""Tokens of a text for display: shaded by weight, with tokens that share a character joined; labels of tokens."""

import unicodedata
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import repeat

import numpy as np
import numpy.typing as npt

from headscope.rendering.explorer_blocks import Token
from headscope.rendering.text import to_visible_line, to_visible_token
from headscope.runs.column_metadata import format_number

CONTEXT_TOKENS = 6
"""Tokens of context on either side of a token."""
MAX_GAP = 4
"""Spans at most so many tokens apart are joined."""
MAX_LINES = 12
"""A text of at most so many newlines keeps its lines."""
MIN_WRITTEN_WEIGHT = 0.05
"""Smaller weights are not written into a text."""
MAX_WHOLE_TEXT = 24
"""Tokens of a text that is written out; of a longer one, the attended tokens and the two tokens before each."""
MAX_TOKEN_CHARACTERS = 14
"""Characters of a token in a label."""
RIGHT_TO_LEFT_CLASSES = ("R", "AL", "AN")


@dataclass(frozen=True)
class TokenizedText:
    """The tokens of one text: the text that each adds, and whether it is a special token."""

    token_texts: npt.NDArray[np.object_]
    is_special: npt.NDArray[np.bool_]

    def split_at(
        self, position: int, before: int = CONTEXT_TOKENS, after: int = CONTEXT_TOKENS
    ) -> tuple[str, str, str]:
        """The text before a token, the token, and the text after it.

        A token that holds part of a character is extended to the token that completes the character.
        """
        end = position + 1
        while end < len(self.token_texts) and not self.token_texts[position:end].sum():
            end += 1
        left, right = self.token_texts[max(0, position - before) : position], self.token_texts[end : end + after]
        return "".join(left), "".join(self.token_texts[position:end]), "".join(right)

    def context_range(self, position: int, before: int, after: int) -> range:
        """Positions of a token and of its context, clipped to the text."""
        return range(max(0, position - before), min(len(self.token_texts), position + after + 1))


def to_display_line(text: str) -> str:
    """The text on one line; right-to-left text is isolated so that it does not reorder the text around it."""
    visible = to_visible_token(line) if (line := to_visible_line(text)) else ""
    is_right_to_left = any(unicodedata.bidirectional(character) in RIGHT_TO_LEFT_CLASSES for character in visible)
    return f"\u2068{visible}\u2069" if is_right_to_left else visible


def token_labels(positions: Iterable[int], texts: Iterable[str], others: Iterable[str] | None = None) -> list[str]:
    """Labels of tokens: "3: France", or "3: France | Italy" where `others`, the tokens of a second prompt, differ."""
    pairs = ((text, text) for text in texts) if others is None else zip(texts, others, strict=True)
    return [f"{position:,}: {_describe_tokens(*pair)}" for position, pair in zip(positions, pairs, strict=True)]


def text_with_weights(text: TokenizedText, query: int, weights: Mapping[int, float]) -> str:
    """The text up to the query, with each weight of at least 0.05 after its token: "The capital[0.89] of France"."""
    visible_weights = {key: weight for key, weight in weights.items() if weight >= MIN_WRITTEN_WEIGHT}
    positions = {near for position in (*visible_weights, query) for near in range(position - 2, position + 1)}
    pieces: list[str] = []
    for position in range(query + 1):
        if query < MAX_WHOLE_TEXT or position in positions:
            weight = f"[{visible_weights[position]:.2f}]" if position in visible_weights else ""
            pieces.append(f"{to_display_line(text.token_texts[position])}{weight}")
        elif pieces[-1:] != [" …"]:
            pieces.append(" …")
    return "".join(pieces).strip()


def mark_token(text: TokenizedText, position: int, before: int = 6, after: int = 3) -> str:
    """A token between ‹ and › within its context."""
    left, token, right = text.split_at(position, before, after)
    return f"{to_display_line(left)}‹{to_display_line(token)}›{to_display_line(right)}".strip()


def shaded_tokens(
    text: TokenizedText,
    span: range,
    weights: Mapping[int, float],
    marked_positions: Collection[int] = (),
    links: Mapping[int, str] | None = None,
    keep_line_breaks: bool = False,
) -> list[Token]:
    """The tokens of a span, shaded by `weights` and linked to `links`, both by position.

    With `keep_line_breaks`, a short text keeps its lines, and a longer one its paragraphs: their other line breaks are
    only shown as symbols, so that a screen holds several hundred tokens.
    """
    groups = [*_character_groups(text, span)]
    breaks = _line_break_positions(text, groups) if keep_line_breaks else set()
    first, *rest = (
        _shaded_token(text, positions, weights, marked_positions, links or {}, positions[-1] in breaks)
        for positions in groups
    )
    return [replace(first, text=first.text.lstrip(" ") or first.text), *rest]


def context_spans(context_sizes: Mapping[int, tuple[int, int]], length: int) -> Iterator[range]:
    """Spans around positions, in order, from the tokens (before, after) of each; spans that nearly meet are joined."""
    spans = sorted(
        (max(0, position - before), min(length, position + after + 1))
        for position, (before, after) in context_sizes.items()
    )
    start, stop = spans[0]
    for first, last in spans[1:]:
        if first > stop + MAX_GAP:
            yield range(start, stop)
            start = first
        stop = max(stop, last)
    yield range(start, stop)


def _character_groups(text: TokenizedText, span: range) -> Iterator[range]:
    """Groups of tokens that share a character; the first and last group may reach beyond the span."""
    start = span.start
    while start > 0 and _continues_character(text, start - 1):
        start -= 1
    while start < span.stop:
        end = start
        while _continues_character(text, end):
            end += 1
        yield range(start, end + 1)
        start = end + 1


def _continues_character(text: TokenizedText, position: int) -> bool:
    """Whether the token adds no text, and the next token may complete its character."""
    return not text.token_texts[position] and position + 1 < len(text.token_texts) and not text.is_special[position + 1]


def _line_break_positions(text: TokenizedText, groups: Sequence[Sequence[int]]) -> set[int]:
    """The tokens after which a line ends: those that end with a newline, or in a text of many lines only the last one
    before the next paragraph."""
    texts = [str(text.token_texts[positions[-1]]) for positions in groups]
    is_short = sum(map(str.count, texts, repeat("\n"))) <= MAX_LINES
    breaks, newlines = set(), 0
    for index, (positions, token_text) in enumerate(zip(groups, texts, strict=True)):
        newlines = token_text.count("\n") + (0 if token_text.strip() else newlines)
        is_last = index + 1 == len(groups) or bool(texts[index + 1].strip())
        if token_text.endswith("\n") and (is_short or (newlines > 1 and is_last)):
            breaks.add(positions[-1])
    return breaks


def _shaded_token(
    text: TokenizedText,
    positions: Sequence[int],
    weights: Mapping[int, float],
    marked_positions: Collection[int],
    links: Mapping[int, str],
    ends_line: bool,
) -> Token:
    group_weights = [weights[position] for position in positions if position in weights]
    weight = sum(group_weights)
    first, last = positions[0], positions[-1]
    href = next((links[position] for position in reversed(positions) if position in links), "")
    special, marked = bool(text.is_special[last]), any(position in marked_positions for position in positions)
    token_text = str(text.token_texts[last])
    visible = to_visible_line(token_text)
    if group_weights or marked or href or special:
        visible = to_visible_token(visible)
    if ends_line:
        visible += "\n"
    label = f"token {first:,}" if len(positions) == 1 else f"tokens {first:,} to {last:,}, one character"
    tooltip = (
        f"{label}: weight {format_number(weight)}" if group_weights else label if href or marked or special else ""
    )
    return Token(visible, min(1.0, weight), href, special, marked, tooltip)


def _describe_tokens(text: str, other: str) -> str:
    return _shorten(text) if text == other else f"{_shorten(text)} | {_shorten(other)}"


def _shorten(text: str) -> str:
    """The text of a token on one line, with symbols for what is invisible."""
    line = to_visible_line(text.strip(" ") or text)
    short = line if len(line) <= MAX_TOKEN_CHARACTERS else f"{line[: MAX_TOKEN_CHARACTERS - 1]}…"
    return to_display_line(short) or to_visible_token("")
