"""Passes over a few tokens that check a model, so that edits of the user's text need not apply to them."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_is_trial: ContextVar[bool] = ContextVar("is_trial", default=False)


def is_trial_pass() -> bool:
    """Whether the running pass checks the model on a few tokens and is not a pass over the user's text."""
    return _is_trial.get()


@contextmanager
def trial_pass() -> Iterator[None]:
    """Mark the passes inside as trials."""
    token = _is_trial.set(True)
    try:
        yield
    finally:
        _is_trial.reset(token)
