"""The loop of the worker process: it loads models on demand and answers one request after another."""

import logging
import signal
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

from headscope.errors import HeadscopeError, Interrupted
from headscope.playground.model_session import ModelSession

if TYPE_CHECKING:
    from headscope.positions.model import Model

log = logging.getLogger("headscope")


class RequestGuard:
    """Ends a request between two layers of a model if it is cancelled or late."""

    def __init__(self, cancelled: Any):
        self.cancelled = cancelled
        self._time_limit = self._deadline = 0.0
        self._guarded: WeakSet[Any] = WeakSet()

    def start(self, time_limit: float) -> None:
        """Start the time of a request, which may take so many seconds."""
        self._time_limit, self._deadline = time_limit, time.monotonic() + time_limit

    def check(self, *_: Any) -> None:
        """Raise Interrupted if the request is cancelled or late. Serves as a hook of attention modules."""
        if self.cancelled.is_set():
            raise Interrupted("the request was cancelled")
        if time.monotonic() > self._deadline:
            limit = f"{self._time_limit:g} s"
            raise Interrupted(f"the request took longer than {limit}. Shorten the prompt, or generate less")

    def watch(self, model: "Model") -> None:
        """Check before every attention layer of the model, from now on."""
        if model.module not in self._guarded:
            self._guarded.add(model.module)
            for module in model.attention_modules:
                module.register_forward_pre_hook(self.check)


def answer_requests(connection: Any, cancelled: Any, specs: Mapping[str, str]) -> None:
    """Answer requests (task, arguments, seconds) until the app closes the connection.

    An answer is ("result", value) or ("error", HeadscopeError), after ("started", None) once the models are loaded.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the app, which then ends this process
    from headscope.playground.tasks import TASKS

    session, guard = ModelSession(specs), RequestGuard(cancelled)
    while True:
        task, arguments, time_limit = connection.recv()
        try:
            session.start_request(task)
            for label in [arguments["model"]] if "model" in arguments else session.labels:
                guard.watch(session.model(label))
            connection.send(("started", None))
            guard.start(time_limit)
            answer = ("result", TASKS[task](session, **arguments))
            session.finish_request(task)
        except HeadscopeError as error:
            answer = ("error", type(error)(str(error)))
        except Exception as error:
            log.exception("the playground's task %s fails", task)
            answer = ("error", HeadscopeError(f"{type(error).__name__}: {str(error)[:200]}. See the terminal"))
        connection.send(answer)
