"""What a report shows of the window probe."""

from collections.abc import Iterator

import pandas as pd

from headscope.report.blocks import Chart, ChartGroup, RenderContext
from probes.window import PROBE, plots

PROFILE_WIDTHS = (1, 32, 128, 512)
"""Window widths whose pairs are drawn, as in the paper."""


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """Accuracy and frequencies by width, and what each pair adds by distance."""
    run = context.run
    if "window" in run.tables:
        yield ChartGroup(PROBE.title, "Which windows are learned", _width_charts(run.window))
        if "window_pairs" in run.tables:
            yield ChartGroup(PROBE.title, "What each pair adds", _profile_charts(run.window, run.window_pairs))


def _width_charts(window: pd.DataFrame) -> Iterator[Chart]:
    yield Chart(
        plots.plot_accuracy_by_width(window),
        "A model sees one needle in a row of background tokens and must tell whether its distance lies in a window "
        "around c. Lines are means over initial weights, bands their 95 % interval.",
        half_width=True,
    )
    yield Chart(
        plots.plot_frequency_mass(window),
        "A point is a trained model that solves the task; its frequency mass is the average of its frequencies, "
        "weighted by how much each pair can move the logit. Theorem 1 bounds it from both sides, up to two constants: "
        "here the tightest that hold for every point.",
        half_width=True,
    )
    yield Chart(
        plots.plot_dominant_frequency(window),
        "Median over initial weights of the frequency whose pair can move the needle's logit most. The slowest pair "
        "hardly turns within the context and may serve as an offset: where it is strongest, the frequency mass "
        "says more.",
    )


def _profile_charts(window: pd.DataFrame, pairs: pd.DataFrame) -> Iterator[Chart]:
    center, widths = int(window["center"].iloc[0]), set(window["width"])
    for width in (width for width in PROFILE_WIDTHS if width in widths):
        for scheme in ("fixed", "learned"):
            caption = "Contribution of each pair to the needle's logit. Dashed lines mark the window."
            yield Chart(plots.plot_pair_profile(pairs, scheme, width, center), caption, half_width=True)
