"""The app in a browser: nothing typed or sorted is lost, and what is not shown is said."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect
from support.app_pages import wait_until_drawn

from headscope.runs.synthetic import synthetic_run

pytestmark = pytest.mark.browser
TINY = {"layers": 2, "heads": 4, "groups": 2, "pairs": 2, "lengths": (256,), "docs": 2}
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


def test_a_newer_run_is_offered_and_controls_go_on_working(
    tmp_path: Path, serve: Callable[[Path], str], browse: Callable[..., Page]
):
    first = synthetic_run(tmp_path, **TINY)
    page = browse(f"{serve(tmp_path)}/heads", reload=True)
    for name in ("29990101T000000Z-new-00000000", NEWER):  # the second offer replaces the first
        shutil.copytree(first.path, tmp_path / name)
        page.evaluate("window.headscopePoll()")
        expect(page.locator("#newer-run-link")).to_contain_text("new")
    expect(page.locator("#newer-run")).to_have_text("A newer run has finished: newer, 12-31 00:00")
    page.get_by_label("Model", exact=True).first.click()
    page.get_by_role("option", name="yarn", exact=True).click()
    expect(page.locator(".introduction")).to_have_text("yarn, head by head.")
    page.locator("#newer-run-link").click()
    page.wait_for_url(f"**run={NEWER}*")
    expect(page.locator("#newer-run")).to_be_hidden()
    wait_until_drawn(page)
