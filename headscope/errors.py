"""Named errors. Each message says what is wrong, where, and what to do next.

A `HeadscopeError` is a user's or a machine's mistake: the command line prints its message as one line
and exits with its `exit_code`. Anything else that escapes is a bug and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class HeadscopeError(Exception):
    """Base of every error that headscope raises on purpose."""

    exit_code = 2


class BadInput(HeadscopeError):
    """A value given by the user cannot be used: a flag, a spec string, a study file, a text."""


class UnsupportedModel(BadInput):
    """The checkpoint would be measured wrongly, so it is refused by name."""


class BadRun(BadInput):
    """A run directory cannot be read: corrupt, incomplete, or of a newer format."""


class CannotWrite(BadInput):
    """The output cannot be stored: the path is taken, the disk is full, another process writes there."""


class Changed(BadInput):
    """What an unfinished run was made from is no longer the same, so the run cannot go on."""


class BrokenProbe(HeadscopeError):
    """A part of a probe, ours or somebody's, cannot be imported or fails."""


class Diverged(HeadscopeError):
    """A training whose loss or gradients are no longer finite."""


class Missing(HeadscopeError):
    """A model, a data set or a package that is asked for is not on this machine."""

    exit_code = 3


class Interrupted(HeadscopeError):
    """The work stopped half-way; finished cells are kept and `--resume` continues."""

    exit_code = 4


def nearest(word: str, known: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the nearest known word, or "" when none is near."""
    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean '{close[0]}'?)" if close else ""


def first_line(error: Exception) -> str:
    """What an error of somebody else's says, in one line; its name where it says nothing."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
