"""Cost estimates of studies: makespans on workers, seconds timed here or read from a stored run."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.refusals import assert_names, refuses
from support.scheduling import CHECKPOINTS, Prerequisites, measure_job, measure_jobs
from support.tiny_studies import LENGTHS, content, save_checkpoint, save_texts
from typer.testing import CliRunner

from headscope.cli import app as cli
from headscope.cli.flags import example_run
from headscope.errors import BadInput
from headscope.runs.columns import all_tables
from headscope.runs.run import Run
from headscope.study import planning, runner, stored_size
from headscope.study.cells import Cell, Job
from headscope.study.config import build_study
from headscope.study.context import StudyContext
from headscope.study.executor import JobExecutor, JobResult
from headscope.study.planning import makespan
from headscope.study.progress import NoProgress
from headscope.study.stored_size import StoredSize, TableCost

EXAMPLE = example_run()


def cost(job: Job) -> float:
    return job.cost


def test_one_worker_makespan_is_the_sum_with_each_checkpoint_opened_once() -> None:
    plan = measure_jobs(4, 5)
    assert makespan(plan, CHECKPOINTS, 1, cost, opening_seconds=7.0, start_seconds=3.0) == 3.0 + 4 * 7.0 + sum(
        map(cost, plan)
    )


def test_two_worker_makespan_equals_a_hand_computed_schedule() -> None:
    """Two checkpoints of cost 1 + 2 + 3: one each. With three, the last cell of the third runs on its own."""
    assert makespan(measure_jobs(2, 3), CHECKPOINTS, 2, cost, opening_seconds=10.0) == 10.0 + 6.0
    assert makespan(measure_jobs(3, 3), CHECKPOINTS, 2, cost) == 6.0 + 3.0


@pytest.mark.parametrize("workers", [2, 3, 5, 16])
def test_a_makespan_lies_within_its_bounds(workers: int) -> None:
    """At least the mean and the longest cell; at most the bound of list scheduling (Graham 1966)."""
    plan = measure_jobs(6, 9)
    longest, mean = max(map(cost, plan)), sum(map(cost, plan)) / workers
    assert max(mean, longest) <= makespan(plan, CHECKPOINTS, workers, cost) <= mean + (1 - 1 / workers) * longest


def test_jobs_wait_for_their_prerequisites() -> None:
    plan = [
        *measure_jobs(1, 4),
        measure_job(Cell("all", "m0", 5.0, Prerequisites(tuple(f"m0: {c}" for c in range(4))))),
    ]
    assert makespan(plan, CHECKPOINTS, 8, cost) == 4.0 + 5.0


@pytest.mark.slow
def test_a_thousand_checkpoints_are_planned_fast() -> None:
    plan = [measure_job(Cell(f"m{n}: {c}", f"m{n}", 60.0 + n % 7)) for n in range(1000) for c in range(2)]
    span = makespan(plan, {f"m{n}": str(n) for n in range(1000)}, 8, cost, opening_seconds=30.0)
    assert span == pytest.approx((sum(map(cost, plan)) + 1000 * 30.0) / 8, rel=0.01)


# Timed cells of a study ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plan")
    save_checkpoint(folder / "tiny")
    save_texts(folder / "texts")
    return folder


class FormulaExecutor(JobExecutor):
    """Reports 0.5 s per cell and 1 s per 1,000 units of cost, twice that for YaRN, and 4 s of opening."""

    def execute(self, job: Job) -> JobResult:
        factor = 2.0 if job.model == "yarn" else 1.0
        return JobResult(super().execute(job).rows, {}, 0.0, None, factor * (0.5 + job.cost / 1000), 4.0)


def test_plan_estimate_follows_the_timed_cells(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "JobExecutor", FormulaExecutor)
    study = build_study(content(folder))
    estimate = planning.plan_study(study, workers=1, gpus=0)
    cells = [job for job in JobExecutor(StudyContext(study)).plan() if job.probe == "measure"]
    expected = sum((2 if job.model == "yarn" else 1) * (0.5 + job.cost / 1000) for job in cells)
    assert estimate["seconds_alone"] == pytest.approx(expected + 4.0 + estimate["seconds_commit"], abs=0.1)
    assert 0 <= estimate["seconds_commit"] < 5
    assert estimate["cells"] == len(cells) + 2
    (row,) = estimate["checkpoints"]
    assert (row["checkpoint"], row["models"], row["cells"]) == (str(folder / "tiny"), 2, len(cells) + 2)
    assert estimate["bytes_of_a_worker"] > 10**8


class RecordedProgress(NoProgress):
    """Adds up the total and the completed cost, and keeps the activities."""

    def __init__(self) -> None:
        self.total, self.completed, self.activities = 0.0, 0.0, list[str]()

    def start(self, total: float, completed: float) -> None:
        self.total += total

    def extend(self, cost: float) -> None:
        self.total += cost

    def set_activity(self, activity: str, worker: str = "") -> None:
        self.activities.append(activity)

    def advance(self, cost: float) -> None:
        self.completed += cost


@pytest.mark.parametrize("job_seconds", [0.001, 2 * planning.MAX_JOB_SECONDS])
def test_a_plan_shows_progress_and_runs_long_jobs_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, job_seconds: float
) -> None:
    executed: list[str] = []

    class CountingExecutor(JobExecutor):
        def execute(self, job: Job) -> JobResult:
            executed.append(job.id)
            return JobResult(super().execute(job).rows, {}, 0.0, None, job_seconds, 4.0)

    monkeypatch.setattr(planning, "JobExecutor", CountingExecutor)
    progress = RecordedProgress()
    study = build_study({**content(folder), "models": {"base": str(folder / "tiny")}, "measure": {"lengths": [16, 48]}})
    planning.plan_study(study, workers=os.cpu_count() or 1, gpus=0, progress=progress)
    timed = [job for job in executed if job.startswith("measure/")]
    is_long = job_seconds > planning.MAX_JOB_SECONDS
    assert len(timed) == len(progress.activities) * (1 if is_long else planning.REPEATS) + (not is_long)
    for activity in progress.activities:
        assert_names(activity, "measure", "base")
    assert 0 < progress.completed <= progress.total
    assert is_long or progress.completed == progress.total


@pytest.mark.slow
def test_predicted_disk_space_is_that_of_the_finished_run(folder: Path, tmp_path: Path) -> None:
    study = content(folder, patterns={"lengths": LENGTHS, "rows": 8}, detectors={"periods": [8], "sequences": 2})
    estimate = planning.plan_study(build_study(study), workers=1, gpus=0)
    run = runner.run_study(build_study(study), tmp_path)
    stored = sum(file.stat().st_size for file in run.path.glob("*.parquet"))
    assert estimate["bytes_stored"] == pytest.approx(stored, rel=0.15)


@pytest.mark.slow
def test_predicted_disk_space_of_the_example_is_that_of_its_tables() -> None:
    """From the rows of one document of each table, as a plan has them. The shipped tables were written once more, as
    a whole, which saves about 5 %."""
    run = Run.open(EXAMPLE)
    predicted, stored = 0.0, 0
    for name in ("attention", "pairs", "distance", "top_keys", "far_keys", "retrieval", "detectors"):
        rows, keys = run.table(name), [key for key in ("model", "doc", "period") if key in all_tables()[name].keys]
        cells = [cell for _, cell in rows.groupby(keys, observed=True)]
        labels = dict.fromkeys(rows.select_dtypes("category").columns, "str")
        jobs = [measure_job(Cell(str(n), str(cell["model"].iloc[0]), 5.0)) for n, cell in enumerate(cells)]
        size = StoredSize()
        size.add(jobs[0], {name: cells[0].astype(labels)})
        predicted += size.predict(jobs)
        stored += run._file(name)[0].stat().st_size
    assert predicted == pytest.approx(stored, rel=0.07)


def test_a_commit_writes_each_key_once_and_merges_the_other_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_size, "_measure_table", lambda table, rows: TableCost(100, 1000, 2.0, 0.5))
    jobs = [measure_job(Cell(f"m{n % 2}: {n}", f"m{n % 2}", 5.0)) for n in range(6)]
    size = StoredSize()
    size.add(jobs[0], {"distance": {}})
    assert size.commit_seconds(jobs) == 2 * (2.0 + 2 * 0.5)  # per model: one document written, two added to it
    size.add(jobs[0], {"attention": {}})
    assert size.commit_seconds(jobs) == 6 * 2.0


def test_plan_estimate_from_a_stored_run_equals_its_time(folder: Path, tmp_path: Path) -> None:
    run = runner.run_study(build_study(content(folder)), tmp_path)
    timings = run.manifest["timings"]
    seconds = sum(row["seconds"] for row in timings["by_probe"]) + timings["opening_seconds"]
    assert 0 < seconds <= run.manifest["timings"]["seconds"] + 0.1
    seconds += timings["commit_seconds"]
    estimate = planning.plan_study(build_study(content(folder)), 1, 0, run)
    assert estimate["seconds_alone"] == pytest.approx(seconds, abs=0.1)
    stored = sum(file.stat().st_size for file in run.path.iterdir())
    assert estimate["bytes_stored"] == pytest.approx(stored, rel=0.01)
    assert estimate["bytes_of_a_worker"] == timings["peak_bytes"]


def test_a_run_without_timings_of_a_probe_is_refused(folder: Path, tmp_path: Path) -> None:
    run = runner.run_study(build_study(content(folder, models={"base": str(folder / "tiny")})), tmp_path)
    without_timings = Run(run.path, {**run.manifest, "timings": {}})
    with refuses(BadInput, run.path, "'measure'"):
        planning.plan_study(build_study(content(folder)), 1, 0, without_timings)


def test_the_command_prints_text_and_json(folder: Path, tmp_path: Path) -> None:
    file = folder / "study.yaml"
    file.write_text(json.dumps(content(folder)))
    command: Any = ["plan", str(file), "--workers", "2"]
    text = CliRunner().invoke(cli.app, command).output
    assert_names(text, "10 work items", "2 workers")
    estimate = json.loads(CliRunner().invoke(cli.app, [*command, "--json"]).output.splitlines()[-1])
    assert estimate["workers"] == 2
    assert estimate["seconds_shared"] > 0
