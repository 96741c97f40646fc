"""What a page consists of, as data: it becomes Dash components on screen and one HTML file when it is saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd

from headscope.chart import Chart


@dataclass(frozen=True)
class Words:
    """Sentences, perhaps under a heading."""

    sentences: Sequence[str]
    heading: str = ""


@dataclass(frozen=True)
class Link:
    """A table's cell that leads to another view."""

    text: str
    href: str


@dataclass(frozen=True)
class Links:
    """Ways from here."""

    links: Sequence[Link]


@dataclass(frozen=True)
class Table:
    """A small table: column names, rows of text, and what it shows. `defined` explains the first cell of a row."""

    caption: str
    names: Sequence[str]
    rows: Sequence[Sequence[str | Link]]
    defined: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Grid:
    """All heads of a model, to sort, filter and save. The first columns are layer and head."""

    caption: str
    heads: pd.DataFrame
    highlight: str
    """The column that the page is about."""


Part = Chart | Words | Links | Table | Grid


@dataclass(frozen=True)
class Content:
    """A page: its title, one sentence that orients, and its parts by heading ("" for none)."""

    title: str
    lead: str
    sections: Mapping[str, Sequence[Part]]
