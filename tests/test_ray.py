"""The engine `ray`: it stores the same bytes as a plain run even if workers die; and the scheduler of its jobs."""

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
from pathlib import Path
from typing import Any

import pytest
from support.refusals import refuses
from support.scheduling import CHECKPOINTS, Prerequisites, measure_job, measure_jobs
from support.source_tree import PACKAGES, ROOT, files, imports, roots
from support.tiny_studies import PROBES, TEXT_PROBES, assert_clean, content, contents, save_checkpoint, save_texts

import headscope as hs
from headscope.errors import BadInput, BadOption, Interrupted, ResourceMissing
from headscope.runs.run import Run
from headscope.runs.writer import RunWriter
from headscope.study import ray_cluster, ray_engine, runner
from headscope.study.cells import Cell, Job
from headscope.study.config import EngineOptions, Study, build_study
from headscope.study.context import StudyContext
from headscope.study.executor import JobExecutor
from headscope.study.progress import NoProgress
from headscope.study.ray_worker import RayWorker
from headscope.study.scheduler import Scheduler

GRID = {"lengths": [90], "depths": 2, "needles": 2, "seeds": 1, "template": "plain", "ablate_top": [1], "draws": 1}
"""A needle grid whose ablations need the stored tables of other cells."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    save_checkpoint(folder / "tiny")
    save_texts(folder / "texts", 130)
    shared = {"question": "w1", "opening": "w2 w3"}
    needles = [{"name": name, "fact": f"w{n} w121 w122", **shared} for n, name in enumerate(("one", "two"), 118)]
    (folder / "needle.jsonl").write_text("\n".join(map(json.dumps, needles)))
    return folder


def study(folder: Path, **engine: Any) -> Study:
    """Two schemes of one checkpoint under `measure` and `needle`, with ablations."""
    needles = {**GRID, "file": str(folder / "needle.jsonl")}
    return build_study({**content(folder), "needle": needles, "engine": engine or "plain"})


@pytest.fixture(scope="module")
def ray_address() -> Iterator[str]:
    """A local Ray that the tests share; yields its address."""
    import ray

    with ray_cluster.connect_to_ray(EngineOptions(name="ray", workers=2), "cpu"):
        assert {node["NodeManagerAddress"] for node in ray.nodes()} == {"127.0.0.1"}
        yield ray.get_runtime_context().gcs_address


@pytest.fixture(scope="module")
def local_run(folder: Path) -> Run:
    return runner.run_study(study(folder), folder / "whole")


def worker_processes() -> list[int]:
    """Process ids of the Ray workers that this process started."""
    ids = []
    for process in Path("/proc").iterdir():
        try:
            if (process / "cmdline").read_bytes().startswith(b"ray::RayWorker"):
                raylet = (process / "stat").read_text().rsplit(")", 1)[1].split()[1]
                owner = int(Path(f"/proc/{raylet}/stat").read_text().rsplit(")", 1)[1].split()[1])
                ids += [int(process.name)] if owner == os.getpid() else []
        except OSError:
            continue
    return ids


class KillsAfter(NoProgress):
    """Kills a worker shortly after `cells` cells were started."""

    def __init__(self, cells: int, seed: int) -> None:
        self.cells, self.rng, self.killed, self.workers = cells, random.Random(seed), [], set()

    def set_activity(self, activity: str, worker: str = "") -> None:
        self.workers.add(worker)
        self.cells -= 1
        if self.cells == 0:
            threading.Timer(self.rng.uniform(0, 0.1), self.kill).start()

    def kill(self) -> None:
        self.killed.append(self.rng.choice(sorted(worker_processes())))
        os.kill(self.killed[0], signal.SIGKILL)


class KillsRaylet(NoProgress):
    """Kills the raylet that runs the workers when the first cell starts."""

    def set_activity(self, activity: str, worker: str = "") -> None:
        import ray

        ray._private.worker._global_node.all_processes["raylet"][0].process.kill()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_killed_raylet_ends_the_run_in_one_line_and_it_can_be_resumed(
    folder: Path, local_run: Run, tmp_path: Path
) -> None:
    # Before the first test that shares a Ray, which this one would use and end.
    with refuses(Interrupted, "raylet", "--resume"):
        runner.run_study(study(folder, name="ray", workers=2), tmp_path, progress=KillsRaylet())
    run = runner.run_study(study(folder), tmp_path, resume=True)
    assert contents(run) == contents(local_run)
    assert_clean(tmp_path, run.path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(int(os.environ.get("HEADSCOPE_KILLS", "1"))))
def test_killing_a_worker_changes_no_byte(
    folder: Path,
    local_run: Run,
    ray_address: str,
    tmp_path: Path,
    seed: int,
    caplog: pytest.LogCaptureFixture,
    capfd: Any,
) -> None:
    progress = KillsAfter(random.Random(seed).randrange(3, 12), seed)
    run = runner.run_study(study(folder, name="ray", workers=2), tmp_path, progress=progress)
    assert contents(run) == contents(local_run)
    assert progress.killed
    assert not capfd.readouterr().out
    assert "died" in caplog.text
    assert progress.workers == {"worker 1 of 2", "worker 2 of 2"}
    assert "no successful trial" in caplog.text  # a warning from a worker
    assert local_run.manifest["inputs"].items() <= run.manifest["inputs"].items()
    assert run.manifest["models"] == local_run.manifest["models"]
    assert run.manifest["config"] == local_run.manifest["config"]
    assert {worker["cpus"] for worker in run.manifest["hardware"]["workers"]} == {1}
    assert_clean(tmp_path, run.path)


@pytest.mark.slow
def test_ray_workers_run_each_shared_pass_once(folder: Path, ray_address: str, tmp_path: Path) -> None:
    shared = content(folder, measure=None) | TEXT_PROBES
    local = runner.run_study(build_study(shared), tmp_path / "local")
    run = runner.run_study(build_study(shared | {"engine": {"name": "ray", "workers": 2}}), tmp_path / "ray")
    assert contents(run) == contents(local)
    models, passes = 2, 2 * 2 * 2  # models x lengths x documents; the positions of a model are a cell of their own
    assert run.manifest["timings"]["cells"] == run.manifest["timings"]["cells_done_now"] == passes + models
    assert sum(row["cells"] for row in run.manifest["timings"]["by_probe"]) == passes


def descendants(process: int) -> set[int]:
    """The processes that a process started, directly or indirectly."""
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parents[int(file.parent.name)] = int(file.read_text().rsplit(")", 1)[1].split()[1])
    all_children, children = set(), {process}
    while children := {child for child, parent in parents.items() if parent in children} - all_children:
        all_children |= children
    return all_children


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_killed_driver_leaves_no_process_and_a_run_to_resume(folder: Path, local_run: Run, tmp_path: Path) -> None:
    """Any engine can resume it and ends with the same bytes."""
    code = f"""
import json, sys
from headscope.study import runner
from headscope.study.config import build_study
runner.run_study(build_study(json.load(sys.stdin)), {str(tmp_path)!r})
"""
    content = study(folder).model_dump(mode="json", exclude_none=True) | {"engine": {"name": "ray", "workers": 2}}
    driver = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, text=True)
    assert driver.stdin
    driver.stdin.write(json.dumps(content))
    driver.stdin.close()
    while len(list(tmp_path.glob(".*.partial/cells/*"))) < 5:
        assert driver.poll() is None
        time.sleep(0.05)
    # Ray's two agents only stop a minute later.
    started = {n for n in descendants(driver.pid) if b"Agent" not in Path(f"/proc/{n}/cmdline").read_bytes()}
    driver.kill()
    driver.wait()
    run = runner.run_study(study(folder), tmp_path, resume=True)
    assert contents(run) == contents(local_run)
    assert run.manifest["timings"]["cells_done_now"] < run.manifest["timings"]["cells"]
    assert_clean(tmp_path, run.path)
    assert len(started) >= 4
    deadline = time.monotonic() + 30
    while any(Path(f"/proc/{process}").exists() for process in started):
        assert time.monotonic() < deadline, "processes are left"
        time.sleep(0.2)


class KillsAt(KillsAfter):
    """Kills the worker that starts one cell."""

    def __init__(self, cell: str) -> None:
        super().__init__(0, 0)
        self.cell = cell

    def set_activity(self, activity: str, worker: str = "") -> None:
        if activity == self.cell:
            self.kill()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_cell_that_kills_every_worker_is_named_and_the_others_are_kept(
    folder: Path, local_run: Run, ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_engine, "MAX_ATTEMPTS", 1)
    fatal = "yarn: 24 tokens, document 1"
    with refuses(Interrupted, f"'{fatal}'", "--resume") as error:
        runner.run_study(study(folder, name="ray", workers=1), tmp_path, progress=KillsAt(fatal))
    assert "\n" not in str(error.value)
    (partial,) = tmp_path.iterdir()
    assert len(list((partial / "cells").iterdir())) == local_run.manifest["timings"]["cells"] - 1


def test_without_ray_the_error_says_what_to_install(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with refuses(ResourceMissing, "pip install 'headscope[ray]'") as error:
        runner.run_study(study(folder, name="ray"), tmp_path)
    assert "\n" not in str(error.value)
    assert_clean(tmp_path)


def test_error_states_why_ray_did_not_start(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine so busy that Ray times out."""
    import ray

    calls = []

    def init(**options: Any) -> None:
        calls.append(options)
        raise Exception("The current node timed out during startup.\nThis could happen")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    with refuses(Interrupted, "The current node timed out", "--engine plain") as error:
        runner.run_study(study(folder, name="ray", workers=2), tmp_path)
    assert "\n" not in str(error.value)
    assert len(calls) == 3
    assert {options["_node_ip_address"] for options in calls} == {"127.0.0.1"}


FAILING_START = """
import os, ray
from pathlib import Path
from headscope.errors import Interrupted
from headscope.study import ray_cluster
from headscope.study.config import EngineOptions

def get_node(*arguments):
    raise Exception("The current node timed out during startup.")

ray._private.services.get_node = get_node
ray_cluster.MAX_START_ATTEMPTS = 2
try:
    with ray_cluster.connect_to_ray(EngineOptions(name="ray"), "cpu"):
        pass
except Interrupted:
    tasks = Path("/proc/self/task").glob("*/children")
    children = [child for task in tasks for child in task.read_text().split()]
    status = [Path(f"/proc/{child}/stat").read_text().rsplit(")", 1)[1].split()[0] for child in children]
    print("left:", [child for child, letter in zip(children, status) if letter != "Z"])
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_failed_start_of_ray_leaves_no_process() -> None:
    done = subprocess.run([sys.executable, "-c", FAILING_START], capture_output=True, text=True, check=False)
    assert "left: []" in done.stdout, done.stdout + done.stderr


def test_models_in_memory_cannot_be_used_with_ray(folder: Path, tmp_path: Path) -> None:
    model = hs.load(str(folder / "tiny"), device="cpu")
    with refuses(BadInput, "'base'", "memory"):
        hs.measure(model, text=f"file:{folder}/texts/*.txt", lengths=[24], engine="ray", out=tmp_path, quiet=True)


@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ({"workers": 2}, ("'workers'", "ray")),
        ({"name": "rye"}, ("engine.name", "'plain'", "'ray'", "'rye'")),
        ({"name": "ray", "workers": 0}, ("engine.workers", 1, 0)),
        ({"name": "ray", "gpus": 1}, ("'engine.gpus'", "gpus_per_worker")),
    ],
)
def test_invalid_engine_options_are_refused(folder: Path, engine: dict[str, Any], named: tuple[object, ...]) -> None:
    with refuses(BadOption, *named) as error:
        build_study({**content(folder), "engine": engine})
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_only_the_engine_imports_ray() -> None:
    users = {file.stem for file in files(*PACKAGES) if "ray" in roots(file)}
    assert users == {"ray_cluster", "ray_engine"}
    importers = {file.stem for file in files(*PACKAGES) if {"ray_engine", "ray_cluster"} & {*imported_parts(file)}}
    assert importers == {"runner", "ray_engine"}
    tree = ast.parse((ROOT / "headscope" / "study" / "runner.py").read_text())
    assert "headscope.study.ray_engine" not in {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}


def imported_parts(file: Path) -> Iterator[str]:
    return (part for name in imports(file) if name.startswith("headscope.study") for part in name.split("."))


# A worker without Ray -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("probe", ["influence", "adapt"])
def test_a_worker_returns_the_rows_of_this_process(folder: Path, tmp_path: Path, probe: str) -> None:
    """For cells that need other cells: `influence` estimates before it verifies, `adapt` trains in stretches."""
    tiny = str(folder / "tiny")
    options = json.loads(json.dumps(PROBES[probe]))
    if probe == "adapt":
        options["adapt"]["training_texts"] = [f"file:{folder}/texts/*.txt"]
    else:
        options["influence"] |= {
            "method": "verify",
            "verify_top": 1,
            "verify_random": 1,
            "components": ["zero"],
            "models": ["base"],
        }
    study = build_study({**content(folder, models={"base": tiny}, measure=None), **options})
    plain = runner.run_study(study, tmp_path / "plain")
    jobs = JobExecutor(StudyContext(study)).plan()
    worker = RayWorker(
        study.model_dump(mode="json", exclude_unset=True), ["base"], 1, Path.cwd(), tmp_path / "run" / "files"
    )
    with RunWriter.open(tmp_path / "remote", "remote", {}) as writer:
        for job in jobs:
            stored = {
                (need, name): writer.read_stored(need, name)
                for need in job.prerequisites
                for name in writer.stored_tables(need)
            }
            result, _ = worker.execute(job, stored)
            writer.add(job.id, result.rows)
        run = writer.commit([job.id for job in jobs], {"models": plain.manifest["models"]})
    assert contents(run) == contents(plain)
    if probe == "adapt":
        assert sum(cost for cost, _ in worker.progress_messages()) > 0
        stored_files = {Path(name).name for name in plain.manifest["files"]}
        assert {file.name for file in (tmp_path / "run" / "files").rglob("*") if file.is_file()} >= stored_files


# The scheduler ------------------------------------------------------------------------------------------------------


def simulate(scheduler: Scheduler, workers: int, deaths: float = 0.0, seed: int = 0) -> list[tuple[int, Job]]:
    """(worker, job) in the order of completion, on equally fast workers that die at a share `deaths` of the jobs."""
    rng, clock, running, completed = random.Random(seed), 0.0, {}, []
    idle = [*range(workers)]
    while True:
        for worker in [*idle]:
            if (job := scheduler.next_job(worker)) is not None:
                running[worker] = (clock + job.cost, job)
                idle.remove(worker)
        if not running:
            break
        worker = min(running, key=lambda number: running[number][0])
        clock, job = running.pop(worker)
        idle.append(worker)
        if rng.random() < deaths:
            scheduler.remove_worker(worker, job)
        else:
            scheduler.finish(job)
            completed.append((worker, job))
    assert not scheduler.unassigned
    return completed


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("deaths", [0.0, 0.3])
def test_every_job_runs_once_even_if_workers_die(workers: int, deaths: float) -> None:
    plan = measure_jobs(5, 7)
    completed = simulate(Scheduler(plan, CHECKPOINTS), workers, deaths, seed=workers)
    assert sorted(job.id for _, job in completed) == sorted(job.id for job in plan)


def test_workers_open_each_checkpoint_once_and_the_costliest_first() -> None:
    plan = [measure_job(Cell(f"m{n}: {c}", f"m{n}", 1.0 + n)) for n in range(12) for c in range(4)]
    completed = simulate(Scheduler(plan, CHECKPOINTS), 3)
    opened = [next(worker for worker, job in completed if job.model == f"m{n}") for n in range(12)]
    for n in range(3, 12):
        assert {worker for worker, job in completed if job.model == f"m{n}"} == {opened[n]}
    assert {job.model for _, job in completed[:3]} == {"m11", "m10", "m9"}


def test_workers_share_a_checkpoint_by_models_and_then_by_halves() -> None:
    completed = simulate(Scheduler(measure_jobs(2, 8), {"m0": "one", "m1": "one"}), 4)
    cost = defaultdict(float)
    for worker, job in completed:
        cost[worker] += job.cost
    assert len(cost) == 4
    assert max(cost.values()) <= sum(cost.values()) / 4 + 8


def test_a_job_runs_after_its_prerequisites() -> None:
    plan = measure_jobs(2, 6)
    plan += [
        measure_job(Cell(f"m{n}: all", f"m{n}", 50.0, Prerequisites(tuple(f"m{n}: {c}" for c in range(6)))))
        for n in (0, 1)
    ]
    order = [job.cell.id for _, job in simulate(Scheduler(plan, CHECKPOINTS), 3, deaths=0.2)]
    for n in (0, 1):
        assert max(order.index(f"m{n}: {c}") for c in range(6)) < order.index(f"m{n}: all")


@pytest.mark.parametrize("deaths", [0.0, 0.3])
def test_jobs_that_continue_from_files_run_in_order_on_one_worker(deaths: float) -> None:
    training = [measure_job(Cell(f"steps {n}", "", 5.0), "pretrain") for n in range(6)]
    completed = simulate(Scheduler([*measure_jobs(2, 3), *training], CHECKPOINTS), 3, deaths)
    stretches = [(worker, job) for worker, job in completed if job.probe == "pretrain"]
    assert [job for _, job in stretches] == training
    assert deaths or len({worker for worker, _ in stretches}) == 1


def test_dropping_a_job_drops_the_jobs_that_depend_on_it() -> None:
    plan = [*measure_jobs(1, 3), measure_job(Cell("all", "m0", 1.0, Prerequisites(("m0: 1",))))]
    scheduler = Scheduler(plan, CHECKPOINTS)
    assigned = [scheduler.next_job(0), scheduler.next_job(1)]
    assert assigned[1].cell.id in ("m0: 1", "m0: 2")
    for worker, current in enumerate(assigned):
        scheduler.remove_worker(worker, current)
    failed = next(current for current in plan if current.cell.id == "m0: 1")
    assert {current.cell.id for current in scheduler.give_up(failed)} == {"m0: 1", "all"}
    assert {current.cell.id for _, current in simulate(scheduler, 1)} == {"m0: 0", "m0: 2"}
