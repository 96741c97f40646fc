"""The one door: a probe from outside brings all it has without a line changed here, and a broken one harms nothing."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect
from test_study import save_checkpoint, save_texts

from headscope import plugins

ROOT = Path(__file__).parents[1]
OUTSIDE = Path(__file__).with_name("outside")
KINDS: tuple[plugins.Kind, ...] = plugins.Kind.__args__


def headscope(*arguments: object, path: Path = OUTSIDE) -> subprocess.CompletedProcess[str]:
    """The command line in a process that finds what lies in `path` installed, too."""
    command = [sys.executable, "-m", "headscope.cli.app", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(path)}, cwd=ROOT
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of the probe from outside, in `runs`, and what its command printed, in `told.json`."""
    place = tmp_path_factory.mktemp("outside")
    tiny, texts = save_checkpoint(place / "tiny"), save_texts(place / "texts")
    flags = ("--model", f"base={tiny}", "--text", texts, "--docs", 1, "--lengths", "24,40", "--power", 2, "--json")
    done = headscope("norms", *flags, "--out", place / "runs")
    assert done.returncode == 0, done.stderr
    (place / "told.json").write_text(done.stdout)
    return place


# Every part of ours ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", plugins.probes().values(), ids=lambda probe: probe.name)
@pytest.mark.parametrize("kind", KINDS)
def test_every_part_that_a_probe_of_ours_names_is_there(probe: plugins.Probe, kind: plugins.Kind) -> None:
    assert (plugins.load_part(probe, kind) is not None) == bool(getattr(probe, kind))


def test_nothing_of_ours_is_broken() -> None:
    assert [probe.name for probe in plugins.probes().values()] == [
        *(
            "measure",
            "patterns",
            "adapt",
            "pretrain",
            "detectors",
            "attribution",
            "needle",
            "evaluate",
            "influence",
            "window",
            "scaling",
        )
    ]
    assert plugins.reported_problems() == []


@pytest.mark.parametrize(
    "probe", [p for p in plugins.probes().values() if p.runner.startswith("probes.")], ids=lambda p: p.name
)
def test_no_file_but_a_probe_s_own_names_it(probe: plugins.Probe) -> None:
    """So that removing its folder and its entry point removes it everywhere."""
    home = probe.runner.split(".")[1]
    names = [table.name for table in plugins.load_part(probe, "tables")] + list(plugins.load_part(probe, "statistics") or ())
    quoted = "|".join(map(re.escape, {probe.name, *names}))
    naming = re.compile(rf"probes[./]{home}\b|[\"'`]({quoted})[\"'`]|run\.({'|'.join(map(re.escape, names))})\b")
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.py", "*.jinja"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    code = [name for name in tracked.stdout.split() if name.startswith(("headscope/", "dashboards/", "probes/"))]
    others = [name for name in code if not name.startswith(f"probes/{home}/") and (ROOT / name).is_file()]
    assert len(others) > 50
    assert [name for name in others if naming.search((ROOT / name).read_text(encoding="utf-8"))] == []


# A probe from outside ----------------------------------------------------------------------------------------------


def test_it_is_small() -> None:
    files = sorted(OUTSIDE.rglob("*.py"))
    assert [file.name for file in files] == ["__init__.py", "cells.py"]
    assert sum(len(file.read_text().splitlines()) for file in files) <= 120


def test_it_adds_a_section_a_table_and_a_column(made: Path) -> None:
    told = json.loads((made / "told.json").read_text())
    assert told["tables"]["norms"] == 2 * 4 * 4
    code = f"import headscope; print(headscope.Run.open({told['path']!r}).heads['query_norm'].describe())"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(OUTSIDE)}
    )
    assert "count     16.0" in done.stdout, done.stderr


def test_it_adds_a_command_with_help_and_keys_of_a_study(made: Path, tmp_path: Path) -> None:
    done = headscope("norms", "--help")
    assert "How long the queries of each head are." in done.stdout
    assert "--power" in done.stdout
    study = tmp_path / "study.yaml"
    study.write_text("norms: {powr: 2}\n")
    done = headscope("run", study)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "did you mean 'power'?" in done.stderr


def test_it_adds_a_chapter_with_a_chart_a_finding_and_a_term(made: Path, tmp_path: Path) -> None:
    (run,) = (made / "runs").glob("2*")
    done = headscope("report", run, "--out", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert re.search(r"<h2[^>]*>Query norms</h2>", page)
    assert re.search(r"<li>The median query of base is [\d.]+ long\.</li>", page)
    assert "how loudly a head asks" in page


@pytest.fixture
def app(made: Path) -> Iterator[str]:
    """The address of the app on the run."""
    command = [sys.executable, "-m", "headscope.cli.app", "dash", str(made / "runs"), "--port", "0"]
    environment = {**os.environ, "PYTHONPATH": str(OUTSIDE)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as server:
        assert server.stdout is not None
        lines = [server.stdout.readline(), server.stdout.readline()]
        yield lines[1].split()[1]
        server.terminate()


@pytest.mark.browser
def test_it_adds_a_page_to_the_app(app: str, chromium: Browser) -> None:
    page = chromium.new_page()
    page.goto(app)
    page.get_by_role("link", name="Query norms").click()
    expect(page.get_by_role("heading", level=1)).to_have_text("Query norms")
    expect(page.get_by_text("The median query of base is")).to_be_visible()
    page.wait_for_selector(".js-plotly-plot .heatmaplayer image")
    assert page.url.startswith(f"{app}/query-norms")
    page.close()


# Broken ------------------------------------------------------------------------------------------------------------


def broken(folder: Path, declaration: str) -> Path:
    """A package in `folder` that is installed with this declaration of a probe."""
    (folder / "wrong.py").write_text(f"from headscope.plugins import Probe\n{declaration}\n")
    info = folder / "wrong-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: wrong\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[headscope.probes]\nwrong = wrong:PROBE\n")
    return folder


@pytest.mark.parametrize(
    ("declaration", "told"),
    [
        ("PROBE = 3", "its declaration fails with TypeError"),
        ("import nothing_of_that_name", "its declaration fails with ModuleNotFoundError"),
        ("PROBE = Probe('wrong', 'W', 'w', config='wrong:gone', cells='')", "its config fails with AttributeError"),
        (
            "PROBE = Probe('wrong', 'W', 'w', config='', cells='', charts='gone:charts')",
            "its charts fails with ModuleNot",
        ),
        (
            "def charts(shown):\n    yield 1 / 0\n"
            "PROBE = Probe('wrong', 'W', 'w', config='', cells='', charts='wrong:charts')",
            "its charts fails with ZeroDivisionError",
        ),
    ],
)
def test_a_broken_part_is_one_clear_line_and_the_rest_works(
    declaration: str, told: str, made: Path, tmp_path: Path
) -> None:
    (run,) = (made / "runs").glob("2*")
    done = headscope("report", run, "--out", tmp_path / "report.html", path=broken(tmp_path, declaration))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report.html").is_file()
    if "config" in told:  # which nothing asks for before a study is read
        done = headscope(
            "scaling", "--length", "100", "--seeds", 2, "--out", tmp_path / "runs", "--quiet", path=tmp_path
        )
        assert done.returncode == 0
    (line,) = done.stderr.splitlines()
    assert line.startswith("headscope: probe 'wrong': ")
    assert told in line


def test_asking_for_a_broken_section_is_one_line(tmp_path: Path) -> None:
    folder = broken(tmp_path, "PROBE = Probe('wrong', 'W', 'w', config='wrong:gone', cells='')")
    done = headscope("wrong", "--out", tmp_path / "runs", path=folder)
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("headscope: probe 'wrong': its config fails with AttributeError")
    assert not (tmp_path / "runs").exists()
