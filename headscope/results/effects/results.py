"""Results that every sweep has: largest and lowest effect, how many differ from zero, agreement of the estimates."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pandas as pd

from headscope.results.effects.comparison import Agreement, agreements
from headscope.results.effects.ranking import largest_unit
from headscope.results.effects.statistics import MIN_COMPARED
from headscope.results.effects.sweep import Effects
from headscope.results.effects.units import unit_result
from headscope.results.questions import Question
from headscope.results.result import Result
from headscope.results.words import value_text
from headscope.runs.aggregation import MIN_DOCUMENTS, SIGNIFICANCE

Fields = Mapping[str, Any]
UnitFields = Callable[[pd.Series], Fields]
"""Fields of the result about a unit, such as its `details`, from its row of `Effects.units`."""


def sweep_questions(
    area: str,
    subject: str,
    brief_subject: str,
    *,
    unit: str = "{unit}",
    number: str,
    samples: str,
    value_unit: str = "",
) -> tuple[Question, ...]:
    """The questions of `sweep_results`, named "<area>.top" and so on.

    `subject` is the template that names the sweep, such as "{intervention} in {model}", `brief_subject` the one of the
    headline. `unit` is the template of a unit's name. The others are fields of the questions about one effect.
    """
    of_measured = "[ among the {measured:,} of {units:,} {nouns} with exact effects]"
    of_ratios = f"[; the mean of the ratios of single {samples} is {{mean_of_ratios:+.2f}}]"
    effect = Question(
        name=f"{area}.top",
        sentence=f"{subject}: the highest effect{of_measured} is that of {unit}, {{value}}{of_ratios}",
        headline=f"{brief_subject}: {unit} {{leads}} {{value}}",
        number=number,
        value_unit=value_unit,
        samples=samples,
        level="headline",
    )
    lowest = f"{subject}: the lowest effect{of_measured} is that of {unit}, {{value}}{of_ratios}"
    return (
        effect,
        replace(effect, name=f"{area}.lowest", sentence=lowest, headline="", level="detail"),
        replace(
            effect,
            name=f"{area}.only",
            sentence=f"{subject}: {unit} has the effect {{value}}{of_ratios}",
            headline=f"{brief_subject}: {unit} {{value}}",
        ),
        Question(
            name=f"{area}.significant",
            sentence=f"{subject}: {{value}} of {{exact:,}} exact effects differ from zero (false discovery rate "
            "{rate:percent} over {units:,} {nouns}[, of which {estimated:,} were only estimated])",
            number=".0f",
        ),
        Question(
            name=f"{area}.estimated",
            sentence=f"{subject}: all effects of {{units:,}} {{nouns}} are estimates, which do not decide whether an "
            "effect is real",
        ),
        Question(
            name=f"{area}.agreement",
            sentence=f"{subject}: the rank correlation of {{estimates}} with exact effects is {{value}} over "
            "{compared:,} {nouns}[, of which {selected:,} have one of the {compared:,} largest estimates of all]"
            "[; over the {others:,} others it is {others_correlation:.2f}]; the top {top} by estimated and by exact "
            "absolute effect share {shared}",
            number=".2f",
            better="higher",
        ),
        Question(
            name=f"{area}.unmeasured",
            sentence=f"{subject}: {{value}} of {{unmeasured:,}} {{nouns}} that were only estimated would have a larger "
            "absolute effect than all exact ones, if their estimates were off by the largest measured error, "
            "{error:.2g}",
            number=".0f",
        ),
    )


def sweep_results(
    effects: Effects,
    area: str,
    nouns: str,
    details: Fields,
    unit_fields: UnitFields = lambda unit: {},
    estimate_labels: Mapping[str, str] = MappingProxyType({"estimate": "estimates"}),
) -> Iterator[Result]:
    """The results of one sweep, whose units are `nouns`. `details` name the sweep in the templates."""
    counts = {**details, "nouns": nouns, "units": len(effects.units)}
    exact = int(effects.is_exact.sum())
    measured = exact if 0 < exact < len(effects.units) else None
    has_choice = len(effects.candidates) > 1
    for name, ascending in (("top", False), ("lowest", True)) if has_choice else (("only", False),):
        unit = largest_unit(effects, ascending)
        fields = dict(unit_fields(unit))
        lead = leads(unit) if unit["effect"] > 0 else "is highest, as no effect is positive:"
        all_details = {**counts, "measured": measured, "leads": lead, **fields.pop("details", {})}
        yield unit_result(effects, unit, f"{area}.{name}", details=all_details, **fields)
    if not exact:
        yield _sweep_result(effects, f"{area}.estimated", counts)
    elif effects.exact["n"].max() >= MIN_DOCUMENTS:
        numbers = counts | {"exact": exact, "rate": SIGNIFICANCE, "estimated": len(effects.units) - exact or None}
        yield _sweep_result(effects, f"{area}.significant", numbers, value=effects.significant_count, n=exact)
    for agreement in agreements(effects):
        yield from _agreement_results(
            effects, area, counts | {"estimates": estimate_labels[agreement.method]}, agreement
        )


def leads(unit: pd.Series) -> str:
    """What a headline says about the unit of largest effect: its interval may contain 0, or be missing."""
    if unit["low"] > 0 or unit["high"] < 0:
        return "has the largest effect,"
    return (
        "is largest, without a test of 0:" if pd.isna(unit["low"]) else "is largest, but not clearly different from 0:"
    )


def _agreement_results(effects: Effects, area: str, details: Fields, agreement: Agreement) -> Iterator[Result]:
    """How well estimates agree with exact effects, and whether an estimated unit may have a larger effect."""
    where = effects.where | ({"estimate": agreement.method} if len(effects.sweep.methods) > 2 else {})
    others = agreement.compared - agreement.selected
    numbers = {
        "compared": agreement.compared,
        "selected": agreement.selected or None,
        "others": others,
        "others_correlation": agreement.others_spearman,
        "shared": agreement.shared,
        "top": agreement.top,
    }
    if agreement.compared >= MIN_COMPARED and pd.notna(agreement.spearman):
        interval = {"value": agreement.spearman, "low": agreement.low, "high": agreement.high}
        yield _sweep_result(
            effects, f"{area}.agreement", {**details, **numbers}, n=agreement.compared, where=where, **interval
        )
    if agreement.unmeasured:
        numbers = {"unmeasured": agreement.unmeasured, "error": agreement.largest_error}
        yield _sweep_result(
            effects, f"{area}.unmeasured", {**details, **numbers}, value=agreement.may_exceed, where=where
        )


def _sweep_result(effects: Effects, question: str, details: Fields, **fields: Any) -> Result:
    return Result(question=question, **({"model": effects.model, "where": effects.where, "details": details} | fields))


def effect_text(effects: Effects, unit: pd.Series, question: Question) -> str:
    """The effect of a unit as text with its interval or as an estimate, for charts and tables."""
    return value_text(unit_result(effects, unit, question.name), question)
