"""Clicks, keys, Back and the box "Go to" lead to what they show; a model keeps its style and the default is no step."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pandas as pd
import pytest
from playwright.sync_api import Page, Route, expect
from support.app_pages import FOLLOW_LINK, wait_until_drawn
from support.synthetic_runs import synthetic_run

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


@pytest.fixture
def open_page(run: Run, serve: Callable[[Path], str], browse: Callable[..., Page]) -> Callable[[str], Page]:
    return lambda path: browse(f"{serve(run.path.parent)}{path}")


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
def test_a_click_on_the_chart_of_a_model_opens_the_head_of_that_model(
    open_page: Callable[[str], Page], model: str
) -> None:
    other = {"base": "yarn", "yarn": "base"}[model]
    page = open_page(f"/retrieval?model={other}&tab=retrieval-scores-of-heads")
    click_middle(page, "Retrieval score of every head", model)
    expect(page.locator("h1")).to_have_text("Layer 3, head 2")
    expect(page.get_by_role("textbox", name="Model", exact=True)).to_have_value(model)
    assert f"model={model}" in page.url


@pytest.mark.browser
def test_keys_on_a_matrix_move_a_cursor_and_say_the_value_not_its_logarithm(
    open_page: Callable[[str], Page], run: Run
) -> None:
    page = open_page("/heads?model=base&stat=ess2_1024")
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
def test_go_to_accepts_what_people_write(open_page: Callable[[str], Page], text: str) -> None:
    page = open_page("/")
    page.locator("#go-to-head").fill(text)
    page.locator("#go-to-head").press("Enter")
    page.wait_for_url("**/head/5.3*")
    expect(page.locator("h1")).to_have_text("Layer 5, head 3")


@pytest.mark.browser
def test_back_restores_the_scroll_position(open_page: Callable[[str], Page]) -> None:
    page = open_page("/heads?model=base")
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
def test_the_lens_shows_its_query_and_folds_blank_lines(open_page: Callable[[str], Page], run: Run) -> None:
    queries = sorted(run.top_keys.query("context_length == 256")["query"].unique())
    page = open_page(f"/lens?model=base&length=256&layer=1&head=1&row={queries[-2]}")
    token = page.locator(".passage .token.marked").first
    expect(token).to_be_in_viewport()
    assert page.locator(".passage").first.evaluate("passage => passage.scrollHeight") < 1500, "256 tokens on a screen"


# A page that is opened while an earlier one is on its way


@contextmanager
def late_timers(page: Page) -> Iterator[None]:
    """Timers that do not run at once run after three seconds, as in a busy browser."""
    page.evaluate(
        """() => { window.punctualTimeout = setTimeout;
        window.setTimeout = (run, delay, ...rest) => punctualTimeout(run, delay < 50 ? delay : 3000, ...rest); }"""
    )
    try:
        yield
    finally:
        page.evaluate("() => { window.setTimeout = punctualTimeout; }")


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Run]:
    """A run of two models and a run of one, in one folder."""
    folder = tmp_path_factory.mktemp("two")
    size = {"layers": 2, "heads": 4, "groups": 2, "pairs": 2, "lengths": (256,), "docs": 2}
    return synthetic_run(folder, ("base", "yarn"), **size), synthetic_run(folder, ("base",), **size)


def assert_stays(page: Page, path: str, run: Run) -> None:
    """The page of this path and run arrives, and neither the URL nor the control of runs leads elsewhere."""
    expect(page.locator("header nav [aria-current=page]")).to_have_attribute("href", path)
    wait_until_drawn(page)
    page.wait_for_timeout(1000)
    url = urlsplit(page.url)
    assert (url.path, parse_qs(url.query)["run"]) == (path, [run.name])
    assert page.locator("#run-control input[type=hidden]").input_value() == run.name


@pytest.mark.browser
def test_back_after_a_click_shows_the_run_of_the_url(
    two_runs: tuple[Run, Run], serve: Callable[[Path], str], browse: Callable[..., Page]
) -> None:
    first, second = two_runs
    url = serve(first.path.parent)
    for path in ("/heads", "/runs"):
        page = browse(f"{url}{path}?run={first.name}")
    with late_timers(page):
        page.locator(".ag-row", has_text=second.name).locator("[col-id='run']").click()
        page.evaluate("history.go(-2)")
        assert_stays(page, "/heads", first)


@pytest.mark.browser
def test_an_address_that_is_opened_while_a_choice_is_on_its_way_stays(
    two_runs: tuple[Run, Run], serve: Callable[[Path], str], browse: Callable[..., Page]
) -> None:
    first, second = two_runs
    url = serve(first.path.parent)
    page = browse(f"{url}/trials?run={second.name}")
    with late_timers(page):
        page.locator("select[data-navigates]").first.select_option(index=0)
        page.evaluate(FOLLOW_LINK, f"{url}/?run={first.name}")
        assert_stays(page, "/", first)


@pytest.mark.browser
def test_a_table_of_a_page_that_is_left_does_not_change_the_address_of_the_next(
    two_runs: tuple[Run, Run], serve: Callable[[Path], str], browse: Callable[..., Page]
) -> None:
    """The table reports its order late, when the answer of the next page is on its way."""
    first, _ = two_runs
    page = browse(f"{serve(first.path.parent)}/heads?run={first.name}&sort=cov-asc")
    held: list[Route] = []
    page.route(re.compile("_dash-update-component"), lambda route: held.append(route), times=1)
    page.get_by_role("link", name="Runs", exact=True).click()
    page.evaluate("""dash_clientside.set_props("head-table", { columnState: [{ colId: "growth", sort: "desc" }] })""")
    page.wait_for_timeout(500)
    (answer,) = held
    answer.continue_()
    assert_stays(page, "/runs", first)
    assert "sort" not in page.url


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
