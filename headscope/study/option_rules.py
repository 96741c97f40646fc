"""Rules about options that depend on each other. A class of options declares them as `option_rules`."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from headscope.errors import OptionError
from headscope.user_input import MAX_QUOTED

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
        values = value or ("other than " if self.operator == "!=" else "") + _join(self.values)
        return f"{{{self.name}}} {values}" if self.operator else f"{{{self.name}}}"

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
