"""The declaration of a probe: a class that names one analysis and the parts that it has.

A part is a function or value at a place of its own in the probe's package (`PLACES`). Its contract is the method of
`Probe` with its name.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Literal

if TYPE_CHECKING:
    import pandas as pd

    from headscope.rendering.blocks import Block, Card, ChartGroup, Overview, PageContent, RenderContext, Term
    from headscope.results.questions import Question
    from headscope.results.result import Result
    from headscope.results.scores import Score
    from headscope.runs.column_metadata import Role, Statistic
    from headscope.runs.columns import Table
    from headscope.runs.run import Run
    from headscope.runs.run_tables import RunTables
    from headscope.study.cells import ObservingRunner, ProbeRunner
    from headscope.study.config import Options
    from headscope.study.context import StudyContext

PLACES: Mapping[str, str] = {
    "options": "schema.{}Options",
    "runner": "run.{}Runner",
    "tables": "schema.TABLES",
    "statistics": "analysis.STATISTICS",
    "roles": "analysis.ROLES",
    "head_columns": "analysis.head_statistics",
    "model_columns": "analysis.model_statistics",
    "loss_by_kept_keys": "kept_keys.loss_by_kept_keys",
    "scores": "scores.SCORES",
    "questions": "questions.QUESTIONS",
    **{name: f"results.{name}" for name in ("results", "head_results", "overview", "next_steps")},
    "glossary": "report.GLOSSARY",
    **{
        name: f"report.{name}"
        for name in ("charts", "overview_cards", "head_card", "head_charts", "row_charts", "page")
    },
    "page_cards": "cards.page_cards",
    "head_explorer": "head_trials.trial_blocks",
    "similar_heads": "similarity.similar_heads",
}
"""Where a part is in the package of a probe: module and name; {} is the name of its class. A name in capitals and a
class are the part themselves, a function is called."""


FROM_SCORES: Mapping[str, str] = {
    "statistics": "headscope.results.scores.score_statistics",
    "roles": "headscope.results.scores.score_roles",
    "head_columns": "headscope.results.scores.score_head_columns",
    "model_columns": "headscope.results.scores.score_model_columns",
    "questions": "headscope.results.scores.score_questions",
    "results": "headscope.results.scores.score_results",
    "charts": "headscope.rendering.score_charts.score_charts",
    "overview_cards": "headscope.rendering.score_charts.score_cards",
    "overview": "headscope.rendering.score_overview.score_overview",
}
"""The parts that follow from `scores`, and the functions that form them. Those that a probe has itself are added."""


class Probe:
    """Base class of the declaration of one analysis.

    A subclass sets `name`, `title`, `summary` and `parts`, or overrides the methods of the parts that it has. Only
    `runner` may import torch. A part is imported when it is used, so that reading a declaration is fast. Names of
    helper methods and attributes begin with an underscore; any other name that Probe lacks is refused. The types below
    are exported by `headscope.plugin_api`.
    """

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
        for part, (module, name) in cls.part_places().items():
            setattr(cls, part, _part_at_place(part, module, name))
        if "scores" in vars(cls):
            for part, place in FROM_SCORES.items():
                setattr(cls, part, _with_scores(part, place, getattr(cls, part)))

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

    # What it measures ------------------------------------------------------------------------------------------------

    def options(self) -> "type[Options]":
        """Its options: the source of flags, help, YAML keys and Python keywords."""
        raise NotImplementedError(f"probe '{self.name}' has no options")

    def runner(self) -> "Callable[[Any, StudyContext], ProbeRunner | ObservingRunner]":
        """The class that executes it, called with its options and the study."""
        raise NotImplementedError(f"probe '{self.name}' has no runner")

    def tables(self) -> "Sequence[Table]":
        """The tables it stores."""
        return ()

    # Statistics of heads and models ----------------------------------------------------------------------------------

    def scores(self) -> "Sequence[Score]":
        """Its scores of heads.

        Statistics, columns with intervals, roles, questions, results, charts, cards and `--json` data follow from them.
        """
        return ()

    def statistics(self) -> "Mapping[str, Statistic]":
        """How to show its columns of the per-head and per-model tables, by name.

        Names must be new. A statistic also owns its name with _low, _high (its interval) and _method, and, if it is
        declared `by_length`, with _<number>.
        """
        return {}

    def head_columns(self, run: "RunTables") -> "pd.DataFrame | None":
        """Its columns of the per-head table, indexed by (model, layer, head, kv_group); None if the run lacks them."""
        return None

    def model_columns(self, run: "RunTables") -> "pd.DataFrame | None":
        """Its columns of the per-model table, indexed by model; None if the run lacks them."""
        return None

    def loss_by_kept_keys(self, run: "RunTables") -> "pd.DataFrame | None":
        """How the loss of whole models changes if heads keep fewer keys; None without such rows.

        Columns model, doc, context_length, rule (text NAME:SIZE), change (nats/token, against all keys), kept (mean
        number of keys that a row keeps) and visible (that of rows that keep all). Charts of sparse attention have a
        line for each NAME, of the texts and lengths that they show.
        """
        return None

    def roles(self) -> "Mapping[str, Role]":
        """Roles of heads that follow from its statistics, by name."""
        return {}

    # Results ---------------------------------------------------------------------------------------------------------

    def questions(self) -> "Sequence[Question]":
        """The questions that its results answer."""
        return ()

    def results(self, run: "Run") -> "Iterable[Result]":
        """Its results of a run."""
        return ()

    def head_results(self, run: "Run", model: str, layer: int, head: int) -> "Iterable[Result]":
        """Its results about one head."""
        return ()

    def overview(self, run: "Run") -> "Overview | None":
        """Its data for `--json`."""
        return None

    def next_steps(self, run: "Run") -> Iterable[str]:
        """Lines that say what to do with the results."""
        return ()

    def glossary(self) -> "Sequence[Term]":
        """Terms that a reader of its chapter needs."""
        return ()

    # Pictures and pages ----------------------------------------------------------------------------------------------

    def charts(self, context: "RenderContext") -> "Iterable[ChartGroup]":
        """The charts of its chapter and page, in order."""
        return ()

    def overview_cards(self, context: "RenderContext") -> "Iterable[Card]":
        """Cards for the overview of a run, and for the top of the probe's own page."""
        return ()

    def page_cards(self, context: "RenderContext", page: str) -> "Iterable[Card]":
        """Cards for the top of a page that several probes share: `page` is "/compare" or "/checkpoints". The page shows
        at most two cards."""
        return ()

    def head_card(self, run: "Run", model: str, layer: int, head: int) -> "Iterable[Block]":
        """The few blocks that the page of a head shows first."""
        return ()

    def head_charts(self, run: "Run", model: str, layer: int, head: int) -> "Iterable[Block]":
        """Further blocks about one head."""
        return ()

    def head_explorer(
        self, run: "Run", model: str, layer: int, head: int, url_query: Mapping[str, str]
    ) -> "Iterable[Block]":
        """Blocks about one head in the state that the URL's query holds, such as the trial that a reader chose."""
        return ()

    def similar_heads(self, run: "Run", model: str, layer: int, head: int) -> "Iterable[Block]":
        """Blocks that list the heads most similar to one."""
        return ()

    def row_charts(
        self, run: "Run", model: str, length: int, doc: str, layer: int, head: int, query: int
    ) -> "Iterable[Block]":
        """Why a head has these weights in the row of one query position of a document."""
        return ()

    def page(self, context: "RenderContext") -> "PageContent | None":
        """Its page in the app, if charts and results in order are not enough."""
        return None

    def explorer(self, context: "RenderContext", url_query: Mapping[str, str]) -> "PageContent":
        """An interactive page in the state of the query parameters, built from `headscope.rendering.explorer_blocks`.

        That module may change between versions.
        """
        raise NotImplementedError(f"probe '{self.name}' has no explorer")

    # Names that follow -----------------------------------------------------------------------------------------------

    def has(self, part: Callable[..., Any]) -> bool:
        """Whether it has a part: `probe.has(Probe.charts)`."""
        return getattr(type(self), part.__name__) is not part

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

    def method(self: Probe, *arguments: Any, **keywords: Any) -> Any:
        value = getattr(import_module(module), name)
        return value if name.isupper() or isinstance(value, type) else value(*arguments, **keywords)

    method.__name__ = part
    return method


def _with_scores(part: str, place: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """The method that joins what follows from the scores of a probe with what it adds itself."""
    module, _, name = place.rpartition(".")

    def method(self: Probe, *arguments: Any, **keywords: Any) -> Any:
        derived = getattr(import_module(module), name)(self, *arguments, **keywords)
        return _join(derived, own(self, *arguments, **keywords))

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
