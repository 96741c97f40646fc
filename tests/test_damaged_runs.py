"""What lies on disk and has changed since it was written: it is noticed, told in one line, and the rest works."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support import small_runs
from support.refusals import assert_names, refuses
from support.synthetic_runs import synthetic_run

from dashboards.app import create_app
from dashboards.layout import empty_page, resolve_url
from headscope.cli import app as cli
from headscope.errors import BadInput, BadRun, CannotWrite
from headscope.rendering import write_report
from headscope.runs import run_tables
from headscope.runs.columns import all_tables
from headscope.runs.io import sha256
from headscope.runs.manifest import write_manifest
from headscope.runs.run import Run, combine_runs, list_runs, unfinished_runs
from headscope.runs.run_tables import validate
from headscope.runs.writer import RunWriter

FLIPPED = ("attention", "pairs", "distance", "nll", "retrieval")


@pytest.fixture(scope="module")
def intact_run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run in a folder of its own; leave it as you found it."""
    return synthetic_run(tmp_path_factory.mktemp("whole"), layers=2, docs=2)


@pytest.fixture
def copy(intact_run: Run, tmp_path: Path) -> Path:
    """A run of one's own to damage."""
    return Path(shutil.copytree(intact_run.path, tmp_path / intact_run.name))


@pytest.fixture
def headscope(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """The command line in this process: exit code, standard output, standard error."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["headscope", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        streams = capsys.readouterr()
        return int(ended.value.code or 0), streams.out, streams.err

    return run


def flips(run: Path, seed: int, count: int) -> Iterator[str]:
    """The name of a table of which one bit is now another; every one is mended before the next."""
    chance = random.Random(seed)
    for turn in range(count):
        name = FLIPPED[turn % len(FLIPPED)]
        file = run / f"{name}.parquet"
        good = file.read_bytes()
        at, bit = chance.randrange(len(good)), chance.randrange(8)
        file.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
        yield name
        file.write_bytes(good)


# One bit of run.json


@pytest.mark.slow
def test_every_flipped_bit_of_run_json_is_detected(copy: Path) -> None:
    file, chance = copy / "run.json", random.Random(7)
    good = file.read_bytes()
    manifest = Run.open(copy).manifest
    for _ in range(300):
        at, bit = chance.randrange(len(good)), chance.randrange(8)
        file.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
        try:
            opened = Run.open(copy).manifest
        except BadRun:
            continue
        assert opened == manifest, "only white space changed"


# One bit of a table


@pytest.mark.slow
def test_every_flipped_bit_of_a_table_is_detected(copy: Path) -> None:
    for name in flips(copy, 0, 150):
        run = Run.open(copy)
        with refuses(BadRun, copy / f"{name}.parquet", "damaged") as refusal:
            run.table(name)
        assert "\n" not in str(refusal.value)
        with refuses(BadRun, copy / f"{name}.parquet"):
            run.check()
        other_tables = [other for other in FLIPPED if other != name]
        assert len(run.table(other_tables[0])) > 0
    Run.open(copy).check()


@pytest.mark.slow
def test_flipped_bit_is_detected_in_combined_runs(copy: Path, intact_run: Run) -> None:
    for order in ((0, 1), (1, 0)):
        for name in flips(copy, 1, 5):
            joined = combine_runs([[intact_run, Run.open(copy)][index] for index in order])
            for ask in (joined.check, lambda joined=joined, name=name: joined.table(name)):
                with refuses(BadRun, copy / f"{name}.parquet"):
                    ask()


def test_report_detects_a_flipped_bit_and_writes_no_file(copy: Path, headscope) -> None:
    out = copy.parent / "report.html"
    for name in flips(copy, 2, 15):
        code, stdout, stderr = headscope("report", copy, "--out", out)
        assert (code, stdout, len(stderr.splitlines())) == (2, "", 1), stderr
        assert_names(stderr, copy / f"{name}.parquet")
        assert [*copy.parent.iterdir()] == [copy]


def test_every_app_page_detects_a_flipped_bit(copy: Path) -> None:
    paths = ("/", "/heads", "/compare", "/retrieval", "/scaling")
    server = create_app(copy.parent).server
    for turn, name in enumerate(flips(copy, 3, 25)):
        with server.app_context():
            with refuses(BadRun, copy / f"{name}.parquet"):
                resolve_url(paths[turn // 5], {})
            assert empty_page("damaged")


@pytest.mark.slow
def test_validate_reports_a_flipped_bit_in_any_table(copy: Path) -> None:
    for name in flips(copy, 4, 20):
        problems = validate(Run.open(copy))
        assert any(name in line for line in problems)
        assert all("\n" not in line for line in problems)


def test_a_missing_table_is_reported_by_file(copy: Path) -> None:
    (copy / "nll.parquet").unlink()
    with refuses(BadRun, copy / "nll.parquet", "No such file or directory"):
        _ = Run.open(copy).nll
    assert any("nll.parquet" in line for line in validate(Run.open(copy)))


# Another schema


def rewritten(run: Path, table: pa.Table) -> Run:
    """The run with another table nll, of which its run.json knows."""
    pq.write_table(table, run / "nll.parquet")
    facts = json.loads((run / "run.json").read_text())
    facts["tables"]["nll"] = {"rows": table.num_rows, "sha256": sha256(run / "nll.parquet")}
    write_manifest(run, facts)
    return Run.open(run)


def test_a_table_of_another_schema_is_one_line_when_read(copy: Path, intact_run: Run, headscope) -> None:
    nll = intact_run.arrow_table("nll")
    at = nll.schema.get_field_index("nll")
    as_text = nll.set_column(at, pa.field("nll", pa.string(), nullable=False), pa.array(["much"] * len(nll)))
    named_facts = (("'doc'", "missing"), ("'nll'", "string", "float"))
    for table, named in zip((nll.drop_columns("doc"), as_text), named_facts, strict=True):
        run = rewritten(copy, table)
        with refuses(BadRun, copy / "nll.parquet", *named):
            run.table("nll")
        assert len(run.attention) == len(intact_run.attention)
    code, _, stderr = headscope("report", copy, "--out", copy.parent / "report.html")
    assert (code, len(stderr.splitlines())) == (2, 1), stderr
    assert [*copy.parent.iterdir()] == [copy]


def test_columns_that_were_added_later_are_left_out(copy: Path, intact_run: Run) -> None:
    nll = intact_run.arrow_table("nll")
    run = rewritten(copy, nll.append_column("later", pa.array([1.0] * len(nll))))
    assert run.nll.equals(intact_run.nll)
    assert list(combine_runs([intact_run, run]).nll) == list(all_tables()["nll"].arrow.names)


# run.json


def changed(where: str, value: object):
    """run.json with another value in one place; "" takes the place away."""

    def change(facts):
        *way, last = [int(key) if key.isdigit() else key for key in where.split(".")]
        inside = facts
        for key in way:
            inside = inside[key]
        if value == "":
            del inside[last]
        else:
            inside[last] = value
        return json.dumps(facts).encode()

    return change


def nested(depth: int):
    return lambda facts: (
        json.dumps(facts)[:-1].encode() + b', "config": ' + b'{"a":' * depth + b"1" + b"}" * depth + b"}"
    )


PLACES: dict[str, tuple[object, ...]] = {
    "format_version": ("", "1", None, [], True, 1.5, 0, -1),
    "models": ("", None, "base", 3, {}, [None], ["base"], [[]]),
    "tables": ("", None, "nll", 3, [], {"nll": None}, {"nll": 8}),
    **dict.fromkeys((f"models.0.{key}" for key in ("label", "spec", "scheme", "weights_sha256")), ("", None, 3)),
    **dict.fromkeys(("models.0.geometry", "models.0.step"), ("", [])),
    **dict.fromkeys((f"models.0.geometry.{key}" for key in ("layers", "kv_groups")), ("", None, 0, "4", 10**30)),
    "tables.nll.rows": ("", None, -1, "8", 1e400, 10**30),
    "tables.nll.sha256": ("", None, 3),
    **dict.fromkeys(("config", "files", "timings"), (None, "x", [3])),
}
ODD = {
    **{f"{where} {value!r}": changed(where, value) for where, values in PLACES.items() for value in values},
    "no seconds": changed("timings", {"seconds": float("nan")}),
    "one label twice": changed("models.1.label", "base"),
    "a lone surrogate in a label": changed("models.0.label", "\ud800"),
    "a lone surrogate in the config": changed("config.\udfff", 1),
    "nested": nested(100),
    "nested deep": nested(100_000),
    "not UTF-8": lambda facts: json.dumps(facts).encode().replace(b"base", b"b\xffse"),
    "UTF-16": lambda facts: json.dumps(facts).encode("utf-16"),
    "empty": lambda facts: b"",
    "cut": lambda facts: json.dumps(facts).encode()[:-9],
    "a list": lambda facts: b"[]",
    "null": lambda facts: b"null",
    "too many digits": lambda facts: json.dumps(facts)[:-1].encode() + b', "seed": ' + b"9" * 5000 + b"}",
}


@pytest.fixture(scope="module")
def folder(intact_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound run, the oldest, among one of every odd kind."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(intact_run.path, folder / intact_run.name)
    facts = (intact_run.path / "run.json").read_text()
    for number, odd in enumerate(ODD.values()):
        (folder / f"9{number}-odd").mkdir()
        (folder / f"9{number}-odd" / "run.json").write_bytes(odd(json.loads(facts)))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD)
def test_malformed_run_json_is_refused_in_one_line(odd: str, folder: Path, headscope) -> None:
    damaged = folder / f"9{[*ODD].index(odd)}-odd"
    with pytest.raises(BadRun) as refusal:
        Run.open(damaged)
    reason = str(refusal.value)
    assert "\n" not in reason
    assert len(reason) < 500
    assert not re.search(r"codec|recursion|Expecting|Extra data|Invalid|sys\.", reason), "words of another library"
    assert headscope("report", damaged, "--out", folder / "x.html") == (2, "", f"headscope: {reason}\n")
    assert not (folder / "x.html").exists()


def test_malformed_run_jsons_are_listed_as_damaged_and_the_rest_works(folder: Path, intact_run: Run, headscope) -> None:
    names = {f"9{number}-odd" for number in range(len(ODD))}
    assert {path.name for path, entry in list_runs(folder) if isinstance(entry, BadRun)} == names
    code, stdout, stderr = headscope("ls", folder)
    assert (code, stderr) == (0, "")
    assert names <= {line.split("  ")[0] for line in stdout.splitlines()}
    entries = json.loads(headscope("ls", folder, "--json")[1])
    assert {Path(entry["path"]).name for entry in entries if "error" in entry} == names
    assert f"{intact_run.name}  base, yarn" in stdout
    with create_app(folder).server.app_context():
        for name in names:
            with pytest.raises(BadRun):
                resolve_url("/", {"run": name})
        _chart, listed = resolve_url("/runs", {})[3].sections[""]
    assert {row["run"] for row in listed.rows if row["state"].startswith("cannot be read: ")} == names
    assert [row["models"] for row in listed.rows if row["run"] not in names] == ["base, yarn"]


def test_a_damaged_run_is_listed_as_data(copy: Path, headscope) -> None:
    facts = json.loads((copy / "run.json").read_text()) | {"timings": {"seconds": 1.5}}
    write_manifest(copy, facts)
    (copy.parent / "odd").mkdir()
    (copy.parent / "odd" / "run.json").write_bytes(b'{"format_version": null}')
    code, stdout, _ = headscope("ls", copy.parent, "--json")
    damaged, sound = json.loads(stdout)
    assert (code, set(damaged), sound["seconds"]) == (0, {"path", "error"}, 1.5)


def test_ls_reads_the_ends_of_tables_only_and_lists_an_incomplete_one_as_damaged(
    copy: Path, headscope, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_tables: list[Path] = []
    monkeypatch.setattr(run_tables, "check_digest", lambda file, *_: read_tables.append(file))
    assert headscope("ls", copy.parent)[1].startswith(f"{copy.name}  base, yarn")
    table = next(copy.glob("*.parquet"))
    table.write_bytes(table.read_bytes()[:-5])
    line = headscope("ls", copy.parent)[1]
    assert line.startswith(f"{copy.name}  ")
    assert_names(line, table)
    assert not read_tables


def test_path_that_is_not_a_run_directory_is_refused(tmp_path: Path, headscope) -> None:
    (tmp_path / "folder" / "run.json").mkdir(parents=True)
    for odd, refusal in ((tmp_path / "folder", BadRun), ("x" * 5000, BadRun), ("a\0b", BadInput)):
        with refuses(refusal, "run" if refusal is BadRun else "path"):
            Run.open(odd)
    for command in (("ls", "x" * 5000), ("report", "x" * 5000, "--out", tmp_path / "a.html"), ("validate", "x" * 5000)):
        code, stdout, stderr = headscope(*command)
        assert (code, stdout, len(stderr.splitlines())) == (2, "", 1)


def test_folders_that_only_look_like_unfinished_runs_are_ignored(tmp_path: Path) -> None:
    (tmp_path / ".a-1.partial" / "cells" / "one").mkdir(parents=True)
    (tmp_path / ".b-2.partial").mkdir()
    (tmp_path / ".b-2.partial" / "cells").write_text("")
    assert unfinished_runs(tmp_path) == {"a-1": 1}


# What is still being made


def test_flipped_bits_of_finished_cells_are_detected_before_resuming(tmp_path: Path) -> None:
    partial = small_runs.interrupted(tmp_path / "runs")
    chance = random.Random(0)
    files = sorted((partial / "cells").iterdir())
    for turn in range(60):
        file = files[turn % len(files)]
        good = file.read_bytes()
        # Half of the turns spoil the first line, which names the tables.
        at, bit = chance.randrange(good.index(b"\n") + 1 if turn % 4 < 2 else len(good)), chance.randrange(8)
        file.write_bytes(good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])
        with refuses(BadRun, file, "--resume") as refusal:
            small_runs.study(tmp_path / "runs", resume=True)
        assert "\n" not in str(refusal.value)
        file.write_bytes(good)
    assert small_runs.contents(small_runs.study(tmp_path / "runs", resume=True)) == small_runs.contents(
        small_runs.study(tmp_path / "whole")
    )


def test_a_damaged_partial_run_is_reported_before_anything_is_measured(tmp_path: Path) -> None:
    draft = small_runs.interrupted(tmp_path) / "run.json"
    good = draft.read_text()
    for spoilt in ("{", "[]", good.replace("tiny", "tinx"), good.replace('"started": "', '"started": "x')):
        draft.write_text(spoilt)
        with refuses(BadRun, draft) as refusal:
            RunWriter.open(tmp_path, "test", small_runs.CONFIG, resume=True)
        assert_names(str(refusal.value).replace(str(draft), ""), draft.parent)  # the folder to delete
    draft.write_text(good)
    assert small_runs.study(tmp_path, resume=True).models == ["base"]


# A name that is no text


@pytest.mark.slow
def test_a_run_whose_folder_has_no_utf8_name_is_listed_checked_and_reported(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    run = synthetic_run(tmp_path / "small", layers=2, docs=1, probes=("measure",))
    shutil.copytree(run.path, folder / os.fsdecode(b"r\xe9n"))
    command = [sys.executable, "-m", "headscope"]
    for arguments in (("ls", folder), ("report", folder / os.fsdecode(b"r\xe9n"), "--out", folder / "r.html")):
        result = subprocess.run([*command, *map(str, arguments)], capture_output=True, check=False)
        assert result.returncode == 0, result.stderr
        assert rb"\udce9" in result.stdout or rb"r\xe9n" in result.stdout
    assert rb"r\xe9n" in (folder / "r.html").read_bytes()


# Where a report cannot go


def test_report_to_a_folder_or_device_is_refused_before_drawing(intact_run: Run, tmp_path: Path, headscope) -> None:
    for out in (tmp_path, "/dev/null", tmp_path / ("x" * 300), "."):
        code, stdout, stderr = headscope("report", intact_run.path, "--out", out)
        assert (code, stdout, len(stderr.splitlines())) == (2, "", 1), stderr
        assert_names(stderr, "--out")
    assert [*tmp_path.iterdir()] == []
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("failing", ["write_bytes", "replace"])
def test_failed_report_leaves_no_draft(
    intact_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def full(*_: object, **__: object) -> None:
        (tmp_path / "seen").touch()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("headscope.rendering.html_page.render_report", lambda runs: "a page")
    monkeypatch.setattr(Path, failing, full)
    with refuses(CannotWrite, "No space left on device", "--out"):
        write_report([intact_run], tmp_path / "report.html")
    assert [entry.name for entry in tmp_path.iterdir()] == ["seen"]
