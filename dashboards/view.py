"""What a user looks at, read from the query of the URL. What the URL asks in vain is told, not followed."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlencode

import pandas as pd

from headscope.errors import BadInput
from headscope.figures.marks import Head
from headscope.report.outline import measured
from headscope.runs.means import HEAD_KEYS
from headscope.runs.roles import holding, roles
from headscope.runs.run import Run
from headscope.runs.statistics import sentence, statistic
from headscope.runs.summary import longest

Query = Mapping[str, str | list[str]]
FILTERS = ("layers", "role", "low", "high", "pick")


@dataclass(frozen=True)
class View:
    """One state of the app. `query` is the URL's own, for links that keep it."""

    query: Query
    model: str
    stat: str
    base: str | None
    layers: tuple[int, int] | None
    role: str | None
    low: float | None
    high: float | None
    picked: frozenset[Head]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, query: Query, run: Run) -> "View":
        """Read the query; what it does not say, or says of something the run lacks, takes a default."""
        known = {name: value if isinstance(value, str) else value[-1] for name, value in query.items() if value}
        notes: list[str] = []

        def one_of(name: str, choices: list[str], default: str | None) -> str | None:
            if (asked := known.get(name)) is None or asked in choices:
                return asked or default
            notes.append(f"This run has no {name} \u2018{asked[:60]}\u2019; the view goes without.")
            return default

        stats = measured(run.heads)
        return cls(
            query=query,
            model=one_of("model", run.models, run.models[-1] if run.models else "") or "",
            stat=one_of("stat", stats, longest(run.heads) or next(iter(stats), "")) or "",
            base=one_of("base", run.models, None),
            layers=_range(known.get("layers", "")),
            role=one_of("role", list(roles()), None),
            low=_number(known.get("low")),
            high=_number(known.get("high")),
            picked=frozenset(_heads(known.get("pick", ""))),
            notes=tuple(notes),
        )

    def kept(self, heads: pd.DataFrame) -> pd.DataFrame:
        """The rows, of every model, of the heads that pass the filters; role and threshold are judged by `model`."""
        mine = heads[heads["model"] == self.model]
        passes = pd.Series(True, mine.index)
        if self.layers:
            passes &= mine["layer"].between(*self.layers)
        if self.role:
            passes &= holding(mine, self.role)
        if self.stat in mine:
            passes &= ~(mine[self.stat] < (-math.inf if self.low is None else self.low))
            passes &= ~(mine[self.stat] > (math.inf if self.high is None else self.high))
        place = ["layer", "head"]
        wanted = pd.MultiIndex.from_frame(mine.loc[passes, place])
        return heads[pd.MultiIndex.from_frame(heads[place]).isin(wanted)]

    def masked(self, heads: pd.DataFrame) -> pd.DataFrame:
        """All rows, so that matrices keep their shape; heads that do not pass the filters lose their numbers."""
        if not self.filtering:
            return heads
        passes = pd.Series(heads.index.isin(self.kept(heads).index), heads.index)
        return heads.assign(**{name: heads[name].where(passes) for name in map(str, heads) if name not in HEAD_KEYS})

    @property
    def filtering(self) -> bool:
        """Whether anything is left out."""
        return any((self.layers, self.role, self.low is not None, self.high is not None))

    def link(self, path: str, *without: str, **changes: str) -> str:
        """The URL of `path` in this state, some of it changed or left out."""
        return linked(path, {name: value for name, value in self.query.items() if name not in without} | changes)

    def head_link(self, layer: int, head: int) -> str:
        """The URL of a head's own page."""
        return self.link(f"/head/{layer}.{head}")


def linked(path: str, query: Query) -> str:
    """The URL of `path` with this query."""
    return f"{path}?{told}" if (told := urlencode(query, doseq=True)) else path


def described(name: str) -> str:
    """A statistic's definition in one line, its formula first."""
    shown = statistic(name)
    unit = f" Unit: {shown.unit}." if shown.unit else ""
    return f"{shown.formula}{'. ' if shown.formula else ''}{sentence(shown.meaning)}.{unit}"


def place_of(at: str, run: Run) -> Head:
    """The head that a path names: `3.2` is layer 3, head 2; `3.g1` the first head of key group 1 in layer 3.

    Raises BadInput for anything else, and for a head that the run does not have.
    """
    heads = run.heads
    told = re.fullmatch(r"([0-9]{1,5})\.(g?)([0-9]{1,5})", at)
    if told is None:
        raise BadInput(f"'{at[:60]}' names no head: write layer.head, such as 3.2")
    layer, column, number = int(told[1]), "kv_group" if told[2] else "head", int(told[3])
    here = heads[(heads["layer"] == layer) & (heads[column] == number)]
    if here.empty:
        raise BadInput(f"this run has no {'key group' if told[2] else 'head'} {number} in layer {layer}")
    return layer, int(here["head"].min())


def _heads(told: str) -> Iterator[Head]:
    for layer, head in re.findall(r"([0-9]{1,5})\.([0-9]{1,5})", told):
        yield int(layer), int(head)


def _range(told: str) -> tuple[int, int] | None:
    ends = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", told)
    return (int(ends[1]), int(ends[2])) if ends else None


def _number(told: str | None) -> float | None:
    try:
        value = float(told or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
