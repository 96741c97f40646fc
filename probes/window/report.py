"""Report of the window probe: charts and glossary."""

from collections.abc import Iterator

import pandas as pd

from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term
from probes.window import PROBE, plots

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
