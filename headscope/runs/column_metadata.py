"""What a column of the per-head and per-model tables is called and how it is shown: one parser, one labeller.

A column is a statistic, perhaps at a context length, perhaps as a difference to the first model, perhaps one end of its
interval: `ess2_2048`, `growth_low`, `nll_512_diff_high`. Probes declare their statistics; this module joins them.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from headscope import plugins
from headscope.errors import BadInput, nearest


@dataclass(frozen=True)
class Statistic:
    """How to show one column. `form` writes a number in words; without it three significant digits are shown.

    `best` is what the head of the highest value is called, if that is worth a closer look ("top retrieval head").
    """

    label: str
    unit: str
    meaning: str
    log_scale: bool = False
    formula: str = ""
    number_format: str = ""
    best_head_name: str = ""

    @property
    def title(self) -> str:
        """The label as a heading."""
        return capitalise(self.label)

    @property
    def label_with_unit(self) -> str:
        """The label with its unit."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    @property
    def is_signed(self) -> bool:
        """Whether zero is the middle of its values: its numbers are written with their sign."""
        return self.number_format.startswith("+")

    def format_number(self, value: float) -> str:
        """The value in words, as this statistic is written."""
        return (
            format(value, self.number_format) if self.number_format and math.isfinite(value) else format_number(value)
        )


@dataclass(frozen=True)
class ColumnName:
    """The parts of a column's name; `end` is "", "low" or "high"."""

    stem: str
    length: int | None
    is_difference: bool
    interval_end: str

    @property
    def value_column(self) -> str:
        """The column that this one is an end of the interval of, or the column itself."""
        length = "" if self.length is None else f"_{self.length}"
        return f"{self.stem}{length}{'_diff' if self.is_difference else ''}"


def parse_column(name: str) -> ColumnName:
    """Take the name of a column apart."""
    told = re.fullmatch(r"(.+?)(?:_([0-9]+))?(_diff)?(?:_(low|high))?", name)
    assert told is not None  # every name but the empty one fits
    return ColumnName(told[1], int(told[2]) if told[2] else None, bool(told[3]), told[4] or "")


@cache
def statistics() -> Mapping[str, Statistic]:
    """Every statistic that a probe declares, by name; the name of one by length lacks the length."""
    return {name: shown for _, declared in plugins.load_parts("statistics") for name, shown in declared.items()}


def is_statistic(name: str) -> bool:
    """Whether the column is a statistic, not an end of its interval, that some probe declares."""
    return parse_column(name).stem in statistics() and not parse_column(name).interval_end


def statistic(name: str) -> Statistic:
    """How to show the column `name`, its length in words. Raises BadInput for a column that no probe declares."""
    at, known = parse_column(name), statistics()
    shown = known.get(name) or known.get(at.stem)
    if shown is None:
        raise BadInput(f"no statistic '{name}' of a head{nearest(name, known)}")
    if at.length is None or name in known:
        return shown
    against = " against the first model" if at.is_difference else ""
    told = f"{shown.label}{against} at {at.length:,}"
    meaning = f"{shown.meaning}, in contexts of {at.length:,} tokens"
    return Statistic(
        told, shown.unit, meaning, shown.log_scale, shown.formula, shown.number_format, shown.best_head_name
    )


def columns_by_length(names: Iterable[str], stem: str) -> list[str]:
    """The columns of that statistic at a length, the shortest first."""
    found = [name for name in names if parse_column(name).stem == stem and parse_column(name).value_column == name]
    return sorted(
        (name for name in found if parse_column(name).length), key=lambda name: parse_column(name).length or 0
    )


def format_number(value: float) -> str:
    """Three significant digits from 1 on, or all of the integer part, thousands separated; below 1, three decimals."""
    if math.isnan(value):
        return "–"
    if math.isinf(value):
        return "infinite"
    decimals = next((digits for digits, limit in enumerate((100, 10, 1)) if abs(value) >= limit), 3)
    return f"{round(value, decimals) + 0.0:,.{decimals}f}".replace("-", "−")


def capitalise(text: str) -> str:
    """The text with its first letter large, all others as they are."""
    return f"{text[:1].upper()}{text[1:]}"
