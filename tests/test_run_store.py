"""The listing of the app: it reads run.json only, is reused for a moment, and notices what changes."""

import os
import shutil
from pathlib import Path

import pytest
from support.refusals import refuses
from support.synthetic_runs import synthetic_run

from dashboards import run_store
from dashboards.app import create_app
from dashboards.components import PAGE_ROWS, build_component
from dashboards.run_store import RunStore
from headscope.errors import BadRun
from headscope.rendering.blocks import RecordTable
from headscope.runs.run import Run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of five runs."""
    original = synthetic_run(tmp_path, layers=2, docs=2, lengths=(64,), probes=("measure",)).path
    for number in range(1, 5):
        shutil.copytree(original, original.with_name(f"2030010{number}T000000Z-copy-0000000{number}"))
    return tmp_path


@pytest.fixture
def touched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files that are looked at with os.stat."""
    paths: list[str] = []
    stat = os.stat

    def recorded(path, *args, **kwargs):
        paths.append(str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", recorded)
    return paths


def test_a_listing_looks_at_no_table(folder: Path, touched: list[str]) -> None:
    assert len(RunStore(folder).list_runs()) == 5
    assert not [path for path in touched if path.endswith(".parquet")]


def test_a_second_listing_looks_at_the_folder_only(folder: Path, touched: list[str]) -> None:
    store = RunStore(folder)
    store.list_runs()
    touched.clear()
    listed = store.list_runs(), store.readable_names(), store.fingerprint(), store.newest_since_start()
    assert all(listed[:3])
    assert listed[3] is None
    assert {*touched} == {str(folder)}


def test_added_and_removed_runs_are_listed_at_once(folder: Path) -> None:
    store = RunStore(folder)
    newest = next(iter(store.list_runs()))
    shutil.copytree(folder / newest, folder / "20310101T000000Z-later-00000005")
    assert store.newest_since_start() == next(iter(store.list_runs())) == "20310101T000000Z-later-00000005"
    shutil.rmtree(folder / newest)
    assert newest not in store.list_runs()


def test_a_changed_run_json_is_noticed_when_the_scan_is_old(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = RunStore(folder)
    newest = next(iter(store.list_runs()))
    (folder / newest / "run.json").write_text("{")
    monkeypatch.setattr(run_store, "SCAN_SECONDS", -1.0)
    assert isinstance(store.list_runs()[newest], BadRun)


def test_a_run_with_damaged_tables_is_marked_once_it_was_opened_and_until_it_is_repaired(folder: Path) -> None:
    store = RunStore(folder)
    newest, second, *_ = store.list_runs()
    file = folder / newest / "attention.parquet"
    good = file.read_bytes()
    file.write_bytes(good[:-5])
    assert isinstance(store.list_runs()[newest], Run)
    assert store.open_combined([]).path.name == second  # an incomplete run is not the default
    assert isinstance(store.list_runs()[newest], BadRun)
    with refuses(BadRun, file):
        store.open_combined([newest])
    file.write_bytes(good)
    assert store.open_combined([newest]).path.name == newest
    assert isinstance(store.list_runs()[newest], Run)


def test_a_long_table_of_runs_has_pages(folder: Path) -> None:
    with create_app(folder).server.test_request_context():
        for count in (PAGE_ROWS, PAGE_ROWS + 1):
            block = RecordTable("Runs", [{"run": str(number), "href": ""} for number in range(count)])
            options = build_component(block, None, "0").children[1].dashGridOptions  # type: ignore[arg-type]
            assert options.get("pagination", False) == (count > PAGE_ROWS)
