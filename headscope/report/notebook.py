"""A run in a notebook: what it found and its first charts, drawn by the report's templates in a frame of their own.

No server, and no other host: each output holds all that it draws with. The methods of `Run` of these names lead here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape, unescape
from typing import overload

import pandas as pd

from headscope.errors import BadInput, nearest
from headscope.report import assembly, html_page
from headscope.report.blocks import Block, Chart, Links, TextBlock
from headscope.report.text import head_mask
from headscope.runs.run import Run


@dataclass(frozen=True)
class NotebookChart(Chart):
    """A chart that shows itself, with its caption, as the last thing of a cell."""

    def _repr_html_(self) -> str:
        return page_iframe(chart_title(self), "", {}, {"": [self]})


@dataclass(frozen=True)
class NotebookCharts(Sequence[NotebookChart]):
    """Charts under one title, with sentences that tell what they show. `charts[0].figure` is a plotly figure.

    `parts` holds what is shown beside the charts as well, such as passages that a head reads.
    """

    title: str
    sentences: Sequence[str]
    blocks: Sequence[Block]

    @property
    def charts(self) -> list[NotebookChart]:
        return [
            NotebookChart(each.figure, each.caption, each.summary) for each in self.blocks if isinstance(each, Chart)
        ]

    @overload
    def __getitem__(self, at: int) -> NotebookChart: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[NotebookChart]: ...

    def __getitem__(self, at: int | slice) -> NotebookChart | Sequence[NotebookChart]:
        return self.charts[at]

    def __len__(self) -> int:
        return len(self.charts)

    def __repr__(self) -> str:
        return "\n".join([f"<{self.title}: {len(self)} charts>", *map(chart_title, self.charts)])

    def _repr_html_(self) -> str:
        parts = [part for part in self.blocks if not isinstance(part, Links)]  # ways are for the app
        return page_iframe(self.title, " ".join(self.sentences), {}, {"": parts})


def run_html(run: Run) -> str:
    """The run as a notebook shows it: its first charts, and what was found, folded under its topics."""
    sections: dict[str, Sequence[Block]] = {"": [*assembly.overview_blocks(assembly.render_context(run))]}
    told = assembly.findings_by_topic(run).items()
    sections["What was found"] = [
        TextBlock([each.text for each in found], topic, collapsed=True) for topic, found in told
    ]
    facts = {"Models": ", ".join(run.models), "Tables": ", ".join(run.tables)}
    return page_iframe(run.name, "", facts, {heading: parts for heading, parts in sections.items() if parts})


def findings(run: Run) -> pd.DataFrame:
    """What was found, a sentence a row: the `model` that it is about ("" for several), its `topic` and its `text`."""
    every = [finding for found in assembly.findings_by_topic(run).values() for finding in found]
    return pd.DataFrame([(each.model, each.topic, each.text) for each in every], columns=["model", "topic", "text"])


def charts(run: Run, topic: str = "") -> NotebookCharts:
    """The report's charts, of one topic or all: those that have it in the name of their chapter or in their heading.

    Raises BadInput for a topic that none has.
    """
    looked = assembly.render_context(run)
    drawn = [
        part
        for groups in assembly.collect_chapters(looked, topic).values()
        for group in groups
        for part in group.charts
    ]
    if topic and not drawn:
        known = [*assembly.collect_chapters(looked)]
        listed = "; ".join(known) or "nothing to draw"
        raise BadInput(f"no chart of {run.name} is about '{topic}'{nearest(topic, known)}; its topics are: {listed}")
    return NotebookCharts(topic or run.name, [], drawn)


def head(run: Run, layer: int, head: int, model: str = "") -> NotebookCharts:
    """One head as the app shows it, in `model` (by default the last): what it is in words, and its charts.

    Raises BadInput for a head or a model that the run does not have.
    """
    model = model or next(reversed(run.models), "")
    if model not in run.models:
        raise BadInput(f"{run.name} has no model '{model}'{nearest(model, run.models)}, only {', '.join(run.models)}")
    if not head_mask(run.heads, layer, head).any():
        raise BadInput(f"{run.name} has no head {head} in layer {layer}: see run.heads for those that it has")
    first, more = assembly.head_sentences(run, model, layer, head)
    parts = [*assembly.head_blocks(run, model, layer, head)]
    return NotebookCharts(f"Layer {layer}, head {head}: {model}", [*first, *more], parts)


def page_iframe(
    title: str, introduction: str, facts: Mapping[str, str], sections: Mapping[str, Sequence[Block]]
) -> str:
    """A page that stands alone, in a frame: its style and scripts do not meet those of the notebook."""
    page = escape(html_page.render_page(title, introduction, facts, sections))
    return f'<iframe srcdoc="{page}" title="{escape(title)}" style="width:100%;height:600px;border:0"></iframe>'


def chart_title(chart: Chart) -> str:
    """The chart's title as one line of text."""
    return unescape(str(chart.figure.layout.title.text or "").replace("<br>", " "))
