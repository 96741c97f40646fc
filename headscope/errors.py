"""Named errors. Each message says what is wrong, gives the value, and says what to do.

A `HeadscopeError` is a mistake of a user or a problem of the machine: the command line prints its message as one line
and exits with its `exit_code`. Any other exception is a bug and keeps its traceback.
"""

import difflib
from collections.abc import Iterable


class HeadscopeError(Exception):
    """Base of all errors that headscope raises on purpose."""

    exit_code = 2


class BadInput(HeadscopeError):
    """A value from the user cannot be used: a flag, a model spec, a study file, a text."""


class UnsupportedModel(BadInput):
    """A checkpoint would be measured wrongly, so it is refused."""


class BadRun(BadInput):
    """A run directory cannot be read: damaged, incomplete, or of an unsupported format."""


class CannotWrite(BadInput):
    """Output cannot be stored: the path exists, the disk is full, or another process writes there."""


class InputChanged(BadInput):
    """An input of an unfinished run has changed, so the run cannot be resumed."""


class BrokenProbe(HeadscopeError):
    """A part of a probe cannot be imported or fails."""


class TrainingDiverged(HeadscopeError):
    """The loss or the gradients of a training are no longer finite."""


class ResourceMissing(HeadscopeError):
    """A requested model, data set or package is not on this machine."""

    exit_code = 3


class IncompatibleLibrary(ResourceMissing):
    """The installed version of a library lacks a private name that headscope uses."""


class Interrupted(HeadscopeError):
    """The work was interrupted. Finished work items are kept, and `--resume` continues."""

    exit_code = 4


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the most similar known word, or "" if none is similar."""
    similar = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.5)
    return f" (did you mean '{similar[0]}'?)" if similar else ""


def first_line(error: Exception) -> str:
    """The first line of another library's error message, or the name of the error if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def missing_package(error: ImportError) -> str:
    """Name the package that an import failed on, as the object of a sentence such as "tasks need ..."."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the package {error.name.partition('.')[0]}, which is not installed"
    return f"a package that cannot be imported ({first_line(error)[:250]})"
