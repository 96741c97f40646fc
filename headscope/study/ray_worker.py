"""A worker process that executes jobs, perhaps on another machine. It knows nothing of Ray, which starts it."""

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from headscope.study.cells import Job
from headscope.study.config import build_study
from headscope.study.context import StudyContext
from headscope.study.executor import JobExecutor, JobResult, hardware

ProgressMessage = tuple[float, str]
"""Progress within a long job: the cost that was done, or a description of what is being done."""
LogLine = tuple[int, str]
"""Level and text of a log line."""


class RayWorker:
    """Executes jobs with at most one checkpoint in memory.

    `working_directory` is the folder that relative paths of the study start from; probes write files that are not
    tables to `files`. Both are folders of the driver process, on a disk that all nodes share.
    """

    def __init__(
        self, study: Mapping[str, Any], used_labels: Sequence[str], threads: int, working_directory: Path, files: Path
    ) -> None:
        torch.set_num_threads(threads)
        if working_directory.is_dir():
            os.chdir(working_directory)
        self._study, self._used_labels, self._files = study, used_labels, files
        self._messages: SimpleQueue[ProgressMessage] = SimpleQueue()
        self._log_lines: list[LogLine] = []
        self._executor: JobExecutor | None = None
        self._identified: set[str] = set()
        logging.getLogger("headscope").addHandler(_LogCollector(self._log_lines))

    def hardware(self) -> dict[str, Any]:
        """The hardware of this worker."""
        return hardware()

    def execute(self, job: Job, stored: Mapping[tuple[str, str], Any]) -> tuple[JobResult, list[LogLine]]:
        """Run a job and return its result and log lines. `stored` holds the tables of its prerequisites."""
        executor = self._open_executor()
        executor.context.read_stored = lambda job_id, table: stored[job_id, table]
        if job.model and job.model not in self._identified:
            executor.context.record_model_digests(job.model)
            self._identified.add(job.model)
        self._log_lines.clear()
        return executor.execute(job), [*self._log_lines]

    def progress_messages(self) -> list[ProgressMessage]:
        """Wait for progress within a long job and return all messages since the last call."""
        messages = [self._messages.get()]
        while not self._messages.empty():
            messages.append(self._messages.get())
        return messages

    def _open_executor(self) -> JobExecutor:
        if self._executor is None:
            progress = _QueueProgress(self._messages)
            context = StudyContext(build_study(self._study), progress=progress, files_folder=self._files)
            self._executor = JobExecutor(context)
            self._executor.used_labels = self._used_labels
        return self._executor


class _QueueProgress:
    """Progress that is passed on to the driver process."""

    def __init__(self, messages: SimpleQueue[ProgressMessage]) -> None:
        self._messages = messages

    def start(self, total: float, completed: float) -> None: ...

    def set_activity(self, activity: str, worker: str = "") -> None:
        self._messages.put((0.0, activity))

    def advance(self, cost: float) -> None:
        self._messages.put((cost, ""))

    def extend(self, cost: float) -> None: ...

    def stop(self) -> None: ...


class _LogCollector(logging.Handler):
    """Appends every log line to a list."""

    def __init__(self, lines: list[LogLine]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append((record.levelno, record.getMessage()))
