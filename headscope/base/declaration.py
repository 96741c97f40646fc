"""The declaration of a probe: a class that names one analysis and the parts that it has.

A part is a function or value at a place of its own in the probe's package (`PLACES`). Its contract, with types and what
it gives where a probe lacks it, is a method of its name in the layer that calls it; `headscope.probe.Probe` has all.
"""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from typing import Any, ClassVar, Literal

PLACES: Mapping[str, str] = {
    "options": "declaration.{}Options",
    "runner": "run.{}Runner",
    "tables": "declaration.TABLES",
    "statistics": "analysis.STATISTICS",
    "roles": "analysis.ROLES",
    "head_columns": "analysis.head_statistics",
    "model_columns": "analysis.model_statistics",
    "loss_by_kept_keys": "analysis.loss_by_kept_keys",
    "scores": "declaration.SCORES",
    "questions": "declaration.QUESTIONS",
    **{name: f"results.{name}" for name in ("results", "head_results", "overview", "next_steps")},
    "glossary": "view.GLOSSARY",
    **{name: f"view.{name}" for name in ("charts", "overview_cards", "head_card", "head_charts", "row_charts", "page")},
    "explorer": "",  # named by what it explores
    "page_cards": "cards.page_cards",
    "head_explorer": "trial_explorer.trial_blocks",
    "similar_heads": "similarity.similar_heads",
}
"""Every part, and where it is in the package of a probe: module and name; {} is the name of its class. A name in
capitals and a class are the part themselves, a function is called."""


FROM_SCORES: Mapping[str, str] = {
    "statistics": "headscope.results.scores.score_statistics",
    "roles": "headscope.results.scores.score_roles",
    "head_columns": "headscope.results.scores.score_head_columns",
    "model_columns": "headscope.results.scores.score_model_columns",
    "questions": "headscope.results.scores.score_questions",
    "results": "headscope.results.scores.score_results",
    "head_results": "headscope.results.scores.score_head_results",
    "charts": "headscope.rendering.score_charts.score_charts",
    "overview_cards": "headscope.rendering.score_charts.score_cards",
    "overview": "headscope.rendering.score_overview.score_overview",
}
"""The parts that follow from `scores`, and the functions that form them. Those that a probe has itself are added."""
OWN_FIRST = frozenset({"questions", "results", "head_results"})
"""The parts in which what a probe has itself precedes what follows from its scores; in the others it comes after."""


class Declaration:
    """What every layer knows of a probe: its names, and which parts it has."""

    name: ClassVar[str]
    """Its key in a study file, its command, and its function in Python."""
    title: ClassVar[str]
    """Title of its chapter in reports and of its page in the app."""
    summary: ClassVar[str]
    """What it does, in one line."""
    takes: ClassVar[tuple[Literal["models", "model", "text", "docs"], ...]] = ("models", "text", "docs")
    """Its inputs: models (or one checkpoint), a text, a number of documents."""
    command: ClassVar[str] = ""
    """Its command, if that differs from its name."""
    function: ClassVar[str] = ""
    """Its function in Python, if that differs from its name."""
    tab: ClassVar[str | None] = ""
    """Its name in the navigation of the app, if that differs from its title; None if it has no page of its own."""
    group: ClassVar[str] = ""
    """The tab of the app's navigation that holds its pages: "Heads", "Prompts", "Tasks", "Causes", "Training", or a new
    one. Default: Causes if it takes models, else Training."""
    explorer_tab: ClassVar[str] = ""
    """The name of its explorer in the navigation."""
    head_explorer_heading: ClassVar[str] = ""
    """The name of its explorer on the page of a head."""
    head_explorer_table: ClassVar[str] = ""
    """The table without which its explorer of a head has nothing to show."""
    example: ClassVar[str] = ""
    """An example command line."""
    order: ClassVar[int] = 100
    """Its position among the probes in runs, reports and the app."""
    runs_always: ClassVar[bool] = False
    """Whether it runs for every model of every study without being requested. It then has no options and no command,
    and its jobs also return the model's entry in run.json."""

    parts: ClassVar[str] = ""
    """The names of the parts that it has, separated by spaces; NAME=MODULE.NAME for one at another place than that in
    `PLACES`."""

    def __init_subclass__(cls) -> None:
        """Methods for the `parts`; for a probe with scores also the parts that follow from them."""
        for part, (module, name) in cls.part_places().items():
            setattr(cls, part, _part_at_place(part, module, name))
        if "scores" in vars(cls):
            for part, place in FROM_SCORES.items():
                setattr(cls, part, _with_scores(part, place, getattr(cls, part, None)))

    @classmethod
    def part_places(cls) -> Mapping[str, tuple[str, str]]:
        """Module and name of every part in `parts`."""
        places = {}
        for entry in cls.parts.split():
            part, _, own_place = entry.partition("=")
            if not (place := own_place or PLACES.get(part, "")):
                raise TypeError(f"part '{part}' has no place. Write {part}=MODULE.NAME")
            module, _, name = place.format(cls.__name__).partition(".")
            places[part] = f"{cls.__module__}.{module}", name
        return places

    def __init__(self, *old_declaration: Any, **old_parts: Any) -> None:
        if old_declaration or old_parts:
            raise TypeError(
                "a probe is a subclass of Probe since API_VERSION 3, with a method for each part; see 'A probe of your "
                "own' in the documentation"
            )

    def has(self, part: Callable[..., Any]) -> bool:
        """Whether it has the part of a contract: `probe.has(ViewParts.charts)`."""
        return hasattr(self, part.__name__)

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


def _part_at_place(part: str, module: str, name: str) -> Callable[..., Any]:
    """The method of a probe that leads to the part at a place."""

    def method(self: Declaration, *arguments: Any, **keywords: Any) -> Any:
        value = getattr(import_module(module), name)
        return value if name.isupper() or isinstance(value, type) else value(*arguments, **keywords)

    method.__name__ = part
    return method


def _with_scores(part: str, place: str, own: Callable[..., Any] | None) -> Callable[..., Any]:
    """The method that joins what follows from the scores of a probe with what it adds itself."""
    module, _, name = place.rpartition(".")

    def method(self: Declaration, *arguments: Any, **keywords: Any) -> Any:
        derived = getattr(import_module(module), name)(self, *arguments, **keywords)
        if own is None:
            return derived
        added = own(self, *arguments, **keywords)
        return [*added, *derived] if part in OWN_FIRST else _join(derived, added)

    method.__name__ = part
    return method


def _join(derived: Any, own: Any) -> Any:
    """Two values of one part as one: mappings, columns and sequences together, and otherwise the probe's own."""
    if isinstance(derived, Mapping):
        return {**derived, **own}
    if isinstance(derived, Iterable) and not hasattr(derived, "columns"):
        return [*derived, *own]
    if derived is None or own is None:
        return own if derived is None else derived
    return derived.join(own, how="outer") if hasattr(own, "columns") else own


def _app_path(name: str) -> str:
    return f"/{name.lower().replace(' ', '-')}"
