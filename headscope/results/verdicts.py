"""Verdicts on claims, from an interval and a threshold that was written before results are seen."""

import math
from collections.abc import Iterable
from dataclasses import replace

from headscope.results.questions import questions
from headscope.results.result import Bound, Result
from headscope.results.samples import allow_for_choice
from headscope.runs.aggregation import (
    MIN_DOCUMENTS,
    NORMAL_QUANTILE,
    Verdict,
    verdict_above,
    verdict_below,
    verdict_of_parts,
    wilson_interval,
)

ROUNDING = 1e-9
"""Excess over a whole number of samples that is an error of floating-point arithmetic."""
_OPPOSITE: dict[Verdict, Verdict] = {"supported": "not supported", "not supported": "supported"}


def verdict_of(result: Result, bound: Bound) -> Verdict:
    """Supported if the whole interval is on the claimed side, not supported if on the other side, else inconclusive."""
    if bound.side == "above":
        return verdict_above(result.low, result.high, bound.threshold)
    if bound.side == "below":
        return verdict_below(result.low, result.high, bound.threshold)
    ends = verdict_above(result.low, result.high, bound.threshold), verdict_below(result.low, result.high, bound.upper)
    between = verdict_of_parts(ends)
    return between if bound.side == "between" else _OPPOSITE.get(between, between)


def judge(result: Result, bound: Bound, reason: str = "") -> Result:
    """The result with the verdict on the claim that its value is on this side of the threshold.

    With a `reason` (a key of `words.REASONS`) the data cannot decide the claim, whatever the interval is.
    """
    if not reason and not result.is_exact:
        reason = "estimate"
    verdict = "inconclusive" if reason else verdict_of(result, bound)
    if not reason and not result.has_interval and result.n is not None and result.n < MIN_DOCUMENTS:
        reason = "few"
    return replace(result, verdict=verdict, bound=bound, reason=reason)


def judge_by_parts(result: Result, parts: Iterable[Result], reason: str = "") -> Result:
    """The result with the verdict on a claim of several parts: all must be supported; one that is not refutes it.

    Of many parts one may contradict a true claim by chance. The interval of a part whose value contradicts the claim
    therefore holds for all parts at once. All parts are needed for support, so the others need no correction
    (intersection-union test).
    """
    given_parts = tuple(parts)
    all_parts = tuple(_allow_for_parts(part, len(given_parts)) for part in given_parts)
    verdict = "inconclusive" if reason else verdict_of_parts([part.verdict for part in all_parts])
    return replace(result, verdict=verdict, reason=reason, parts=all_parts)


def _allow_for_parts(part: Result, count: int) -> Result:
    """The part with an interval and a verdict that allow for the choice among `count` parts, if it contradicts the
    claim and does not allow for a choice already."""
    if part.bound is None or part.reason or part.selected_from > 1 or not _contradicts(part):
        return part
    question = questions().get(part.question)
    limits, is_ratio = (question.limits, question.is_ratio) if question else ((-math.inf, math.inf), False)
    return judge(allow_for_choice(part, count, limits, is_logarithmic=is_ratio), part.bound)


def samples_needed(result: Result) -> int | None:
    """Number of documents, pairs or trials that would decide the claim, at the spread and the value seen.

    n' = ceil(n (half width / distance to the threshold)²), with the half of the interval that faces the threshold; for
    proportions the number at which the end of Wilson's interval reaches it. At least three. None if more samples do not
    help: an estimate, a value on the threshold, or a value that is not a mean over samples.
    """
    if result.bound is None or not result.is_exact or not result.n or result.reason not in {"", "few"}:
        return None
    if not result.has_interval:
        return MIN_DOCUMENTS if result.n < MIN_DOCUMENTS else None
    thresholds = [result.bound.threshold, *([] if math.isnan(result.bound.upper) else [result.bound.upper])]
    if any(threshold == result.value for threshold in thresholds):
        return None
    return max(MIN_DOCUMENTS, *(_samples_to_reach(result, result.n, threshold) for threshold in thresholds))


def _samples_to_reach(result: Result, n: int, threshold: float) -> int:
    """Number of samples at which the interval ends at a threshold."""
    distance = abs(threshold - result.value)
    if 0 <= threshold <= 1 and _is_proportion(result, n):
        return math.ceil(NORMAL_QUANTILE**2 * threshold * (1 - threshold) / distance**2 - ROUNDING)
    half_width = result.value - result.low if threshold < result.value else result.high - result.value
    return math.ceil(n * (half_width / distance) ** 2 - ROUNDING)


def _is_proportion(result: Result, n: int) -> bool:
    """Whether the interval is that of a share of n independent samples."""
    if not 0 <= result.value <= 1:
        return False
    ends = zip((result.low, result.high), wilson_interval(result.value, n), strict=True)
    return all(math.isclose(end, float(wilson_end), abs_tol=1e-9) for end, wilson_end in ends)


def undecided_parts(result: Result) -> list[Result]:
    """The results without parts of their own that leave a claim undecided; the result itself if it has no parts."""
    if result.verdict != "inconclusive":
        return []
    if not result.parts:
        return [result]
    return [leaf for part in result.parts for leaf in undecided_parts(part)]


def deciding_part(result: Result) -> tuple[Result, int] | None:
    """The part whose samples would decide an inconclusive claim, and their number, at the values and spreads seen.

    If values of parts contradict the claim, the one that needs fewest samples refutes it; else all parts must be
    supported, and the one that needs most samples counts. None if samples do not decide.
    """
    if result.verdict != "inconclusive" or result.reason not in {"", "few"}:
        return None
    needs = [
        (part, samples_needed(part)) if not part.parts else deciding_part(part)
        for part in (result.parts or [result])
        if part.verdict == "inconclusive"
    ]
    known = [(need[0], need[1]) for need in needs if need is not None and need[1] is not None]
    refuting = [need for need in known if _contradicts(need[0])]
    if refuting:
        return min(refuting, key=lambda need: need[1])
    return max(known, key=lambda need: need[1]) if known and len(known) == len(needs) else None


def _contradicts(result: Result) -> bool:
    """Whether the value itself is on the side that refutes the claim."""
    exact_value = replace(result, low=result.value, high=result.value)
    return result.bound is not None and verdict_of(exact_value, result.bound) == "not supported"
