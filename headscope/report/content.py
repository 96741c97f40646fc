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

from headscope.figures.marks import Head
from headscope.runs.run import Run


@dataclass(frozen=True)
class Chart:
    """A figure, how to read it, and what it shows in words for those who do not see it.

    `ways` are links of the app from the cells of a matrix, row by row, as `exploring.way` writes them.
    """

    figure: go.Figure
    caption: str
    summary: str = ""
    half: bool = False
    ways: Sequence[Sequence[str]] = ()


@dataclass(frozen=True)
class Finding:
    """A sentence with numbers about a run: its topic, and the label of the model that it is about ("" for several)."""

    topic: str
    text: str
    model: str = ""


@dataclass(frozen=True)
class Term:
    """A word that the reader of a chapter needs; shown where a run has one of `tables`, or models if there are none."""

    word: str
    text: str
    formula: str = ""
    tables: tuple[str, ...] = ()


@dataclass(frozen=True)
class Shown:
    """What a chapter or page is drawn from.

    `heads` is the per-head table of `models` (at most six), the heads that a filter leaves out without numbers; `model`
    the one in view; `chosen` the heads worth a closer look, each with the reason.
    """

    run: Run
    models: Sequence[str]
    heads: pd.DataFrame
    model: str
    chosen: Mapping[Head, str]

    def table(self, name: str) -> pd.DataFrame | None:
        """A table of the run with only these models, its categories in the order of the study; None if not stored."""
        if name not in self.run.tables:
            return None
        frame = self.run.table(name)
        frame = frame[frame["model"].isin(list(self.models))]
        return frame.assign(model=frame["model"].astype(pd.CategoricalDtype(self.run.models)))

    def finite(self, name: str) -> dict[str, pd.Series]:
        """The finite values of a column of `heads` by model; models without one are left out."""
        if name not in self.heads:
            return {}
        kept = self.heads[np.isfinite(self.heads[name].astype("float64"))]
        return {str(label): block[name] for label, block in kept.groupby("model", observed=True)}


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
class Words:
    """Sentences, perhaps under a heading, and ways from there. Of `folded` ones the heading alone shows at first."""

    sentences: Sequence[str]
    heading: str = ""
    links: Links | None = None
    folded: bool = False


@dataclass(frozen=True)
class Listing:
    """A small table: column names, rows of text, and what it shows. `defined` explains the first cell of a row."""

    caption: str
    names: Sequence[str]
    rows: Sequence[Sequence[str | Link | Links]]
    defined: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Group:
    """Charts and tables under one heading of a chapter. Chapters of one name, of several probes, are read as one.

    `page` holds the paths of pages of the app that show them too, such as "/compare"; the probe's own page shows them
    anyway.
    """

    chapter: str
    heading: str
    charts: Iterable[Chart | Listing]
    page: str = ""


@dataclass(frozen=True)
class Grid:
    """All heads of a model, to sort, filter and save. The first columns are layer and head."""

    caption: str
    heads: pd.DataFrame
    highlight: str
    """The column that the page is about."""


@dataclass(frozen=True)
class Records:
    """A table to sort and to search: rows of one kind by column name; `href` leads to what a row is about."""

    caption: str
    rows: Sequence[Mapping[str, Any]]

    @property
    def names(self) -> list[str]:
        """Its columns."""
        return [name for name in (self.rows[0] if self.rows else {}) if name != "href"]


Piece = Chart | Words | Links | Listing | Grid | Records


class Later(Sequence[Piece]):
    """Parts of a page that are made when they are reached, and once: charts take long, and those at the end of a page
    need not be drawn before it is shown."""

    def __init__(self, parts: Iterable[Piece]) -> None:
        self._made: list[Piece] = []
        self._more = iter(parts)

    def __iter__(self) -> Iterator[Piece]:
        at = 0
        while self._reaches(at):
            yield self._made[at]
            at += 1

    def __bool__(self) -> bool:
        return self._reaches(0)

    def __len__(self) -> int:
        self._made += self._more
        return len(self._made)

    @overload
    def __getitem__(self, at: int) -> Piece: ...

    @overload
    def __getitem__(self, at: slice) -> Sequence[Piece]: ...

    def __getitem__(self, at: int | slice) -> Piece | Sequence[Piece]:
        return [*self][at]

    def _reaches(self, at: int) -> bool:
        """Whether there is a part at that place, made now if it was not before."""
        if len(self._made) <= at:
            self._made += islice(self._more, at + 1 - len(self._made))
        return len(self._made) > at


@dataclass(frozen=True)
class Content:
    """A page: its title, one sentence that orients, and its parts by heading ("" for none). One without parts is left
    out where the page is shown."""

    title: str
    lead: str
    sections: Mapping[str, Sequence[Piece]]
