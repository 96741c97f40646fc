"""What a user looks at, read from the query of the URL. What the URL asks in vain is told, not followed."""

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import pandas as pd

from headscope import user_input
from headscope.errors import BadInput
from headscope.plots.highlight import HeadIndex
from headscope.report.assembly import run_statistics
from headscope.report.text import default_models
from headscope.runs.aggregation import HEAD_KEYS
from headscope.runs.column_metadata import number, sentence, statistic
from headscope.runs.roles import holding, roles
from headscope.runs.run import Run
from headscope.runs.summary import longest, longest_of_all

Query = Mapping[str, str | list[str]]
FILTERS = ("layers", "role", "low", "high")
"""They hold on the page that they were set on; thresholds for the statistic that they were set for."""
TABLE = ("sort", "columns")
"""How the grid is sorted and filtered: the browser's affair, and no reason to draw the page anew."""
KEPT = ("run", "model", "models", "stat", "base", "pick", "sets")
"""What goes along to another page."""


@dataclass(frozen=True)
class View:
    """One state of the app. `query` is what of the URL holds, for links that keep it."""

    query: Query
    model: str
    models: tuple[str, ...]
    """Those that are drawn side by side."""
    stat: str
    base: str | None
    judge: str
    """The model that filters are judged by."""
    layers: tuple[int, int] | None
    role: str | None
    low: float | None
    high: float | None
    picked: frozenset[HeadIndex]
    sets: Mapping[str, frozenset[HeadIndex]]
    """Heads picked earlier, by the name that they were given."""
    lines: str
    """Which heads a rank shift draws: "leading" ones, or "changed" those that changed beyond noise."""
    sort: tuple[str, str] | None
    columns: Mapping[str, Any]
    notes: tuple[str, ...]

    @classmethod
    def of(cls, query: Query, run: Run, controls: Collection[str] | None = None) -> "View":
        """Read the query; what it does not say, or says of something the run lacks, takes a default.

        Of filters only those hold that are among the page's `controls` (by default all).
        """
        known = {name: value if isinstance(value, str) else value[-1] for name, value in query.items() if value}
        has = {*FILTERS, "model"} if controls is None else {*controls}
        notes: list[str] = []

        def one_of(name: str, choices: Sequence[str], default: str | None) -> str | None:
            if (asked := known.get(name)) is None or asked in choices:
                return asked or default
            notes.append(f"This run has no {name} \u2018{asked[:60]}\u2019; the view goes without.")
            del known[name]
            return default

        if strange := [name for name in FILTERS if name in known and name not in has]:
            known = {name: value for name, value in known.items() if name not in strange}
            notes.append(f"Left out, as it is no filter of this page: {', '.join(strange)}.")
        stats = run_statistics(run)
        asked = query.get("models", [])
        drawn = [label for label in run.models if label in asked] or default_models(run)
        model = one_of("model", run.models, run.models[-1] if run.models else "") or ""
        base = one_of("base", run.models, None)
        first = next(iter(default_models(run)), "")
        judge = (
            model if "model" in has else (base or first) if "base" in has else drawn[0] if "models" in has else model
        )
        seen = drawn if "models" in has else [model] if "model" in has else run.models
        known_of_all = longest_of_all(run.heads[run.heads["model"].isin(seen)]) or longest(run.heads)
        stat = one_of("stat", stats, known_of_all or next(iter(stats), "")) or ""
        role = one_of("role", list(roles()), None)
        return cls(
            query={name: query[name] if name in ("run", "models", "sets") else known[name] for name in known},
            model=model,
            models=tuple(drawn),
            stat=stat,
            base=base,
            judge=judge,
            layers=_range(known.get("layers", "")),
            role=role,
            low=_number(known.get("low")),
            high=_number(known.get("high")),
            picked=frozenset(heads_of(known.get("pick", ""))),
            sets=dict(_sets(query.get("sets", []))),
            lines=one_of("lines", ["leading", "changed"], "leading") or "",
            sort=_sort(known.get("sort", "")),
            columns=_columns(known.get("columns", "")),
            notes=tuple(notes),
        )

    def kept(self, heads: pd.DataFrame) -> pd.DataFrame:
        """The rows, of every model, of the heads that pass the filters; role and threshold are judged by `judge`."""
        if not self.filtering:
            return heads
        mine = heads[heads["model"] == self.judge]
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

    def filters(self) -> list[str]:
        """What the filters ask of a head, in words."""
        told = [f"in layers {self.layers[0]} to {self.layers[1]}"] if self.layers else []
        told += [f"that are {self.role} in {self.judge}"] if self.role else []
        called = statistic(self.stat).label if self.stat else ""
        ends = [("at least", self.low), ("at most", self.high)]
        if limits := " and ".join(f"{how} {number(end)}" for how, end in ends if end is not None):
            told.append(f"with {called} {limits} in {self.judge}")
        return told

    def link(self, path: str, *without: str, **changes: str | list[str]) -> str:
        """The URL of `path` in this state, some of it changed or left out; another page's filters stay behind."""
        kept = {name: value for name, value in self.query.items() if name not in without and (name in KEPT or not path)}
        return linked(path, kept | changes)

    def leads(self, way: str) -> str:
        """The URL of a link that names what it changes, as `exploring.way` writes it, in this state."""
        told = urlsplit(way)
        return self.link(told.path, **dict(parse_qsl(told.query)))

    def head_link(self, layer: int, head: int) -> str:
        """The URL of a head's own page."""
        return self.link(f"/head/{layer}.{head}")


def asked(search: str) -> Query:
    """What the query of a URL asks for."""
    return {**parse_qs(search.removeprefix("?"))}


def linked(path: str, query: Query) -> str:
    """The URL of `path` with this query."""
    return f"{path}?{told}" if (told := urlencode(query, doseq=True)) else path


def described(name: str) -> str:
    """A statistic's definition in one line, its formula first."""
    shown = statistic(name)
    unit = f" Unit: {shown.unit}." if shown.unit else ""
    return f"{shown.formula}{'. ' if shown.formula else ''}{sentence(shown.meaning)}.{unit}"


def place_of(at: str, run: Run) -> HeadIndex:
    """The head that a path names: `3.2` is layer 3, head 2; `3.g1` the first head of key group 1 in layer 3.

    Raises BadInput for anything else, and for a head that the run does not have.
    """
    heads = run.heads
    try:
        layer, number, whole = user_input.unit(at)
    except ValueError as error:
        raise BadInput(f"{error}: write layer.head, such as 3.2") from error
    here = heads[(heads["layer"] == layer) & (heads["kv_group" if whole else "head"] == number)]
    if here.empty:
        raise BadInput(f"this run has no {'key group' if whole else 'head'} {number} in layer {layer}")
    return layer, int(here["head"].min())


def heads_of(told: str) -> Iterator[HeadIndex]:
    """The heads of `3.2_4.0`."""
    for layer, head in re.findall(r"([0-9]{1,5})\.([0-9]{1,5})", told):
        yield int(layer), int(head)


def _sets(told: str | list[str]) -> Iterator[tuple[str, frozenset[HeadIndex]]]:
    for each in [told] if isinstance(told, str) else told:
        name, _, places = each.rpartition(":")
        if name and (heads := frozenset(heads_of(places))):
            yield name[:40], heads


def _range(told: str) -> tuple[int, int] | None:
    ends = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", told)
    return (int(ends[1]), int(ends[2])) if ends else None


def _sort(told: str) -> tuple[str, str] | None:
    named = re.fullmatch(r"(\w+)-(asc|desc)", told)
    return (named[1], named[2]) if named else None


def _columns(told: str) -> Mapping[str, Any]:
    try:
        asked = json.loads(told or "{}")
    except ValueError:
        return {}
    return asked if isinstance(asked, dict) else {}


def _number(told: str | None) -> float | None:
    try:
        value = float(told or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
