"""The engine `ray`: the tables of a plain run, byte for byte, whoever dies meanwhile; and how cells are shared out."""

import ast
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_imports import PACKAGES, ROOT, files, imports, roots
from test_resume import SECTIONS
from test_study import assert_clean, content, contents, save_checkpoint, save_texts

import headscope as hs
from headscope.errors import BadInput, Interrupted, Missing
from headscope.runs.run import Run
from headscope.runs.writer import RunWriter
from headscope.study import ray_engine, runner
from headscope.study.cells import Cell
from headscope.study.config import EngineOptions, Study, build_study
from headscope.study.context import StudyContext
from headscope.study.executor import CellExecutor, Job
from headscope.study.progress import NoProgress
from headscope.study.ray_cluster import connect_to_ray
from headscope.study.ray_worker import RayWorker
from headscope.study.scheduler import Scheduler

GRID = {"lengths": [90], "depths": 2, "needles": 2, "seeds": 1, "template": "plain", "ablate_top": [1], "draws": 1}
"""A needle grid whose knock-outs read other cells back."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("ray")
    save_checkpoint(place / "tiny")
    save_texts(place / "texts", 130)
    asks = {"question": "w1", "opening": "w2 w3"}
    needles = [{"name": name, "fact": f"w{n} w121 w122", **asks} for n, name in enumerate(("one", "two"), 118)]
    (place / "needle.jsonl").write_text("\n".join(map(json.dumps, needles)))
    return place


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A Ray of our own that the tests of this file share; returns its address."""
    import ray

    with connect_to_ray(EngineOptions(name="ray", workers=2), "cpu"):
        assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}
        yield ray.get_runtime_context().gcs_address


def study(place: Path, **engine: Any) -> Study:
    """Two schemes of one checkpoint: measured, with needles hidden, and with heads knocked out."""
    needles = {**GRID, "file": str(place / "needle.jsonl")}
    return build_study({**content(place), "needle": needles, "engine": engine or "plain"})


@pytest.fixture(scope="module")
def whole(place: Path) -> Run:
    return runner.run_study(study(place), place / "whole")


def workers() -> list[int]:
    """Processes that make cells for a Ray of this process."""
    found = []
    for each in Path("/proc").iterdir():
        try:
            if (each / "cmdline").read_bytes().startswith(b"ray::Hand"):
                raylet = (each / "stat").read_text().rsplit(")", 1)[1].split()[1]
                owner = int(Path(f"/proc/{raylet}/stat").read_text().rsplit(")", 1)[1].split()[1])
                found += [int(each.name)] if owner == os.getpid() else []
        except OSError:
            continue
    return found


class Kills(NoProgress):
    """Kills a worker a moment after that many cells were begun."""

    def __init__(self, cells: int, seed: int) -> None:
        self.cells, self.chance, self.killed, self.named = cells, random.Random(seed), [], set()

    def set_activity(self, what: str, worker: str = "") -> None:
        self.named.add(worker)
        self.cells -= 1
        if self.cells == 0:
            threading.Timer(self.chance.uniform(0, 0.1), self.kill).start()

    def kill(self) -> None:
        self.killed.append(self.chance.choice(sorted(workers())))
        os.kill(self.killed[0], signal.SIGKILL)


@pytest.mark.parametrize("seed", range(int(os.environ.get("HEADSCOPE_KILLS", "1"))))
def test_a_worker_killed_at_any_moment_changes_no_byte(
    place: Path, whole: Run, address: str, tmp_path: Path, seed: int, caplog: pytest.LogCaptureFixture, capfd: Any
) -> None:
    progress = Kills(random.Random(seed).randrange(3, 12), seed)
    run = runner.run_study(study(place, name="ray", workers=2), tmp_path, progress=progress)
    assert contents(run) == contents(whole)
    assert progress.killed
    assert not capfd.readouterr().out
    assert "died" in caplog.text
    assert progress.named == {"worker 1 of 2", "worker 2 of 2"}
    assert "finds none of the needles" in caplog.text  # what a worker warns of is heard here
    assert whole.manifest["inputs"].items() <= run.manifest["inputs"].items()
    assert run.manifest["models"] == whole.manifest["models"]
    assert run.manifest["config"] == whole.manifest["config"]
    assert {worker["cpus"] for worker in run.manifest["hardware"]["workers"]} == {1}
    assert_clean(tmp_path, run.path)


def descendants(process: int) -> set[int]:
    """Processes that it started, and those that they started."""
    parents = {}
    for each in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(each.parent.name)] = int(each.read_text().rsplit(")", 1)[1].split()[1])
    found, more = set(), {process}
    while more := {child for child, parent in parents.items() if parent in more} - found:
        found |= more
    return found


def test_a_driver_that_is_killed_leaves_no_process_and_a_run_to_go_on_with(
    place: Path, whole: Run, tmp_path: Path
) -> None:
    """By whatever engine, to the same bytes."""
    code = f"""
import json, sys
from headscope.study import runner
from headscope.study.config import build_study
runner.run(build_study(json.load(sys.stdin)), {str(tmp_path)!r})
"""
    told = study(place).model_dump(mode="json", exclude_none=True) | {"engine": {"name": "ray", "workers": 2}}
    driver = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)
    assert driver.stdin
    driver.stdin.write(json.dumps(told))
    driver.stdin.close()
    while len(list(tmp_path.glob(".*.partial/cells/*"))) < 5:
        assert driver.poll() is None
        time.sleep(0.05)
    # Ray's two agents see only a minute later that they are alone.
    started = {n for n in descendants(driver.pid) if b"Agent" not in Path(f"/proc/{n}/cmdline").read_bytes()}
    driver.kill()
    driver.wait()
    run = runner.run_study(study(place), tmp_path, resume=True)
    assert contents(run) == contents(whole)
    assert run.manifest["timings"]["cells_done_now"] < run.manifest["timings"]["cells"]
    assert_clean(tmp_path, run.path)
    assert len(started) >= 4
    until = time.monotonic() + 30
    while any(Path(f"/proc/{each}").exists() for each in started):
        assert time.monotonic() < until, "processes are left"
        time.sleep(0.2)


class KillsAt(Kills):
    """Kills the worker that begins one cell."""

    def __init__(self, cell: str) -> None:
        super().__init__(0, 0)
        self.cell = cell

    def set_activity(self, what: str, worker: str = "") -> None:
        if what == self.cell:
            self.kill()


def test_a_cell_that_no_worker_survives_is_named_and_all_others_are_kept(
    place: Path, whole: Run, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "MAX_ATTEMPTS", 1)
    fatal = "yarn: 24 tokens, document 1"
    with pytest.raises(Interrupted, match=f"no worker survived '{fatal}' .*--resume") as told:
        runner.run_study(study(place, name="ray", workers=1), tmp_path, progress=KillsAt(fatal))
    assert "\n" not in str(told.value)
    (partial,) = tmp_path.iterdir()
    assert len(list((partial / "cells").iterdir())) == whole.manifest["timings"]["cells"] - 1


def test_without_the_extra_one_line_says_what_to_install(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(Missing, match=r"pip install 'headscope\[ray\]'") as told:
        runner.run_study(study(place, name="ray"), tmp_path)
    assert "\n" not in str(told.value)
    assert_clean(tmp_path)


def test_a_ray_that_does_not_start_is_one_line(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine too busy for Ray's own patience."""
    import ray

    asked = []

    def init(**options: Any) -> None:
        asked.append(options)
        raise Exception("The current node timed out during startup.\nThis could happen")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with pytest.raises(Interrupted, match=r"Ray does not start \(The current node .*--engine plain") as told:
        runner.run_study(study(place, name="ray", workers=2), tmp_path)
    assert "\n" not in str(told.value)
    assert len(asked) == 3
    assert {options["_node_ip_address"] for options in asked} == {"127.0.0.1"}


def test_models_in_memory_stay_in_this_process(place: Path, tmp_path: Path) -> None:
    model = hs.load(str(place / "tiny"), device="cpu")
    with pytest.raises(BadInput, match="'base' is in memory"):
        hs.measure(model, text=f"file:{place}/texts/*.txt", lengths=[24], engine="ray", out=tmp_path, quiet=True)


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        ({"workers": 2}, "are of the engine ray: name it"),
        ({"name": "rye"}, "engine.name: Input should be 'plain' or 'ray', found 'rye'"),
        ({"name": "ray", "workers": 0}, "engine.workers"),
        ({"name": "ray", "gpus": 1}, "unknown key 'engine.gpus'"),
    ],
)
def test_a_mistake_about_the_engine_is_one_line(place: Path, engine: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInput) as told:
        build_study({**content(place), "engine": engine})
    assert said in str(told.value)
    assert "\n" not in str(told.value)


def test_only_the_engine_imports_ray() -> None:
    users = {file.stem for file in files(*PACKAGES) if "ray" in roots(file)}
    assert users == {"cluster", "on_ray"}
    ways = {file.stem for file in files(*PACKAGES) if {"on_ray", "cluster"} & {*last(file)}}
    assert ways == {"engines", "on_ray"}
    tree = ast.parse((ROOT / "headscope" / "study" / "engines.py").read_text())
    assert "on_ray" not in {name for node in tree.body if isinstance(node, ast.ImportFrom) for name in [node.module]}


def last(file: Path) -> Iterator[str]:
    return (part for name in imports(file) if name.startswith("headscope.study") for part in name.split("."))


# A worker without Ray -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", ["influence", "adapt"])
def test_a_worker_makes_what_this_process_makes(place: Path, tmp_path: Path, section: str) -> None:
    """A screen and what is chosen by it, and a training of which each stretch goes on from the one before."""
    tiny = str(place / "tiny")
    options = json.loads(json.dumps(SECTIONS[section]))
    if section == "adapt":
        options["adapt"]["train"] = [f"file:{place}/texts/*.txt"]
    else:
        options["influence"] |= {
            "method": "verify",
            "top": 1,
            "random": 1,
            "components": ["zero"],
            "models": ["base"],
        }
    wanted = build_study({**content(place, models={"base": tiny}, measure=None), **options})
    plain = runner.run_study(wanted, tmp_path / "plain")
    maker = CellExecutor(StudyContext(wanted))
    jobs = runner.plan_jobs(maker)
    hand = RayWorker(wanted.model_dump(mode="json", exclude_none=True), ["base"], 1, Path.cwd(), tmp_path / "run" / "files")
    with RunWriter.open(tmp_path / "made", "made", {}) as writer:
        for job in jobs:
            stored = {(need, name): writer.stored(need, name) for need in job.prerequisites for name in writer.tables(need)}
            made, _ = hand.make(job, stored)
            writer.add(job.id, made.rows)
        run = writer.commit([job.id for job in jobs], {"models": plain.manifest["models"]})
    assert contents(run) == contents(plain)
    if section == "adapt":
        assert sum(cost for cost, _ in hand.tells()) > 0
        kept = {file.name: digest for file, digest in ((Path(n), d) for n, d in plain.manifest["files"].items())}
        assert {file.name for file in (tmp_path / "run" / "files").rglob("*") if file.is_file()} >= {*kept}


# How cells are shared out -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Reads:
    prerequisites: tuple[str, ...]


def jobs(checkpoints: int, cells: int, section: str = "measure") -> list[Job]:
    """Cells of as many models, each of a checkpoint of its own, that cost 1 to `cells`."""
    return [
        Job(section, Cell(f"m{model}: {cell}", f"m{model}", cell + 1.0))
        for model in range(checkpoints)
        for cell in range(cells)
    ]


def worked_through(sharing: Scheduler, workers: int, deaths: float = 0.0, seed: int = 0) -> list[tuple[int, Job]]:
    """Who did what in which order, on workers of one speed of which some die at a job."""
    chance, clock, doing, did = random.Random(seed), 0.0, {}, []
    idle = [*range(workers)]
    while True:
        for worker in [*idle]:
            if (job := sharing.take(worker)) is not None:
                doing[worker] = (clock + job.cell.cost, job)
                idle.remove(worker)
        if not doing:
            break
        worker = min(doing, key=lambda each: doing[each][0])
        clock, job = doing.pop(worker)
        idle.append(worker)
        if chance.random() < deaths:
            sharing.gone(worker, job)
        else:
            sharing.done(job)
            did.append((worker, job))
    assert not sharing.left
    return did


OWN = {f"m{n}": f"checkpoint {n}" for n in range(20)}


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("deaths", [0.0, 0.3])
def test_every_cell_is_made_once_whoever_dies(workers: int, deaths: float) -> None:
    wanted = jobs(5, 7)
    did = worked_through(Scheduler(wanted, OWN), workers, deaths, seed=workers)
    assert sorted(job.id for _, job in did) == sorted(job.id for job in wanted)


def test_a_checkpoint_is_opened_once_while_there_are_others() -> None:
    """And the costliest first."""
    wanted = [Job("measure", Cell(f"m{n}: {c}", f"m{n}", 1.0 + n)) for n in range(12) for c in range(4)]
    did = worked_through(Scheduler(wanted, OWN), 3)
    opened = [next(worker for worker, job in did if job.cell.model == f"m{n}") for n in range(12)]
    for n in range(3, 12):
        assert {worker for worker, job in did if job.cell.model == f"m{n}"} == {opened[n]}
    assert {job.cell.model for _, job in did[:3]} == {"m11", "m10", "m9"}


def test_workers_share_one_checkpoint_by_its_models_and_then_by_halves() -> None:
    did = worked_through(Scheduler(jobs(2, 8), {"m0": "one", "m1": "one"}), 4)
    spent = defaultdict(float)
    for worker, job in did:
        spent[worker] += job.cell.cost
    assert len(spent) == 4
    assert max(spent.values()) <= sum(spent.values()) / 4 + 8


def test_a_cell_comes_after_those_that_it_reads() -> None:
    wanted = jobs(2, 6)
    wanted += [
        Job("measure", Cell(f"m{n}: all", f"m{n}", 50.0, Reads(tuple(f"m{n}: {c}" for c in range(6))))) for n in (0, 1)
    ]
    order = [job.cell.id for _, job in worked_through(Scheduler(wanted, OWN), 3, deaths=0.2)]
    for n in (0, 1):
        assert max(order.index(f"m{n}: {c}") for c in range(6)) < order.index(f"m{n}: all")


@pytest.mark.parametrize("deaths", [0.0, 0.3])
def test_a_section_that_goes_on_from_its_own_files_is_one_workers_in_order(deaths: float) -> None:
    training = [Job("pretrain", Cell(f"steps {n}", None, 5.0)) for n in range(6)]
    did = worked_through(Scheduler([*jobs(2, 3), *training], OWN), 3, deaths)
    mine = [(worker, job) for worker, job in did if job.section == "pretrain"]
    assert [job for _, job in mine] == training
    assert deaths or len({worker for worker, _ in mine}) == 1


def test_what_is_given_up_takes_along_what_needs_it() -> None:
    wanted = [*jobs(1, 3), Job("measure", Cell("all", "m0", 1.0, Reads(("m0: 1",))))]
    sharing = Scheduler(wanted, OWN)
    taken = [sharing.take(0), sharing.take(1)]
    assert taken[1].cell.id == "m0: 2" or taken[1].cell.id == "m0: 1"
    doomed = next(job for job in wanted if job.cell.id == "m0: 1")
    for worker, job in enumerate(taken):
        sharing.gone(worker, job)
    assert {job.cell.id for job in sharing.give_up(doomed)} == {"m0: 1", "all"}
    assert {job.cell.id for _, job in worked_through(sharing, 1)} == {"m0: 0", "m0: 2"}
