"""Options that break each rule about options that depend on each other, from the rules and the types of the options."""

import json
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from itertools import product, takewhile
from typing import Any, Literal, get_args, get_origin

import pytest

from headscope.base import plugins
from headscope.study.config import EngineOptions, OptionParts, Options
from headscope.study.option_rules import Excludes, Needs, Rule, Term, parse_terms, rules_of

Values = dict[str, Any]
ENGINE = "engine"
EXAMPLES: Mapping[str, list[Any]] = {
    "ablate_top": [[2]],
    "ablation": [["uniform"]],
    "heads": [["L0H1"]],
    "estimate_order": [1],
    "influence.heads": [{"a": ["L0H1"]}],
    "needle.heads": ["heads.json"],
    "orders": [["far-mass"], ["random"]],
    "pairs": [["own.jsonl"], ["induction"]],
    "weights.pairs": [["a>b"]],
    "receivers": [["L3H0"]],
    "reference": ["own.jsonl", "induction"],
    "steer": [0.5],
    "detectors.tokens": [[[5, 6, 7]]],
}
"""Values of options of which the type does not say what they may be."""
REQUIRED: Mapping[str, Values] = {"circuit": {"heads": ["L0H1"]}}


@cache
def option_classes() -> dict[str, type[Options]]:
    """The classes of options by their key in a study file."""
    return {ENGINE: EngineOptions} | {probe.name: options for probe, options in plugins.call_parts(OptionParts.options)}


def literal_values(annotation: Any) -> list[Any]:
    """The values of every Literal in an annotation."""
    if get_origin(annotation) is Literal:
        return [*get_args(annotation)]
    return [value for part in get_args(annotation) for value in literal_values(part)]


def kinds(annotation: Any) -> set[Any]:
    """The types in an annotation."""
    return {annotation, get_origin(annotation)}.union(*(kinds(part) for part in get_args(annotation)))


def candidates(section: str, term: Term) -> list[Any]:
    """Valid values of an option, among them those of the term."""
    field = option_classes()[section].model_fields[term.name]
    types, default = kinds(field.annotation), field.get_default(call_default_factory=True)
    first = default[0] if isinstance(default, list) and default else default
    named = [*term.values] if term.operator == "=" else []
    if values := EXAMPLES.get(f"{section}.{term.name}") or EXAMPLES.get(term.name):
        return [*values, *([value] if isinstance(default, list) else value for value in named)]
    plain = [*literal_values(field.annotation), *named]
    if not plain:
        plain = [True, False] if bool in types else [(first or 1) + 1] if types & {int, float} else ["text"]
    values = [*dict.fromkeys(plain)]
    return [[value] for value in values] if list in types and not isinstance(default, int) else values


def options_of(section: str, values: Values) -> Options:
    """The options with these values, without any check."""
    values = REQUIRED.get(section, {}) | values
    return option_classes()[section].model_construct({*values}, **values)


def with_term(section: str, term: Term, *, matches: bool, values: Values) -> Values | None:
    """The values changed so that the term has matches, or none; None if no value does that."""
    without = {name: value for name, value in values.items() if name != term.name}
    for changed in (without, *({**without, term.name: value} for value in candidates(section, term))):
        if bool(term.matches(options_of(section, changed))) == matches:
            return changed
    return None


def with_terms(section: str, terms: Iterable[Term], *, matches: bool) -> Values | None:
    """Values with which each term has matches, or none."""
    values: Values | None = {}
    for term in terms:
        values = None if values is None else with_term(section, term, matches=matches, values=values)
    return values


def violations() -> Iterator[Any]:
    """(section, rule, values that break it, the options that the message names)."""
    for section, options in option_classes().items():
        for rule in rules_of(options):
            terms, others = (
                [term for term in parse_terms(side) if term.name in options.model_fields]
                for side in (rule.options, rule.others)
            )
            for term, named in product(terms, [others] if isinstance(rule, Needs) else [[other] for other in others]):
                values = with_terms(section, named, matches=isinstance(rule, Excludes))
                for value in candidates(section, term) if values is not None else ():
                    given = first_breaking(section, rule, {**(values or {}), term.name: value})
                    if term.is_set(options_of(section, given)):
                        names = (term.name, *(other.name for other in named))
                        yield pytest.param(section, rule, given, names, id=f"{section}: {json.dumps(given)}")


def fault(section: str, rule: Rule, values: Values) -> str:
    """The message if the values break the rule, else ""."""
    error = rule.fault(options_of(section, values))
    return "" if error is None else str(error)


def first_breaking(section: str, rule: Rule, values: Values) -> Values:
    """The values with what earlier rules need, so that this rule is the first one that they break."""
    for earlier in takewhile(lambda other: other is not rule, rules_of(option_classes()[section])):
        if fault(section, earlier, values):
            values = with_term(section, parse_terms(earlier.others)[0], matches=True, values=values) or values
    return values
