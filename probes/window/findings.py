"""What the window probe says in words."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from headscope.report.blocks import Finding, Term
from headscope.runs.column_metadata import format_number
from headscope.runs.run import Run
from probes.window.analysis import SCHEME_NAMES, accuracy_by_width, mass_bounds

TOPIC = "Needle retrieval from a window"

GLOSSARY = (
    Term(
        "Rotary pair and its usage",
        "Rotary position embedding turns each pair of query and key dimensions by an angle, θ × distance. Fast pairs "
        "(large θ) tell near tokens apart; slow pairs hardly change with distance.",
        tables=("window_pairs",),
    ),
)


def findings(run: Run) -> Iterator[Finding]:
    """What the window probe found, scheme by scheme, and Theorem 1's constants."""
    if "window" not in run.tables:
        return
    widths = accuracy_by_width(run.window)
    for scheme, rows in widths.groupby("scheme", observed=True, sort=False):
        worst = rows.sort_values("accuracy").iloc[0]
        yield Finding(
            TOPIC,
            f"With {SCHEME_NAMES[str(scheme)]} the mean accuracy over widths is {rows['accuracy'].mean():.3f}, lowest at "
            f"W = {worst['width']:,} with {worst['accuracy']:.3f}{_format_interval(worst)}; "
            f"{rows['solved'].sum()} of {rows['seeds'].sum()} models solve the task.",
        )
    fixed = widths[widths["scheme"] == "fixed"]
    if len(fixed) > 2:
        falls = fixed["width"].rank().corr(fixed["frequency_mass"].rank())
        yield Finding(
            TOPIC, f"The frequency mass of fixed RoPE follows the width with a rank correlation of {falls:+.2f}."
        )
    if bounds := mass_bounds(run.window):
        yield Finding(
            TOPIC,
            f"The frequency mass of all {bounds.solved_models} solved models lies between C1 / (W/2 + 1) with C1 = "
            f"{format_number(bounds.c1)} and pi / (W + 1) + C2 with C2 = {format_number(bounds.c2)} rad/token (Theorem 1, r = 1).",
        )


def _format_interval(width: pd.Series) -> str:
    """The interval of an accuracy as it follows it; "" without one."""
    return "" if np.isnan(width["low"]) else f" (95 % interval {width['low']:.3f} to {width['high']:.3f})"
