"""A study that one example of the documentation has run is a stored run for the others, on every worker."""

import hashlib
import shutil
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock

from headscope.errors import BadInput
from headscope.runs.run import Run
from headscope.study import runner
from headscope.study.config import Study


@pytest.fixture(scope="session")
def stored_runs(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """A folder that all workers of the session share: a folder of runs per study."""
    base = tmp_path_factory.getbasetemp()
    return (base if worker_id == "master" else base.parent) / "stored-runs"


@pytest.fixture
def studies_run_once(stored_runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands and functions resume the run of a study that an earlier test has finished, if its inputs are equal."""
    run_study = runner.run_study

    def run_or_resume(study: Study, out: Path | str = "runs", *, resume: bool = False, **options: Any) -> Run:
        if resume or not can_resume(study):
            return run_study(study, out, resume=resume, **options)
        stored = stored_runs / hashlib.sha256(study.model_dump_json().encode()).hexdigest()
        stored.mkdir(parents=True, exist_ok=True)
        with FileLock(stored / "lock"):
            for path in stored.glob("*Z-*"):
                copy_folder(path, Path(out))
            run = run_study(study, out, resume=True, **options)
            copy_folder(run.path, stored)
        return run

    monkeypatch.setattr(runner, "run_study", run_or_resume)


def can_resume(study: Study) -> bool:
    """Whether no metric of the study is a Python function, of which a run stores the name only."""
    try:
        runner._check_own_metrics(study, True)
    except BadInput:
        return False
    return True


def copy_folder(path: Path, folder: Path) -> None:
    if not (folder / path.name).exists():
        shutil.copytree(path, folder / path.name)
