"""The page that every probe gets: what it found in words, and its charts under their headings."""

from collections.abc import Sequence
from dataclasses import dataclass

from dashboards.view import View
from headscope import door
from headscope.door import Probe
from headscope.report import outline
from headscope.report.content import Content, Piece, Words
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
        """The model of a page that the probe draws of one, else which models are drawn side by side."""
        if not len(run.heads) or not {"models", "model"} & {*self.probe.takes} or not self._has_tables(run):
            return ()
        which = ("model",) if self.probe.page else ("models",) if len(run.models) > 1 else ()
        return (*which, "layers", "role")

    def content(self, run: Run, view: View) -> Content:
        """Of the heads that pass the filters; without the probe's tables, the command that makes them."""
        models = [*dict.fromkeys([*run.models[:1], view.model])] if self.probe.page else view.models
        shown = outline.shown(run, view.model if self.probe.page else view.judge, view.masked(run.heads), models)
        if not self._has_tables(run):
            return self._nothing()
        if drawn := outline.page_of(shown, self.probe):
            return drawn
        sections: dict[str, list[Piece]] = {}
        for topic, found in outline.findings_of(run, self.probe).items():
            heading = "" if topic == self.probe.title else topic
            sections.setdefault("", []).append(Words([finding.text for finding in found], heading))
        for heading, charts in outline.charts_of(shown, self.probe).items():
            sections.setdefault(heading, []).extend(charts)
        return Content(self.probe.title, self.probe.summary, sections) if sections else self._nothing()

    def _has_tables(self, run: Run) -> bool:
        names = {table.name for table in door.part(self.probe, "tables") or ()}
        return not names or bool(names & set(run.tables))

    def _nothing(self) -> Content:
        command = self.probe.example or f"headscope {self.probe.command or self.probe.name}"
        told = Words([f"These runs hold no table of this probe. Make one that does: {command}"])
        return Content(self.probe.title, self.probe.summary, {"": [told]})


def pages() -> list[ProbePage]:
    """Of every probe that has something to show and no other page to show it on."""
    shows = (probe for probe in door.probes().values() if probe.charts or probe.findings or probe.page)
    return [ProbePage(probe) for probe in shows if probe.tab is not None]
