"""What report and app consist of, as data: charts, words, tables and terms. Each becomes HTML, components or text.

Probes hand these on; they know neither the report nor the app.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, overload

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots.highlight import HeadIndex
from headscope.runs.run import Run


@dataclass(frozen=True)
class Chart:
    """A figure, how to read it, and what it shows in words for those who do not see it.

    `ways` are links of the app from the cells of a matrix, row by row, as `exploring.way` writes them.
    """

    figure: go.Figure
    caption: str
    summary: str = ""
    half_width: bool = False
    cell_links: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Finding:
    """A sentence with numbers about a run: its topic, and the label of the model that it is about ("" for several)."""

    topic: str
    text: str
    model: str = ""


@dataclass(frozen=True)
class PaperClaim(Finding):
    """What the paper says, whether it holds on the run, and the figures that say so; as a finding, all in one line."""

    topic: str = field(default="Against the paper", init=False)
    text: str = field(default="", init=False)
    model: str = field(default="", kw_only=True)
    statement: str
    verdict: str
    evidence: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", f"{self.statement}: {self.verdict}. {self.evidence}.")


@dataclass(frozen=True)
class Term:
    """A word that the reader of a chapter needs; shown where a run has one of `tables`, or models if there are none."""

    word: str
    definition: str
    formula: str = ""
    tables: tuple[str, ...] = ()


@dataclass(frozen=True)
class RenderContext:
    """What a chapter or page is drawn from.

    `heads` is the per-head table of `models` (at most six), the heads that a filter leaves out without numbers; `model`
    the one in view; `chosen` the heads worth a closer look, each with the reason.
    """

    run: Run
    models: Sequence[str]
    heads: pd.DataFrame
    selected_model: str
    notable_heads: Mapping[HeadIndex, str]

    def table(self, name: str) -> pd.DataFrame | None:
        """A table of the run with only these models, its categories in the order of the study; None if not stored."""
        if name not in self.run.tables:
            return None
        frame = self.run.table(name)
        frame = frame[frame["model"].isin(list(self.models))]
        return frame.assign(model=frame["model"].astype(pd.CategoricalDtype(self.run.models)))

    def finite_values(self, column: str) -> dict[str, pd.Series]:
        """The finite values of a column of `heads` by model; models without one are left out."""
        if column not in self.heads:
            return {}
        kept = self.heads[np.isfinite(self.heads[column].astype("float64"))]
        return {str(label): block[column] for label, block in kept.groupby("model", observed=True)}


@dataclass(frozen=True)
class Overview:
    """What the terminal shows of a probe: `data` as JSON has it under `name`, `rows` in words, lines of warning."""

    name: str
    title: str
    data: pd.DataFrame
    rows: Sequence[Mapping[str, object]]
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class Link:
    """A way to another view."""

    text: str
    href: str


@dataclass(frozen=True)
class Links:
    """Ways from here."""

    links: Sequence[Link]


@dataclass(frozen=True)
class TextBlock:
    """Sentences, perhaps under a heading, and ways from there. Of `folded` ones the heading alone shows at first."""

    sentences: Sequence[str]
    heading: str = ""
    links: Links | None = None
    collapsed: bool = False


@dataclass(frozen=True)
class TextTable:
    """A small table: column names, rows of text, and what it shows. `defined` explains the first cell of a row."""

    caption: str
    column_names: Sequence[str]
    rows: Sequence[Sequence[str | Link | Links]]
    definitions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class ChartGroup:
    """Charts and tables under one heading of a chapter. Chapters of one name, of several probes, are read as one.

    `page` holds the paths of pages of the app that show them too, such as "/compare"; the probe's own page shows them
    anyway.
    """

    chapter: str
    heading: str
    charts: Iterable[Chart | TextTable]
    app_pages: str = ""


@dataclass(frozen=True)
class HeadTable:
    """All heads of a model, to sort, filter and save. The first columns are layer and head."""

    caption: str
    heads: pd.DataFrame
    highlighted_column: str
    """The column that the page is about."""


@dataclass(frozen=True)
class RecordTable:
    """A table to sort and to search: rows of one kind by column name; `href` leads to what a row is about."""

    caption: str
    rows: Sequence[Mapping[str, Any]]

    @property
    def column_names(self) -> list[str]:
        """Its columns."""
        return [name for name in (self.rows[0] if self.rows else {}) if name != "href"]


Block = Chart | TextBlock | Links | TextTable | HeadTable | RecordTable


class LazySequence(Sequence[Block]):
    """Parts of a page that are made when they are reached, and once: charts take long, and those at the end of a page
    need not be drawn before it is shown."""

    def __init__(self, blocks: Iterable[Block]) -> None:
        self._items: list[Block] = []
        self._remaining = iter(blocks)

    def __iter__(self) -> Iterator[Block]:
        at = 0
        while self._has_item(at):
            yield self._items[at]
            at += 1

    def __bool__(self) -> bool:
        return self._has_item(0)

    def __len__(self) -> int:
        self._items += self._remaining
        return len(self._items)

    @overload
    def __getitem__(self, index: int) -> Block: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Block]: ...

    def __getitem__(self, at: int | slice) -> Block | Sequence[Block]:
        return [*self][at]

    def _has_item(self, index: int) -> bool:
        """Whether there is a part at that place, made now if it was not before."""
        if len(self._items) <= index:
            self._items += islice(self._remaining, index + 1 - len(self._items))
        return len(self._items) > index


@dataclass(frozen=True)
class PageContent:
    """A page: its title, one sentence that orients, and its parts by heading ("" for none). One without parts is left
    out where the page is shown."""

    title: str
    introduction: str
    sections: Mapping[str, Sequence[Block]]
