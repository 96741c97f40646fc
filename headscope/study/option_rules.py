"""Rules that relate options to one another, and in words what is wrong with options that pydantic refuses."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from headscope.base import user_input
from headscope.base.user_input import MAX_QUOTED
from headscope.errors import OptionError, did_you_mean

REQUIREMENTS = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float", "int_parsing_size"), "must be an integer"),
    **dict.fromkeys(("float_parsing", "float_type"), "must be a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "must be true or false"),
    **dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "must be a mapping (key: value)"),
    "finite_number": "must be a finite number",
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be above {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be below {lt}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "string_type": "must be a string",
    "string_too_short": "must not be empty",
    "string_pattern_mismatch": "may only have letters, digits, - and _, at most 100 of them",
    "invalid_key": "must be a string (a key)",
    "list_type": "must be a list",
    "too_short": "must have at least {min_length} value",
    "too_long": "must have at most {max_length} values",
    "literal_error": "must be {expected}",
}
"""What a value must be, by pydantic's type of mistake."""


def first_fault(error: ValidationError, root: type[BaseModel]) -> tuple[tuple[str | int, ...], str | OptionError]:
    """The path of the first mistake in options of type `root`, and what is expected (by each type that was tried) with
    the value."""
    mistakes = [(_error_path(mistake["loc"], root), mistake) for mistake in error.errors()]
    mistakes.sort(key=lambda item: item[1]["type"] != "extra_forbidden")  # which may be why another key is missing
    first = mistakes[0][0]
    # Of the types that were tried, the one whose validation went furthest was probably meant.
    same_key = (item for item in mistakes if item[0][: len(first)] == first)
    steps, mistake = max(same_key, key=lambda item: len(item[0]))
    path = tuple(step for step, _ in steps)
    if mistake["type"] == "extra_forbidden":
        known_keys = list(steps[-1][1].model_fields)
        hint = did_you_mean(str(steps[-1][0]), known_keys)
        return (), f"unknown key '{'.'.join(map(str, path))}'{hint}. Use one of: {', '.join(known_keys)}"
    same_place = [item for item_steps, item in mistakes if item_steps == steps]
    if own_check := next((item for item in same_place if item["type"] == "value_error"), None):
        cause = own_check["ctx"]["error"]
        return path, cause if isinstance(cause, OptionError) else OptionError("{text}", text=str(cause))
    if mistake["type"] == "missing":
        return path, " is missing. Give it a value"
    first_text, *texts = dict.fromkeys(map(_error_text, same_place))
    reason = " or ".join([first_text, *(text.removeprefix("must be ") for text in texts)])
    return path, f" {reason}: {user_input.quote(mistake['input'])}{_example(steps, mistake['type'])}"


def _error_text(error: Any) -> str:
    """What a value must be, for the mistakes that pydantic finds itself."""
    text = REQUIREMENTS.get(error["type"])
    return (
        str(error["msg"]).replace("Input should be", "must be") if text is None else text.format(**error.get("ctx", {}))
    )


def _example(steps: list[tuple[int | str, Any]], error_type: str) -> str:
    """The default of a numeric option, as an example of a value; "" for other mistakes or without a default."""
    name, options = steps[-1]
    field = options.model_fields.get(name) if options is not None and isinstance(name, str) else None
    if field is None or not error_type.startswith(("int_", "float_", "finite_")):
        return ""
    default = field.get_default(call_default_factory=True)
    return f". Use e.g. {default}" if isinstance(default, int | float) else ""


def _error_path(location: tuple[int | str, ...], root: type[BaseModel]) -> list[tuple[int | str, Any]]:
    """The keys of a pydantic location with the options that contain each, without pydantic's names of types."""
    options: Any = root
    steps: list[tuple[int | str, Any]] = []
    for index, step in enumerate(location):
        if options is None and not isinstance(step, int):
            continue  # the name of a type that was tried
        steps.append((step, options))
        if isinstance(step, int):
            continue
        field = options.model_fields.get(step) if options is not None else None
        classes = [] if field is None else annotation_classes(field.annotation)
        options = next((item for item in classes if isinstance(item, type) and issubclass(item, BaseModel)), None)
        if dict in _annotation_origins(field.annotation if field is not None else None):
            return [*steps, *((key, None) for key in location[index + 1 : index + 2])]
    return steps


def annotation_classes(annotation: Any) -> list[Any]:
    """The classes in an annotation such as `list[Phase] | None`."""
    arguments = get_args(annotation)
    return [item for argument in arguments for item in annotation_classes(argument)] if arguments else [annotation]


def _annotation_origins(annotation: Any) -> set[Any]:
    return {get_origin(annotation)}.union(*(_annotation_origins(argument) for argument in get_args(annotation)))


MAX_LISTED = 4
"""Values that a message lists before the last one."""


@dataclass(frozen=True)
class Term:
    """An option with any value, with one of some values (operator "=") or with another value than these ("!=")."""

    name: str
    operator: str = ""
    values: tuple[str, ...] = ()

    def matches(self, options: Any) -> list[str]:
        """The values that the term is about: of a list its items. None, False and an empty list ask for nothing."""
        value = getattr(options, self.name, None)
        items = value if isinstance(value, list | dict) else [] if value is None or value is False else [value]
        return [
            text for text in map(str, items) if not self.operator or (text in self.values) == (self.operator == "=")
        ]

    def is_set(self, options: Any) -> bool:
        """Whether the term is about the present value: of an option with any value, only if the user set it."""
        return bool(self.matches(options)) and bool(self.operator or self.name in options.model_fields_set)

    def describe(self, value: str = "") -> str:
        """The option in the template of a message, with this value or all values of the term if the term has some."""
        return f"{{{self.name}}} {value or self.describe_values()}" if self.operator else f"{{{self.name}}}"

    def describe_values(self) -> str:
        """The values that the term is about; "" for any."""
        return ("other than " if self.operator == "!=" else "") + _join(self.values) if self.operator else ""

    @property
    def removal(self) -> str:
        """The verb for what a user does to make the term false."""
        return "change" if self.operator else "remove"


@dataclass(frozen=True)
class Rule:
    """Each of the `options` needs or excludes `others`, as in `Needs("draws seed", "kinds=resample|noise")`.

    Both are terms separated by spaces: NAME, NAME=A|B for these values or NAME!=A|B for other values. Of `options`, a
    term without values counts only if the user set the option. `reason` follows in the message, with options as
    {NAME}. Options that a subclass does not have are ignored.
    """

    options: str
    others: str
    reason: str = ""

    def set_options(self, options: Any) -> list[Term]:
        """The terms of `options` that are set."""
        return [term for term in parse_terms(self.options) if term.is_set(options)]

    def fault(self, options: Any) -> OptionError | None:
        """What is wrong if these options break the rule."""
        raise NotImplementedError

    def _error(self, fault: str, remedy: str, given: Sequence[str], present: Sequence[str]) -> OptionError:
        """The error, with the values {given} and {present} of the two sides."""
        reason = f": {self.reason}" if self.reason else ""
        values = {"given": _shorten(",".join(given)), "present": _shorten(",".join(present))}
        verb, rest = remedy.split(" ", 1)
        return OptionError(f"{fault}{reason}. {verb.title()} {rest.replace(f', or {verb} ', ' or ')}", **values)


class Needs(Rule):
    """Each of the options has no effect, or is impossible, without one of the others."""

    def fault(self, options: Any) -> OptionError | None:
        terms = self.set_options(options)
        others = [term for term in parse_terms(self.others) if term.name in type(options).model_fields]
        if not terms or any(other.matches(options) for other in others):
            return None
        term, other = terms[0], others[0]
        needed, remedy, present = _join([item.describe() for item in others]), "give one of them", []
        if len(others) == 1:
            present = Term(other.name).matches(options)
            needed += ", not {present}" if present and other.operator == "=" else ""
            remedy = f"{'change' if present else 'add'} {{{other.name}}}"
        return self._error(
            f"{term.describe('{given}')} needs {needed}",
            f"{remedy}, or {term.removal} {{{term.name}}}",
            *(term.matches(options), present),
        )


class Excludes(Rule):
    """None of the options can be combined with one of the others."""

    def fault(self, options: Any) -> OptionError | None:
        terms, others = self.set_options(options), [term for term in parse_terms(self.others) if term.matches(options)]
        if not terms or not others:
            return None
        term, other = terms[0], others[0]
        return self._error(
            f"{term.describe('{given}')} and {other.describe('{present}')} cannot be combined",
            f"{term.removal} {{{term.name}}}, or {other.removal} {{{other.name}}}",
            *(term.matches(options), other.matches(options)),
        )


def rules_of(options: type) -> list[Rule]:
    """The rules of a class of options, those of its bases first."""
    return [rule for base in reversed(options.__mro__) for rule in vars(base).get("option_rules", ())]


def rule_notes(options: type[BaseModel], name: str) -> list[str]:
    """What the rules say of one option, for the help of its flag: "Only with --heads", "rank: not with --pairs".

    A rule about all sets of a kind is left out: its list would be longer than the description of the option.
    """
    needed: list[str] = []
    excluded: dict[str, list[str]] = {}  # the other options by the values of this one
    for rule in rules_of(options):
        sides = [
            [term for term in parse_terms(side) if term.name in options.model_fields]
            for side in (rule.options, rule.others)
        ]
        if not all(sides) or any(len(term.values) > MAX_LISTED for side in sides for term in side):
            continue
        for terms, others in [sides] if isinstance(rule, Needs) else [sides, sides[::-1]]:
            if isinstance(rule, Needs) and any(not other.operator and _has_default(options, other) for other in others):
                continue
            partners = [other.describe() for other in others]
            for term in terms:
                if term.name != name:
                    continue
                values = f"{term.describe_values()}: ".removeprefix(": ")
                if isinstance(rule, Needs):
                    needed.append(f"{values}only with {_join(partners)}")
                else:
                    excluded.setdefault(values, []).extend(partners)
    notes = [*needed, *(f"{values}not with {_join([*dict.fromkeys(others)])}" for values, others in excluded.items())]
    flags = {field: f"--{field.replace('_', '-')}" for field in options.model_fields}
    return [(note if ": " in note else f"{note[0].upper()}{note[1:]}").format(**flags) for note in notes]


def _has_default(options: type[BaseModel], term: Term) -> bool:
    return bool(options.model_fields[term.name].get_default(call_default_factory=True))


def options_without_effect(options: BaseModel) -> list[str]:
    """The options that a user set and has to remove until the others break no rule."""
    rules, removed = rules_of(type(options)), list[str]()
    while broken := [term.name for rule in rules if rule.fault(options) for term in rule.set_options(options)]:
        removed.append(broken[0])
        rest = options.model_dump(include=options.model_fields_set - {*removed})
        options = type(options).model_construct(**rest)
    return removed


@cache
def parse_terms(text: str) -> list[Term]:
    """The terms of one side of a rule."""
    parts = [term.partition("!=" if "!=" in term else "=") for term in text.split()]
    return [Term(name, operator, tuple(values.split("|"))) for name, operator, values in parts]


def _join(items: Sequence[str]) -> str:
    *first, last = items
    if len(first) > MAX_LISTED:
        first, last = first[:MAX_LISTED], "..."
    return f"{', '.join(first)} or {last}" if first else last


def _shorten(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."
