"""Report of the window probe: charts, findings and glossary."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from headscope.report.blocks import Chart, ChartGroup, Finding, RenderContext, Term
from headscope.runs.column_metadata import format_number
from headscope.runs.run import Run
from probes.window import PROBE, plots
from probes.window.analysis import SCHEME_NAMES, accuracy_by_width, mass_bounds

PROFILE_WIDTHS = (1, 32, 128, 512)
"""Window widths with a plot of their pairs, as in the paper."""

GLOSSARY = (
    Term(
        "Rotary pair and its usage",
        "Rotary position embedding rotates each pair of query and key dimensions by an angle, θ × distance. Fast pairs "
        "(large θ) distinguish nearby tokens; slow pairs hardly change with distance.",
        tables=("window_pairs",),
    ),
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """Accuracy and frequencies by window width, and the contribution of each pair by distance."""
    run = context.run
    if "window" in run.tables:
        yield ChartGroup(PROBE.title, "Accuracy and frequencies by window width", _width_charts(run.window))
        if "window_pairs" in run.tables:
            profiles = _profile_charts(run.window, run.window_pairs)
            yield ChartGroup(PROBE.title, "Contribution of each rotary pair", profiles)


def _width_charts(window: pd.DataFrame) -> Iterator[Chart]:
    yield Chart(
        plots.plot_accuracy_by_width(window),
        "The model sees one needle in a sequence of background tokens and decides whether its distance is within a "
        "window around c. Lines are means over initial weights, bands their 95 % confidence intervals.",
        half_width=True,
    )
    yield Chart(
        plots.plot_frequency_mass(window),
        "One point per trained model that solves the task. Its frequency mass is the mean of its frequencies, weighted "
        "by how much each pair can change the logit. Theorem 1 bounds it from both sides, up to two constants; the "
        "lines use the tightest constants for all points.",
        half_width=True,
    )
    yield Chart(
        plots.plot_dominant_frequency(window),
        "Frequency of the pair that can change the needle's logit most: median over initial weights. The slowest pair "
        "hardly rotates within the context and may serve as an offset. Where it is the strongest, the frequency mass "
        "is more informative.",
    )


def _profile_charts(window: pd.DataFrame, pairs: pd.DataFrame) -> Iterator[Chart]:
    center, widths = int(window["center"].iloc[0]), set(window["width"])
    for width in (width for width in PROFILE_WIDTHS if width in widths):
        for scheme in ("fixed", "learned"):
            caption = "Contribution of each pair to the needle's logit. Dashed lines mark the window."
            yield Chart(plots.plot_pair_profile(pairs, scheme, width, center), caption, half_width=True)


def findings(run: Run) -> Iterator[Finding]:
    """Accuracy of each scheme, frequency mass by width, and the constants of Theorem 1."""
    if "window" not in run.tables:
        return
    widths = accuracy_by_width(run.window)
    for scheme, rows in widths.groupby("scheme", observed=True, sort=False):
        worst = rows.sort_values("accuracy").iloc[0]
        yield Finding(
            PROBE.title,
            f"With {SCHEME_NAMES[str(scheme)]} the mean accuracy over widths is {rows['accuracy'].mean():.3f}; it is "
            f"lowest at W = {worst['width']:,} ({worst['accuracy']:.3f}{_format_interval(worst)}). "
            f"{rows['solved'].sum()} of {rows['seeds'].sum()} models solve the task.",
        )
    fixed = widths[widths["scheme"] == "fixed"]
    if len(fixed) > 2:
        correlation = fixed["width"].rank().corr(fixed["frequency_mass"].rank())
        yield Finding(
            PROBE.title, f"Under fixed RoPE the rank correlation of frequency mass and width is {correlation:+.2f}."
        )
    if bounds := mass_bounds(run.window):
        yield Finding(
            PROBE.title,
            f"The frequency mass of all {bounds.solved_models} models that solve the task is between C1 / (W/2 + 1) "
            f"with C1 = {format_number(bounds.c1)} and pi / (W + 1) + C2 with C2 = {format_number(bounds.c2)} "
            "rad/token (Theorem 1, r = 1).",
        )


def _format_interval(row: pd.Series) -> str:
    """The interval of an accuracy, to follow it; "" without one."""
    return "" if np.isnan(row["low"]) else f", 95 % confidence interval {row['low']:.3f} to {row['high']:.3f}"
