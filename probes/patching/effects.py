"""The effect of a patch: how far the metric moves from one run of a pair to the other."""

from typing import Any

from headscope.prompts.pairs import OWN_METRIC, metric_unit

MIN_DIFFERENCE, MIN_PROBABILITY = 0.5, 0.05
"""Least |m(clean) - m(corrupted)| of a pair whose effects are normalised, in logits, nats or ranks, and in
probabilities [ours]."""
MIN_OWN_DIFFERENCE = 1e-4
"""The same for a metric of the user, whose unit is unknown: relative to the larger of the two values [ours]. A
difference within the rounding of float32 logits would make any effect."""


def min_difference(metric: str) -> float:
    """The least difference of a metric between the prompts of a pair whose effects are normalised.

    A metric of the user, whose unit is unknown, has the relative bound `MIN_OWN_DIFFERENCE` instead.
    """
    return 0.0 if metric.startswith(OWN_METRIC) else MIN_PROBABILITY if metric == "prob_diff" else MIN_DIFFERENCE


def describe_min_difference(metric: str) -> str:
    """The least difference in words."""
    if metric.startswith(OWN_METRIC):
        return f"{100 * MIN_OWN_DIFFERENCE:g} % of the metric"
    return f"{min_difference(metric):g} {metric_unit(metric)}"


def is_normalised(clean: float, corrupted: float, metric: str) -> bool:
    """Whether the metric differs enough between the prompts of a pair to divide by the difference."""
    least = MIN_OWN_DIFFERENCE * max(abs(clean), abs(corrupted)) if metric.startswith(OWN_METRIC) else 0.0
    difference = abs(clean - corrupted)
    return difference > least and difference >= min_difference(metric)


def effect_columns(
    patched: Any, clean: float, corrupted: float, direction: str, metric: str = "logit_diff"
) -> dict[str, Any]:
    """The value columns of patched metrics (a scalar or an array)."""
    unpatched, source = (corrupted, clean) if direction == "denoising" else (clean, corrupted)
    differs = is_normalised(clean, corrupted, metric)
    effect = (patched - unpatched) / (source - unpatched) if differs else 0 * patched
    return {
        "metric_clean": clean,
        "metric_corrupted": corrupted,
        "metric_patched": patched,
        "is_normalised": differs,
        "is_counted": differs,
        "effect": effect,
    }
