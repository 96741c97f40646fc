"""Shapes of charts: what a table and a style give."""

import numpy as np
import pandas as pd
import pytest

from headscope.plots import shapes, style
from headscope.plots.style import UNNAMED, ModelStyle

DASHED = ModelStyle("a &lt; b", "#112233", "dash", "square")
PLAIN = ModelStyle("plain", "#445566", "", "")


def test_a_line_has_markers_and_dashes_only_if_its_style_has_them() -> None:
    curve = pd.DataFrame({"y": [1.0, 2.0], "customdata": ["first", "second"]}, [10, 20])
    figure = shapes.lines("Title", {DASHED: curve, PLAIN: curve}, "%{customdata}", "tokens", {"title_text": "loss"})
    dashed, plain = figure.data
    assert (dashed.mode, dashed.line.dash, dashed.marker.symbol) == ("lines+markers", "dash", "square")
    assert (plain.mode, plain.line.dash, plain.marker.symbol) == ("lines", None, None)
    assert [*plain.x] == [10, 20]
    assert [*plain.y] == [1, 2]
    assert [*plain.customdata] == ["first", "second"]
    assert (figure.layout.xaxis.title.text, figure.layout.yaxis.title.text) == ("tokens", "loss")


@pytest.mark.parametrize(
    ("hover", "text"),
    [
        ("%{y}", "%{y}<extra>a &lt; b</extra>"),
        ("%{y}<extra></extra>", "%{y}<extra></extra>"),
        (f"{shapes.NAME}: %{{y}}<extra></extra>", "a &lt; b: %{y}<extra></extra>"),
    ],
)
def test_a_hover_text_ends_with_the_name_unless_it_says_where_the_name_stands(hover: str, text: str) -> None:
    figure = shapes.bars("Title", {DASHED: pd.DataFrame({"y": [1.0]}, ["x"])}, hover, "x", "y")
    assert figure.data[0].hovertemplate == text


def test_bars_have_error_bars_from_low_to_high_and_the_opacity_of_each_bar() -> None:
    table = pd.DataFrame(
        {"y": [1.0, 2.0], "low": [0.5, np.nan], "high": [3.0, np.nan], "opacity": [1, 0.45]}, ["a", "b"]
    )
    bars = shapes.bars("Title", {UNNAMED: table}, "%{y}", "x", "y", top_margin=62).data[0]
    np.testing.assert_array_equal(bars.error_y.arrayminus, [0.5, np.nan])
    np.testing.assert_array_equal(bars.error_y.array, [2.0, np.nan])
    assert [*bars.marker.opacity] == [1, 0.45]
    assert bars.name is None
    without = shapes.bars("Title", {UNNAMED: table.assign(low=np.nan)}, "%{y}", "x", "y", top_margin=62).data[0]
    assert without.error_y.array is None


def test_the_mean_curve_has_an_interval_from_three_columns_on() -> None:
    three = shapes.mean_curve(pd.DataFrame([[1.0, 2.0, 6.0], [0.0, 0.0, 0.0]], [7, 8]))
    mean, low, high = three.loc[7].to_numpy(np.float64)
    assert [*three["mean"]] == [3, 0]
    assert low < 1 < 3 == mean < 6 < high
    assert shapes.mean_curve(pd.DataFrame([[1.0, 2.0]])).loc[0, ["low", "high"]].isna().all()


def test_a_matrix_has_the_labels_of_its_grid_and_a_title_with_a_subtitle() -> None:
    grid = pd.DataFrame([[1.0, 2.0]], ["row"], ["first", "second"])
    figure = shapes.matrix(style.title_with_subtitle("Title", "below"), grid, "%{z}", "x", "y", unit="logits")
    assert (figure.layout.title.text, figure.layout.title.subtitle.text) == ("Title", "below")
    assert ([*figure.data[0].x], [*figure.data[0].y]) == (["first", "second"], ["row"])
    assert figure.data[0].colorbar.title.text == "logits"
