"""Clicks, keys, Back and the box "Go to" lead to what they show; a model keeps its style and the default is no step."""

import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pandas as pd
import pytest
from playwright.sync_api import Browser, Page, expect
from support.synthetic_runs import synthetic_run
from werkzeug.serving import make_server

from dashboards.app import create_app
from dashboards.view_state import ViewState
from headscope.plots import style
from headscope.runs.run import Run

MIDDLE_OF_PANEL = """(plot, model) => {
  const box = plot.getBoundingClientRect(), layout = plot._fullLayout;
  const panel = plot._fullData.find(({name}) => name === model);
  const xaxis = layout["xaxis" + panel.xaxis.slice(1)], yaxis = layout["yaxis" + panel.yaxis.slice(1)];
  return [box.x + xaxis._offset + xaxis._length / 2, box.y + yaxis._offset + yaxis._length / 2];
}"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("runs")
    return synthetic_run(folder, models=("base", "yarn"), layers=7, heads=5, groups=1, lengths=(256, 1024), docs=2)


@pytest.fixture(scope="module")
def page(run: Run, chromium: Browser) -> Iterator[Page]:
    server = make_server("127.0.0.1", 0, create_app(run.path.parent).server, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    context = chromium.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(60_000)
    tab, problems = context.new_page(), list[str]()
    tab.on("pageerror", lambda error: problems.append(str(error)))
    tab.goto(f"http://127.0.0.1:{server.server_port}/")
    yield tab
    context.close()
    server.shutdown()
    assert problems == []


def open_page(page: Page, path: str) -> None:
    page.goto(re.sub(r"(//[^/]+)/.*", rf"\1{path}", page.url))


def click_middle(page: Page, title: str, model: str) -> None:
    chart = page.locator(f"[data-head-matrix][aria-label^='{title};']")
    chart.scroll_into_view_if_needed()
    expect(chart.locator(".heatmaplayer image").first).to_be_attached()
    expect(page.locator("p.loading")).to_have_count(0)  # the rest of the page replaces what stands for it
    plot, before = chart.locator(".js-plotly-plot"), None
    while before != (middle := plot.evaluate(MIDDLE_OF_PANEL, model)):  # charts above it that are drawn later move it
        before = middle
        page.wait_for_timeout(200)
    page.mouse.click(*middle)


@pytest.mark.browser
@pytest.mark.parametrize("model", ["base", "yarn"])
def test_a_click_on_the_chart_of_a_model_opens_the_head_of_that_model(page: Page, model: str) -> None:
    other = {"base": "yarn", "yarn": "base"}[model]
    open_page(page, f"/retrieval?model={other}&tab=retrieval-scores-of-heads")
    click_middle(page, "Retrieval score of every head", model)
    expect(page.locator("h1")).to_have_text("Layer 3, head 2")
    expect(page.get_by_role("textbox", name="Model", exact=True)).to_have_value(model)
    assert f"model={model}" in page.url


@pytest.mark.browser
def test_keys_on_a_matrix_move_a_cursor_and_say_the_value_not_its_logarithm(page: Page, run: Run) -> None:
    open_page(page, "/heads?model=base&stat=ess2_1024")
    matrix = page.locator("[data-head-matrix]").first
    expect(matrix.locator(".heatmaplayer image")).to_be_attached()
    matrix.focus()
    for key in ("ArrowRight", "ArrowUp", "ArrowUp"):
        page.keyboard.press(key)
    value = run.heads.set_index(["model", "layer", "head"]).loc[("base", 2, 0), "ess2_1024"]
    said = matrix.locator("[aria-live]").inner_text()
    assert said.startswith("layer 2, head 0: ")
    assert float(said.split()[-1]) == pytest.approx(value, rel=1e-3)
    expect(matrix.locator(".cell-cursor")).to_be_visible()
    expect(matrix.locator(".hoverlayer .hovertext")).to_be_visible()


@pytest.mark.browser
@pytest.mark.parametrize("text", ["layer 5 head 3", "L5H3", "5.3", "Layer 5, Head 3"])
def test_go_to_accepts_what_people_write(page: Page, text: str) -> None:
    page.locator("#go-to-head").fill(text)
    page.locator("#go-to-head").press("Enter")
    page.wait_for_url("**/head/5.3*")
    expect(page.locator("h1")).to_have_text("Layer 5, head 3")
    page.go_back()


@pytest.mark.browser
def test_back_restores_the_scroll_position(page: Page) -> None:
    open_page(page, "/heads?model=base")
    table = page.locator("#head-table")
    table.scroll_into_view_if_needed()
    expect(page.locator("#head-table .ag-row").first).to_be_visible()
    page.evaluate("window.scrollTo(0, 500)")
    page.wait_for_timeout(200)
    before = page.evaluate("scrollY")
    assert before > 300
    page.get_by_role("link", name="Runs", exact=True).click()
    expect(page.locator("h1")).to_have_text("Runs")
    assert page.evaluate("scrollY") == 0
    page.go_back()
    expect(page.locator("#head-table")).to_be_visible()
    page.wait_for_function("(before) => Math.abs(scrollY - before) < 20", arg=before)


@pytest.mark.browser
def test_the_lens_shows_its_query_and_folds_blank_lines(page: Page, run: Run) -> None:
    queries = sorted(run.top_keys.query("context_length == 256")["query"].unique())
    open_page(page, f"/lens?model=base&length=256&layer=1&head=1&row={queries[-2]}")
    token = page.locator(".passage .token.marked").first
    expect(token).to_be_in_viewport()
    assert page.locator(".passage").first.evaluate("passage => passage.scrollHeight") < 1500, "256 tokens on a screen"


def test_a_model_has_one_style_in_all_runs() -> None:
    def colour(models: list[str]) -> str:
        return style.model_styles(pd.DataFrame({"model": models}))["yarn"].colour

    assert len({colour(["yarn"]), colour(["base", "yarn"]), colour(["adarope", "x", "yarn"])}) == 1
    named = style.model_styles(pd.DataFrame({"model": ["yarn · first", "base"]}))["yarn · first"].colour
    assert named == colour(["yarn"]), "a label that two runs share keeps the style of its scheme"


@pytest.mark.slow
def test_the_default_model_is_no_intermediate_checkpoint(tmp_path: Path) -> None:
    run = synthetic_run(tmp_path, models=("step 10", "step 20", "base"), layers=1, heads=2, groups=1, docs=1)
    for entry, step in zip(run.manifest["models"], (10, 20, None), strict=True):
        entry |= {"training": "run", "step": step} if step else {}
    run.models = run.models[2:] + run.models[:2]
    run.manifest["models"] = run.manifest["models"][2:] + run.manifest["models"][:2]
    assert ViewState.from_query({}, run).model == "step 20"
    run.manifest["models"].reverse()
    assert ViewState.from_query({}, run).model == "base"
