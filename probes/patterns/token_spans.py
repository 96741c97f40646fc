"""Tokens of a document as an explorer shows them: each with its weight, those that share a character as one."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace

from headscope.report.explorer_blocks import Token
from headscope.report.token_text import to_visible_line, to_visible_token
from headscope.runs.column_metadata import number
from probes.patterns.analysis import Text

NEARBY = 4
"""Tokens between two windows that are left in, so that a gap is one worth reading."""


def stretch(
    text: Text,
    window: range,
    weights: Mapping[int, float],
    marked: Collection[int] = (),
    ways: Mapping[int, str] | None = None,
    broken: bool = False,
) -> list[Token]:
    """The tokens of a window, shaded by `weights`; `ways` leads on from a token. `broken` text keeps its lines."""
    first, *others = (_token(text, part, weights, marked, ways or {}, broken) for part in _wholes(text, window))
    return [replace(first, text=first.text.lstrip(" ") or first.text), *others]


def windows(around: Mapping[int, tuple[int, int]], length: int) -> Iterator[range]:
    """What stands around positions, in order: so many tokens before and after each. What all but meets is one."""
    spans = sorted((max(0, at - before), min(length, at + after + 1)) for at, (before, after) in around.items())
    start, stop = spans[0]
    for first, last in spans[1:]:
        if first > stop + NEARBY:
            yield range(start, stop)
            start = first
        stop = max(stop, last)
    yield range(start, stop)


def _wholes(text: Text, window: range) -> Iterator[range]:
    """The tokens of a window, those that end in one character together, also where they begin before it or go on."""
    at = window.start
    while at > 0 and _goes_on(text, at - 1):
        at -= 1
    while at < window.stop:
        end = at
        while _goes_on(text, end):
            end += 1
        yield range(at, end + 1)
        at = end + 1


def _goes_on(text: Text, at: int) -> bool:
    """Whether the token adds nothing by itself, and the next one can tell what it is part of."""
    return not text.pieces[at] and at + 1 < len(text.pieces) and not text.special[at + 1]


def _token(
    text: Text,
    part: Sequence[int],
    weights: Mapping[int, float],
    marked: Collection[int],
    ways: Mapping[int, str],
    broken: bool,
) -> Token:
    got = [weights[at] for at in part if at in weights]
    first, last = part[0], part[-1]
    href = next((ways[at] for at in reversed(part) if at in ways), "")
    special, chosen = bool(text.special[last]), any(at in marked for at in part)
    piece = str(text.pieces[last])
    told = to_visible_line(piece)
    if got or chosen or href or special:
        told = to_visible_token(told)
    if broken and piece.endswith("\n"):
        told += "\n"
    place = f"token {first:,}" if len(part) == 1 else f"tokens {first:,} to {last:,}, which make one character"
    hint = f"{place}: {number(sum(got))} of the weight" if got else place if href or chosen or special else ""
    return Token(told, min(1.0, sum(got)), href, special, chosen, hint)
