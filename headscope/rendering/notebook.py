"""Runs in a notebook: findings and charts. The methods of `headscope.run.Run` call the functions here.

Jupyter and VS Code have plotly's viewer, so they get text and figures, which follow the notebook's theme. Other
frontends get a self-contained page in an iframe, with plotly.js. Neither needs a server or a network.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape, unescape
from pathlib import Path
from typing import Any, overload

import pandas as pd
import plotly.io as pio
from markupsafe import Markup
from plotly.io.base_renderers import PlotlyRenderer

from headscope.base.heads import check_statistic
from headscope.base.user_input import check_path, quote
from headscope.errors import BadInput, did_you_mean
from headscope.plots.style import GRAPH_CONFIG
from headscope.rendering import assembly, html_page, run_results
from headscope.rendering.blocks import Block, Card, Chart, ChartGroup, Links, PageContent, TextBlock
from headscope.rendering.figure_files import check_figure, save_chart
from headscope.rendering.run_description import describe_run
from headscope.rendering.text import head_mask, statistics_table
from headscope.results.collection import all_results, results_of_all_models
from headscope.results.table import results_table
from headscope.runs import summary
from headscope.runs.run import Run
from headscope.runs.run_tables import check_model
from headscope.runs.summary import default_model

PLOTLY_MIME_TYPE = "application/vnd.plotly.v1+json"
Bundle = dict[str, Any]
"""An output of a notebook by MIME type."""


class Page(PageContent):
    """A page as a notebook displays it."""

    def html(self) -> str:
        """A self-contained page in an iframe, which isolates its styles and scripts from the notebook."""
        page = escape(html_page.render_page(self))
        return (
            f'<iframe srcdoc="{page}" title="{escape(self.title)}" style="width:100%;height:600px;border:0"></iframe>'
        )

    def outputs(self) -> Iterator[Bundle]:
        """The page in parts: HTML without styles, and figures for plotly's viewer."""
        renderer = html_page.BlockRenderer()
        introduction = Markup("\n<p>{}</p>").format(self.introduction) if self.introduction else ""
        yield {"text/html": Markup("<h2>{}</h2>{}").format(self.title, introduction)}
        for heading, blocks in self.sections.items():
            if heading:
                yield {"text/html": f"<h3>{escape(heading)}</h3>"}
            for block in blocks:
                if isinstance(block, Chart):
                    yield _figure_bundle(block)
                    yield {"text/html": _caption(block)}
                else:
                    yield {"text/html": renderer.html(block)}

    def display(self) -> None:
        """Show the page in the notebook, in parts if plotly's default renderer says that there is a viewer."""
        from IPython.display import display

        names = pio.renderers.default.split("+")
        has_viewer = any(isinstance(pio.renderers[name], PlotlyRenderer) for name in names if name)
        for bundle in self.outputs() if has_viewer else [{"text/html": self.html()}]:
            display({"text/plain": self.title, **bundle}, raw=True)


def _figure_bundle(chart: Chart) -> Bundle:
    figure = html_page.figure_values(chart.picture)
    return {PLOTLY_MIME_TYPE: {**figure, "config": GRAPH_CONFIG}, "text/plain": chart_title(chart)}


def _caption(chart: Chart) -> Markup:
    if isinstance(chart, Card):
        return Markup("<p><b>{}</b> {}</p>").format(chart.question, chart.caption)
    return Markup("<div>{}</div>").format(html_page.block_macros().caption(chart))


@dataclass(frozen=True, repr=False)
class NotebookChart(Chart):
    """A chart that a notebook displays with its caption."""

    def __repr__(self) -> str:
        return f"<chart: {chart_title(self)}>"

    def save(self, path: Path | str, width: str | float | None = None) -> Path:
        """Write the figure to an HTML, PDF, SVG, PNG, WebP or JPEG file, at the `width` of a paper's column if given:
        see `headscope.rendering.figure_files.save_chart`."""
        return save_chart(self, path, width)

    def _page(self) -> Page:
        return Page(chart_title(self), "", {"": [self]})

    def _ipython_display_(self) -> None:
        self._page().display()

    def _repr_html_(self) -> str:
        return self._page().html()


@dataclass(frozen=True)
class NotebookCharts(Sequence[NotebookChart]):
    """A sequence of charts with a title and sentences; `charts[0].figure` is a plotly figure.

    `blocks` holds the charts and the blocks between them, such as passages with the top attended tokens.
    """

    title: str
    sentences: Sequence[str]
    blocks: Sequence[Block]

    @property
    def charts(self) -> list[NotebookChart]:
        return [
            NotebookChart(block.figure, block.caption, block.summary)
            for block in self.blocks
            if isinstance(block, Chart)
        ]

    @overload
    def __getitem__(self, index: int) -> NotebookChart: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[NotebookChart]: ...

    def __getitem__(self, index: int | slice) -> NotebookChart | Sequence[NotebookChart]:
        return self.charts[index]

    def __len__(self) -> int:
        return len(self.charts)

    def __repr__(self) -> str:
        return "\n".join([f"<{self.title}: {len(self)} charts>", *map(chart_title, self.charts)])

    def files(self, path: Path | str) -> list[Path]:
        """The file of each chart: `path`, and for further charts its name with -2, -3, ... before the ending."""
        first = Path(path)
        return [
            first if number == 1 else first.with_name(f"{first.stem}-{number}{first.suffix}")
            for number in range(1, len(self) + 1)
        ]

    def save(self, path: Path | str, width: str | float | None = None) -> list[Path]:
        """Write every chart to a file of its own: see `files`, and `headscope.rendering.figure_files.save_chart`."""
        files = [check_figure(file, width) for file in self.files(check_path(path, "path"))]  # before any is drawn
        return [chart.save(file, width) for chart, file in zip(self.charts, files, strict=True)]

    def _page(self) -> Page:
        blocks = [block for block in self.blocks if not isinstance(block, Links)]  # links lead to pages of the app
        return Page(self.title, " ".join(self.sentences), {"": blocks})

    def _ipython_display_(self) -> None:
        self._page().display()

    def _repr_html_(self) -> str:
        return self._page().html()


def run_page(run: Run) -> Page:
    """A run as a page: the cards of the overview and its charts, headlines, claims, and all results, folded."""
    context = assembly.render_context(run)
    claims = run_results.claim_table(all_results(run))
    sections: dict[str, Sequence[Block]] = {
        "": [*assembly.overview_cards(context)],
        "At a glance": [*assembly.overview_blocks(context)],
        "In short": run_results.summary_blocks(run),
        "Claims of the paper": [claims] if claims else [],
        "In words": [
            TextBlock(sentences, topic, collapsed=True)
            for topic, sentences in run_results.sentences_by_topic(all_results(run)).items()
        ],
        "Tables": [TextBlock([*run.tables], "Tables of the run", collapsed=True)],
    }
    shown_sections = {heading: blocks for heading, blocks in sections.items() if blocks}
    return Page(run.name, describe_run(run), shown_sections)


def findings(run: Run) -> pd.DataFrame:
    """All results of the run, for every model, one per row: what they answer, the value with its interval, verdict and
    sentence."""
    return results_table(results_of_all_models(run))


def charts(run: Run, topic: str = "") -> NotebookCharts:
    """The charts of the report; with a `topic`, those whose chapter or heading contains it, or else those with all its
    words in the title.

    Raises BadInput if no chart matches the topic.
    """
    if not isinstance(topic, str):
        raise BadInput(f"topic must be a string: {topic!r}. Give a part of a heading or title, e.g. 'loss'")
    context = assembly.render_context(run)
    blocks = _chart_blocks(assembly.collect_chapters(context, topic))
    if topic and not blocks:
        chapters = assembly.collect_chapters(context)
        words = topic.casefold().split()
        blocks = [
            block
            for block in _chart_blocks(chapters)
            if isinstance(block, Chart) and all(word in chart_title(block).casefold() for word in words)
        ]
        if not blocks:
            topic_list = "; ".join(chapters) or "none"
            hint = did_you_mean(topic, [*chapters])
            raise BadInput(
                f"no chart of {run.name} matches {quote(topic)}{hint}. Use words of a title, or one of: {topic_list}"
            )
    return NotebookCharts(topic or run.name, [], blocks)


def _chart_blocks(chapters: Mapping[str, Iterable[ChartGroup]]) -> list[Block]:
    return [block for groups in chapters.values() for group in groups for block in group.charts]


def head(run: Run, layer: int, head: int, model: str = "") -> NotebookCharts:
    """Sentences and charts about one head in a model, by default the last one that is not an intermediate checkpoint.

    Raises BadInput for an unknown model or head.
    """
    model = model or default_model(run)
    check_model(run, model)
    if not head_mask(run.heads, layer, head).any():
        raise BadInput(f"{run.name} has no head {head} in layer {layer}. Use a head of run.heads")
    first, more = assembly.head_sentences(run, model, layer, head)
    blocks = [*assembly.head_card(run, model, layer, head), *assembly.head_blocks(run, model, layer, head)]
    return NotebookCharts(f"Layer {layer}, head {head}: {model}", [*first, *more], blocks)


def to_latex(run: Run, statistics: Sequence[str], count: int, model: str | None) -> str:
    """A LaTeX tabular of the top heads by the first statistic, or of the models without statistics."""
    frame = summary.model_table(run)
    if statistics:
        for name in statistics:
            check_statistic(run.heads, name)
        top = [*run.top_heads(statistics[0], count, model)]
        heads = run.heads[run.heads["model"] == (model or run.models[0])].set_index(["layer", "head"])
        ends = [f"{name}_{end}" for name in statistics for end in ("low", "high") if f"{name}_{end}" in heads]
        frame = heads.loc[top, [*statistics, *ends]].reset_index()
    table = statistics_table("", frame)
    rows = [" & ".join(_escape_latex(str(cell)) for cell in row) + r" \\" for row in (table.column_names, *table.rows)]
    columns = f"{'rr' if statistics else 'l'}{'r' * len(table.column_names)}"[: len(table.column_names)]
    lines = [f"% {run.name}", rf"\begin{{tabular}}{{{columns}}}", r"\hline", rows[0], r"\hline", *rows[1:], r"\hline"]
    return "\n".join([*lines, r"\end{tabular}"]) + "\n"


def _escape_latex(text: str) -> str:
    return "".join(f"\\{character}" if character in "&%$#_{}" else character for character in text)


def chart_title(chart: Chart) -> str:
    """The title of the chart as one line of plain text."""
    return unescape(str(chart.figure.layout.title.text or "").replace("<br>", " "))
