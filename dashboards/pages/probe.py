"""The pages of probes: findings and charts of each probe, and an interactive page for those that have an explorer."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from dashboards import explorer_components as explorer_components  # registers the components of explorer blocks
from dashboards.empty_pages import command_for_run
from dashboards.view_state import ViewState
from headscope.base import plugins
from headscope.base.declaration import Declaration
from headscope.rendering import assembly, run_results
from headscope.rendering.blocks import Block, LazySequence, PageContent, RenderContext, TextBlock
from headscope.rendering.view_parts import ViewParts
from headscope.results.collection import ResultParts, results_by_probe
from headscope.results.result import Result
from headscope.runs.columns import TableParts
from headscope.runs.run import Run
from headscope.runs.summary import ColumnParts


@dataclass(frozen=True)
class ProbePage:
    """The page of one probe: its own page if it declares one, else its findings and charts in order."""

    probe: Declaration

    @property
    def NAME(self) -> str:
        return self.probe.tab or self.probe.title

    @property
    def PATH(self) -> str:
        return self.probe.path

    def controls(self, run: Run) -> Sequence[str]:
        """The model for a page of the probe's own, else the models shown; filters if the probe describes heads."""
        if not len(run.heads) or not {"models", "model"} & {*self.probe.takes} or not has_tables(self.probe, run):
            return ()
        models = ("model",) if self.probe.has(ViewParts.page) else ("models",) if len(run.models) > 1 else ()
        return (*models, "layers", "role", "set") if _describes_heads(self.probe) else models

    def missing_command(self, run: Run) -> str:
        """The command that stores the tables of the probe; "" if the run has one."""
        return "" if has_tables(self.probe, run) else command_for_run(self.probe.command_line, run, self.probe.takes)

    def content(self, run: Run, view: ViewState) -> PageContent:
        """The page for the heads that pass the filters."""
        models = (
            [*dict.fromkeys([*run.models[:1], view.model])] if self.probe.has(ViewParts.page) else view.shown_models
        )
        selected_model = view.model if self.probe.has(ViewParts.page) else view.filter_model
        context = assembly.render_context(run, selected_model, view.mask_filtered(run.heads), models)
        if page := assembly.probe_page(context, self.probe):
            return page
        results = results_by_probe(run).get(self.probe.name, [])
        claims = run_results.claim_table(results)
        sections: dict[str, Sequence[Block]] = {
            "": [] if "tab" in view.query else LazySequence(_answers(context, self.probe, results)),
            **assembly.probe_charts(context, self.probe),
            "Claims of the paper": [claims] if claims else [],
            "In words": [
                TextBlock(sentences, topic, collapsed=True)
                for topic, sentences in run_results.sentences_by_topic(results).items()
            ],
        }
        if not any(blocks for heading, blocks in sections.items() if heading):
            hint = f" See {self.probe.explorer_tab}." if self.probe.has(ViewParts.explorer) else ""
            sections = {"": [TextBlock([f"These runs have no chart or finding of this probe.{hint}"])]}
        return PageContent(self.probe.title, self.probe.summary, sections, tabs=True)


def _answers(context: RenderContext, probe: Declaration, results: Sequence[Result]) -> Iterator[Block]:
    """What the page answers: the cards of the probe, each a question, its answer and a picture; without cards its first
    headline, with the first chart below as the picture."""
    cards = [*assembly.probe_cards(context, probe)]
    yield from cards
    headlines = [] if cards else run_results.headlines(results)[:1]
    if headlines:
        yield TextBlock(headlines)


@dataclass(frozen=True)
class ExplorerPage:
    """The interactive page of one probe."""

    probe: Declaration

    @property
    def NAME(self) -> str:
        return self.probe.explorer_tab

    @property
    def PATH(self) -> str:
        return self.probe.explorer_path

    def controls(self, run: Run) -> Sequence[str]:
        """The model, and the models to compare it with."""
        if not run.models or not has_tables(self.probe, run):
            return ()
        return ("model", "models") if len(run.models) > 1 else ("model",)

    def missing_command(self, run: Run) -> str:
        """The command that stores the tables of the probe; "" if the run has one."""
        return "" if has_tables(self.probe, run) else command_for_run(self.probe.command_line, run, self.probe.takes)

    def content(self, run: Run, view: ViewState) -> PageContent:
        """The explorer in the state that the URL holds."""
        models = [*dict.fromkeys([*view.shown_models, view.model])]
        url_query = {name: value for name, value in view.query.items() if isinstance(value, str)}
        context = assembly.render_context(run, view.model, None, models)
        return plugins.call_part(self.probe, ViewParts.explorer, context, url_query)


def probe_pages() -> list[ProbePage | ExplorerPage]:
    """The pages and explorers of all probes, in order."""
    pages: list[ProbePage | ExplorerPage] = []
    for probe in plugins.probes().values():
        if probe.tab is not None and (
            probe.has(ViewParts.charts) or probe.has(ResultParts.results) or probe.has(ViewParts.page)
        ):
            pages.append(ProbePage(probe))
        if probe.has(ViewParts.explorer):
            pages.append(ExplorerPage(probe))
    return pages


def _describes_heads(probe: Declaration) -> bool:
    return (
        probe.has(ColumnParts.head_columns) or probe.has(ViewParts.head_charts) or probe.has(ResultParts.head_results)
    )


def has_tables(probe: Declaration, run: Run) -> bool:
    """Whether the run has a table of the probe, or the probe declares none."""
    names = {table.name for table in plugins.call_part(probe, TableParts.tables)}
    return not names or bool(names & set(run.tables))
