"""The one door: every section of a study declares itself as data and is found through Python's entry points.

headscope knows a probe by its `Probe` and by nothing else. Ours come in as anybody else's do: an entry point of the
group `headscope.probes` names the declaration, and each part of it is imported when it is asked for. A part that is
broken is told in one line, and the rest works.
"""

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from headscope.errors import BrokenProbe, HeadscopeError

GROUP = "headscope.probes"
"""The group of entry points; the name of one is the name of its section."""

log = logging.getLogger("headscope")

Kind = Literal[
    "config",
    "cells",
    "tables",
    "statistics",
    "heads",
    "models",
    "roles",
    "charts",
    "findings",
    "head_charts",
    "head_findings",
    "glossary",
    "overview",
    "next_steps",
    "page",
    "explorer",
    "sample",
    "bench",
]


@dataclass(frozen=True)
class Probe:
    """A question asked of a model: what it is called, and where its parts are.

    A part is written "module:attribute"; "" where there is none. Only `cells`, `bench` and what they import may import
    torch. The protocols of the parts stand where they are used, named behind each.
    """

    name: str
    """Key of the section in a study file, its command, and its function in Python."""
    title: str
    """Heading of its chapter and of its page."""
    summary: str
    """What it does, in one line."""
    config: str
    """Its options, a `studies.config.Options`: one source for flags, help, YAML and Python."""
    cells: str
    """What runs it: a `studies.cells.Section`."""
    tables: str = ""
    """What it stores: a sequence of `runs.columns.Table`."""
    statistics: str = ""
    """How to show its columns of the per-head table: name -> `runs.statistics.Statistic`."""
    heads: str = ""
    """Its columns of the per-head table: (Stored) -> DataFrame indexed by (model, layer, head, kv_group)."""
    models: str = ""
    """Its columns of the per-model table: (Stored) -> DataFrame indexed by model."""
    roles: str = ""
    """What heads are called by what it measures: name -> `runs.roles.Role`."""
    charts: str = ""
    """(`report.content.Shown`) -> iterator of `report.content.Group`."""
    findings: str = ""
    """(Run) -> iterator of `report.content.Finding`."""
    head_charts: str = ""
    """(Run, model, layer, head) -> iterator of `report.content.Piece` about one head."""
    head_findings: str = ""
    """(Run, model, layer, head) -> iterator of sentences about one head."""
    glossary: str = ""
    """Terms that a reader of its chapter needs: a sequence of `report.content.Term`."""
    overview: str = ""
    """(Run) -> `report.content.Overview` or None: what the terminal shows of it, with warnings."""
    next_steps: str = ""
    """(Run) -> lines that say what to do with what was made."""
    page: str = ""
    """(`report.content.Shown`) -> `report.content.Content`: its page, where charts and findings in order do not do."""
    explorer: str = ""
    """(`report.content.Shown`, mapping of what the address asks, by name) -> `report.content.Content`: one more page,
    on which a reader goes from one thing to another with the parts of `report.exploring`."""
    sample: str = ""
    """(`runs.synthetic.Sizes`, model, rng) -> iterator of (cell, tables): made-up rows, for tests and timings."""
    bench: str = ""
    """(Model, longest context) -> ways to run it by name, the first being what the others are compared with."""
    takes: tuple[Literal["models", "model", "text", "docs"], ...] = ("models", "text", "docs")
    """What it measures: models (or one checkpoint), a text, a number of its documents."""
    command: str = ""
    """Its command, where that is not its name."""
    tab: str | None = ""
    """Its name in the navigation of the app, where that is not its title; None where other pages show its charts."""
    explorer_tab: str = ""
    """The name of its explorer in the navigation."""
    example: str = ""
    """A command line that makes such a run."""
    order: int = 100
    """Its place among the others, in runs, report and app."""

    @property
    def command_name(self) -> str:
        """What its command is called."""
        return self.command or self.name

    @property
    def command_line(self) -> str:
        """What makes such a run, on the command line."""
        return self.example or f"headscope {self.command_name}"

    @property
    def path(self) -> str:
        """The address of its page in the app."""
        return _path(self.tab or self.title)

    @property
    def explorer_path(self) -> str:
        """The address of its explorer."""
        return _path(self.explorer_tab)


@cache
def probes() -> Mapping[str, Probe]:
    """Every probe that is installed, by name, in order. One that cannot be read is told of and left out."""
    found = [probe for entry in entry_points(group=GROUP) if (probe := _declared(entry)) is not None]
    return {probe.name: probe for probe in sorted(found, key=lambda probe: (probe.order, probe.name))}


def part(probe: Probe, kind: Kind) -> Any:
    """That part of a probe, imported now; None where it has none. Raises BrokenProbe naming part and reason."""
    where = getattr(probe, kind)
    if not where:
        return None
    module, _, attribute = where.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # somebody else's code can fail in any way
        raise _broken(probe.name, kind, error) from error


def parts(kind: Kind) -> Iterator[tuple[Probe, Any]]:
    """Every probe that has such a part, with it; a broken one is told of and left out."""
    for probe in probes().values():
        try:
            found = part(probe, kind)
        except BrokenProbe as reason:
            tell(reason)
            continue
        if found is not None:
            yield probe, found


def answers(kind: Kind, *arguments: Any) -> Iterator[tuple[Probe, Any]]:
    """What each probe's part of that kind answers; iterators as lists. One that fails is told of and left out."""
    for probe, ask in parts(kind):
        try:
            answer = call(probe, kind, ask, *arguments)
        except BrokenProbe as reason:
            tell(reason)
            continue
        yield probe, answer


def call(probe: Probe, kind: Kind, function: Callable[..., Any], *arguments: Any) -> Any:
    """`function(*arguments)` on behalf of a probe's part; an iterator as a list. Raises BrokenProbe where it fails.

    Raises what is headscope's own to raise, such as BadRun for a damaged table.
    """
    try:
        answer = function(*arguments)
        return [*answer] if isinstance(answer, Iterator) else answer
    except HeadscopeError:
        raise
    except Exception as error:  # somebody else's code can fail in any way
        raise _broken(probe.name, kind, error) from error


def complaints() -> list[str]:
    """What was found broken so far, a line each."""
    return [*_told]


_told: dict[str, None] = {}


def tell(reason: BrokenProbe) -> None:
    """Warn of what is broken, once."""
    line = str(reason)
    if line not in _told:
        _told[line] = None
        log.warning("headscope: %s", line)


def _path(name: str) -> str:
    return f"/{name.lower().replace(' ', '-')}"


def _declared(entry: EntryPoint) -> Probe | None:
    try:
        probe = entry.load()
        if isinstance(probe, Probe) and probe.name == entry.name:
            return probe
        raise TypeError(f"{entry.value} is not the declaration of a probe of that name")
    except Exception as error:  # somebody else's code can fail in any way
        tell(_broken(entry.name, "declaration", error))
        return None


def _broken(name: str, what: str, error: Exception) -> BrokenProbe:
    why = " ".join(f"{type(error).__name__}: {error}".split())
    return BrokenProbe(f"probe '{name}': its {what} fails with {why[:300]}; mend or uninstall the package it is from")
