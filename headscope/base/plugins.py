"""Discovery of probes through Python's entry points, and calls of their parts.

headscope knows a probe only by its `Declaration`. Built-in probes are found like those of other packages: an
entry point of the group `headscope.probes` names the declaration. A part that fails is reported in one line;
everything else keeps working.
"""

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Concatenate, ParamSpec, TypeVar

from headscope.base.declaration import PLACES, Declaration
from headscope.errors import BrokenProbe, HeadscopeError, did_you_mean

GROUP = "headscope.probes"
"""Group of the entry points; the name of an entry point is the name of its probe."""

Arguments = ParamSpec("Arguments")
Part = TypeVar("Part")

log = logging.getLogger("headscope")


@cache
def probes() -> Mapping[str, Declaration]:
    """All installed probes by name, in order. A declaration that cannot be read is reported and left out."""
    loaded = [probe for entry in entry_points(group=GROUP) if (probe := _load_declaration(entry)) is not None]
    return {probe.name: probe for probe in sorted(loaded, key=lambda probe: (probe.order, probe.name))}


def requestable_probes() -> Mapping[str, Declaration]:
    """The installed probes that a study or command can request: all but those that always run."""
    return {name: probe for name, probe in probes().items() if not probe.runs_always}


def probe_functions() -> Mapping[str, Declaration]:
    """The requestable probes by the names of their functions in Python."""
    return {probe.function_name: probe for probe in requestable_probes().values()}


def call_part(
    probe: Declaration,
    part: Callable[Concatenate[Any, Arguments], Part],
    *arguments: Arguments.args,
    **keywords: Arguments.kwargs,
) -> Part:
    """Call a part of a probe, named by its contract, such as `ViewParts.charts`; an iterator is returned as a list.

    A probe without the part gives what the contract returns. Raises BrokenProbe if the part fails, and headscope's own
    errors, such as BadRun for a damaged table, as they are.
    """
    return call_guarded(probe, part.__name__, method_of(probe, part), *arguments, **keywords)


def method_of(probe: Declaration, part: Callable[Concatenate[Any, Arguments], Part]) -> Callable[Arguments, Part]:
    """The method of a probe for a part; without one, that of the contract."""
    method: Callable[Concatenate[Any, Arguments], Part] = getattr(type(probe), part.__name__, part)
    return partial(method, probe)


def call_parts(
    part: Callable[Concatenate[Any, Arguments], Part], *arguments: Arguments.args, **keywords: Arguments.kwargs
) -> Iterator[tuple[Declaration, Part]]:
    """Call this part of every probe that has it. One that fails is reported and left out."""
    for probe in probes().values():
        if not probe.has(part):
            continue
        try:
            result = call_part(probe, part, *arguments, **keywords)
        except BrokenProbe as error:
            report_broken(error)
            continue
        yield probe, result


def call_guarded(
    probe: Declaration,
    part_name: str,
    function: Callable[Arguments, Part],
    *arguments: Arguments.args,
    **keywords: Arguments.kwargs,
) -> Part:
    """Call a function that belongs to this part of a probe; raise and return as `call_part` does."""
    try:
        result: Any = function(*arguments, **keywords)
        return [*result] if isinstance(result, Iterator) else result  # type: ignore[return-value]
    except HeadscopeError:
        raise
    except Exception as error:  # third-party code can fail in any way
        raise _broken_probe(probe.name, part_name, error) from error


def reported_problems() -> list[str]:
    """The broken parts reported so far, a line each."""
    return [*_reported]


_reported: dict[str, None] = {}


def report_broken(error: BrokenProbe) -> None:
    """Log a broken part, once per process; its traceback at level DEBUG."""
    line = str(error)
    if line not in _reported:
        _reported[line] = None
        log.warning("headscope: %s", line)
        log.debug("headscope: the error of this part", exc_info=error.__cause__)


def _load_declaration(entry: EntryPoint) -> Declaration | None:
    try:
        probe = entry.load()
        if not isinstance(probe, Declaration) or probe.name != entry.name:
            raise TypeError(f"{entry.value} is not a Probe named '{entry.name}'")
        known = _known_names(type(probe))
        if unknown := [name for name in vars(type(probe)) if not name.startswith("_") and name not in known]:
            raise TypeError(_unknown_part(unknown[0], known))
        return probe
    except Exception as error:  # third-party code can fail in any way
        report_broken(_broken_probe(entry.name, "declaration", error))
        return None


def _known_names(declaration: type[Declaration]) -> list[str]:
    """The parts of a probe, and the other names that its declaration may have: those of its base classes."""
    names = [name for base in declaration.__mro__[1:] for name in (*inspect.get_annotations(base), *vars(base))]
    return [*PLACES, *(name for name in names if not name.startswith("_"))]


def _unknown_part(name: str, known: Sequence[str]) -> str:
    return f"unknown part '{name}'{did_you_mean(name, known)}. Begin the names of helpers with an underscore"


def _broken_probe(name: str, part: str, error: Exception) -> BrokenProbe:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return BrokenProbe(f"probe '{name}': part '{part}' fails with {reason[:300]}. Fix or uninstall its package")
