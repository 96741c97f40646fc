"""The order of results: how certain each is, and which are shown first."""

import math
from collections.abc import Iterable, Mapping

from headscope.results.questions import questions
from headscope.results.result import Result, Scalar

MAX_HEADLINES = 8


def certainty(result: Result) -> float:
    """How many half-widths of its interval a value is away from 0; 0 without an interval."""
    half = result.half_width
    return abs(result.value) / half if math.isfinite(half) and half > 0 else 0.0


def headlines(results: Iterable[Result], count: int = MAX_HEADLINES) -> list[Result]:
    """At most `count` results that are shown first.

    The most certain one of every question, then of every condition (`where`) of a question, then all others by
    certainty. Only results of questions of level "headline" count; claims of a paper have a line of their own.
    """
    declared = questions()
    candidates = [r for r in results if declared[r.question].level == "headline" and not declared[r.question].is_claim]
    ordered = sorted(candidates, key=lambda result: -certainty(result))
    by_question = [_first(ordered, result.question) for result in candidates]
    by_condition = [_first(ordered, result.question, result.where) for result in candidates]
    order = {id(result): result for result in (*by_question, *by_condition, *ordered)}
    return [*order.values()][:count]


def _first(results: Iterable[Result], question: str, where: Mapping[str, Scalar] | None = None) -> Result:
    """The first result of a question, under these conditions if they are given."""
    return next(r for r in results if r.question == question and where in (None, r.where))
