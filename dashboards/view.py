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
FILTER_PARAMETERS = ("layers", "role", "low", "high")
"""They hold on the page that they were set on; thresholds for the statistic that they were set for."""
TABLE_PARAMETERS = ("sort", "columns")
"""How the grid is sorted and filtered: the browser's affair, and no reason to draw the page anew."""
KEPT_PARAMETERS = ("run", "model", "models", "stat", "base", "pick", "sets")
"""What goes along to another page."""


@dataclass(frozen=True)
class ViewState:
    """One state of the app. `query` is what of the URL holds, for links that keep it."""

    query: Query
    model: str
    shown_models: tuple[str, ...]
    """Those that are drawn side by side."""
    statistic_name: str
    baseline: str | None
    filter_model: str
    """The model that filters are judged by."""
    layers: tuple[int, int] | None
    role: str | None
    min_value: float | None
    max_value: float | None
    selected_heads: frozenset[HeadIndex]
    head_sets: Mapping[str, frozenset[HeadIndex]]
    """Heads picked earlier, by the name that they were given."""
    rank_lines: str
    """Which heads a rank shift draws: "leading" ones, or "changed" those that changed beyond noise."""
    sort: tuple[str, str] | None
    column_filters: Mapping[str, Any]
    notes: tuple[str, ...]

    @classmethod
    def from_query(cls, query: Query, run: Run, controls: Collection[str] | None = None) -> "ViewState":
        """Read the query; what it does not say, or says of something the run lacks, takes a default.

        Of filters only those hold that are among the page's `controls` (by default all).
        """
        known = {name: value if isinstance(value, str) else value[-1] for name, value in query.items() if value}
        has = {*FILTER_PARAMETERS, "model"} if controls is None else {*controls}
        notes: list[str] = []

        def one_of(name: str, choices: Sequence[str], default: str | None) -> str | None:
            if (asked := known.get(name)) is None or asked in choices:
                return asked or default
            notes.append(f"This run has no {name} \u2018{asked[:60]}\u2019; the view goes without.")
            del known[name]
            return default

        if strange := [name for name in FILTER_PARAMETERS if name in known and name not in has]:
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
            layers=_parse_range(known.get("layers", "")),
            role=role,
            low=_parse_number(known.get("low")),
            high=_parse_number(known.get("high")),
            picked=frozenset(parse_heads(known.get("pick", ""))),
            sets=dict(_parse_head_sets(query.get("sets", []))),
            lines=one_of("lines", ["leading", "changed"], "leading") or "",
            sort=_parse_sort(known.get("sort", "")),
            columns=_parse_column_filters(known.get("columns", "")),
            notes=tuple(notes),
        )

    def filter_heads(self, heads: pd.DataFrame) -> pd.DataFrame:
        """The rows, of every model, of the heads that pass the filters; role and threshold are judged by `judge`."""
        if not self.has_filters:
            return heads
        mine = heads[heads["model"] == self.filter_model]
        passes = pd.Series(True, mine.index)
        if self.layers:
            passes &= mine["layer"].between(*self.layers)
        if self.role:
            passes &= holding(mine, self.role)
        if self.statistic_name in mine:
            passes &= ~(mine[self.statistic_name] < (-math.inf if self.min_value is None else self.min_value))
            passes &= ~(mine[self.statistic_name] > (math.inf if self.max_value is None else self.max_value))
        place = ["layer", "head"]
        wanted = pd.MultiIndex.from_frame(mine.loc[passes, place])
        return heads[pd.MultiIndex.from_frame(heads[place]).isin(wanted)]

    def mask_filtered(self, heads: pd.DataFrame) -> pd.DataFrame:
        """All rows, so that matrices keep their shape; heads that do not pass the filters lose their numbers."""
        if not self.has_filters:
            return heads
        passes = pd.Series(heads.index.isin(self.filter_heads(heads).index), heads.index)
        return heads.assign(**{name: heads[name].where(passes) for name in map(str, heads) if name not in HEAD_KEYS})

    @property
    def has_filters(self) -> bool:
        """Whether anything is left out."""
        return any((self.layers, self.role, self.min_value is not None, self.max_value is not None))

    def describe_filters(self) -> list[str]:
        """What the filters ask of a head, in words."""
        told = [f"in layers {self.layers[0]} to {self.layers[1]}"] if self.layers else []
        told += [f"that are {self.role} in {self.filter_model}"] if self.role else []
        called = statistic(self.statistic_name).label if self.statistic_name else ""
        ends = [("at least", self.min_value), ("at most", self.max_value)]
        if limits := " and ".join(f"{how} {number(end)}" for how, end in ends if end is not None):
            told.append(f"with {called} {limits} in {self.filter_model}")
        return told

    def link(self, path: str, *without: str, **changes: str | list[str]) -> str:
        """The URL of `path` in this state, some of it changed or left out; another page's filters stay behind."""
        kept = {
            name: value
            for name, value in self.query.items()
            if name not in without and (name in KEPT_PARAMETERS or not path)
        }
        return build_url(path, kept | changes)

    def resolve_link(self, query_link: str) -> str:
        """The URL of a link that names what it changes, as `exploring.way` writes it, in this state."""
        told = urlsplit(query_link)
        return self.link(told.path, **dict(parse_qsl(told.query)))

    def head_link(self, layer: int, head: int) -> str:
        """The URL of a head's own page."""
        return self.link(f"/head/{layer}.{head}")


def parse_query(search: str) -> Query:
    """What the query of a URL asks for."""
    return {**parse_qs(search.removeprefix("?"))}


def build_url(path: str, query: Query) -> str:
    """The URL of `path` with this query."""
    return f"{path}?{told}" if (told := urlencode(query, doseq=True)) else path


def describe_statistic(statistic_name: str) -> str:
    """A statistic's definition in one line, its formula first."""
    shown = statistic(statistic_name)
    unit = f" Unit: {shown.unit}." if shown.unit else ""
    return f"{shown.formula}{'. ' if shown.formula else ''}{sentence(shown.meaning)}.{unit}"


def parse_head(identifier: str, run: Run) -> HeadIndex:
    """The head that a path names: `3.2` is layer 3, head 2; `3.g1` the first head of key group 1 in layer 3.

    Raises BadInput for anything else, and for a head that the run does not have.
    """
    heads = run.heads
    try:
        layer, number, whole = user_input.unit(identifier)
    except ValueError as error:
        raise BadInput(f"{error}: write layer.head, such as 3.2") from error
    here = heads[(heads["layer"] == layer) & (heads["kv_group" if whole else "head"] == number)]
    if here.empty:
        raise BadInput(f"this run has no {'key group' if whole else 'head'} {number} in layer {layer}")
    return layer, int(here["head"].min())


def parse_heads(text: str) -> Iterator[HeadIndex]:
    """The heads of `3.2_4.0`."""
    for layer, head in re.findall(r"([0-9]{1,5})\.([0-9]{1,5})", text):
        yield int(layer), int(head)


def _parse_head_sets(text: str | list[str]) -> Iterator[tuple[str, frozenset[HeadIndex]]]:
    for each in [text] if isinstance(text, str) else text:
        name, _, places = each.rpartition(":")
        if name and (heads := frozenset(parse_heads(places))):
            yield name[:40], heads


def _parse_range(text: str) -> tuple[int, int] | None:
    ends = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    return (int(ends[1]), int(ends[2])) if ends else None


def _parse_sort(text: str) -> tuple[str, str] | None:
    named = re.fullmatch(r"(\w+)-(asc|desc)", text)
    return (named[1], named[2]) if named else None


def _parse_column_filters(text: str) -> Mapping[str, Any]:
    try:
        asked = json.loads(text or "{}")
    except ValueError:
        return {}
    return asked if isinstance(asked, dict) else {}


def _parse_number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
