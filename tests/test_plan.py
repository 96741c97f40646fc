"""What a study will cost: workers as cells are shared out, seconds as cells take, of a study and of a stored run."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_ray import OWN, Reads, jobs
from test_study import content, save_checkpoint, save_texts
from typer.testing import CliRunner

from headscope.cli import app as cli
from headscope.errors import BadInput
from headscope.runs.run import Run
from headscope.study import planning, runner
from headscope.study.cells import Cell
from headscope.study.config import build_study
from headscope.study.executor import CellExecutor, CellResult, Job
from headscope.study.planning import makespan


def cost(job: Job) -> float:
    return job.cell.cost


def test_one_worker_takes_the_sum_and_opens_each_checkpoint_once() -> None:
    wanted = jobs(4, 5)
    assert makespan(wanted, OWN, 1, cost, opening=7.0, start=3.0) == 3.0 + 4 * 7.0 + sum(map(cost, wanted))


def test_two_workers_by_hand() -> None:
    """Two checkpoints of 1 + 2 + 3: one each. Then three of them: the third is halved, its last cell goes alone."""
    assert makespan(jobs(2, 3), OWN, 2, cost, opening=10.0) == 10.0 + 6.0
    assert makespan(jobs(3, 3), OWN, 2, cost) == 6.0 + 3.0


@pytest.mark.parametrize("workers", [2, 3, 5, 16])
def test_a_makespan_lies_between_what_none_and_what_any_sharing_can_do(workers: int) -> None:
    """Not below the mean and the longest cell; not above what a list of cells in any order would do (Graham 1966)."""
    wanted = jobs(6, 9)
    longest, mean = max(map(cost, wanted)), sum(map(cost, wanted)) / workers
    assert max(mean, longest) <= makespan(wanted, OWN, workers, cost) <= mean + (1 - 1 / workers) * longest


def test_cells_that_wait_are_waited_for() -> None:
    wanted = [*jobs(1, 4), Job("measure", Cell("all", "m0", 5.0, Reads(tuple(f"m0: {c}" for c in range(4)))))]
    assert makespan(wanted, OWN, 8, cost) == 4.0 + 5.0


def test_a_thousand_checkpoints_are_planned_in_no_time() -> None:
    wanted = [Job("measure", Cell(f"m{n}: {c}", f"m{n}", 60.0 + n % 7)) for n in range(1000) for c in range(2)]
    span = makespan(wanted, {f"m{n}": str(n) for n in range(1000)}, 8, cost, opening=30.0)
    assert span == pytest.approx((sum(map(cost, wanted)) + 1000 * 30.0) / 8, rel=0.01)


# A study's own cells --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("plan")
    save_checkpoint(place / "tiny")
    save_texts(place / "texts")
    return place


class Slowly(CellExecutor):
    """Cells that take what a formula says: half a second each and one per thousand of cost, YaRN's twice that."""

    def make(self, job: Job) -> CellResult:
        factor = 2.0 if job.cell.model == "yarn" else 1.0
        return CellResult(super().execute(job).rows, {}, 0.0, None, factor * (0.5 + job.cell.cost / 1000), 4.0)


def test_seconds_are_those_of_the_cells(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "CellExecutor", Slowly)
    wanted = build_study(content(place))
    told = planning.plan(wanted, workers=1, gpus=0)
    cells = [job for job in runner.plan_jobs(Slowly(planning.StudyContext(wanted))) if job.section == "measure"]
    expected = sum((2 if job.cell.model == "yarn" else 1) * (0.5 + job.cell.cost / 1000) for job in cells)
    assert told["seconds_alone"] == pytest.approx(expected + 4.0, abs=0.1)
    assert told["cells"] == len(cells) + 2
    (row,) = told["checkpoints"]
    assert (row["checkpoint"], row["models"], row["cells"]) == (str(place / "tiny"), 2, len(cells) + 2)
    assert told["bytes_of_a_worker"] > 10**8


def test_a_stored_run_tells_the_same_times(place: Path, tmp_path: Path) -> None:
    """Of itself, the seconds that it took; of twice the documents, twice as many."""
    run = runner.run_study(build_study(content(place)), tmp_path)
    spent = run.manifest["spent"]
    took = sum(row["seconds"] for row in spent["made"]) + spent["opening"]
    assert 0 < took <= run.manifest["timings"]["seconds"] + 0.1
    told = planning.plan(build_study(content(place)), 1, 0, run)
    assert told["seconds_alone"] == pytest.approx(took, abs=0.1)
    stored = sum(file.stat().st_size for file in run.path.iterdir())
    assert told["bytes_stored"] == pytest.approx(stored, rel=0.01)
    assert told["bytes_of_a_worker"] == spent["peak"]


def test_a_run_without_times_of_a_section_is_refused(place: Path, tmp_path: Path) -> None:
    run = runner.run_study(build_study(content(place, models={"base": str(place / "tiny")})), tmp_path)
    untold = Run(run.path, {**run.manifest, "spent": {}})
    with pytest.raises(BadInput, match="tells no times of 'measure'"):
        planning.plan(build_study(content(place)), 1, 0, untold)


def test_the_command_tells_it_in_words_and_as_data(place: Path, tmp_path: Path) -> None:
    file = place / "study.yaml"
    file.write_text(json.dumps(content(place)))
    asked: Any = ["plan", str(file), "--workers", "2"]
    said = CliRunner().invoke(cli.app, asked).output
    assert "10 cells: about" in said
    assert "2 workers on the cores of this machine" in said
    told = json.loads(CliRunner().invoke(cli.app, [*asked, "--json"]).output.splitlines()[-1])
    assert told["workers"] == 2
    assert told["seconds_shared"] > 0
