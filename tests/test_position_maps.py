"""Maps of patches by position: every pair can be selected, tokens are named, and a result names the largest effects."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from playwright.sync_api import Browser, Page, expect
from support.shipped_runs import shipped_path
from support.tiny_studies import PAIRS, save_checkpoint

import headscope as hs
from headscope import rendering
from headscope.plots.axes import MAX_TOKEN_LABELS, token_axis
from headscope.plots.selector import MAX_CELLS, MAX_CHOICES, combine_figures, first_choices, remove_menu
from headscope.plots.style import new_figure
from headscope.rendering import assembly, run_results
from headscope.rendering.blocks import Chart
from headscope.rendering.figure_files import save_chart
from headscope.rendering.token_spans import token_labels
from headscope.results.collection import all_results
from headscope.results.result import Result
from headscope.results.words import sentence
from headscope.runs.run import Run
from probes.patching import view
from probes.patching.plots import plot_positions
from probes.patching.position_maps import PositionMap, layer_maps, unit_maps
from probes.patching.results import map_result

HEADINGS = ("Patching of layers", "Patching of entries of the attention pattern")
SHOWN_MAP = """(plot) => ({
    pair: plot._fullLayout.title.subtitle.text.split(",")[0],
    texts: plot._fullLayout.xaxis.ticktext,
    z: Array.from(plot._fullData.find((trace) => trace.visible === true).z, (row) => Array.from(row)),
})"""

RIGHT_ENDS = "(texts) => texts.map((text) => text.getBoundingClientRect().right)"
WIDTHS_OF_MARKS = """(plot) => ({
    marks: [...plot.querySelectorAll(".annotation-text")].map((mark) => mark.getBoundingClientRect().width),
    cell: plot._fullLayout.xaxis._length / plot._fullData[0].x.length,
})"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("positions")
    save_checkpoint(folder / "tiny")
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    """Effects of heads, layers and pattern entries at every position of four pairs."""
    options: dict[str, Any] = {"activations": ["z", "pattern", "mlp_out", "resid_pre"], "pattern_entries": True}
    options |= {"positions": ["each"], "keep_failing": True, "method": "estimate", "quiet": True}
    return hs.patch(f"{folder}/tiny", pairs=[f"{folder}/pairs.jsonl"], out=folder / "runs", **options)


def synthetic_map(
    effects: dict[tuple[str, int, int], float], words: dict[str, list[str]], **columns: Any
) -> PositionMap:
    """A map of layers with these effects by pair, layer and position; a word with | differs between the prompts."""
    rows = pd.DataFrame([(*place, effect) for place, effect in effects.items()])
    rows = rows.set_axis(["pair", "layer", "position", "effect"], axis=1)
    rows = rows.assign(metric_clean=1.0, metric_corrupted=0.0, method="exact").assign(**columns)
    tokens = pd.DataFrame(
        [
            (pair, position, *(word.split("|") if "|" in word else (word, word)))
            for pair, of_pair in words.items()
            for position, word in enumerate(of_pair)
        ],
        columns=["pair", "position", "clean", "corrupted"],
    )
    labels = token_labels(tokens["position"], tokens["clean"], tokens["corrupted"])
    kinds = tokens["clean"].where(tokens["clean"] == tokens["corrupted"], "")
    key = {"model": "base", "prompts": "own", "metric": "logit_diff", "intervention": "mlp_out", "direction": "noising"}
    return PositionMap(key, rows, tokens.assign(label=labels, kind=kinds))


def selected(figure: go.Figure, number: int) -> tuple[list[go.Heatmap], dict[str, Any]]:
    """The traces and the changed layout that a choice of the menu shows."""
    visible, layout = figure.layout.updatemenus[0].buttons[number].args
    return [trace for trace, shows in zip(figure.data, visible["visible"], strict=True) if shows], layout


def test_a_menu_selects_the_layer_map_of_every_pair(run: Run) -> None:
    rows = run.table("patching_layers")
    for position_map in layer_maps(run):
        figure = plot_positions(position_map)
        assert [button.label for button in figure.layout.updatemenus[0].buttons] == [pair["name"] for pair in PAIRS]
        assert [trace.visible for trace in figure.data] == [True, False, False, False]
        for number, pair in enumerate(PAIRS):
            (heatmap,), layout = selected(figure, number)
            own = rows[(rows["pair"] == pair["name"]) & (rows["activation"] == position_map.key["intervention"])]
            own = own[(own["position"] >= 0) & (own["span"] == "")]
            expected = own.pivot_table(index="layer", columns="position", values="effect", observed=True)
            np.testing.assert_allclose(heatmap.z, expected, rtol=1e-6)
            first, third = pair["clean"].split()[1], pair["clean"].split()[3]
            assert layout["xaxis"]["ticktext"][1].startswith(f"1: {first} | ")
            assert layout["xaxis"]["ticktext"][3].startswith(f"3: {third} | ")
            assert layout["title"]["subtitle"]["text"].startswith(pair["name"])
        assert len({trace.zmax for trace in figure.data}) == 1, "all pairs share the colour scale"


def test_a_menu_selects_the_heads_of_every_pair(run: Run) -> None:
    rows = run.table("patching")
    for position_map in unit_maps(run):
        figure = plot_positions(position_map)
        assert len({tuple(trace.y) for trace in figure.data}) == 1, "the same heads in every pair"
        for number, pair in enumerate(PAIRS):
            (heatmap,), _ = selected(figure, number)
            own = rows[(rows["pair"] == pair["name"]) & (rows["activation"] == position_map.key["intervention"])]
            own = own[own["position"] >= 0].set_index(["layer", "head", "position"])["effect"]
            for name, values in zip(heatmap.y, heatmap.z, strict=True):
                layer, head = map(int, name.removeprefix("L").split("H"))
                assert [*values] == pytest.approx([own[layer, head, position] for position in range(5)], rel=1e-5)


def test_report_and_app_show_maps_of_all_pairs(run: Run) -> None:
    charts = {group.heading: [*group.charts] for group in view.charts(assembly.render_context(run))}
    menus = [chart for heading in HEADINGS for chart in charts[heading] if chart.figure.layout.updatemenus]
    assert len(menus) == 3
    assert all("menu selects one of 4 pairs" in f"{chart.line} {chart.explanation}" for chart in menus)
    heads = [chart for heading, of_heading in charts.items() if "head output" in heading for chart in of_heading]
    assert sum(bool(chart.figure.layout.updatemenus) for chart in heads) == 1


def test_one_line_per_activation_names_the_largest_effects_of_both_signs(run: Run) -> None:
    results = [result for result in all_results(run) if result.question == "patching.position"]
    assert [result.where["intervention"] for result in results] == [
        "z",
        "pattern",
        "resid_pre",
        "mlp_out",
        "pattern entries",
    ]
    lines = [line for line in run_results.row_lines(run) if "by position" in line]
    assert len(lines) == len(results)
    for result, line in zip(results, lines, strict=True):
        assert f"{result.value:+.2f}" in line
        assert result.details["place"] in line
        assert result.details["place"] in sentence(result)
        assert not result.is_exact


def test_the_line_is_about_the_largest_change_and_names_each_text_once() -> None:
    effects = {
        ("a", 0, 0): 0.1,
        ("a", 0, 1): 0.5,
        ("a", 1, 1): 0.9,
        ("a", 1, 2): 0.3,
        ("b", 0, 1): 2.0,  # of a pair whose metric hardly differs
        ("a", 1, 0): -0.2,
        ("b", 1, 2): -0.004,  # would be written as 0.00
    }
    differences = [1.0, 1.0, 1.0, 1.0, 0.1, 1.0, 0.1]
    words = {"a": ["The", "France|Italy", "is"], "b": ["The", "Spain|Peru", "is"]}
    result = map_result(synthetic_map(effects, words, metric_clean=differences))
    assert result.details["place"] == 'layer 1 at "1: France | Italy" of a'
    assert result.details["next"] == {'layer 1 at "2: is" of a': 0.3}
    assert result.details["lowest"] == {'layer 1 at "0: The" of a': -0.2}
    assert (result.value, result.is_exact, result.details["position"], result.details["patched_layer"]) == (
        0.9,
        True,
        1,
        1,
    )


def test_a_map_without_a_positive_effect_says_so() -> None:
    result = map_result(synthetic_map({("a", 0, 0): -0.3, ("a", 1, 1): -0.5}, {"a": ["x", "y"]}))
    assert result.value == -0.5
    assert result.details["place"] == 'layer 1 at "1: y"', "one pair needs no name"
    assert "no effect is positive" in sentence(result)
    zeros: Result = map_result(synthetic_map({("a", 0, 0): 0.0, ("a", 1, 1): 0.0}, {"a": ["x", "y"]}))
    assert zeros.value == 0
    assert not zeros.details["next"]
    assert not zeros.details["lowest"]


def test_the_map_of_a_long_prompt_begins_where_the_prompts_differ() -> None:
    """Earlier positions have no effect; if few are left, their tokens are named."""
    length = MAX_TOKEN_LABELS + 50
    effects = {("long", layer, position): 0.5 * (position >= 88) for layer in (0, 1) for position in range(length)}
    words = ["same"] * 88 + ["a|b"] * 10
    figure = plot_positions(synthetic_map(effects, {"long": words}))
    assert [*figure.data[0].x] == [*range(88, length)]
    assert [*figure.layout.xaxis.ticktext][:2] == ["88: a | b", "89: a | b"]
    everywhere = plot_positions(synthetic_map(effects, {"long": ["a|b"] * length}))
    assert everywhere.layout.xaxis.ticktext is None
    assert everywhere.layout.xaxis.title.text == "position"
    assert everywhere.data[0].text[0][3] == "3: a | b", "the hover text names the tokens"


def test_labels_of_tokens_are_short_visible_and_safe() -> None:
    texts = [" The", "\n", "", " <b>", "x" * 40, " "]
    labels = token_labels(range(6), texts, [" The", "\n", "", " <b>", "y", " "])
    assert labels[:4] == ["0: The", "1: ⏎", "2: ▯", "3: <b>"]
    assert labels[4] == f"4: {'x' * 13}… | y"
    axis = token_axis(range(6), labels)
    assert axis["ticktext"][3] == "3: &lt;b&gt;"
    assert axis["tickangle"] < 0
    assert token_axis(range(2), labels[:2])["tickangle"] == 0, "a few short labels are level"


def test_a_page_holds_a_bounded_number_of_maps() -> None:
    assert first_choices({str(number): 10 for number in range(100)}) == [str(number) for number in range(MAX_CHOICES)]
    assert first_choices({"a": MAX_CELLS // 2, "b": MAX_CELLS // 2, "c": 1}) == ["a", "b"]
    assert first_choices({"a": 2 * MAX_CELLS, "b": 1}) == ["a"]


def test_an_image_has_no_menu(tmp_path: Path) -> None:
    figures = {name: new_figure(name).add_scatter(y=[number]) for number, name in enumerate("ab")}
    for figure in figures.values():
        figure.layout.margin.t = 60
    combined = combine_figures(figures, "pair")
    page = save_chart(Chart(combined, "caption"), tmp_path / "figure.html").read_text()
    assert "updatemenus" in page
    image = remove_menu(combined)
    assert not image.layout.updatemenus
    assert not image.layout.annotations
    assert [[*trace.y] for trace in image.data] == [[0]]
    assert (image.layout.height, image.layout.margin.t) == (380, 60)


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 820])
def test_a_reader_selects_a_pair_in_the_report(run: Run, chromium: Browser, tmp_path: Path, width: int) -> None:
    page = chromium.new_page(viewport={"width": width, "height": 900}, color_scheme="dark")
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(rendering.write_report([run], tmp_path / "report.html").as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=60_000)
    plot = page.locator("[data-figure]:has(.updatemenu-header)", has_text="Denoising of the output of the MLP")
    _select_pair(page, plot, "pair 2")
    _assert_shows(plot.evaluate(SHOWN_MAP), run, "pair 2")
    assert _label_spacing(plot) >= 11
    assert problems == []
    page.close()


@pytest.mark.browser
def test_a_reader_selects_a_pair_in_the_app_and_panels_keep_their_width_on_a_phone(
    run: Run, serve: Callable[[Path], str], browse: Callable[..., Page]
) -> None:
    page = browse(f"{serve(run.path.parent)}/patching?tab=patching-of-layers", 1280, "dark")
    plot = page.locator(".js-plotly-plot", has_text="Denoising of the output of the MLP").first
    _select_pair(page, plot, "pair 3")
    _assert_shows(plot.evaluate(SHOWN_MAP), run, "pair 3")
    table = plot.evaluate("(plot) => window.headscopeChartCsv(plot)").splitlines()
    assert len(table) == 1 + 4 * 5, "only the selected pair"
    narrow = browse(f"{serve(run.path.parent)}/patching?tab=patching-of-entries-of-the-attention-pattern", 390)
    assert narrow.evaluate("document.documentElement.scrollWidth") <= 390, "the chart scrolls, not the page"
    plot_width = narrow.locator("main .js-plotly-plot").first.evaluate("(plot) => plot._fullLayout.xaxis._length")
    assert plot_width >= 120


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
def test_names_of_groups_stay_apart_and_marks_in_their_cells(
    serve: Callable[[Path], str], browse: Callable[..., Page], width: int
) -> None:
    run = shipped_path("patching")
    page = browse(f"{serve(run.parent)}/patching?run={run.name}", width, reload=True)
    figures = page.locator("main figure")
    for figure in (figures.nth(0), figures.nth(2)):
        figure.scroll_into_view_if_needed()
        expect(figure.locator(".main-svg").first).to_be_visible()
    matrix, groups = (figures.nth(number).locator(".js-plotly-plot") for number in (0, 2))
    assert _label_spacing(groups) >= 11
    widths = matrix.evaluate(WIDTHS_OF_MARKS)
    assert len(widths["marks"]) == 3
    assert max(widths["marks"]) <= widths["cell"]


def _select_pair(page: Page, plot: Any, name: str) -> None:
    plot.scroll_into_view_if_needed()
    plot.locator(".updatemenu-header").click()
    plot.locator(".updatemenu-dropdown-button", has_text=name).click()
    page.wait_for_timeout(500)


def _assert_shows(shown: dict[str, Any], run: Run, pair: str) -> None:
    rows = run.table("patching_layers").query("pair == @pair and activation == 'mlp_out' and position >= 0")
    expected = rows.pivot_table(index="layer", columns="position", values="effect", observed=True)
    np.testing.assert_allclose(np.array(shown["z"], float), expected, rtol=1e-3, atol=1e-6)
    number = int(pair.split()[1])
    assert shown["pair"] == pair
    assert shown["texts"] == ["0: w1", f"1: w{10 + number} | w{40 + number}", "2: w3", shown["texts"][3], "4: w4"]


def _label_spacing(plot: Any) -> float:
    """Least distance in px between the ends of neighbouring tick labels below the plot."""
    ends = plot.locator(".xtick text").evaluate_all(
        "(texts) => texts.map((text) => text.getBoundingClientRect().right)"
    )
    return min(right - left for left, right in itertools.pairwise(ends))
