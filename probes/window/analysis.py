"""Accuracy by window width, and the constants of Theorem 1's bounds on the frequency mass."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from headscope.runs.aggregation import confidence_interval
from headscope.runs.column_metadata import falls_below

SOLVED_ACCURACY = 0.99
"""Balanced accuracy from which a trained model counts as solving the task [ours]."""

SCHEME_NAMES = {"fixed": "fixed RoPE", "learned": "learned frequencies", "partial": "partial RoPE", "nope": "NoPE"}
"""Scheme -> its name in plots and findings."""


@dataclass(frozen=True)
class MassBounds:
    """Tightest constants of C1 / (r W / 2 + 1) <= M <= pi / (W + 1) + C2, r = 1 [ours], over all models that solve the
    task.

    `solved_models` counts those models.
    """

    c1: float
    c2: float
    solved_models: int

    def lower_bound(self, width: float) -> float:
        return self.c1 / (width / 2 + 1)

    def upper_bound(self, width: float) -> float:
        return math.pi / (width + 1) + self.c2


def solves_task(accuracy: Any) -> Any:
    """Whether trained models with these accuracies, of a pandas object, solve the task; NaN is no model."""
    return ~falls_below(accuracy, SOLVED_ACCURACY) & accuracy.notna()


def accuracy_by_width(window: pd.DataFrame) -> pd.DataFrame:
    """One row per (scheme, width), aggregated over the `seeds` models.

    Columns: mean accuracy with its 95 % confidence interval (`low`, `high`), number of `solved` models, mean frequency
    mass and median dominant theta (both rad/token).
    """
    by_seed = window.astype({"accuracy": "float64"}).pivot_table(
        index=["scheme", "width"], columns="seed", values="accuracy", observed=True, sort=False
    )
    low, high = confidence_interval(by_seed.to_numpy())
    groups = window.astype({"frequency_mass": "float64"}).groupby(["scheme", "width"], observed=True, sort=False)
    return pd.DataFrame(
        {
            "accuracy": by_seed.mean(axis=1),
            "low": low,
            "high": high,
            "solved": solves_task(by_seed).sum(axis=1),
            "seeds": by_seed.notna().sum(axis=1),
            "frequency_mass": groups["frequency_mass"].mean(),
            "dominant_theta": groups["dominant_theta"].median(),
        }
    ).reset_index()


def mass_bounds(window: pd.DataFrame) -> MassBounds | None:
    """The constants of Theorem 1 over all models with RoPE that solve the task; None without such a model."""
    solved = window[solves_task(window["accuracy"]) & (window["scheme"] != "nope")]
    if solved.empty:
        return None
    mass, width = (solved[name].to_numpy(dtype=np.float64) for name in ("frequency_mass", "width"))
    c2 = float(np.maximum(mass - math.pi / (width + 1), 0).max())
    return MassBounds(float((mass * (width / 2 + 1)).min()), c2, len(solved))
