"""Names, labels and number formats of the columns of the per-head and per-model tables.

Probes declare their statistics; this module joins them. A column is a statistic, at a context length and as a
difference to the first model if it is declared so, optionally with an ending for an end of its interval or for the
methods of its values: `ess2_2048`, `growth_low`, `nll_512_diff_high`, `influence_joint_method`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pandas as pd

from headscope.base import plugins
from headscope.errors import BadInput, BrokenProbe, did_you_mean

RESERVED_COLUMNS = frozenset({"model", "layer", "head", "kv_group", "value", "baseline", "change"})
"""Keys of the per-head table, and columns that comparisons add to it."""
ENDINGS = ("low", "high", "method")
"""Endings of the columns with the interval of a value and with its method."""


@dataclass(frozen=True)
class Statistic:
    """Label, unit, meaning and number format of one column; without `number_format`, three significant digits.

    `best_head_name` names the head of the highest value, if that head is notable ("top retrieval head"). `explanation`
    is one clause for readers who see the statistic for the first time; it follows the first table with it.
    """

    label: str
    unit: str
    meaning: str
    log_scale: bool = False
    formula: str = ""
    number_format: str = ""
    best_head_name: str = ""
    explanation: str = ""
    by_length: bool = False
    """Whether it has a column per context length: <name>_<length>."""
    against_first: bool = False
    """Whether it also has columns of the difference to the first model: <name>_<length>_diff."""

    @property
    def title(self) -> str:
        """The label with a capital first letter."""
        return capitalise(self.label)

    @property
    def label_with_unit(self) -> str:
        """The label with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def is_signed(self) -> bool:
        """Whether its values are centred at zero and written with a sign."""
        return self.number_format.startswith("+")

    def format_number(self, value: float) -> str:
        """The value as text."""
        return (
            format(value, self.number_format) if self.number_format and math.isfinite(value) else format_number(value)
        )


@dataclass(frozen=True)
class ColumnName:
    """The parts of a column name; `ending` is "", "low", "high" (the interval) or "method"."""

    stem: str
    length: int | None = None
    is_difference: bool = False
    ending: str = ""

    @property
    def value_column(self) -> str:
        """The column without its ending: the column with the values."""
        length = "" if self.length is None else f"_{self.length}"
        return f"{self.stem}{length}{'_diff' if self.is_difference else ''}"


def parse_column(name: str) -> ColumnName:
    """The declared statistic that a column belongs to, and which of its columns it is; any other name is a stem."""
    declared = statistics()
    return (None if name in declared else _column_of_statistic(name, declared)) or ColumnName(name)


def _column_of_statistic(name: str, declared: Mapping[str, Statistic]) -> ColumnName | None:
    """The parts of a further column of one of these statistics, or None."""
    value_name, _, last_part = name.rpartition("_")
    ending = last_part if last_part in ENDINGS else ""
    if not ending:
        value_name = name
    elif value_name in declared:
        return ColumnName(value_name, ending=ending)
    name_with_length = value_name.removesuffix("_diff")
    is_difference = name_with_length != value_name
    stem, _, length = name_with_length.rpartition("_")
    entry = declared.get(stem)
    if entry is None or not entry.by_length or not (length.isascii() and length.isdecimal()):
        return None
    return ColumnName(stem, int(length), is_difference, ending) if entry.against_first or not is_difference else None


class StatisticParts:
    """Contracts of the parts of a probe that describe heads."""

    def statistics(self) -> Mapping[str, Statistic]:
        """How to show its columns of the per-head and per-model tables, by name.

        Names must be new. A statistic also owns its name with _low, _high (its interval) and _method, and, if it is
        declared `by_length`, with _<number>.
        """
        return {}

    def roles(self) -> "Mapping[str, Role]":
        """Roles of heads that follow from its statistics, by name."""
        return {}


@cache
def statistics() -> Mapping[str, Statistic]:
    """Every declared statistic by name, without a context length.

    A name that is already used, also by a column of another statistic, is reported and left out.
    """
    entries: dict[str, Statistic] = {}
    for probe, declared in plugins.call_parts(StatisticParts.statistics):
        for name, entry in declared.items():
            if name in entries or name in RESERVED_COLUMNS:
                fault = "the name is already used"
            elif owner := _column_of_statistic(name, entries):
                fault = f"the name is that of a column of the statistic '{owner.stem}'"
            elif other := next((other for other in entries if _column_of_statistic(other, {name: entry})), None):
                fault = f"the statistic '{other}' has the name of one of its columns"
            else:
                entries[name] = entry
                continue
            plugins.report_broken(
                BrokenProbe(f"probe '{probe.name}': statistic '{name}' is left out: {fault}. Rename it")
            )
    return entries


def is_statistic(name: str) -> bool:
    """Whether the column has the values of a declared statistic, not an end of their interval or their methods."""
    return parse_column(name).stem in statistics() and not parse_column(name).ending


def statistic(name: str) -> Statistic:
    """The metadata of column `name`, with its length in the label. Raises BadInput for an undeclared column.

    A column of methods has text and so no unit or number format.
    """
    parts, declared = parse_column(name), statistics()
    entry = declared.get(name) or declared.get(parts.stem)
    if entry is None:
        raise BadInput(f"unknown statistic '{name}'{did_you_mean(name, declared)}. Use a column of run.heads")
    if parts.ending == "method":
        values = statistic(parts.value_column)
        return Statistic(f"{values.label}, method", "", "method of each value: exact, that of an estimate, or mixed")
    if parts.length is None or name in declared:
        return entry
    against = " against the first model" if parts.is_difference else ""
    label = f"{entry.label}{against} at {parts.length:,}"
    meaning = f"{entry.meaning}, in contexts of {parts.length:,} tokens"
    return replace(entry, label=label, meaning=meaning, explanation="")


def columns_by_length(names: Iterable[str], stem: str) -> list[str]:
    """The columns of a statistic at each context length, shortest first."""
    lengths = {
        name: parts.length
        for name in names
        if (parts := parse_column(name)).stem == stem and parts.length and parts.value_column == name
    }
    return sorted(lengths, key=lengths.__getitem__)


def format_number(value: float) -> str:
    """Format with three significant digits, at least the whole integer part; below 1, three decimals."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "infinite"
    decimals = next((digits for digits, limit in enumerate((100, 10, 1)) if abs(value) >= limit), 3)
    # numpy rounds 0.8625 to 0.862, Python to 0.863: a value has one text, whatever its type.
    return f"{round(float(value), decimals) + 0.0:,.{decimals}f}"


def capitalise(text: str) -> str:
    """The text with a capital first letter."""
    return f"{text[:1].upper()}{text[1:]}"


ROUNDING = 1e-6
"""Relative difference below which a value counts as equal to a threshold: values are stored with seven digits."""


def exceeds(values: Any, threshold: float) -> Any:
    """Whether values, of a number or a pandas object, are above a threshold by more than rounding; NaN is not.

    Every place that compares a statistic with a threshold does so by this rule, so that all count the same heads.
    """
    # A scalar of numpy has the method, too; float32 would round the threshold.
    precise = values.astype("float64") if hasattr(values, "astype") else values
    return precise - threshold > ROUNDING * abs(threshold)


def falls_below(values: Any, threshold: float) -> Any:
    """Whether values are below a threshold by more than rounding, as `exceeds` for those above it."""
    return exceeds(-values, -threshold)


@dataclass(frozen=True)
class Role:
    """A role: its meaning and which rows of the per-head table have it.

    Leading heads have the largest `order_by`, or the smallest if `ascending`.
    """

    meaning: str
    has_role: Callable[[pd.DataFrame], pd.Series]
    order_by: str = ""
    ascending: bool = False
    threshold: float | None = None
    """Heads with `order_by` above this value have the role; None if another rule decides."""
    criterion: Callable[[pd.DataFrame], str] | None = None
    """The column of a per-head table that decides the role, if it is not `order_by`."""


@cache
def roles() -> Mapping[str, Role]:
    """Every declared role by name."""
    return {name: role for _, declared in plugins.call_parts(StatisticParts.roles) for name, role in declared.items()}


def measured_roles(heads: pd.DataFrame) -> list[str]:
    """The roles whose statistics were measured for at least one of these rows of the per-head table."""
    return [name for name in roles() if is_role_measured(heads, name)]


def is_role_measured(heads: pd.DataFrame, role: str) -> bool:
    """Whether the statistics that decide the role were measured for at least one of the rows."""
    return bool(measured_role_mask(heads, role).any())


def measured_role_mask(heads: pd.DataFrame, role: str) -> pd.Series:
    """Mask of the rows of the per-head table for which the statistics that decide the role were measured."""
    try:
        roles()[role].has_role(heads)
    except KeyError:
        return pd.Series(False, heads.index)
    order_by = roles()[role].order_by
    if not order_by:
        return pd.Series(True, heads.index)
    return heads[order_by].notna() if order_by in heads else pd.Series(False, heads.index)


def heads_with_role(heads: pd.DataFrame, role: str) -> pd.Series:
    """Mask of the rows of the per-head table that have the role; all False if its statistic was not measured."""
    try:
        return roles()[role].has_role(heads).fillna(False).astype(bool)
    except KeyError:
        return pd.Series(False, heads.index)


def leading_heads(heads: pd.DataFrame, role: str, count: int = 3) -> pd.DataFrame:
    """The leading heads of one model that have the role."""
    rows = heads[heads_with_role(heads, role)]
    by = roles()[role].order_by
    ordered = rows.sort_values(by, ascending=roles()[role].ascending, kind="stable") if by in rows else rows
    return ordered.head(count)
