"""The pages that probes get: each one of what it found in words and charts, and one to explore where it has that."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from dashboards import exploring as exploring  # draws the parts of an explorer
from dashboards.pages import Page
from dashboards.view_state import ViewState
from headscope import plugins
from headscope.plugins import Probe
from headscope.report import assembly
from headscope.report.blocks import Block, LazySequence, PageContent, TextBlock
from headscope.runs.run import Run


@dataclass(frozen=True)
class ProbePage:
    """The page of one probe: the one that it draws itself, else what it says and shows, in order."""

    probe: Probe

    @property
    def NAME(self) -> str:
        return self.probe.tab or self.probe.title

    @property
    def PATH(self) -> str:
        return self.probe.path

    def controls(self, run: Run) -> Sequence[str]:
        """The model of a page that the probe draws of one, else which models are drawn side by side; where the probe
        says something of heads, which of them."""
        if not len(run.heads) or not {"models", "model"} & {*self.probe.takes} or not has_tables(self.probe, run):
            return ()
        which = ("model",) if self.probe.page else ("models",) if len(run.models) > 1 else ()
        return (*which, "layers", "role") if _describes_heads(self.probe) else which

    def content(self, run: Run, view: ViewState) -> PageContent:
        """Of the heads that pass the filters; without the probe's tables, the command that makes them."""
        models = [*dict.fromkeys([*run.models[:1], view.model])] if self.probe.page else view.shown_models
        shown = assembly.render_context(
            run, view.model if self.probe.page else view.filter_model, view.mask_filtered(run.heads), models
        )
        if not has_tables(self.probe, run):
            return _missing_tables_page(self.probe)
        if drawn := assembly.probe_page(shown, self.probe):
            return drawn
        told = [
            TextBlock([finding.text for finding in found], "" if topic == self.probe.title else topic)
            for topic, found in assembly.probe_findings(run, self.probe).items()
        ]
        sections: dict[str, Sequence[Block]] = {"": told} if told else {}
        for heading, charts in assembly.probe_charts(shown, self.probe).items():
            sections[heading] = LazySequence(chain(sections.get(heading, ()), charts))
        if not any(sections.values()):
            where = f" {self.probe.explorer_tab} shows it." if self.probe.explorer else ""
            sections = {"": [TextBlock([f"What these runs hold of it draws nothing here.{where}"])]}
        return PageContent(self.probe.title, self.probe.summary, sections)


@dataclass(frozen=True)
class ExplorerPage:
    """The page of one probe on which a reader goes from one thing to another."""

    probe: Probe

    @property
    def NAME(self) -> str:
        return self.probe.explorer_tab

    @property
    def PATH(self) -> str:
        return self.probe.explorer_path

    def controls(self, run: Run) -> Sequence[str]:
        """The model in view, and those beside it."""
        if not run.models or not has_tables(self.probe, run):
            return ()
        return ("model", "models") if len(run.models) > 1 else ("model",)

    def content(self, run: Run, view: ViewState) -> PageContent:
        """What the address asks for, as the probe draws it; without its tables, the command that makes them."""
        if not has_tables(self.probe, run):
            return _missing_tables_page(self.probe)
        models = [*dict.fromkeys([*view.shown_models, view.model])]
        asked = {name: value for name, value in view.query.items() if isinstance(value, str)}
        draw = plugins.load_part(self.probe, "explorer")
        drawn: PageContent = plugins.call_part(
            self.probe, "explorer", draw, assembly.render_context(run, view.model, None, models), asked
        )
        return drawn


def probe_pages() -> list[Page]:
    """Of every probe that has something to show and no other page to show it on, and to explore."""
    found: list[Page] = []
    for probe in plugins.probes().values():
        if (probe.charts or probe.findings or probe.page) and probe.tab is not None:
            found.append(ProbePage(probe))
        if probe.explorer:
            found.append(ExplorerPage(probe))
    return found


def _describes_heads(probe: Probe) -> bool:
    return bool(probe.head_columns or probe.head_charts or probe.head_findings)


def has_tables(probe: Probe, run: Run) -> bool:
    """Whether the run holds a table of the probe, or the probe needs none."""
    names = {table.name for table in plugins.load_part(probe, "tables") or ()}
    return not names or bool(names & set(run.tables))


def _missing_tables_page(probe: Probe) -> PageContent:
    told = TextBlock([f"These runs hold no table of this probe. Make one that does: {probe.command_line}"])
    return PageContent(probe.title, probe.summary, {"": [told]})
