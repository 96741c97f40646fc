"""Tokens of a document as an explorer shows them: each with its weight, those that share a character as one."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from headscope.report.explorer_blocks import Token
from headscope.report.text import to_visible_line, to_visible_token
from headscope.runs.column_metadata import number
from probes.patterns.analysis import TokenizedText

MAX_GAP = 4
"""Tokens between two windows that are left in, so that a gap is one worth reading."""


def shaded_tokens(
    text: TokenizedText,
    span: range,
    weights: Mapping[int, float],
    marked_positions: Collection[int] = (),
    links: Mapping[int, str] | None = None,
    keep_line_breaks: bool = False,
) -> list[Token]:
    """The tokens of a window, shaded by `weights`; `ways` leads on from a token. `broken` text keeps its lines."""
    first, *others = (
        _shaded_token(text, part, weights, marked_positions, links or {}, keep_line_breaks)
        for part in _character_groups(text, span)
    )
    return [replace(first, text=first.text.lstrip(" ") or first.text), *others]


def context_spans(context_sizes: Mapping[int, tuple[int, int]], length: int) -> Iterator[range]:
    """What stands around positions, in order: so many tokens before and after each. What all but meets is one."""
    spans = sorted((max(0, at - before), min(length, at + after + 1)) for at, (before, after) in context_sizes.items())
    start, stop = spans[0]
    for first, last in spans[1:]:
        if first > stop + MAX_GAP:
            yield range(start, stop)
            start = first
        stop = max(stop, last)
    yield range(start, stop)


def _character_groups(text: TokenizedText, span: range) -> Iterator[range]:
    """The tokens of a window, those that end in one character together, also where they begin before it or go on."""
    at = span.start
    while at > 0 and _continues_character(text, at - 1):
        at -= 1
    while at < span.stop:
        end = at
        while _continues_character(text, end):
            end += 1
        yield range(at, end + 1)
        at = end + 1


def _continues_character(text: TokenizedText, position: int) -> bool:
    """Whether the token adds nothing by itself, and the next one can tell what it is part of."""
    return not text.token_texts[position] and position + 1 < len(text.token_texts) and not text.is_special[position + 1]


def _shaded_token(
    text: TokenizedText,
    positions: Sequence[int],
    weights: Mapping[int, float],
    marked_positions: Collection[int],
    links: Mapping[int, str],
    keep_line_breaks: bool,
) -> Token:
    got = [weights[at] for at in positions if at in weights]
    first, last = positions[0], positions[-1]
    href = next((links[at] for at in reversed(positions) if at in links), "")
    special, chosen = bool(text.is_special[last]), any(at in marked_positions for at in positions)
    piece = str(text.token_texts[last])
    told = to_visible_line(piece)
    if got or chosen or href or special:
        told = to_visible_token(told)
    if keep_line_breaks and piece.endswith("\n"):
        told += "\n"
    place = f"token {first:,}" if len(positions) == 1 else f"tokens {first:,} to {last:,}, which make one character"
    hint = f"{place}: {number(sum(got))} of the weight" if got else place if href or chosen or special else ""
    return Token(told, min(1.0, sum(got)), href, special, chosen, hint)
