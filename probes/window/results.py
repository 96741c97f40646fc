"""Results of the window probe: accuracy of each scheme, frequency mass by width, the constants of Theorem 1."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from headscope.results.questions import Question
from headscope.results.result import Result
from headscope.results.samples import allow_for_choice
from headscope.runs.aggregation import confidence_interval
from headscope.runs.column_metadata import falls_below
from headscope.runs.run import Run

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


QUESTIONS = (
    Question(
        name="window.solved",
        sentence="With {scheme}, {value} of {n:n models} solve the task",
        headline="With {scheme}, {value} of {n:n models} solve the task",
        number=",.0f",
        level="headline",
        better="higher",
    ),
    Question(
        name="window.accuracy",
        sentence="With {scheme} the mean accuracy over {n:n widths} is {value}",
        number=".3f",
        better="higher",
    ),
    Question(
        name="window.lowest_accuracy",
        sentence="With {scheme} the accuracy is lowest at W = {width:,}: {value}",
        number=".3f",
        samples="models",
        better="higher",
    ),
    Question(
        name="window.mass_by_width",
        sentence="Under fixed RoPE the rank correlation of frequency mass and width is {value} over {n:n widths}",
        number="+.2f",
    ),
    Question(
        name="window.mass_bounds",
        sentence="The frequency mass of all {n:n models} that solve the task is between C1 / (W/2 + 1) with C1 = "
        "{value} and pi / (W + 1) + C2 with C2 = {c2:number} rad/token (Theorem 1, r = 1)",
    ),
)


def results(run: Run) -> Iterator[Result]:
    """Results of the trained models, by scheme and over all."""
    if "window" not in run.tables:
        return
    widths = accuracy_by_width(run.window)
    for scheme, rows in widths.groupby("scheme", observed=True, sort=False):
        yield from _scheme_results(SCHEME_NAMES[str(scheme)], rows)
    fixed = widths[widths["scheme"] == "fixed"]
    if len(fixed) > 2:
        correlation = fixed["width"].rank().corr(fixed["frequency_mass"].rank())
        yield Result(question="window.mass_by_width", value=float(correlation), n=len(fixed))
    if bounds := mass_bounds(run.window):
        details = {"c2": bounds.c2}
        yield Result(question="window.mass_bounds", value=bounds.c1, n=bounds.solved_models, details=details)


def _scheme_results(name: str, widths: pd.DataFrame) -> Iterator[Result]:
    """The models of one scheme that solve the task, and their accuracies by width."""
    where = {"scheme": name}
    solved, models = int(widths["solved"].sum()), int(widths["seeds"].sum())
    yield Result(question="window.solved", value=solved, n=models, where=where)
    yield Result(question="window.accuracy", value=float(widths["accuracy"].mean()), n=len(widths), where=where)
    worst = widths.sort_values("accuracy").iloc[0]
    lowest = Result(
        question="window.lowest_accuracy",
        value=float(worst["accuracy"]),
        low=float(worst["low"]),
        high=float(worst["high"]),
        n=int(worst["seeds"]),
        where=where,
        details={"width": int(worst["width"])},
    )
    yield allow_for_choice(lowest, len(widths), (0.0, 1.0))
