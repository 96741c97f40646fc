"""Layout of charts: titles, tick labels, marks and cards keep their room on a phone, a laptop and a wide screen."""

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from playwright.sync_api import Page
from support.shipped_runs import open_shipped, shipped_path

from headscope.plots import shapes, style
from headscope.plots.axes import CountAxis
from headscope.plots.colour_range import MAX_ARROW_COLUMNS, mark_clipped_cells, symmetric_colorbar
from headscope.plots.least_width import CELL_WIDTH, least_width
from headscope.rendering import assembly
from headscope.results.effects.ranking import largest_unit
from probes.needle.plots import plot_success_by_length
from probes.patching import view
from probes.patching.analysis import sweeps

TEXTS_BEYOND = """() => [...document.querySelectorAll("main figure .js-plotly-plot")].flatMap((plot) =>
    [...plot.querySelectorAll(".g-gtitle text")]
        .filter((text) => text.getBoundingClientRect().right > plot.getBoundingClientRect().right + 1)
        .map((text) => text.textContent))"""
TITLES_ON_LEGENDS = """() => [...document.querySelectorAll("main figure .js-plotly-plot")].filter((plot) => {
    const [title, legend] = [".g-gtitle", ".legend"].map((part) => plot.querySelector(part)?.getBoundingClientRect());
    return legend && title.bottom > legend.top + 1; }).map((plot) => plot.layout.title.text)"""
ROWS_OF_CARDS = """() => Object.values(Object.groupBy([...document.querySelectorAll("main .card")],
    (card) => Math.round(card.getBoundingClientRect().top)))
    .map((row) => [row.at(-1).getBoundingClientRect().right, row[0].parentElement.getBoundingClientRect().right])"""
NARROW_CELLS = """() => [...document.querySelectorAll("main figure .js-plotly-plot")].flatMap((plot) => plot._fullData
    .filter(({ type }) => type === "heatmap").map(({ x, xaxis }) =>
        plot._fullLayout[xaxis.replace("x", "xaxis")]._length / x.length)).filter((width) => width < 1.9)"""


@pytest.mark.parametrize(
    ("value", "limit", "expected"),
    [(0.999, 0.9951, "≥ +0.995<br>max +0.999"), (0.999, 0.5, "≥ +0.5<br>max +0.999"), (2.1, 0.019, "max +2.1")],
)
def test_a_clipped_share_is_not_rounded_to_one_or_to_the_limit(value: float, limit: float, expected: str) -> None:
    assert expected in symmetric_colorbar([0.0, value], limit)["ticktext"][-1]
    grid = pd.DataFrame([[0.0, value]])
    figure = shapes.matrix("Title", grid, "", "x", "y")
    (mark,) = mark_clipped_cells(figure, grid.to_numpy(), limit).layout.annotations
    assert expected.rpartition("max ")[2] in mark.text


def test_cells_without_room_for_an_arrow_have_no_marks() -> None:
    grid = pd.DataFrame(np.eye(2, MAX_ARROW_COLUMNS + 1))
    figure = mark_clipped_cells(shapes.matrix("Title", grid, "", "x", "y"), grid.to_numpy(), 0.5)
    assert not figure.layout.annotations
    assert least_width(shapes.matrix("Title", pd.DataFrame(np.ones((2, 270))), "", "x", "y")) >= 270 * CELL_WIDTH
    assert least_width(go.Figure(go.Table())) == 0


def test_one_length_or_step_has_one_tick() -> None:
    needles = open_shipped("example").table("needles")
    one_length = needles[needles["context_length"] == 512]
    axis = plot_success_by_length(one_length).layout.xaxis
    assert ([*axis.tickvals], [*axis.ticktext]) == ([512], ["512"])
    assert CountAxis(pd.Series([512, 512])).settings == {"tickvals": [512], "ticktext": ["512"]}


def test_the_top_margin_holds_all_lines_of_a_subtitle() -> None:
    short, long = (
        style.set_top_margin(style.new_figure(style.title_with_subtitle("Title", "word " * count))) for count in (2, 40)
    )
    lines = long.layout.title.subtitle.text.count("<br>")
    assert lines >= 2
    assert long.layout.margin.t - short.layout.margin.t >= 14 * lines


def test_the_first_bar_of_a_card_has_the_interval_of_its_sentence() -> None:
    run = open_shipped("patching")
    effects = next(one for one in sweeps(run) if one.key["prompts"] == "ioi" and one.model == "base")
    card = next(iter(view.overview_cards(assembly.render_context(run))))
    (bars,) = card.figure.data
    unit = largest_unit(effects)
    assert bars.x[0] + bars.error_x.array[0] == pytest.approx(unit["high"])
    assert bars.x[0] - bars.error_x.arrayminus[0] == pytest.approx(unit["low"])
    assert f"{unit['low']:+.2f} to {unit['high']:+.2f}" in card.caption
    assert math.isfinite(unit["high"])


def drawn(page: Page) -> Page:
    """The page with all its charts drawn."""
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function("[...document.querySelectorAll('main .js-plotly-plot')].every((plot) => plot._fullLayout)")
    page.wait_for_timeout(1500)  # a title is wrapped after the first drawing
    return page


@pytest.mark.browser
@pytest.mark.parametrize("width", [390, 1280])
def test_titles_legends_and_cells_have_room(
    serve: Callable[[Path], str], browse: Callable[..., Page], width: int
) -> None:
    run = shipped_path("causes")
    page = drawn(browse(f"{serve(run)}/influence?run={run.name}", width, reload=True))
    assert page.evaluate(TEXTS_BEYOND) == []
    assert page.evaluate(TITLES_ON_LEGENDS) == []
    assert page.evaluate(NARROW_CELLS) == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 1920])
def test_rows_of_cards_have_no_holes(serve: Callable[[Path], str], browse: Callable[..., Page], width: int) -> None:
    run = shipped_path("example")
    page = browse(f"{serve(run)}/?run={run.name}", width, reload=True)
    rows = page.evaluate(ROWS_OF_CARDS)
    assert len(rows) >= 2
    assert all(right == pytest.approx(end, abs=2) for right, end in rows)
