"""The app's side of the worker process that holds the models. It starts on first use; this file never imports torch.

Requests wait in order of arrival and run one at a time. A request that is cancelled or takes too long ends between two
layers of the model; if it does not, the process is killed. After that, and after a crash, the next request starts a new
process.
"""

import math
import multiprocessing
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from threading import Condition
from typing import Any

from flask import Flask, current_app, request

from headscope.errors import BadInput, Interrupted

TIME_LIMIT = 120.0
"""Seconds that a request may take, without the time to load a model."""
GRACE_SECONDS = 5.0
"""Seconds after which a cancelled or late request is killed together with the process."""
MAX_WAITING = 16
"""Requests that may wait."""


class ModelWorker:
    """A worker process with the models `specs`, by label. Safe to use from several threads."""

    def __init__(self, specs: Mapping[str, str], time_limit: float = TIME_LIMIT):
        self.specs, self.time_limit = dict(specs), time_limit
        self._context = multiprocessing.get_context("spawn")  # torch's threads do not survive a fork
        self._process: Any = None
        self._connection: Any = None
        self._cancelled = self._context.Event()
        self._running_page = ""
        self._cancel_counts: Counter[str] = Counter()
        self._queue: list[object] = []
        self._changed = Condition()

    def run_task(self, task: str, /, *, page: str = "", **arguments: Any) -> Any:
        """The result of a task of `headscope.playground.tasks`, after the requests before it, for an opened page.

        Raises Interrupted if it is cancelled or takes too long, BadInput if the process dies or too many requests
        wait, and the errors that the task raises.
        """
        with self._waiting_for_turn(page):
            self._start_if_needed()
            process = self._process
            try:
                self._connection.send((task, arguments, self.time_limit))
                kind, value = self._receive()
            except (EOFError, OSError):
                raise self._died(process) from None
        if kind == "error":
            raise value
        return value

    def cancel(self, page: str = "") -> None:
        """Cancel the requests of a page, whether they run or wait."""
        with self._changed:
            self._cancel_counts[page] += 1
            if page == self._running_page:
                self._cancelled.set()
            self._changed.notify_all()

    def stop(self) -> None:
        """End the process. The next request starts a new one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None

    @property
    def process_id(self) -> int | None:
        """The id of the worker process; None while there is none."""
        return None if self._process is None else int(self._process.pid)

    @contextmanager
    def _waiting_for_turn(self, page: str) -> Iterator[None]:
        ticket = object()
        with self._changed:
            if len(self._queue) > MAX_WAITING:
                raise BadInput(f"{MAX_WAITING} requests are waiting. Cancel yours, or try again later")
            self._queue.append(ticket)
            count = self._cancel_counts[page]
        try:
            with self._changed:
                self._changed.wait_for(lambda: self._queue[0] is ticket or count != self._cancel_counts[page])
                if count != self._cancel_counts[page]:
                    raise Interrupted("the request was cancelled")
                self._running_page = page
                self._cancelled.clear()
            yield
        finally:
            with self._changed:
                self._queue.remove(ticket)
                self._changed.notify_all()

    def _start_if_needed(self) -> None:
        if self._process is not None and self._process.is_alive():
            return
        self.stop()
        self._connection, other_end = self._context.Pipe()
        self._process = self._context.Process(
            target=_run_worker, args=(other_end, self._cancelled, self.specs), daemon=True
        )
        self._process.start()
        other_end.close()

    def _receive(self) -> tuple[str, Any]:
        """The answer: its kind, "result" or "error", and its value. Only the time after "started" is limited."""
        kind, value = self._next_message(math.inf)
        return self._next_message(self.time_limit + GRACE_SECONDS) if kind == "started" else (kind, value)

    def _next_message(self, seconds: float) -> tuple[str, Any]:
        """The next message. Ends the process if none comes in time, or soon after the request is cancelled."""
        deadline = time.monotonic() + seconds
        while not self._connection.poll(0.2):
            if self._cancelled.is_set():
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > deadline:
                self.stop()
                reason = "was cancelled" if self._cancelled.is_set() else f"took longer than {self.time_limit:g} s"
                raise Interrupted(f"the request {reason}. The next one loads the model again")
        message: tuple[str, Any] = self._connection.recv()
        return message

    def _died(self, process: Any) -> BadInput:
        process.join(1)
        code = process.exitcode
        self.stop()
        return BadInput(
            f"the process that runs the model stopped (exit code {code}), perhaps for lack of memory. Try again: the "
            "next request starts a new one"
        )


def add_worker(server: Flask, worker: ModelWorker) -> None:
    """Give the server a worker and a new token."""
    server.config.update(PLAYGROUND_WORKER=worker, PLAYGROUND_TOKEN=secrets.token_urlsafe())


def has_worker() -> bool:
    """Whether the app was started with models."""
    return "PLAYGROUND_WORKER" in current_app.config


def model_labels() -> list[str]:
    """The labels of the models."""
    return [*current_app.config["PLAYGROUND_WORKER"].specs]


def page_token() -> str:
    """The token that an opened page sends with its requests: the session's, and the page's own part after a point."""
    return f"{current_app.config['PLAYGROUND_TOKEN']}.{secrets.token_urlsafe(8)}"


def authorized_worker(token: str | None) -> ModelWorker:
    """The worker. Raises BadInput if the request comes from another site or lacks the session's token."""
    is_own_page = request.headers.get("Origin") == request.host_url.rstrip("/")
    sent, expected = (token or "").partition(".")[0], current_app.config["PLAYGROUND_TOKEN"]
    if not is_own_page or not secrets.compare_digest(sent.encode(), expected.encode()):
        raise BadInput("the request does not come from this session of the app. Load the page again")
    model_worker: ModelWorker = current_app.config["PLAYGROUND_WORKER"]
    return model_worker


def run_task(token: str | None, task: str, /, **arguments: Any) -> Any:
    """The result of a task (see `ModelWorker.run_task`) for a request with this token."""
    return authorized_worker(token).run_task(task, page=token or "", **arguments)


def _run_worker(connection: Any, cancelled: Any, specs: Mapping[str, str]) -> None:
    """The main function of the worker process."""
    from headscope.cli import quiet_libraries
    from headscope.playground.model_process import answer_requests

    with suppress(EOFError, KeyboardInterrupt):  # the app has ended
        quiet_libraries(warnings_only=True)
        answer_requests(connection, cancelled, specs)
