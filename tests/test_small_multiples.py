"""Charts of several models: panels with shared axes and one colour scale, named lines, one meaning a colour."""

import numpy as np
import plotly.graph_objects as go
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.shipped_runs import open_shipped
from support.synthetic_runs import synthetic_run

from headscope.plots import rank_shift, style
from headscope.plots.layers import plot_by_layer
from headscope.plots.line_ends import LINE_END, spread_labels
from headscope.plots.top_heads import card_picture, fit_to_card
from headscope.rendering import assembly
from headscope.rendering.blocks import Chart
from headscope.run import Run

MODELS = ("base", "yarn", "adarope", "linear", "ntk", "llama3", "abf", "a longer label of mine")
SHOWN = MODELS[:3]
PAPERS = ("#ffffff", "#15181c")
"""Backgrounds of light and dark pages."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Eight models with plausible numbers."""
    folder = tmp_path_factory.mktemp("runs")
    probes = ("measure", "needle", "detectors")
    sizes = {"layers": 2, "heads": 4, "groups": 2, "pairs": 2, "docs": 3}
    return synthetic_run(folder, models=MODELS, lengths=(256,), probes=probes, **sizes)


@pytest.fixture(scope="module")
def charts(run: Run) -> list[Chart]:
    context = assembly.render_context(run, models=SHOWN)
    blocks = [chart for _, group in assembly.drawn_groups(context) for chart in group.charts]
    return [block for block in blocks if isinstance(block, Chart)]


def luminance(colour: str) -> float:
    """Relative luminance as WCAG defines it."""
    if colour.startswith("rgb"):
        shares = np.array([float(part) for part in colour[4:-1].split(",")]) / 255
    else:
        shares = np.array([int(colour[start : start + 2], 16) for start in (1, 3, 5)]) / 255
    linear = np.where(shares <= 0.04045, shares / 12.92, ((shares + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


@pytest.mark.parametrize("colours", [style.CATEGORY_PALETTE, style.ordered_colours(9)], ids=["categories", "ordered"])
def test_lines_are_visible_on_light_and_dark_pages(colours: list[str]) -> None:
    """The line of 12.5 % of a budget was not, in dark."""
    for colour in colours:
        for paper in PAPERS:
            light, dark = sorted((luminance(colour), luminance(paper)), reverse=True)
            assert (light + 0.05) / (dark + 0.05) >= 3, (colour, paper)


@pytest.mark.slow
def test_a_colour_of_a_model_is_that_of_no_other_thing(charts: list[Chart]) -> None:
    assert {*style.PALETTE}.isdisjoint(style.CATEGORY_PALETTE)
    labels = {*SHOWN}
    for chart in charts:
        meta = chart.figure.layout.meta or {}
        for trace in chart.figure.data:
            colours = (
                {trace.marker.color if "marker" in trace else None, trace.line.color if "line" in trace else None}
                if trace.type in ("scatter", "bar") and isinstance(getattr(trace.marker, "color", None), str | None)
                else set()
            )
            if colours & {*style.PALETTE}:
                named = {trace.name, trace.legendgroup, meta.get("model")}
                assert named & labels, (chart.figure.layout.title.text, trace.name)


@pytest.mark.slow
def test_a_chart_is_not_repeated_once_per_model(charts: list[Chart]) -> None:
    titles = [str(chart.figure.layout.title.text).replace("<br>", " ") for chart in charts]
    for label in SHOWN[1:]:
        repeated = {title.replace(label, "base") for title in titles if title.endswith(f": {label}")}
        assert not repeated & {*titles}, label


@pytest.mark.slow
def test_panels_share_axes_and_one_colour_scale(charts: list[Chart]) -> None:
    (chart,) = [chart for chart in charts if chart.figure.layout.title.text == "Needle retrieved"]
    maps = [trace for trace in chart.figure.data if trace.type == "heatmap"]
    assert [trace.meta for trace in maps] == [*SHOWN]
    assert {trace.coloraxis for trace in maps} == {"coloraxis"}
    assert all(axis.matches == "x" for axis in [*chart.figure.select_xaxes()][1:])
    assert len(chart.cell_links) == len(maps[0].y)


def test_frequencies_that_several_models_learned_are_panels_of_one_chart() -> None:
    run = open_shipped("from-scratch")
    charts = {chart.figure.layout.title.text: chart for chart in run.charts("Frequency change relative")}
    charts = {title: chart for title, chart in charts.items() if title.startswith("Frequency change")}
    assert [*charts] == [f"Frequency change relative to the {origin}" for origin in ("checkpoint", "initialisation")]
    for chart in charts.values():
        assert [trace.meta for trace in chart.figure.data] == ["adarope-s0/step-002048", "no-scale-s0/step-002048"]
        assert {trace.coloraxis for trace in chart.figure.data} == {"coloraxis"}


def test_lines_of_eight_models_are_named_at_their_ends_inside_the_chart(run: Run) -> None:
    figure = plot_by_layer(run.heads, "ess2_256")
    labels = [label for label in figure.layout.annotations if label.name == LINE_END]
    assert figure.layout.showlegend is False
    assert [label.text.partition("</span> ")[2].replace("<br>", " ") for label in labels] == [*MODELS]
    assert min(np.diff(line_ends(figure, 56))) >= 15
    assert figure.layout.margin.r >= 80


def line_ends(figure: go.Figure, bottom: float) -> list[float]:
    """Heights of the names of lines above the axis in px, from below; the margin below the axis is `bottom`."""
    height = figure.layout.height - figure.layout.margin.t - bottom
    return sorted(label.y * height for label in figure.layout.annotations if label.name == LINE_END)


def test_names_of_lines_stay_apart_when_a_chart_becomes_a_card(run: Run) -> None:
    picture = card_picture(fit_to_card(plot_by_layer(run.heads[run.heads["model"].isin([*MODELS][:4])], "ess2_256")))
    ends = line_ends(picture, picture.layout.margin.b)
    assert len(ends) == 4
    assert min(np.diff(ends)) >= 15


def test_every_line_of_a_rank_shift_has_the_name_of_its_head(run: Run) -> None:
    heads = run.heads[run.heads["model"].isin(["base", "yarn"])]
    figure = rank_shift.plot_rank_shift(heads, "ess2_256", "base")
    changes = rank_shift.rank_changes(heads, "ess2_256", "base", "yarn")
    top = changes[(changes["before_rank"] <= 10) | (changes["after_rank"] <= 10)]
    names = {label.text for label in figure.layout.annotations if str(label.text).startswith("L")}
    assert names == {f"L{row.layer}H{row.head}" for row in top.itertuples()}


@given(st.lists(st.floats(0, 300), min_size=1, max_size=8))
def test_labels_keep_their_order_and_do_not_overlap(places: list[float]) -> None:
    centres = spread_labels(places, [16.0] * len(places))
    assert centres is not None
    assert min(centres) >= -1e-6
    ordered = np.array(centres)[np.argsort(places, kind="stable")]
    assert (np.diff(ordered) > 15).all()


def test_figure_of_single_points_keeps_its_legend() -> None:
    figure = style.new_figure("Points")
    figure.add_traces([go.Scatter(x=[1], y=[1], mode="markers", name="a"), go.Scatter(x=[1], y=[2], name="b")])
    assert style.fit_legend(figure).layout.showlegend is True
