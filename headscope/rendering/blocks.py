"""Blocks of a report or page as data: charts, findings, texts, tables, links and terms.

Probes create blocks; report and app render them as HTML, Dash components or terminal text.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import pandas as pd

from headscope.base.heads import Head
from headscope.runs.run import Run

if TYPE_CHECKING:
    import plotly.graph_objects as go

MAX_LINE_CHARACTERS = 120
"""Characters of a caption that is shown without opening it."""
SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z])")


@dataclass(frozen=True)
class Chart:
    """A figure with a caption that explains how to read it, and a summary of what it shows.

    `cell_links` are app links from the cells of a matrix, row by row, as `explorer_blocks.query_link` writes them; a
    row of one link has the same link in every cell.
    """

    figure: "go.Figure"
    caption: str
    summary: str = ""
    half_width: bool = False
    cell_links: Sequence[Sequence[str]] = ()

    @property
    def picture(self) -> "go.Figure":
        """The figure as a page shows it."""
        return self.figure

    @property
    def least_width(self) -> int:
        """Width in px below which a page scrolls the figure; 0 for one that fits everywhere."""
        from headscope.plots.least_width import least_width

        return least_width(self.picture)

    @property
    def line(self) -> str:
        """What it shows, or else how to read it, in one short line; "" if its first sentence is longer."""
        first = SENTENCE_END.split(self.summary or self.caption, maxsplit=1)[0]
        return first if len(first) <= MAX_LINE_CHARACTERS else ""

    @property
    def explanation(self) -> str:
        """What `line` leaves out of the summary and the caption."""
        rest = (self.summary or self.caption)[len(self.line) :].strip()
        return f"{rest} {self.caption}".strip() if self.summary else rest


@dataclass(frozen=True)
class Card(Chart):
    """An answer on the overview: a question, the answer in one sentence (the `caption`), a small picture and a link.

    The link is an app link, as `explorer_blocks.query_link` writes it.
    """

    question: str = field(kw_only=True)
    href: str = field(kw_only=True)

    @property
    def picture(self) -> "go.Figure":
        """The figure without its title, with few ticks."""
        from headscope.plots.top_heads import card_picture

        return card_picture(self.figure)


@dataclass(frozen=True)
class Term:
    """A glossary term, for runs with one of `tables`, or for all runs with models if `tables` is empty."""

    word: str
    definition: str
    formula: str = ""
    tables: tuple[str, ...] = ()


@dataclass(frozen=True)
class RenderContext:
    """The data that the charts of a chapter or page are drawn from.

    `heads` is the per-head table of `models` (usually at most six); heads that a filter excludes have no values.
    `notable_heads` maps notable heads (layer, head) to the reason.
    """

    run: Run
    models: Sequence[str]
    heads: pd.DataFrame
    selected_model: str
    notable_heads: Mapping[Head, str]

    def table(self, name: str) -> pd.DataFrame | None:
        """A table of the run, only the rows of these models, categories in run order; None if it is not stored."""
        if name not in self.run.tables:
            return None
        frame = self.run.table(name)
        frame = frame[frame["model"].isin(list(self.models))]
        return frame.assign(model=frame["model"].astype(pd.CategoricalDtype(self.run.models)))

    @property
    def scale_heads(self) -> pd.DataFrame:
        """The per-head table of `models` without filters; it sets the colour scales."""
        heads = self.run.heads
        return heads[heads["model"].isin(list(self.models))]

    def finite_values(self, column: str) -> dict[str, pd.Series]:
        """The finite values of a column of `heads` by model; models without a finite value are left out."""
        if column not in self.heads:
            return {}
        finite_rows = self.heads[np.isfinite(self.heads[column].astype("float64"))]
        return {str(label): rows[column] for label, rows in finite_rows.groupby("model", observed=True)}


@dataclass(frozen=True)
class Overview:
    """The data of a probe for `--json`, under the key `name`."""

    name: str
    data: pd.DataFrame


@dataclass(frozen=True)
class Link:
    """A link to another page or view."""

    text: str
    href: str


@dataclass(frozen=True)
class Links:
    """A list of links."""

    links: Sequence[Link]


@dataclass(frozen=True)
class TextBlock:
    """Sentences with an optional heading, links and a command to type.

    A collapsed block first shows only its heading.
    """

    sentences: Sequence[str]
    heading: str = ""
    links: Links | None = None
    collapsed: bool = False
    command: str = ""


@dataclass(frozen=True)
class TextTable:
    """A small table of text with a caption. `definitions` explains the values of the first column.

    A collapsed table first shows only its caption.
    """

    caption: str
    column_names: Sequence[str]
    rows: Sequence[Sequence[str | Link | Links]]
    definitions: Mapping[str, str] = field(default_factory=dict)
    half_width: bool = field(default=False, kw_only=True)
    collapsed: bool = field(default=False, kw_only=True)


@dataclass(frozen=True)
class Claim:
    """A statement of a paper with its verdict, the evidence, and our criterion unless the statement names it, as
    text."""

    statement: str
    verdict: str
    evidence: str
    criterion: str = ""

    @property
    def mark(self) -> str:
        """A sign for the verdict, for readers who do not see its colour."""
        return VERDICT_MARKS[self.verdict]


VERDICT_MARKS = {"supported": "✓", "partly supported": "◐", "not supported": "✗", "inconclusive": "?"}


@dataclass(frozen=True)
class ClaimTable:
    """The claims of a paper, one per row, with folded evidence and criterion."""

    claims: Sequence[Claim]


@dataclass(frozen=True)
class ChartGroup:
    """Charts and tables under one heading of a chapter. Chapters of several probes with the same name are joined.

    `app_pages` are the paths of app pages that also show them, separated by spaces, such as "/compare". The probe's own
    page always shows them.
    """

    chapter: str
    heading: str
    charts: Iterable[Chart | TextTable | TextBlock]
    app_pages: str = ""


@dataclass(frozen=True)
class HeadTable:
    """All heads of a model as a table to sort, filter and save. The first columns are layer and head."""

    caption: str
    heads: pd.DataFrame
    highlighted_column: str
    """The column of the statistic that the page is about."""


@dataclass(frozen=True)
class RecordTable:
    """A table to sort and search: one mapping per row. The key `href` is the link of a row and not a column."""

    caption: str
    rows: Sequence[Mapping[str, Any]]

    @property
    def column_names(self) -> list[str]:
        """The column names, without `href`."""
        return [name for name in (self.rows[0] if self.rows else {}) if name != "href"]


Block = Chart | TextBlock | Links | TextTable | ClaimTable | HeadTable | RecordTable


class LazySequence(Sequence[Block]):
    """Blocks that are created on first access and cached: a page appears before all its charts are drawn.

    With `is_filled` the caller guarantees at least one block, and a truth test creates none.
    """

    def __init__(self, blocks: Iterable[Block], is_filled: bool = False) -> None:
        self._items: list[Block] = []
        self._remaining = iter(blocks)
        self._is_filled = is_filled

    def __iter__(self) -> Iterator[Block]:
        index = 0
        while self._has_item(index):
            yield self._items[index]
            index += 1

    def __bool__(self) -> bool:
        return self._is_filled or self._has_item(0)

    def __len__(self) -> int:
        self._items += self._remaining
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Block: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Block]: ...

    def __getitem__(self, index: int | slice) -> Block | Sequence[Block]:
        return [*self][index]

    def _has_item(self, index: int) -> bool:
        """Whether the index exists; creates the block if necessary."""
        if len(self._items) <= index:
            self._items += islice(self._remaining, index + 1 - len(self._items))
        return len(self._items) > index


@dataclass(frozen=True)
class PageContent:
    """A page: its title, a one-sentence introduction, and its blocks by heading ("" for none).

    A section without blocks is not shown.
    """

    title: str
    introduction: str
    sections: Mapping[str, Sequence[Block]]
    tabs: bool = False
    """Whether the app shows one section at a time, behind named tabs."""
