"""Verdicts on claims: a 95 % confidence interval against a threshold that was written before the results were seen."""

from collections.abc import Iterable


def judge(low: float, high: float, threshold: float = 0.0) -> str:
    """Verdict on the claim that a quantity is above `threshold`, from its interval `low` to `high`.

    "supported" if the whole interval is above the threshold, "not supported" if it is below, else "inconclusive". An
    interval of NaN (too few documents) is inconclusive.
    """
    return "supported" if low > threshold else "not supported" if high < threshold else "inconclusive"


def judge_below(low: float, high: float, threshold: float = 0.0) -> str:
    """Verdict on the claim that a quantity is below `threshold`, as `judge` for one that is above it."""
    return judge(-high, -low, -threshold)


def judge_all(verdicts: Iterable[str]) -> str:
    """Verdict on a claim of several parts: all must be supported, and one that is not supported refutes it."""
    parts = {*verdicts}
    return "not supported" if "not supported" in parts else parts.pop() if len(parts) == 1 else "inconclusive"
