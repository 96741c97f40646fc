"""Verdicts on claims, from an interval and a threshold that was written before results are seen."""

import math
from collections.abc import Iterable
from dataclasses import replace

from headscope.results.result import Bound, Result
from headscope.runs.aggregation import MIN_DOCUMENTS, Verdict, verdict_above, verdict_below, verdict_of_parts


def verdict_of(result: Result, bound: Bound) -> Verdict:
    """Supported if the whole interval is on the claimed side, not supported if on the other side, else inconclusive."""
    judge = verdict_above if bound.side == "above" else verdict_below
    return judge(result.low, result.high, bound.threshold)


def judged(result: Result, bound: Bound, reason: str = "") -> Result:
    """The result with the verdict on the claim that its value is on this side of the threshold.

    With a `reason` (a key of `words.REASONS`) the data cannot decide the claim, whatever the interval is.
    """
    verdict = "inconclusive" if reason else verdict_of(result, bound)
    if verdict == "inconclusive" and not reason and not result.has_interval:
        reason = "few"
    return replace(result, verdict=verdict, bound=bound, reason=reason)


def judged_by_parts(result: Result, parts: Iterable[Result], reason: str = "") -> Result:
    """The result with the verdict on a claim of several parts: all must be supported; one that is not refutes it."""
    all_parts = tuple(parts)
    verdict = "inconclusive" if reason else verdict_of_parts([part.verdict for part in all_parts])
    return replace(result, verdict=verdict, reason=reason, parts=all_parts)


def samples_needed(result: Result) -> int | None:
    """Number of documents, pairs or trials that would decide the claim, at the spread and the value seen.

    n' = ceil(n (half width / distance to the threshold)²), at least three. None if more samples do not help: an
    estimate, a value on the threshold, or a value that is not a mean over samples.
    """
    if result.bound is None or not result.is_exact or not result.n:
        return None
    if not result.has_interval:
        return MIN_DOCUMENTS if result.n < MIN_DOCUMENTS else None
    distance = abs(result.value - result.bound.threshold)
    if distance == 0 or not math.isfinite(distance):
        return None
    return max(MIN_DOCUMENTS, math.ceil(result.n * (result.half_width / distance) ** 2 - 1e-9))
