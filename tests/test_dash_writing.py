"""What the app writes (notes and tags on runs), what it copies (Python code), filters together, and live progress."""

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from playwright.sync_api import Browser, Page, expect
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run
from werkzeug.serving import make_server

from dashboards.app import create_app
from dashboards.export import python_code
from dashboards.layout import browser_state, resolve_url
from dashboards.lazy_loading import rendered_page
from dashboards.navigation import all_pages
from dashboards.pages.runs import run_records
from dashboards.python_view import figure_title, open_view
from dashboards.run_notes import save_notes
from dashboards.view_state import ViewState
from headscope.errors import BadInput, CannotWrite
from headscope.rendering.blocks import Chart
from headscope.runs.notes import MAX_NOTE, RunNotes, read_notes, write_notes
from headscope.runs.run import Run, run_progress
from headscope.runs.run_tables import validate

OWN_PAGE = {"base_url": "http://127.0.0.1:8050", "headers": {"Origin": "http://127.0.0.1:8050"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return synthetic_run(tmp_path_factory.mktemp("runs"), layers=3, heads=4, groups=2, lengths=(256,), docs=3)


@pytest.fixture(scope="module")
def server(run: Run) -> Flask:
    return create_app(run.path.parent).server


# Notes and tags ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_notes_are_stored_beside_the_run_and_shown_in_the_table(run: Run, server: Flask) -> None:
    with server.test_request_context(**OWN_PAGE):
        saved = save_notes(run.path.name, " <b>two</b>\nlines ", "baseline, , draft, baseline")
        assert_names(saved, f"{run.path.name}/notes.json")
        row = next(row for row in run_records() if row["run"] == run.path.name)
        assert (row["tags"], row["note"]) == ("baseline, draft", "<b>two</b>\nlines")
        assert "&lt;b&gt;" not in str(rendered_page("/runs", "").all_components()), "components escape text themselves"
    assert read_notes(run.path) == RunNotes("<b>two</b>\nlines", ("baseline", "draft"))
    assert validate(Run.open(run.path)) == []


@pytest.mark.slow
def test_a_note_that_cannot_be_stored_is_refused_and_leaves_no_file(run: Run) -> None:
    for note, tags in (("x\ud800", "a"), ("x", "a\ud800")):
        with refuses(BadInput, r"'\ud800'"):
            RunNotes.parse(note, tags)
    with pytest.raises(UnicodeEncodeError):
        write_notes(run.path, RunNotes("x\ud800"))
    assert not (run.path / ".notes.json").exists()


@pytest.mark.parametrize(
    ("name", "note", "tags", "named"),
    [
        ("../x", "", "", ("'../x'",)),
        (None, "x" * (MAX_NOTE + 1), "", ("4,001", "4,000")),
        (None, "", "t" * 41, (f"'{'t' * 41}'", 40)),
        (None, "", ",".join(map(str, range(21))), ("21 tags", 20)),
    ],
)
def test_bad_notes_are_refused(
    run: Run, server: Flask, name: str | None, note: str, tags: str, named: tuple[str | int, ...]
) -> None:
    with server.test_request_context(**OWN_PAGE), refuses(BadInput, *named):
        save_notes(name or run.path.name, note, tags)


def test_only_the_own_page_of_a_writable_app_writes(run: Run, server: Flask) -> None:
    with (
        server.test_request_context(base_url="http://127.0.0.1:8050", headers={"Origin": "http://evil.example"}),
        refuses(BadInput, "page"),
    ):
        save_notes(run.path.name, "x", "")
    app = create_app(run.path.parent, read_only=True)
    assert not [name for name in app.callback_map if "notes-saved" in name]
    with app.server.test_request_context(**OWN_PAGE), refuses(CannotWrite, "--read-only"):
        save_notes(run.path.name, "x", "")
    with app.server.app_context():
        assert "Notes and tags" not in resolve_url("/runs", {})[3].sections


def test_the_shipped_runs_are_read_only(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    served: list[Any] = []
    monkeypatch.setattr("dashboards.app.serve", lambda *arguments: served.append(arguments))
    assert request.getfixturevalue("headscope")("dash")[0] == 0
    assert request.getfixturevalue("headscope")("dash", str(Path(__file__).parent))[0] == 0
    assert request.getfixturevalue("headscope")("dash", str(Path(__file__).parent), "--read-only")[0] == 0
    assert [read_only for *_, read_only, _ in served] == [True, False, True]


def test_a_damaged_notes_file_is_no_note(tmp_path: Path) -> None:
    (tmp_path / "notes.json").write_text("[1]")
    assert read_notes(tmp_path) == RunNotes()
    (tmp_path / "notes.json").write_text('{"note": 3, "tags": "x"}')
    assert read_notes(tmp_path) == RunNotes("3")
    with refuses(CannotWrite, tmp_path / "missing"):
        write_notes(tmp_path / "missing", RunNotes())


# Copy as Python ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_copied_code_opens_the_figures_of_every_page(run: Run, server: Flask) -> None:
    with server.app_context():
        names = {page.PATH: resolve_url(page.PATH, {}) for page in all_pages() if page.PATH != "/playground"}
        charts = {
            path: [
                figure_title(block.figure)
                for section in content.sections.values()
                for block in section
                if isinstance(block, Chart)
            ]
            for path, (_, _, _, content) in names.items()
        }
        states = {path: browser_state(path, "", *rest) for path, rest in names.items()}
    assert sum(map(len, charts.values())) > 30
    for path, titles in charts.items():
        scope: dict[str, Any] = {}
        exec(states[path]["python"], scope)
        figures = {re.sub(r" \(\d+\)$", "", title) for title in scope["view"].figures}
        assert {*titles} <= figures, path  # equal titles are numbered


def test_the_copied_code_gives_the_heads_that_the_page_shows(run: Run) -> None:
    heads = run.heads[(run.heads["model"] == "base")]
    bound = float(heads["growth"].median())
    address = f"/heads?run={run.path.name}&model=base&stat=growth&min={bound}&layers=1-2&heads=1.0_2.3"
    scope: dict[str, Any] = {}
    exec(python_code(run.path.parent, address), scope)
    view = scope["view"]
    passing = heads[(heads["growth"] >= bound) & (heads["layer"] > 0)][["layer", "head"]].apply(tuple, axis=1)
    assert {*view.heads[["layer", "head"]].apply(tuple, axis=1)} == {*passing}, "selected or not"
    assert view.run.attention.equals(run.attention)
    with refuses(BadInput, "'Los'"):
        view.figures["Los"]
    with refuses(BadInput, "'other'"):
        open_view(run.path.parent, "/heads?run=other")


# Filters together ----------------------------------------------------------------------------------------------------


def test_layers_role_statistic_and_set_filter_together(run: Run) -> None:
    heads = run.heads[run.heads["model"] == "base"]
    members = [(layer, head) for layer in range(3) for head in (0, 1, 3)]
    query = {
        "model": "base",
        "stat": "growth",
        "max": "0.9",
        "layers": "0-1",
        "role": "local",
        "sets": f"mine:{'_'.join(f'{layer}.{head}' for layer, head in members)}",
        "set": "mine",
    }
    view = ViewState.from_query(query, run)
    filtered_heads = {*view.filter_heads(heads)[["layer", "head"]].apply(tuple, axis=1)}
    without_set = ViewState.from_query({name: value for name, value in query.items() if name != "set"}, run)
    expected = {*without_set.filter_heads(heads)[["layer", "head"]].apply(tuple, axis=1)} & {*members}
    assert filtered_heads == expected
    assert_names(" ".join(view.describe_filters()), "mine")
    (note,) = ViewState.from_query({**query, "set": "other"}, run).notes
    assert_names(note, "set", "\u2018other\u2019")


def test_the_set_filter_is_offered_once_there_is_a_set(run: Run, server: Flask) -> None:
    with server.app_context():
        for sets, is_offered in ({}, False), ({"sets": "mine:1.0"}, True):
            page, opened, view, content = resolve_url("/heads", sets)
            state = browser_state("/heads", "", page, opened, view, content)
            assert ("set" in state["control_values"]) == is_offered
            assert state["head_sets"] == (["mine"] if is_offered else [])


# Live progress -------------------------------------------------------------------------------------------------------


def test_progress_counts_stored_and_planned_work_items(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / ".study-1.partial" / "cells" / name).mkdir(parents=True)
    (progress,) = run_progress(tmp_path)
    assert (progress.name, progress.stored_jobs, progress.planned_jobs) == ("study-1", 3, None)
    assert progress.describe().startswith("3 work items stored; last change 0 s ago")
    (tmp_path / ".study-1.partial" / "plan.json").write_text(json.dumps({"cells": 12}))
    (progress,) = run_progress(tmp_path)
    assert progress.describe().startswith("3 of 12 work items stored")
    client = create_app(tmp_path).server.test_client()
    assert client.get("/run-progress").json == [f"study-1: {progress.describe()}."]


@pytest.fixture(scope="module")
def tab(run: Run, server: Flask, chromium: Browser) -> Iterator[Page]:
    web = make_server("127.0.0.1", 0, server, threaded=True)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    context = chromium.new_context(
        viewport={"width": 1440, "height": 900}, permissions=["clipboard-read", "clipboard-write"]
    )
    page, problems = context.new_page(), list[str]()
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"http://127.0.0.1:{web.server_port}/runs")
    yield page
    context.close()
    web.shutdown()
    assert problems == []


@pytest.mark.browser
def test_a_note_is_saved_and_progress_is_live_in_the_browser(tab: Page, run: Run) -> None:
    tab.get_by_label("Tags", exact=True).fill("shared")
    tab.get_by_label("Note", exact=True).fill("Looked at with care.")
    tab.get_by_role("button", name="Save", exact=True).click()
    expect(tab.get_by_text("notes.json.")).to_be_visible()
    assert read_notes(run.path) == RunNotes("Looked at with care.", ("shared",))
    cells = run.path.parent / ".study-1.partial" / "cells"
    (cells / "a").mkdir(parents=True)
    (cells.parent / "plan.json").write_text('{"cells": 4}')
    tab.reload()
    expect(tab.locator("#run-progress")).to_contain_text("study-1: 1 of 4 work items stored")
    expect(tab.locator(".ag-cell", has_text="shared")).to_be_visible()
    (cells / "b").mkdir()
    expect(tab.locator("#run-progress")).to_contain_text("study-1: 2 of 4 work items stored", timeout=10_000)


@pytest.mark.browser
def test_a_chart_is_copied_as_python_code_that_runs(tab: Page, run: Run) -> None:
    tab.goto(tab.url.split("/runs")[0] + "/heads?model=base&stat=growth")
    tab.get_by_role("button", name="Copy as Python: ").first.click()
    expect(tab.get_by_role("button", name="Copy as Python: ").first).to_have_text("Copied")
    *lines, last = tab.evaluate("navigator.clipboard.readText()").strip().splitlines()
    scope: dict[str, Any] = {}
    exec("\n".join(lines), scope)
    assert eval(last.removesuffix(".show()"), scope).data[0].type == "heatmap"
    tab.get_by_role("button", name="Copy as Python", exact=True).click()
    assert tab.evaluate("navigator.clipboard.readText()").strip().splitlines() == lines
