"""Named errors. Each message says what is wrong, gives the value, and says what to do.

A `HeadscopeError` is a mistake of a user or a problem of the machine: the command line prints its message as one line
and exits with its `exit_code`. Any other exception is a bug and keeps its traceback.
"""

import difflib
import logging
from collections.abc import Callable, Iterable
from functools import cache
from string import Formatter

log = logging.getLogger("headscope")


class HeadscopeError(Exception):
    """Base of all errors that headscope raises on purpose."""

    exit_code = 2

    def __str__(self) -> str:
        return escape_controls(super().__str__())


class BadInput(HeadscopeError):
    """A value from the user cannot be used: a flag, a model spec, a study file, a text."""


class OptionName(str):
    """The name of an option among the values of an OptionError."""


class OptionError(ValueError):
    """Options that cannot be used together, or a value that the others exclude.

    `template` names an option as {name}; `values` fill its other placeholders, an OptionName as an option. A study file
    and Python call an option 'name', the command line --name.
    """

    def __init__(self, template: str, **values: object) -> None:
        super().__init__(template)
        self.template, self.values = template, values

    def describe(self, name_option: Callable[[str], str]) -> str:
        """The message, with the options named by this function."""
        fields = {name for _, name, _, _ in Formatter().parse(self.template) if name}
        values = {name: self.values.get(name, OptionName(name)) for name in fields}
        return self.template.format_map(
            {name: name_option(value) if isinstance(value, OptionName) else value for name, value in values.items()}
        )

    def __str__(self) -> str:
        return self.describe(quote_option)


class BadOption(BadInput):
    """A mistake in the options of a study.

    `source` is where they come from, `path` the keys and indices that lead to the option or to the probe, and `fault`
    is a check that failed, or text that continues a sentence after the path.
    """

    def __init__(self, source: str, path: tuple[str | int, ...], fault: str | OptionError) -> None:
        super().__init__(source, path, fault)
        self.source, self.path, self.fault = source, path, fault

    @property
    def key(self) -> str:
        """The option as a study file spells it: measure.lengths."""
        return ".".join(step for step in self.path if isinstance(step, str))

    def describe(self, name_option: Callable[[str], str], subject: str) -> str:
        """The message about this subject, with other options named by this function."""
        if isinstance(self.fault, str):
            return f"{subject}{self.fault}"
        return f"{subject}{': ' if subject else ''}{self.fault.describe(name_option)}"

    def __str__(self) -> str:
        text = self.describe(quote_option, ".".join(map(str, self.path)))
        return escape_controls(f"{self.source}: {text}" if self.source else text)


def escape_controls(text: str) -> str:
    """The text on one line: line breaks and other characters that cannot be shown become escapes such as \\n."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def quote_option(name: str) -> str:
    """The option in quotes, as messages about a study file name it."""
    return f"'{name}'"


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


@cache
def warn_once(message: str) -> None:
    """Log a warning, unless this process has logged it before."""
    log.warning(message)


def did_you_mean(word: object, choices: Iterable[str]) -> str:
    """Return " (did you mean 'x'?)" for the most similar known word, or "" if none is similar."""
    similar = difflib.get_close_matches(str(word), list(choices), n=1, cutoff=0.5)
    return f" (did you mean '{similar[0]}'?)" if similar else ""


def first_line(error: Exception) -> str:
    """The first line of another library's error message, or the name of the error if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def missing_package(error: ImportError) -> str:
    """Name the package that an import failed on, as the object of a sentence such as "tasks need ..."."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"the package {error.name.partition('.')[0]}, which is not installed"
    return f"a package that cannot be imported ({first_line(error)[:250]})"
