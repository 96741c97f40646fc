"""Access to the worker process: only for requests of this app's own page, which hold the token of this session."""

import secrets
from typing import Any

from flask import Flask, current_app, request

from dashboards.playground.worker import ModelWorker
from headscope.errors import BadInput


def add_worker(server: Flask, worker: ModelWorker) -> None:
    """Give the server a worker and a new token."""
    server.config.update(PLAYGROUND_WORKER=worker, PLAYGROUND_TOKEN=secrets.token_urlsafe())


def has_worker() -> bool:
    """Whether the app was started with models."""
    return "PLAYGROUND_WORKER" in current_app.config


def model_labels() -> list[str]:
    """The labels of the models."""
    return [*current_app.config["PLAYGROUND_WORKER"].specs]


def session_token() -> str:
    """The token that the page sends with its requests."""
    token: str = current_app.config["PLAYGROUND_TOKEN"]
    return token


def worker(token: str | None) -> ModelWorker:
    """The worker. Raises BadInput if the request comes from another site or lacks the session's token."""
    is_own_page = request.headers.get("Origin") == request.host_url.rstrip("/")
    if not is_own_page or not secrets.compare_digest((token or "").encode(), session_token().encode()):
        raise BadInput("the request does not come from this session of the app. Load the page again")
    model_worker: ModelWorker = current_app.config["PLAYGROUND_WORKER"]
    return model_worker


def ask(token: str | None, task: str, /, **arguments: Any) -> Any:
    """The result of a task (see `ModelWorker.ask`) for a request with this token."""
    return worker(token).ask(task, **arguments)
