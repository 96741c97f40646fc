"""The order of results: how certain each is, and which are shown first."""

import math
from collections.abc import Iterable

from headscope.results.questions import questions
from headscope.results.result import Result

MAX_HEADLINES = 8


def certainty(result: Result) -> float:
    """How many half-widths of its interval a value is away from 0; 0 without an interval."""
    half = result.half_width
    return abs(result.value) / half if math.isfinite(half) and half > 0 else 0.0


def headlines(results: Iterable[Result], count: int = MAX_HEADLINES) -> list[Result]:
    """At most `count` results that are shown first: the most certain one of every question, then the others.

    Only results of questions of level "headline" count; claims of a paper have a line of their own.
    """
    declared = questions()
    candidates = [r for r in results if declared[r.question].level == "headline" and not declared[r.question].is_claim]
    surest = sorted(candidates, key=lambda result: -certainty(result))
    first = [next(r for r in surest if r.question == name) for name in dict.fromkeys(r.question for r in candidates)]
    rest = [result for result in surest if all(result is not other for other in first)]
    return [*first, *rest][:count]
