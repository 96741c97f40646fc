"""The state of the app as the URL's query holds it. Values that the run lacks are replaced and noted."""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlencode, urlsplit

import pandas as pd

from headscope.base.head_set import HeadSet
from headscope.base.heads import Head, parse_unit
from headscope.errors import BadInput
from headscope.rendering.assembly import run_statistics
from headscope.runs.aggregation import HEAD_KEYS
from headscope.runs.column_metadata import (
    capitalise,
    exceeds,
    falls_below,
    format_number,
    heads_with_role,
    measured_roles,
    statistic,
)
from headscope.runs.run import Run
from headscope.runs.summary import default_model, default_models, longest_ess_column_of

Query = Mapping[str, str | list[str]]
FILTER_PARAMETERS = ("layers", "role", "set", "min", "max")
"""Filters of heads; they apply to the page on which they were set, `min` and `max` to the statistic shown then."""
BROWSER_PARAMETERS = ("sort", "column_filters", "playground")
"""Sorting and filters of the table of heads, and the view of the playground. The browser applies and writes them; they
never redraw the page."""
PERSISTENT_PARAMETERS = ("run", "model", "models", "stat", "baseline", "heads", "sets")
"""Parameters that links to other pages keep."""
KNOWN_PARAMETERS = {*FILTER_PARAMETERS, *BROWSER_PARAMETERS, *PERSISTENT_PARAMETERS, "rank_lines", "tab"}
"""Parameters that some page reads; pages with an explorer of a probe read others, too."""


@dataclass(frozen=True)
class ViewState:
    """One state of the app. `query` holds the valid parameters of the URL, for links that keep them."""

    query: Query
    model: str
    models: tuple[str, ...]
    """All models of the run."""
    shown_models: tuple[str, ...]
    """Models that charts compare."""
    statistic_name: str
    baseline: str | None
    filter_model: str
    """The model whose values decide which heads pass the filters."""
    layers: tuple[int, int] | None
    role: str | None
    min_value: float | None
    max_value: float | None
    selected_heads: HeadSet
    head_sets: Mapping[str, HeadSet]
    """Earlier selections, by name."""
    set_name: str | None
    """The named set that the heads must be in."""
    rank_lines: str
    """Which heads a rank shift shows: "top" for the leading ones, "changed" for those that changed beyond noise."""
    sort: tuple[str, str] | None
    column_filters: Mapping[str, Any]
    notes: tuple[str, ...]

    @classmethod
    def from_query(cls, query: Query, run: Run, controls: Collection[str] | None = None) -> "ViewState":
        """Read the query. Missing values, and values that the run lacks, take a default; the latter are noted.

        Only the filters among the page's `controls` apply (by default all).
        """
        values = {name: value if isinstance(value, str) else value[-1] for name, value in query.items() if value}
        page_controls = {*FILTER_PARAMETERS, "model"} if controls is None else {*controls}
        notes: list[str] = []

        def choice(name: str, choices: Sequence[str], default: str | None) -> str | None:
            if (value := values.get(name)) is None or value in choices:
                return value or default
            notes.append(f"This run has no {name} \u2018{value[:60]}\u2019; the parameter is ignored.")
            del values[name]
            return default

        if unused := [name for name in FILTER_PARAMETERS if name in values and name not in page_controls]:
            values = {name: value for name, value in values.items() if name not in unused}
            notes.append(f"Ignored, because this page has no such filter: {', '.join(unused)}.")

        def parsed(name: str, parse: Callable[[str], Any]) -> Any:
            value = parse(values.get(name, ""))
            if name in values and (value is None or value == HeadSet(())):
                notes.append(f"{name} \u2018{values[name][:60]}\u2019 cannot be read; the parameter is ignored.")
                del values[name]
            return value

        requested = [query["models"]] if isinstance(query.get("models"), str) else query.get("models", [])
        if lacking := [label for label in requested if label not in run.models]:
            notes.append(f"This run has no model \u2018{lacking[0][:60]}\u2019; it is not compared.")
        shown_models = [label for label in run.models if label in requested] or default_models(run)
        model = choice("model", run.models, default_model(run)) or ""
        baseline = choice("baseline", run.models, None)
        if "model" in page_controls:
            filter_model = model
        elif "baseline" in page_controls:
            filter_model = baseline or next(iter(default_models(run)), "")
        else:
            filter_model = shown_models[0] if "models" in page_controls else model
        single_model = [model] if "model" in page_controls else run.models
        visible_models = shown_models if "models" in page_controls else single_model
        measured = longest_ess_column_of(run, tuple(visible_models)) or longest_ess_column_of(run)
        names = run_statistics(run)
        statistic_name = choice("stat", names, measured or next(iter(names), "")) or ""
        role = choice("role", roles_of_run(run), None)
        head_sets = dict(_parse_head_sets(query.get("sets", [])))
        set_name = choice("set", [*head_sets], None)
        rank_lines = choice("rank_lines", ["top", "changed"], "top") or ""
        if selected_heads := parsed("heads", parse_heads):  # the browser compares names such as 18.6
            values["heads"] = "_".join(f"{layer}.{head}" for layer, head in selected_heads)
        else:
            values.pop("heads", None)
        layers, min_value, max_value = (
            parsed(name, parse)
            for name, parse in (("layers", _parse_range), ("min", _parse_number), ("max", _parse_number))
        )
        sort = parsed("sort", _parse_sort)
        return cls(
            query={name: query[name] if name in ("run", "models", "sets") else values[name] for name in values},
            model=model,
            models=tuple(run.models),
            shown_models=tuple(shown_models),
            statistic_name=statistic_name,
            baseline=baseline,
            filter_model=filter_model,
            layers=layers,
            role=role,
            min_value=min_value,
            max_value=max_value,
            selected_heads=selected_heads,
            head_sets=head_sets,
            set_name=set_name,
            rank_lines=rank_lines,
            sort=sort,
            column_filters=_parse_column_filters(values.get("column_filters", "")),
            notes=tuple(notes),
        )

    def filter_heads(self, heads: pd.DataFrame) -> pd.DataFrame:
        """The rows, of every model, of the heads that pass the filters in `filter_model`."""
        if not self.has_filters:
            return heads
        rows = heads[heads["model"] == self.filter_model]
        passes = pd.Series(True, rows.index)
        if self.layers:
            passes &= rows["layer"].between(*self.layers)
        if self.role:
            passes &= heads_with_role(rows, self.role)
        if self.statistic_name in rows:
            passes &= ~falls_below(rows[self.statistic_name], -math.inf if self.min_value is None else self.min_value)
            passes &= ~exceeds(rows[self.statistic_name], math.inf if self.max_value is None else self.max_value)
        columns = ["layer", "head"]
        if self.set_name:
            passes &= pd.MultiIndex.from_frame(rows[["layer", "head"]]).isin([*self.head_sets[self.set_name]])
        passing = pd.MultiIndex.from_frame(rows.loc[passes, columns])
        return heads[pd.MultiIndex.from_frame(heads[columns]).isin(passing)]

    def mask_filtered(self, heads: pd.DataFrame) -> pd.DataFrame:
        """All rows, so that matrices keep their shape; heads that do not pass the filters lose their values."""
        if not self.has_filters:
            return heads
        passes = pd.Series(heads.index.isin(self.filter_heads(heads).index), heads.index)
        return heads.assign(**{name: heads[name].where(passes) for name in map(str, heads) if name not in HEAD_KEYS})

    def select_rows(self, heads: pd.DataFrame) -> pd.DataFrame:
        """The rows of the selected heads; all rows without a selection."""
        if not self.selected_heads:
            return heads
        return heads[heads[["layer", "head"]].apply(tuple, axis=1).isin([*self.selected_heads])]

    @property
    def has_filters(self) -> bool:
        """Whether a filter is set."""
        return any((self.layers, self.role, self.set_name, self.min_value is not None, self.max_value is not None))

    def describe_filters(self) -> list[str]:
        """The conditions of the filters, in words."""
        conditions = [f"in layers {self.layers[0]} to {self.layers[1]}"] if self.layers else []
        conditions += [f"with role {self.role} in {self.filter_model}"] if self.role else []
        conditions += [f"in the set {self.set_name}"] if self.set_name else []
        label = statistic(self.statistic_name).label if self.statistic_name else ""
        bounds = [("at least", self.min_value), ("at most", self.max_value)]
        if limits := " and ".join(f"{bound} {format_number(value)}" for bound, value in bounds if value is not None):
            conditions.append(f"with {label} {limits} in {self.filter_model}")
        return conditions

    def link(self, path: str, *without: str, **changes: str | list[str]) -> str:
        """The URL of `path` in this state, with parameters changed or left out; filters do not go to another page."""
        query = {
            name: value
            for name, value in self.query.items()
            if name not in without and (name in PERSISTENT_PARAMETERS or not path)
        }
        return build_url(path, query | changes)

    def resolve_link(self, query_link: str) -> str:
        """The URL in this state of a link from `explorer_blocks.query_link`, which names only what it changes."""
        parts = urlsplit(query_link)
        return self.link(parts.path, **dict(parse_qsl(parts.query)))

    def head_link(self, layer: int, head: int) -> str:
        """The URL of a head's page."""
        return self.link(f"/head/{layer}.{head}")


def roles_of_run(run: Run) -> list[str]:
    """The roles that were measured in the run."""
    return run.derived(_measured_roles)


def _measured_roles(run: Run) -> list[str]:
    return measured_roles(run.heads)


def parse_query(search: str) -> Query:
    """The query of a URL, by parameter."""
    return parse_qs(search.removeprefix("?"))


def build_url(path: str, query: Query) -> str:
    """The URL of `path` with this query."""
    return f"{path}?{encoded}" if (encoded := urlencode(query, doseq=True)) else path


def describe_statistic(statistic_name: str) -> str:
    """A statistic's definition in one line, formula first."""
    described = statistic(statistic_name)
    unit = f" Unit: {described.unit}." if described.unit else ""
    return f"{described.formula}{'. ' if described.formula else ''}{capitalise(described.meaning)}.{unit}"


def parse_head(identifier: str, run: Run) -> Head:
    """The head that a path names: `3.2` is layer 3, head 2; `3.g1` the first head of KV group 1 in layer 3.

    Raises BadInput for any other text, and for a head that the run does not have.
    """
    try:
        unit = parse_unit(identifier)
    except ValueError as error:
        raise BadInput(str(error)) from error
    layer, number, is_group = unit
    head = run.derived(_first_heads).get(unit)
    if head is None:
        noun = "KV group" if is_group else "head"
        raise BadInput(f"this run has no {noun} {number} in layer {layer}. Choose one on the page /heads")
    return layer, head


def _first_heads(run: Run) -> dict[tuple[int, int, bool], int]:
    """The head of every (layer, head, False), and the first head of every (layer, KV group, True)."""
    units = run.heads[["layer", "head", "kv_group"]].drop_duplicates().sort_values("head", ascending=False)
    rows = [*units.itertuples(index=False, name=None)]
    heads = {(layer, head, False): head for layer, head, _ in rows}
    return heads | {(layer, group, True): head for layer, head, group in rows}


def parse_heads(text: str) -> HeadSet:
    """The heads in a text such as `3.2_4.0`; empty if one of them is not a head."""
    try:
        return HeadSet.parse(text)
    except ValueError:
        return HeadSet(())


def format_heads(heads: Collection[Head]) -> str:
    """Heads as the URL holds them: `3.2_4.0`."""
    return "_".join(f"{layer}.{head}" for layer, head in sorted(heads))


def _parse_head_sets(entries: str | list[str]) -> Iterator[tuple[str, HeadSet]]:
    for entry in [entries] if isinstance(entries, str) else entries:
        name, _, heads = entry.rpartition(":")
        if name and (head_set := parse_heads(heads)):
            yield name[:40], head_set


def _parse_range(text: str) -> tuple[int, int] | None:
    ends = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    return (int(ends[1]), int(ends[2])) if ends else None


def _parse_sort(text: str) -> tuple[str, str] | None:
    match = re.fullmatch(r"(\w+)-(asc|desc)", text)
    return (match[1], match[2]) if match else None


def _parse_column_filters(text: str) -> Mapping[str, Any]:
    try:
        filters = json.loads(text or "{}")
    except (ValueError, RecursionError):  # deeply nested brackets
        return {}
    return filters if isinstance(filters, dict) else {}


def _parse_number(text: str | None) -> float | None:
    try:
        value = float(text or "nan")
    except ValueError:
        return None
    return value if math.isfinite(value) else None
