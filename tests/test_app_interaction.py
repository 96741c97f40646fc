"""The app in a browser: nothing typed or sorted is lost, and what is not shown is said."""

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
from flask import Flask
from playwright.sync_api import Page, Route, expect
from support.app_pages import choose_option, wait_until_drawn
from support.synthetic_runs import synthetic_run

from dashboards.empty_pages import _runs_with_data
from dashboards.layout import all_pages
from dashboards.pages import compare, head, heads
from dashboards.playground.components import _value as playground_value
from dashboards.run_store import RunStore
from headscope.cli.flags import EXAMPLES, example_run
from headscope.runs.run import Run

pytestmark = pytest.mark.browser
TINY = {"layers": 2, "heads": 4, "groups": 2, "pairs": 2, "lengths": (256,), "docs": 2}
ALL_LINKS = """() => [
    ...[...document.querySelectorAll("a[href^='/']")].map((link) => link.getAttribute("href")),
    ...[...document.querySelectorAll(".js-plotly-plot")].flatMap((plot) => plot.layout?.meta?.cell_links?.flat() ?? []),
]"""
NEWER = "29991231T000000Z-newer-00000000"


@pytest.fixture(scope="module")
def many_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Thirty copies of a run of 32 layers."""
    folder = tmp_path_factory.mktemp("many")
    run = synthetic_run(folder, models=("base",), layers=32, heads=4, groups=2, pairs=2, lengths=(256,), docs=2)
    for number in range(29):
        shutil.copytree(run.path, folder / f"20260101T0000{number:02d}Z-copy-{number:08d}")
    return folder


def test_a_click_keeps_a_typed_note_and_a_sorted_table(
    many_runs: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    page = browse(f"{serve(many_runs)}/runs")
    note = page.get_by_label("Note", exact=True)
    note.fill("not saved yet")
    requests: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    for place in ("h1", "#content .text-block p", "textarea"):
        page.locator(place).first.click()
    page.wait_for_timeout(300)
    assert not [url for url in requests if "_dash-update-component" in url], "a click loads nothing"
    expect(note).to_have_value("not saved yet")

    page = browse(f"{serve(many_runs)}/heads")
    header = page.locator(".ag-header-cell[col-id=ess2_256] .ag-header-cell-label")
    header.click()
    page.wait_for_url("**sort=ess2_256-asc*")
    cell = page.locator(".ag-pinned-left-cols-container .ag-row[row-index='0'] [col-id=layer]")
    expect(cell).not_to_have_text("0")
    first = page.locator(".ag-pinned-left-cols-container .ag-row[row-index='0']").inner_text()
    page.locator("#head-table-count").click()
    page.wait_for_timeout(300)
    assert page.locator(".ag-pinned-left-cols-container .ag-row[row-index='0']").inner_text() == first
    assert "sort=ess2_256-asc" in page.url


def test_the_table_of_heads_stays_where_it_is_when_a_head_is_selected(
    many_runs: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    page = browse(f"{serve(many_runs)}/heads")
    expect(page.locator("#head-table .ag-row").first).to_be_visible()
    viewport = page.locator("#head-table .ag-body-viewport")
    top = viewport.evaluate("(element) => { element.scrollTop = 1e6; return element.scrollTop; }")
    assert top > 1000
    page.locator("#head-table .ag-row[row-index='126'] input[type=checkbox]").check()
    expect(page.locator("#head-table-count")).to_contain_text("1 selected")
    expect(page.locator("#head-table .ag-row-selected input")).to_be_visible()
    page.wait_for_timeout(500)
    assert viewport.evaluate("(element) => element.scrollTop") == top


def test_a_newer_run_is_offered_and_controls_go_on_working(
    tmp_path: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    first = synthetic_run(tmp_path, **TINY)
    page = browse(f"{serve(tmp_path)}/heads", reload=True)
    for name in ("29990101T000000Z-new-00000000", NEWER):  # the second offer replaces the first
        shutil.copytree(first.path, tmp_path / name)
        page.evaluate("window.headscopePoll()")
        expect(page.locator("#newer-run-link")).to_contain_text("new")
    expect(page.locator("#newer-run")).to_contain_text("newer, 12-31 00:00")
    page.get_by_label("Model", exact=True).first.click()
    page.get_by_role("option", name="yarn", exact=True).click()
    expect(page.locator(".introduction")).to_have_text(re.compile(r"^yarn\b(?!.*\bbase\b)"))
    page.locator("#newer-run-link").click()
    page.wait_for_url(f"**run={NEWER}*")
    expect(page.locator("#newer-run")).to_be_hidden()
    wait_until_drawn(page)


def test_a_chart_that_fails_is_named_in_its_place_and_the_log_has_the_traceback(
    tmp_path: Path,
    serve: Callable[[Path], str],
    browse: Callable[..., Page],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
):
    synthetic_run(tmp_path, **TINY)

    def fail(*_: object) -> None:
        raise IndexError("index 3200 is out of bounds")

    monkeypatch.setattr("dashboards.components.highlight_heads", fail)
    page = browse(f"{serve(tmp_path)}/heads")
    expect(page.locator("main .notice").first).to_contain_text("IndexError: index 3200 is out of bounds")
    expect(page.locator("#head-table .ag-row").first).to_be_visible()
    assert any(record.exc_info and record.exc_info[0] is IndexError for record in caplog.records)


def test_a_request_to_the_shared_server_is_not_in_the_log_of_a_test(
    tmp_path: Path, serve: Callable[[Path], str], caplog: pytest.LogCaptureFixture
):
    synthetic_run(tmp_path, **TINY)
    with urlopen(f"{serve(tmp_path)}/newest-run") as reply:
        assert reply.status == 200
    assert caplog.messages == []


def test_bounds_and_the_colour_bar_state_the_values_of_the_model(
    tmp_path: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    heads = synthetic_run(tmp_path, **TINY).heads
    page = browse(f"{serve(tmp_path)}/heads?model=base&stat=cov")
    for name in ("cov", "ess2_256"):
        if name != "cov":
            page.get_by_label("Statistic", exact=True).first.click()
            page.get_by_role("option", name="effective length at 256", exact=True).click()
            page.wait_for_url(f"**stat={name}*")
        values = heads.loc[heads["model"] == "base", name]
        for bound, value in (("Minimum value", values.min()), ("Maximum value", values.max())):
            expect(page.get_by_label(bound)).to_have_attribute("placeholder", f"{value:.4g}")


def test_a_comparison_of_two_documents_says_why_its_panels_are_empty(
    tmp_path: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    synthetic_run(tmp_path, **TINY)
    page = browse(f"{serve(tmp_path)}/compare?rank_lines=changed")
    chart = page.locator("figure", has_text="Rank by").first
    chart.scroll_into_view_if_needed()
    expect(chart.locator(".annotation-text").last).to_contain_text("confidence intervals")


def test_every_link_of_a_page_leads_to_a_page(
    tmp_path: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    synthetic_run(tmp_path, **TINY)
    paths = {page.PATH for page in all_pages()}
    for path in ("/runs", "/heads"):
        page = browse(f"{serve(tmp_path)}{path}")
        links = page.evaluate(ALL_LINKS)
        assert {urlsplit(link).path.replace("/head/", "/head?").split("?")[0] for link in links} <= paths
    browse(f"{serve(tmp_path)}/runs")
    links = page.evaluate("document.querySelector('.js-plotly-plot').layout.meta.cell_links.flat()")
    assert "/heads" in {urlsplit(link).path for link in links}, "the measures are shown on the page of heads"


def test_a_table_that_is_damaged_while_the_app_runs_is_refused(
    tmp_path: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    run = synthetic_run(tmp_path, **TINY)
    page = browse(f"{serve(tmp_path)}/heads?run={run.name}")
    expect(page.locator("#head-table .ag-row").first).to_be_visible()
    (run.path / "attention.parquet").write_bytes(b"PAR1 no more")
    page.reload()
    expect(page.locator("h1")).to_have_text("Nothing to show")
    expect(page.locator("#content")).to_contain_text("attention.parquet")


def test_a_run_that_starts_later_shows_its_progress(
    tmp_path: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    synthetic_run(tmp_path, **TINY)
    page = browse(f"{serve(tmp_path)}/runs")
    expect(page.locator("#run-progress")).to_have_text(re.compile(r"^[^\d]+$"))
    cells = tmp_path / ".study-1.partial" / "cells"
    (cells / "a").mkdir(parents=True)
    (cells.parent / "plan.json").write_text('{"cells": 4}')
    page.evaluate("window.headscopePoll()")
    expect(page.locator("#run-progress")).to_have_text(re.compile(r"\bstudy-1\b.*\b1\b.*\b4\b"))


def test_an_empty_page_opens_the_run_that_fills_it(serve: Callable[[Path], str], browse: Callable[..., Page]):
    example = example_run().name
    page = browse(f"{serve(EXAMPLES)}/patching?run={example}")
    link = page.get_by_role("link", name=re.compile("^Open patching,"))
    expect(link).to_be_visible()
    expect(page.locator("#content pre")).to_contain_text("headscope patch")
    link.click()
    page.wait_for_url("**run=*-patching-*")
    expect(page.locator("#content .dash-graph").first).to_be_visible()


def test_a_link_keeps_a_choice_whose_page_has_not_arrived_and_the_sort_of_the_browser(
    tmp_path: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    synthetic_run(tmp_path, **TINY)
    page = browse(f"{serve(tmp_path)}/heads?model=base&layers=0-0&sort=cov-asc")
    held: list[Route] = []
    page.route("**/_dash-update-component*", lambda route: held.append(route))
    choose_option(page, "Model", "yarn")
    page.wait_for_url("**model=yarn*")
    page.get_by_role("link", name="Show all").click()
    page.wait_for_url(lambda url: "layers=" not in url)
    assert "model=yarn" in page.url
    assert "sort=cov-asc" in page.url
    page.unroute("**/_dash-update-component*")  # lets them go on
    expect(page.locator(".introduction")).to_have_text(re.compile(r"^yarn\b(?!.*\bbase\b)"))
    expect(page.locator("#head-table-count")).to_contain_text("8 heads.")


def test_a_page_that_is_shown_late_does_not_take_back_a_later_choice(
    tmp_path: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    synthetic_run(tmp_path, **TINY)
    page = browse(f"{serve(tmp_path)}/heads?model=base")
    page.evaluate(
        """() => {
            const functions = window.dash_clientside.headscope, { showState } = functions;
            functions.showState = (state) => { window.shown = () => showState(state); return showState(state); };
        }"""
    )
    choose_option(page, "Model", "yarn")
    expect(page.locator(".introduction")).to_have_text(re.compile(r"^yarn\b(?!.*\bbase\b)"))
    page.wait_for_function("window.shown !== undefined")
    held: list[Route] = []
    page.route("**/_dash-update-component*", lambda route: held.append(route))
    choose_option(page, "Baseline", "base")
    page.wait_for_url("**baseline=base*")
    page.evaluate("window.shown()")  # the page of the first choice
    assert "baseline=base" in page.url
    page.unroute("**/_dash-update-component*")  # lets them go on
    expect(page.locator(".introduction")).to_have_text(re.compile(r"^yarn\b.*\bbase\b"))
    expect(page.get_by_label("Baseline", exact=True).first).to_have_value("base")


def test_a_link_sets_the_prompt_whatever_was_typed_before() -> None:
    """A typed prompt returns in the same tab only where no link names one."""
    assert "persistence" not in playground_value({"prompt": "of the link"}, "prompt", "")
    assert playground_value({}, "prompt", "an example") == {
        "value": "an example",
        "persistence": True,
        "persistence_type": "session",
    }


def test_runs_that_fill_a_page_are_found_without_reading_their_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = synthetic_run(tmp_path, probes=("window",), **TINY)
    full = synthetic_run(tmp_path, probes=("measure",), **TINY)
    monkeypatch.setattr(Run, "table", lambda *_: pytest.fail("a table was read"))
    server = Flask("test")
    server.config["RUN_STORE"] = RunStore(tmp_path)
    with server.app_context():
        for page in (heads, compare, head):
            assert [*_runs_with_data(page, Run.open(empty.path))] == [full.path.name]
