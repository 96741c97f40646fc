"""Every rule about options that depend on each other is kept by flags, study files and Python, in the words of each."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest
from pydantic import Field, ValidationError
from support.broken_rules import ENGINE, REQUIRED, Values, fault, literal_values, option_classes, violations, with_term
from support.refusals import assert_names, refuses

import headscope as hs
from headscope.base import plugins
from headscope.errors import BadOption
from headscope.study.config import Options, read_study
from headscope.study.option_rules import Excludes, Needs, Rule, parse_terms, rule_notes, rules_of


def as_text(value: Any) -> str:
    if isinstance(value, dict):
        return ";".join(f"{name}={as_text(items)}" for name, items in value.items())
    return ",".join(map(as_text, value)) if isinstance(value, list) else str(value)


def as_flags(section: str, values: Values) -> list[str]:
    names = {name: ENGINE if (section, name) == (ENGINE, "name") else name.replace("_", "-") for name in values}
    return [
        f"--{'' if value else 'no-'}{names[name]}" if isinstance(value, bool) else f"--{names[name]}={as_text(value)}"
        for name, value in values.items()
    ]


@pytest.mark.parametrize(("section", "rule", "values", "names"), violations())
def test_options_that_break_a_rule_are_refused_in_the_words_of_flags_keys_and_keywords(
    section: str, rule: Rule, values: Values, names: tuple[str, ...], refused: Callable[..., str], tmp_path: Path
) -> None:
    values = REQUIRED.get(section, {}) | values
    probe = plugins.probes()["measure" if section == ENGINE else section]
    quoted = [f"'{name}'" for name in names]

    file = tmp_path / "study.yaml"
    file.write_text(json.dumps({section: values, **({probe.name: {}} if section == ENGINE else {})}))
    with refuses(BadOption, f"'{file}'", section, *quoted) as raised:
        read_study(file, {})
    message = str(raised.value)
    assert message == f"study file '{file}': {section}: {fault(section, rule, values)}"
    assert "\n" not in message
    assert "--" not in message

    line = refused(2, probe.command_name, *as_flags(section, values))
    flags = [f"--{ENGINE}" if (section, name) == (ENGINE, "name") else f"--{name.replace('_', '-')}" for name in names]
    assert_names(line, *flags)
    assert "'" not in line

    model = ["none"] if {"models", "model"} & {*probe.takes} else []
    keywords = {ENGINE: values} if section == ENGINE else values
    with refuses(BadOption, section, *quoted):
        getattr(hs, probe.function_name)(*model, **keywords)


@pytest.mark.parametrize(("section", "rule", "values", "names"), violations())
def test_options_that_are_changed_as_the_message_says_keep_the_rule(
    section: str, rule: Rule, values: Values, names: tuple[str, ...]
) -> None:
    first, *others = names
    without = {name: value for name, value in values.items() if name != first}
    assert not [other for other in rules_of(option_classes()[section]) if fault(section, other, without)]
    for term in (term for term in parse_terms(rule.others) if term.name in others):
        changed = with_term(section, term, matches=isinstance(rule, Needs), values=values)
        assert changed is not None
        assert not fault(section, rule, changed)


def test_every_rule_can_be_broken() -> None:
    broken = {id(case.values[1]) for case in violations()}
    assert {id(rule) for options in option_classes().values() for rule in rules_of(options)} == broken


def test_rules_name_options_and_values_that_exist() -> None:
    """A rule that several classes share may name an option that only some of them have."""
    users: dict[int, tuple[Rule, list[type[Options]]]] = {}
    for options in option_classes().values():
        for rule in rules_of(options):
            users.setdefault(id(rule), (rule, []))[1].append(options)
    for rule, classes in users.values():
        assert type(rule) in (Needs, Excludes)
        for term in (*parse_terms(rule.options), *parse_terms(rule.others)):
            fields = [options.model_fields[term.name] for options in classes if term.name in options.model_fields]
            assert fields, term
            for choices in filter(None, (literal_values(field.annotation) for field in fields)):
                assert not term.operator or {*term.values} <= {*choices}, term


class Shared(Options):
    """Options with rules, some about options of a subclass."""

    option_rules: ClassVar[tuple[Rule, ...]] = (
        Needs("draws", "kinds=resample|mean extra", "it is {kinds} that draw"),
        Excludes("flag", "text"),
    )

    draws: int = 5
    kinds: list[str] = Field(["zero"])
    flag: bool = True
    text: str | None = None


class Derived(Shared):
    option_rules = (Needs("kinds!=zero", "text"), Excludes("level=high|top", "draws flag", "{level} has none"))

    extra: list[str] = Field([])
    level: Literal["low", "high", "top"] = "low"


@pytest.mark.parametrize(
    ("options", "values", "message"),
    [
        (Shared, {}, ""),
        (Shared, {"draws": 5}, "'draws' needs 'kinds' resample or mean, not zero: it is 'kinds' that draw. "
                               "Change 'kinds', or remove 'draws'"),
        (Shared, {"draws": 5, "kinds": []}, "'draws' needs 'kinds' resample or mean: it is 'kinds' that draw. "
                                            "Add 'kinds', or remove 'draws'"),
        (Shared, {"draws": 5, "kinds": ["zero", "mean"]}, ""),
        (Shared, {"kinds": ["{x}"], "draws": 1}, "'draws' needs 'kinds' resample or mean, not {x}: it is 'kinds' that "
                                                 "draw. Change 'kinds', or remove 'draws'"),
        (Shared, {"text": "a"}, ""),
        (Shared, {"text": "a", "flag": False}, ""),
        (Shared, {"text": None, "flag": True}, ""),
        (Shared, {"text": "a", "flag": True}, "'flag' and 'text' cannot be combined. Remove 'flag' or 'text'"),
        (Derived, {"text": "a", "flag": True}, "'flag' and 'text' cannot be combined. Remove 'flag' or 'text'"),
        (Derived, {"draws": 5}, "'draws' needs 'kinds' resample or mean or 'extra': it is 'kinds' that draw. Give one "
                                "of them, or remove 'draws'"),
        (Derived, {"draws": 5, "extra": ["x"]}, ""),
        (Derived, {"draws": 5, "kinds": ["a"]}, "'draws' needs 'kinds' resample or mean or 'extra': it is 'kinds' that "
                                                "draw. Give one of them, or remove 'draws'"),
        (Derived, {"kinds": ["zero"]}, ""),
        (Derived, {"kinds": ["zero", "a", "b"]}, "'kinds' a,b needs 'text'. Add 'text', or change 'kinds'"),
        (Derived, {"kinds": ["a"], "text": "b"}, ""),
        (Derived, {"level": "top"}, "'level' top and 'draws' cannot be combined: 'level' has none. Change 'level', or "
                                    "remove 'draws'"),
        (Derived, {"level": "low"}, ""),
    ],
)  # fmt: skip
def test_options_count_if_they_are_set_and_ask_for_something(
    options: type[Options], values: Values, message: str
) -> None:
    if message:
        with pytest.raises(ValidationError) as raised:
            options(**values)
        assert str(raised.value.errors()[0]["ctx"]["error"]) == message
    else:
        options(**values)


@pytest.mark.parametrize(
    ("options", "name", "notes"),
    [
        (Shared, "draws", ["Only with --kinds resample or mean"]),
        (Shared, "kinds", []),
        (Shared, "flag", ["Not with --text"]),
        (Shared, "text", ["Not with --flag"]),
        (Derived, "draws", ["Only with --kinds resample or mean or --extra", "Not with --level high or top"]),
        (Derived, "kinds", ["other than zero: only with --text"]),
        (Derived, "level", ["high or top: not with --draws or --flag"]),
        (Derived, "flag", ["Not with --text or --level high or top"]),
    ],
)
def test_help_names_the_options_that_an_option_needs_or_excludes(
    options: type[Options], name: str, notes: list[str]
) -> None:
    assert rule_notes(options, name) == notes


def test_help_leaves_out_what_always_holds_and_long_lists() -> None:
    class Many(Options):
        option_rules = (Needs("draws", "kinds=a|b|c|d|e|f"), Needs("draws", "pairs"))

        draws: int = 1
        kinds: list[str] = Field([])
        pairs: str = "ioi"

    assert not rule_notes(Many, "draws")


def test_a_message_lists_a_few_of_many_values_and_shortens_a_long_one() -> None:
    class Many(Options):
        option_rules = (Needs("draws", "kinds=a|b|c|d|e|f"),)

        draws: int = 1
        kinds: list[str] = Field([])

    with pytest.raises(ValidationError) as raised:
        Many(draws=1, kinds=["x" * 500])
    message = str(raised.value.errors()[0]["ctx"]["error"])
    assert message.startswith("'draws' needs 'kinds' a, b, c, d or ..., not xxx")
    assert len(message) < 250
