"""Every output that a user can name: checked before the work, and what headscope did not write is left alone."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from support.refusals import refuses
from support.synthetic_runs import synthetic_run
from support.tiny_studies import save_checkpoint, save_texts

import headscope as hs
from headscope.base import plugins, signals
from headscope.base.head_set import HeadSet
from headscope.cli import app
from headscope.errors import CannotWrite
from headscope.prompts.needles import read_needles
from headscope.prompts.pairs import read_prompt_pairs
from headscope.prompts.spans import read_span_prompts
from headscope.prompts.texts import read_documents
from headscope.rendering import figure_files
from headscope.rendering.figure_files import IMAGE_FORMATS, MARK
from headscope.results import check_file, checks
from headscope.runs.run_tables import RunTables
from headscope.runs.writer import RunWriter
from headscope.scores import export
from headscope.study import runner
from headscope.study.config import PromptOptions, read_study
from headscope.study.monitor import TrainingMonitor
from headscope.study.prompts import read_prompt

TINY = ("--model", "x={place}/tiny", "--text", "file:{place}/texts/*.txt", "--docs", 1, "--device", "cpu", "--quiet")
OUTPUTS: dict[str, tuple[object, ...]] = {
    "demo out": ("demo", "--report", "{place}/new.html", "--out", "{out}"),
    "demo report": ("demo", "--report", "{out}"),
    "report": ("report", "{run}", "--out", "{out}.html"),
    "chart": ("report", "{run}", "--chart", "Loss by position", "--out", "{out}.html"),
    "charts": ("report", "{run}", "--chart", "loss", "--out", "{out}.html"),
    "join": ("join", "{run}", "{other}", "--quiet", "--out", "{out}"),
    "bundle": ("bundle", "{run}", "--quiet", "--out", "{out}"),
    "export": ("export", "{run}", "--format", "csv", "--score", "cov", "--model", "base", "--out", "{out}"),
    "export folder": ("export", "{run}", "--format", "duo", "--score", "cov", "--model", "base", "--out", "{out}"),
    "check init": ("check", "{run}", "{out}", "--init"),
    "check junit": ("check", "{run}", "{place}/checks.yaml", "--junit", "{out}"),
    "run": ("run", *TINY, "--length", 24, "--out", "{out}"),
}
RUN_FOLDERS = {"demo out", "join", "run"}
"""Outputs that are a folder for any number of runs."""
REPLACED = {"report", "chart", "charts", "bundle", "check junit"}
"""Outputs that replace an older one of their kind."""
INPUT_PATHS = {"directory", "runs", "run", "before", "after", "against", "study_file", "timings", "config", "checks"}
OUTPUT_PATHS = {"out", "report", "junit", "checks"}
"""Parameters of commands that are paths; `checks` is written with --init."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("outputs")
    sizes: dict[str, Any] = {"probes": ["measure"], "layers": 2, "heads": 2, "groups": 2}
    run, other = (synthetic_run(place / "stored", [label], **sizes).path for label in ("base", "other"))
    save_checkpoint(place / "tiny")
    save_texts(place / "texts")
    (place / "checks.yaml").write_text("- {statistic: cov, median: true, at_least: 0}\n")
    return {"place": place, "run": run, "other": other}


def arguments(output: str, shared: dict[str, Path], out: Path | str) -> list[str]:
    return [str(argument).format(**shared, out=out) for argument in OUTPUTS[output]]


def contents(folder: Path) -> dict[str, bytes | None]:
    """All paths of a folder, with the content of regular files."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


PLACES: dict[str, Callable[[Path, str], Path]] = {
    "a file of somebody else": lambda folder, suffix: _file(folder / f"own{suffix}"),
    "a folder with content": lambda folder, suffix: _file(folder / f"own{suffix}" / "thesis.tex").parent,
    "a FIFO": lambda folder, suffix: _fifo(folder / f"own{suffix}"),
    "below a file": lambda folder, suffix: _file(folder / "file") / "deep" / f"new{suffix}",
    "below a FIFO": lambda folder, suffix: _fifo(folder / "fifo") / f"new{suffix}",
    "a long name": lambda folder, suffix: folder / ("a" * 300 + suffix),
    "below a long name": lambda folder, suffix: folder / "new" / ("a" * 300) / f"new{suffix}",
    "a loop of links": lambda folder, suffix: _link(folder / f"own{suffix}"),
    "the home of nobody": lambda folder, suffix: Path("~nobody-here") / f"new{suffix}",
}


def _file(path: Path) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("mine")
    return path


def _fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def _link(path: Path) -> Path:
    path.symlink_to(path)
    return path


def test_every_path_of_a_command_is_an_input_or_a_tested_output() -> None:
    group = typer.main.get_command(app.app)
    context = group.make_context("headscope", ["ls"])
    names = set()
    for command_name in [*group.commands, *(probe.command_name for probe in plugins.requestable_probes().values())]:  # type: ignore[attr-defined]
        command = group.get_command(context, command_name)  # type: ignore[attr-defined]
        command = command.with_flags() if hasattr(command, "with_flags") else command
        names |= {param.name for param in command.params if "Path" in str(param.type_descriptor.annotation)}
    assert names <= INPUT_PATHS | OUTPUT_PATHS


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("output", OUTPUTS)
def test_an_output_that_cannot_be_written_is_refused_before_the_work_and_nothing_changes(
    output: str,
    place: str,
    shared: dict[str, Path],
    headscope: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if place == "a folder with content" and output in RUN_FOLDERS:
        pytest.skip("runs of others may be there")
    suffix = ".html" if "{out}.html" in OUTPUTS[output] else ""
    out = PLACES[place](tmp_path, suffix)
    monkeypatch.chdir(tmp_path)
    for owner, work in (
        (RunTables, "check"),
        (runner, "StudyContext"),
        (checks, "run_checks"),
        (check_file, "_checks_of_results"),
        (export.HeadScores, "from_run"),
    ):
        monkeypatch.setattr(owner, work, lambda *_, **__: pytest.fail("the work was begun"))
    before = contents(tmp_path)
    code, printed, err = headscope(*arguments(output, shared, str(out).removesuffix(suffix)))
    assert (code, printed, err.count("\n")) == (2, "", 1), err
    assert re.match(r"headscope: .*(own|new|aaa)", err), err
    assert contents(tmp_path) == before


@pytest.mark.parametrize("output", sorted({*OUTPUTS} - {"demo out", "demo report"}))
def test_an_output_is_written_below_new_folders_of_the_home_and_only_an_older_one_is_replaced(
    output: str,
    shared: dict[str, Path],
    headscope: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    command = arguments(output, shared, "~/new/result")
    code, _, err = headscope(*command)
    assert code == 0, err
    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert not [*tmp_path.glob("new/.*")]
    if output not in RUN_FOLDERS:
        assert headscope(*command)[0] == (0 if output in REPLACED else 2)
    command = arguments(output, shared, "")
    if output not in ("check init", "report", "chart", "charts"):
        code, _, err = headscope(*command)
        assert (code, "is empty" in err) == (2, True), err


READERS: dict[str, tuple[Callable[[str], object], str]] = {
    "checks": (lambda file: check_file.read_checks(Path(file)), "- {statistic: cov, median: true, at_least: 0}"),
    "heads": (HeadSet.read, "heads: [L0H1]"),
    "needles": (lambda file: read_needles(file, 1), '{"name": "a", "question": "b", "opening": "c", "fact": "d"}'),
    "pairs": (read_prompt_pairs, '{"name": "a", "clean": "b", "corrupted": "c", "answer": "d"}'),
    "prompt": (lambda file: read_prompt(PromptOptions(prompt_file=file)), "text"),
    "spans": (read_span_prompts, '{"messages": [{"role": "user", "content": "a", "images": ["content"]}]}'),
    "study": (lambda file: read_study(file, {}), "measure: {}"),
    "texts": (lambda file: next(read_documents(f"file:{file}")), "text"),
}


@pytest.mark.parametrize("reader", READERS)
def test_an_input_of_the_home_is_read(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, content = READERS[reader]
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "content").write_text(content)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read("~/deep/content")


@pytest.mark.parametrize("kind", ["html", *IMAGE_FORMATS])
def test_a_figure_of_every_format_replaces_an_older_one_and_stays_readable(
    kind: str, shared: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    file = tmp_path / f"a.{kind}"
    pixels = Image.fromarray(np.zeros((4, 4, 3), np.uint8))

    def draw(figure: object, kind: str, file: Path) -> bytes:
        if kind in ("svg", "pdf"):
            return b"<svg></svg>" if kind == "svg" else b"%PDF-1.4\n%%EOF\n"
        pixels.save(tmp_path / f"drawn.{kind}")
        return (tmp_path / f"drawn.{kind}").read_bytes()

    monkeypatch.setattr(figure_files, "_draw_image", draw)
    chart = hs.Run.open(shared["run"]).charts("Loss by position")[0]
    for _ in range(2):
        chart.save(file)
    if kind in ("png", "webp", "jpg"):
        Image.open(file).verify()
        assert Image.open(file).convert("RGB").tobytes() == pixels.tobytes()
    file.write_bytes(file.read_bytes().replace(MARK, b"edited"))
    with refuses(CannotWrite, file):
        chart.save(file)


def test_a_set_of_heads_replaces_only_a_set_of_heads(tmp_path: Path) -> None:
    for name in ("a.yaml", "a.json"):
        for heads in ("L0H1", "L1H1"):
            HeadSet.parse(heads).write(tmp_path / name)
        assert HeadSet.read(tmp_path / name) == HeadSet.parse("L1H1")
        (tmp_path / name).write_text("mine")
        with refuses(CannotWrite, tmp_path / name):
            HeadSet.parse("L1H1").write(tmp_path / name)


def test_a_link_is_kept_and_its_target_written(tmp_path: Path) -> None:
    (tmp_path / "link.yaml").symlink_to("real.yaml")
    HeadSet.parse("L0H1").write(tmp_path / "link.yaml")
    assert (tmp_path / "link.yaml").is_symlink()
    assert HeadSet.read(tmp_path / "real.yaml") == HeadSet.parse("L0H1")


def test_the_folder_of_runs_is_removed_only_if_the_writer_made_it(tmp_path: Path) -> None:
    for out, remains in ((tmp_path / "new" / "runs", tmp_path), (tmp_path / "old", tmp_path / "old")):
        remains.mkdir(exist_ok=True)
        with RunWriter.open(out, "test", {}):
            pass
        assert remains.is_dir()
        assert not [*remains.iterdir()]
        remains.rmdir() if remains != tmp_path else None


def test_a_monitor_refuses_its_folder_at_once(tmp_path: Path) -> None:
    with refuses(CannotWrite, _file(tmp_path / "file")):
        TrainingMonitor(out=tmp_path / "file")


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        (("run", "--resume"), "finished work items are kept. Repeat the command to continue"),
        (("run",), "finished work items are kept. Add --resume to continue"),
        (("bundle",), "interrupted. Repeat the command"),
    ],
)
def test_an_interruption_offers_only_flags_that_the_command_has(
    command: tuple[str, ...],
    advice: str,
    headscope: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_study", interrupt)
    monkeypatch.setattr(type(app.bundle.BUNDLE), "draft", interrupt)
    code, _, err = headscope(*command)
    assert (code, err.strip()) == (signals.EXIT_CODE, err.strip())
    assert err.strip().endswith(advice)
    assert ("--resume" in err) == (command == ("run",))
