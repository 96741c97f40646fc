"""Comparisons of two runs and outcomes of checks: as lines of the terminal, as tables, and as JSON data."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from rich.text import Text

from headscope.base.heads import format_head
from headscope.rendering.blocks import TextTable
from headscope.rendering.console import bold, print_line, print_table
from headscope.results.checks import CheckResult
from headscope.results.comparison import Change, Comparison, RoleChange
from headscope.results.pairing import MATCHING
from headscope.results.questions import questions
from headscope.results.result import Result
from headscope.results.table import results_table
from headscope.results.words import count_nouns, format_value, percent, q_value
from headscope.runs.aggregation import SIGNIFICANCE

MAX_CHANGES = 20
"""Clear changes that the terminal lists unless all are requested."""
MAX_HEADS = 6
"""Heads that are listed by name for each role."""
MARKS = {"passes": "green", "fails": "red", "undecided": "yellow"}
COUNTED = {"passes": "passed", "fails": "failed", "undecided": "undecided"}
"""How the last line of the terminal names the outcomes."""
POINTS = " points"
"""Unit of a difference of shares: percentage points."""
CHANGE_COLUMNS = ("result", "model", "before", "after", "difference", "samples", "")
ROLE_COLUMNS = ("role", "model", "heads before", "heads after", "gained", "lost")


def print_comparison(before: str, after: str, comparison: Comparison, show_all: bool) -> None:
    """Print the clear changes, or all results, and the heads that gained or lost a role."""
    print_line("From ", bold(before), " to ", bold(after))
    clear = [change for change in comparison.changes if change.is_clear]
    listed = comparison.changes if show_all else clear[:MAX_CHANGES]
    if listed:
        changes = [dict(zip(CHANGE_COLUMNS, change_row(change), strict=True)) for change in listed]
        print_table(changes, wrap_files=False)
    without = len(comparison.changes) - comparison.compared
    more = f" ({len(clear) - len(listed)} more with --all)" if len(clear) > len(listed) else ""
    print_line(
        f"{len(clear):,} of {count_nouns(comparison.compared, 'results')} clearly changed{more} (false discovery rate "
        f"{percent(SIGNIFICANCE)}), {without:,} have no interval of the difference. In brackets: 95 % confidence "
        "intervals."
        if comparison.changes
        else f"The runs have no result in common. {MATCHING}."
    )
    if comparison.roles:
        roles = [dict(zip(ROLE_COLUMNS, role_row(change), strict=True)) for change in comparison.roles]
        print_table(roles, wrap_files=False)
    for results, name in ((comparison.only_before, before), (comparison.only_after, after)):
        if results:
            areas = sorted({result.question for result in results})
            print_line(f"Only in {name}: {', '.join(areas[:8])}{' ...' if len(areas) > 8 else ''}")


def comparison_tables(comparison: Comparison) -> list[TextTable]:
    """The clear changes, all other results, and the roles, as tables of a page."""
    clear = [change_row(change) for change in comparison.changes if change.is_clear]
    others = [change_row(change) for change in comparison.changes if not change.is_clear]
    roles = [role_row(change) for change in comparison.roles]
    title = (
        f"Results that clearly changed, of {comparison.compared:,} compared (false discovery rate "
        f"{percent(SIGNIFICANCE)}); 95 % confidence intervals in brackets"
    )
    tables = [
        TextTable(title, CHANGE_COLUMNS, clear),
        TextTable("Heads that gained or lost a role", ROLE_COLUMNS, roles),
        TextTable("Results without a clear change", CHANGE_COLUMNS, others, collapsed=True),
    ]
    return [table for table in tables if table.rows]


def change_row(change: Change) -> list[str]:
    """A change as texts by `CHANGE_COLUMNS`."""
    question = questions()[change.after.question]
    unit = f" {question.value_unit}" if question.value_unit else ""
    difference = signed(change.difference, question.number)
    if math.isfinite(change.low):
        ends = [signed(end, question.number).removesuffix(POINTS) for end in (change.low, change.high)]
        points = POINTS if difference.endswith(POINTS) else ""
        difference = f"{difference.removesuffix(POINTS)} ({ends[0]} to {ends[1]}){points}"
    pairing = "unpaired" if change.n is None else f"{change.n} paired"
    return [
        f"{change.after.question}{f' ({change.after.conditions})' if change.after.where else ''}",
        change.after.models,
        _value(change.before, question.number),
        f"{_value(change.after, question.number)}{unit}",
        difference,
        pairing if math.isfinite(change.low) else "",
        f"{change.direction}{q_value(change.p_adjusted)}",
    ]


def _value(result: Result, number_format: str) -> str:
    unit = f" ({result.unit})" if result.unit else ""
    return f"{'' if result.is_exact else '~'}{format_value(result.value, number_format)}{unit}"


def signed(value: float, number_format: str) -> str:
    """A difference with its sign, in the format of the value; with two digits if that would round it to zero.

    A difference of shares is in percentage points.
    """
    text = format_value(value, number_format)
    if value and not re.search("[1-9]", text):
        digits = f"{100 * value if '%' in text or number_format == 'points' else value:+.2g}"
        text = f"{digits} %" if "%" in text else digits
    text = text.replace(" %", POINTS)
    return text if text.startswith(("+", "-", "−")) or value < 0 else f"+{text}"


def role_row(change: RoleChange) -> list[str]:
    """A change of roles as texts by `ROLE_COLUMNS`."""
    gained, lost = (
        ", ".join(format_head(*head) for head in heads[:MAX_HEADS])
        + (f" and {len(heads) - MAX_HEADS} more" if len(heads) > MAX_HEADS else "")
        for heads in (change.gained, change.lost)
    )
    return [change.role, change.model, str(change.before), str(change.after), gained or "–", lost or "–"]


def comparison_to_frame(comparison: Comparison) -> pd.DataFrame:
    """One row per result that both runs have, the clearest change first; the roles in `.attrs["roles"]`."""
    rows = [
        {
            **{name: getattr(change.after, name) for name in ("question", "model", "baseline")},
            "where": ", ".join(f"{name}={value}" for name, value in sorted(change.after.where.items())),
            "before": change.before.value,
            "after": change.after.value,
            "unit_before": change.before.unit,
            "unit_after": change.after.unit,
            **{name: getattr(change, name) for name in ("difference", "low", "high")},
            "p_adjusted": change.p_adjusted,
            "paired": change.n,
            "direction": change.direction,
        }
        for change in comparison.changes
    ]
    frame = pd.DataFrame(rows).astype({"paired": "Int64"} if rows else {})
    frame.attrs["roles"] = _role_records(comparison)
    return frame


def _role_records(comparison: Comparison) -> list[dict[str, Any]]:
    return [
        {
            "role": change.role,
            "model": change.model,
            "gained": [format_head(*head) for head in change.gained],
            "lost": [format_head(*head) for head in change.lost],
        }
        for change in comparison.roles
    ]


def comparison_to_dict(comparison: Comparison) -> dict[str, Any]:
    """The comparison as JSON data."""

    def records(results: Sequence[Result]) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(results_table(results).to_json(orient="records"))
        return rows

    changes = [
        {
            "before": records([change.before])[0],
            "after": records([change.after])[0],
            "difference": change.difference,
            **without_nan({name: getattr(change, name) for name in ("low", "high", "p_adjusted")}),
            "paired": change.n,
            "direction": change.direction,
        }
        for change in comparison.changes
    ]
    return {
        "changes": changes,
        "roles": _role_records(comparison),
        "only_before": records(comparison.only_before),
        "only_after": records(comparison.only_after),
    }


def without_nan(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON data, with None for NaN."""
    return {name: None if value != value else value for name, value in values.items()}


def print_outcomes(outcomes: Sequence[CheckResult]) -> None:
    """Print one line per outcome, and the numbers of each."""
    width = max(map(len, MARKS))
    for outcome in outcomes:
        mark = Text(outcome.outcome.ljust(width), style=f"bold {MARKS[outcome.outcome]}")
        print_line(mark, "  ", outcome_text(outcome))
    counts = [f"{sum(outcome.outcome == name for outcome in outcomes)} {word}" for name, word in COUNTED.items()]
    print_line(f"{count_nouns(len(outcomes), 'checks')}: ", ", ".join(counts))


def outcome_name(outcome: CheckResult) -> str:
    """The name of the check, or else what it compares; with model, conditions and bound."""
    is_named = outcome.name != f"{outcome.measure} {outcome.bound}"
    title = outcome.name if is_named else "" if outcome.measure in outcome.subject else outcome.measure
    return f"{title}{': ' if title else ''}{outcome.subject}, {outcome.bound}"


def outcome_text(outcome: CheckResult) -> str:
    """What was compared with which bound, the value with its interval, and what would decide."""
    interval = f" ({outcome.low:.4g} to {outcome.high:.4g})" if math.isfinite(outcome.low) else ""
    reason = f": {outcome.reason}" if outcome.reason else ""
    both = " of both runs" if outcome.is_change or outcome.is_share else ""
    needed = f"; about {outcome.needed:,} {outcome.samples or 'samples'}{both} would decide" if outcome.needed else ""
    compared = "value minus bound " if outcome.is_share else "change " if outcome.is_change else ""
    return f"{outcome_name(outcome)}: {compared}{outcome.value:.4g}{interval}{reason}{needed}"
