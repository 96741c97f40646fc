"""Discovery of probes: each analysis declares itself as data and is found through Python's entry points.

headscope knows a probe only by its `Probe` declaration. Built-in probes are found like those of other packages: an
entry point of the group `headscope.probes` names the declaration, and each part is imported when it is first needed. A
broken part is reported in one line; everything else keeps working.
"""

import importlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Literal

from headscope.errors import BrokenProbe, HeadscopeError

GROUP = "headscope.probes"
"""Group of the entry points; the name of an entry point is the name of its probe."""

log = logging.getLogger("headscope")

_OLD_PARTS = {"findings": "results", "head_findings": "head_results"}
"""Parts of earlier versions of the declaration, and what replaces them."""

Kind = Literal[
    "options",
    "runner",
    "tables",
    "statistics",
    "head_columns",
    "model_columns",
    "roles",
    "charts",
    "overview_cards",
    "questions",
    "results",
    "head_charts",
    "head_card",
    "similar_heads",
    "head_results",
    "row_charts",
    "glossary",
    "overview",
    "next_steps",
    "page",
    "explorer",
    "synthetic_rows",
    "bench",
]


@dataclass(frozen=True)
class Probe:
    """The declaration of one analysis: its name, and where its parts are.

    A part is written "module:attribute", or "" if the probe has no such part. Only the modules of `runner` and `bench`
    may import torch. The types below are exported by `headscope.plugin_api`.
    """

    name: str
    """Its key in a study file, its command, and its function in Python."""
    title: str
    """Title of its chapter in reports and of its page in the app."""
    summary: str
    """What it does, in one line."""
    options: str
    """Its options, a subclass of `Options`: the source of flags, help, YAML keys and Python keywords."""
    runner: str
    """The class that executes it: a `ProbeRunner` or an `ObservingRunner`."""
    tables: str = ""
    """The tables it stores: a sequence of `Table`."""
    statistics: str = ""
    """How to show its columns of the per-head table: name -> `Statistic`.

    Names must be new, and must not end in _low, _high, _diff, _method or _<number>: those endings have a meaning."""
    head_columns: str = ""
    """Its columns of the per-head table: (RunTables) -> DataFrame indexed by (model, layer, head, kv_group), or
    None."""
    model_columns: str = ""
    """Its columns of the per-model table: (RunTables) -> DataFrame indexed by model, or None."""
    roles: str = ""
    """Roles of heads that follow from its statistics: name -> `Role`."""
    charts: str = ""
    """(RenderContext) -> iterator of `ChartGroup`."""
    overview_cards: str = ""
    """(RenderContext) -> iterator of `Card` for the overview of a run."""
    questions: str = ""
    """The questions that its results answer: a sequence of `Question`."""
    results: str = ""
    """(Run) -> iterator of `Result`."""
    head_charts: str = ""
    """(Run, model, layer, head) -> iterator of `Block` about one head."""
    head_card: str = ""
    """(Run, model, layer, head) -> iterator of `Block`: the few blocks that the page of a head shows first."""
    similar_heads: str = ""
    """(Run, model, layer, head) -> iterator of `Block` that list the heads most similar to one."""
    head_results: str = ""
    """(Run, model, layer, head) -> iterator of `Result` about one head."""
    row_charts: str = ""
    """(Run, model, context length, document, layer, head, query position) -> iterator of `Block`: why a head has these
    weights in one row."""
    glossary: str = ""
    """Terms that a reader of its chapter needs: a sequence of `Term`."""
    overview: str = ""
    """(Run) -> `Overview` or None: its data for `--json`."""
    next_steps: str = ""
    """(Run) -> lines that say what to do with the results."""
    page: str = ""
    """(RenderContext) -> `PageContent`: its page in the app, if charts and results in order are not enough."""
    explorer: str = ""
    """(RenderContext, query parameters by name) -> `PageContent`: an interactive page built from
    `headscope.report.explorer_blocks`."""
    synthetic_rows: str = ""
    """(Sizes, model, rng) -> iterator of (cell, rows by table): random rows, for tests and timings."""
    bench: str = ""
    """(Model, longest context) -> functions to time, by name; the first is the reference for the others."""
    takes: tuple[Literal["models", "model", "text", "docs"], ...] = ("models", "text", "docs")
    """Its inputs: models (or one checkpoint), a text, a number of documents."""
    command: str = ""
    """Its command, if that differs from its name."""
    function: str = ""
    """Its function in Python, if that differs from its name."""
    tab: str | None = ""
    """Its name in the navigation of the app, if that differs from its title; None if it has no page of its own."""
    group: str = ""
    """The tab of the app's navigation that holds its pages: "Heads", "Prompts", "Tasks", "Causes", "Training", or a new
    one. Default: Causes if it takes models, else Training."""
    explorer_tab: str = ""
    """The name of its explorer in the navigation."""
    example: str = ""
    """An example command line."""
    order: int = 100
    """Its position among the probes in runs, reports and the app."""
    runs_always: bool = False
    """Whether it runs for every model of every study without being requested. It then has no options and no command,
    and its jobs also return the model's entry in run.json."""

    @property
    def command_name(self) -> str:
        """The name of its command."""
        return self.command or self.name

    @property
    def function_name(self) -> str:
        """The name of its function in Python: `hs.<name>`."""
        return self.function or self.name

    @property
    def command_line(self) -> str:
        """A command line that runs it."""
        return self.example or f"headscope {self.command_name}"

    @property
    def path(self) -> str:
        """The path of its page in the app."""
        return _app_path(self.tab or self.title)

    @property
    def navigation_group(self) -> str:
        """The tab of the app's navigation that holds its pages."""
        return self.group or ("Causes" if {"models", "model"} & {*self.takes} else "Training")

    @property
    def explorer_path(self) -> str:
        """The path of its explorer in the app."""
        return _app_path(self.explorer_tab)


@cache
def probes() -> Mapping[str, Probe]:
    """All installed probes by name, in order. A declaration that cannot be read is reported and left out."""
    loaded = [probe for entry in entry_points(group=GROUP) if (probe := _load_declaration(entry)) is not None]
    return {probe.name: probe for probe in sorted(loaded, key=lambda probe: (probe.order, probe.name))}


def requestable_probes() -> Mapping[str, Probe]:
    """The installed probes that a study or command can request: all but those that always run."""
    return {name: probe for name, probe in probes().items() if not probe.runs_always}


def probe_functions() -> Mapping[str, Probe]:
    """The requestable probes by the names of their functions in Python."""
    return {probe.function_name: probe for probe in requestable_probes().values()}


def load_part(probe: Probe, kind: Kind) -> Any:
    """Import a part of a probe; None if it has none. Raises BrokenProbe naming the part and the reason."""
    location = getattr(probe, kind)
    if not location:
        return None
    module, _, attribute = location.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except Exception as error:  # third-party code can fail in any way
        raise _broken_probe(probe.name, kind, error) from error


def load_parts(kind: Kind) -> Iterator[tuple[Probe, Any]]:
    """Every probe that has such a part, with the part; a broken one is reported and left out."""
    for probe in probes().values():
        try:
            part = load_part(probe, kind)
        except BrokenProbe as error:
            report_broken(error)
            continue
        if part is not None:
            yield probe, part


def call_parts(kind: Kind, *arguments: Any, only: Collection[str] = ()) -> Iterator[tuple[Probe, Any]]:
    """Call this part of every probe, or of the named ones; iterators are returned as lists.

    One that fails is reported and left out.
    """
    for probe, function in load_parts(kind):
        if only and probe.name not in only:
            continue
        try:
            result = call_part(probe, kind, function, *arguments)
        except BrokenProbe as error:
            report_broken(error)
            continue
        yield probe, result


def call_part(probe: Probe, kind: Kind, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return `function(*arguments)`, an iterator as a list.

    Raises BrokenProbe if it fails, and headscope's own errors, such as BadRun for a damaged table, as they are.
    """
    try:
        result = function(*arguments)
        return [*result] if isinstance(result, Iterator) else result
    except HeadscopeError:
        raise
    except Exception as error:  # third-party code can fail in any way
        raise _broken_probe(probe.name, kind, error) from error


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


def _app_path(name: str) -> str:
    return f"/{name.lower().replace(' ', '-')}"


def _load_declaration(entry: EntryPoint) -> Probe | None:
    try:
        probe = entry.load()
        if isinstance(probe, Probe) and probe.name == entry.name:
            return probe
        raise TypeError(f"{entry.value} is not a Probe named '{entry.name}'")
    except Exception as error:  # third-party code can fail in any way
        report_broken(_broken_probe(entry.name, "declaration", error))
        return None


def _broken_probe(name: str, part: str, error: Exception) -> BrokenProbe:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    if old_part := next((name for name in _OLD_PARTS if f"'{name}'" in reason), ""):
        reason = (
            f"'{old_part}', which is '{_OLD_PARTS[old_part]}' since API_VERSION 3: it yields results, not sentences"
        )
    return BrokenProbe(f"probe '{name}': part '{part}' fails with {reason[:300]}. Fix or uninstall its package")
