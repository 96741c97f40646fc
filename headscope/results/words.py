"""Sentences about results. The only place that formats values, intervals, percentages and p-values in text."""

import math
import re
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from types import MappingProxyType
from typing import Any

from headscope.base.heads import ESTIMATE_MARK
from headscope.prompts.token_positions import describe_positions
from headscope.results.questions import Question, questions
from headscope.results.result import Bound, Result
from headscope.results.verdicts import deciding_part, undecided_parts
from headscope.runs.aggregation import MIN_DOCUMENTS
from headscope.runs.column_metadata import capitalise, format_number

INTERVAL = "95 % confidence interval"
MAX_LISTED_MODELS = 4
"""Maximum number of models whose values a sentence lists."""

REASONS: Mapping[str, str] = MappingProxyType(
    {
        "few": "at least {minimum} {samples} are needed",
        "few_units": "the interval of a share of a sum over {samples} needs at least {needed} {samples} instead of {n}",
        "estimate": "an estimate decides no claim: an exact value is needed",
        "estimated": "{estimated} of {units} {unit_nouns} were only estimated and would have to be exact[, over at "
        "least {minimum} {samples}]",
        "power": "with {n} {samples}, even the largest possible effect would not show[. At least {needed} {samples} "
        "are needed]",
        "draws": "success depends on which random heads are drawn[: about {needed} draws instead of {draws} would "
        "decide]",
        "few_draws": "an interval over random heads needs at least {needed} draws instead of {draws}",
        "trials": "more draws do not decide: the interval over {n} {samples} alone reaches {threshold:g}[. About "
        "{needed} {samples} would decide with the draws of this run]",
        "unmeasured": "the run measured no {unmeasured}",
        "short": "{context_length:,} tokens are not beyond half of the native context of {native_context:,}. A context "
        "of more than {half_context:,} tokens would decide",
        "start": "the start of the training is unknown. A run that also measures the checkpoint under the scheme from "
        "which the training started would decide",
    }
)
"""Why the data cannot decide a claim, and what would. Places are names of the result and of its `details`."""
UNITS_OF_A_MODEL = frozenset({"heads", "KV groups", "layers"})
"""Samples of which a model has a fixed number."""


def percent(share: float, decimals: int = 0, sign: str = "") -> str:
    """A share as text: "67 %"; `sign` "+" shows the sign of positive shares."""
    return f"{100 * share:{sign}.{decimals}f} %"


def join_words(words: Sequence[str]) -> str:
    """Join words: "a, b and c"."""
    *first_words, last = words
    return f"{', '.join(first_words)} and {last}" if first_words else last


def count_nouns(count: int, nouns: str) -> str:
    """A number with its noun, which is stated in the plural: "5 documents", "1 document"."""
    return f"{count:,} {nouns.removesuffix('s') if count == 1 else nouns}"


FORMATS: Mapping[str, Callable[[Any], str]] = MappingProxyType(
    {
        "number": format_number,
        "percent": percent,
        "percent1": lambda share: percent(share, 1),
        "+percent": lambda share: percent(share, sign="+"),
        "points": lambda share: f"{100 * share:+.0f}",
        "bytes": lambda size: f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.2f} MiB",
        "words": join_words,
        "capital": capitalise,
        "positions": describe_positions,
    }
)
"""Formats of places in templates, besides Python's. A noun in the plural is a format, too: {heads:n heads}."""


def format_value(value: Any, number_format: str = "") -> str:
    """A value by a name of `FORMATS`, by "n <nouns>", or by one of Python's formats.

    Pairs of a name and a number become a list: "L3H1 (+0.45), L5H2 (+0.33)".
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name} ({format_value(number, number_format)})" for name, number in value.items())
    if number_format in FORMATS:
        return FORMATS[number_format](value)
    if number_format.startswith("n "):
        return count_nouns(int(value), number_format[2:])
    return format(value, number_format)


def q_value(p_adjusted: float) -> str:
    """An adjusted p-value to follow a value, such as ", q = 0.012"; "" without one."""
    return "" if math.isnan(p_adjusted) else f", q = {p_adjusted:.2g}"


class _Formatter(string.Formatter):
    """Fills the places of a template; raises _Missing for one without a value."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value = kwargs.get(str(key))
        is_empty = isinstance(value, (str, list, tuple, dict)) and not value
        if value is None or is_empty or (isinstance(value, float) and math.isnan(value)):
            raise _Missing(str(key))
        return value

    def format_field(self, value: Any, format_spec: str) -> str:
        return format_value(value, format_spec)


class _Missing(Exception):
    """A place without a value."""


_OPTIONAL = re.compile(r"\[([^\[\]]*)\]")


def fill(template: str, values: Mapping[str, Any]) -> str:
    """The template with its places filled; parts in square brackets with a place that has no value are left out."""

    def optional(match: re.Match[str]) -> str:
        try:
            return _Formatter().vformat(match[1], (), values).replace("{", "{{").replace("}", "}}")
        except _Missing:
            return ""

    complete = _OPTIONAL.sub(optional, template)
    try:
        return _Formatter().vformat(complete, (), values)
    except _Missing as missing:
        raise KeyError(f"no value for {{{missing}}} in the template '{template}'") from None


def _sentence(template: str, values: Mapping[str, Any]) -> str:
    """The filled template with a capital first letter, unless it begins with a place, such as the label of a model."""
    text = fill(template, values)
    return text if template.startswith(("{", "[")) else capitalise(text)


def interval_text(result: Result, question: Question) -> str:
    """Both ends of the interval: "+0.40 to +0.50"; says so if all samples have the same value."""
    if result.low == result.high:
        return f"the same in all {result.n or ''} {question.samples}".replace("  ", " ")
    return f"{format_value(result.low, question.number)} to {format_value(result.high, question.number)}"


def cell(result: Result) -> str:
    """The value and its interval for a table whose heading has the unit: "+0.45 (+0.40 to +0.50)"."""
    question = questions()[result.question]
    mark = "" if result.is_exact else ESTIMATE_MARK
    interval = f" ({interval_text(result, question)})" if result.has_interval and result.is_exact else ""
    return f"{mark}{format_value(result.value, question.number)}{interval}"


def value_text(result: Result, question: Question, brief: bool = False) -> str:
    """The value with its unit, its interval and what it is over: "+0.45 (95 % confidence interval +0.40 to +0.50, 60
    pairs)". The `brief` text omits the name of the interval and that it is corrected for a choice."""
    number = format_value(result.value, question.number)
    notes = [] if result.is_exact else ["an estimate"]
    if result.has_interval and result.is_exact:
        bounds = interval_text(result, question)
        if not brief and result.low != result.high:
            bounds = f"{INTERVAL} {bounds}"
        notes.append(bounds)
        if result.selected_from > 1 and not brief and result.low != result.high:
            notes.append(f"corrected for the choice among {result.selected_from:,}")
    if question.samples and result.n is not None and result.low != result.high:
        may_lack = result.n < MIN_DOCUMENTS or "mean_of_ratios" in result.details  # a ratio may have an open interval
        lacks_interval = not brief and result.is_exact and not result.has_interval and may_lack
        verb = "gives" if result.n == 1 else "give"
        notes.append(f"{count_nouns(result.n, question.samples)}{f' {verb} no interval' if lacks_interval else ''}")
    unit = f" {question.value_unit}" if question.value_unit else ""
    mark = ESTIMATE_MARK if brief and not result.is_exact else ""
    return f"{mark}{number}{unit}" + (f" ({', '.join(notes)})" if notes else "")


def _places(result: Result, question: Question, brief: bool) -> dict[str, Any]:
    """The values of all places by name. Raises ValueError if a detail or condition has the name of another place."""
    value = "" if math.isnan(result.value) else value_text(result, question, brief)
    bound = {"threshold": result.bound.threshold, "upper": result.bound.upper} if result.bound else {}
    places = {
        **bound,
        "minimum": MIN_DOCUMENTS,
        "model": result.model,
        "baseline": result.baseline,
        "unit": result.unit,
        "n": result.n,
        "samples": question.samples,
        "verdict": result.verdict,
        "p_adjusted": result.p_adjusted,
        "value": value,
        "number": result.value,
        "low": result.low,
        "high": result.high,
        "parts": "; ".join(_clause(part, brief) for part in result.parts),
    }
    for kind, values in (("condition", result.where), ("detail", result.details)):
        if repeated_names := sorted(places.keys() & values.keys()):
            name = f"{kind} '{repeated_names[0]}' of result '{result.question}'"
            raise ValueError(f"{name} is already the name of a placeholder. Rename it")
        places |= values
    return places


def _clause(result: Result, brief: bool) -> str:
    question = questions()[result.question]
    return fill(question.sentence, _places(result, question, brief))


def statement(result: Result) -> str:
    """The statement of a paper that a claim is about."""
    question = questions()[result.question]
    return _sentence(question.statement, _places(result, question, brief=False))


def evidence(result: Result) -> str:
    """The evidence for a verdict, and what would decide an inconclusive one."""
    question = questions()[result.question]
    return f"{_sentence(question.sentence, _places(result, question, brief=False))}{_undecided(result)}"


def criterion(result: Result) -> str:
    """The threshold of a verdict that is ours; "" if the statement names it."""
    question = questions()[result.question]
    return fill(question.criterion, _places(result, question, brief=False)) if question.criterion else ""


def _undecided(result: Result) -> str:
    """`what_decides` to follow the evidence."""
    text = what_decides(result)
    return f"; {text}" if text else ""


def what_decides(result: Result) -> str:
    """Why a verdict is inconclusive and what would decide it; "" for other verdicts."""
    declared = questions()
    leaves = undecided_parts(result)
    reasons = dict.fromkeys(
        fill(REASONS[part.reason], _places(part, declared[part.question], brief=False))
        for part in ([result] if result.verdict and result.reason else leaves)
        if part.reason
    )
    texts = [*reasons]
    need = deciding_part(result)
    nouns = {declared[leaf.question].samples for leaf in leaves}
    if need and not need[0].reason:
        samples = declared[need[0].question].samples or "samples"
        texts.append(_what_decides(samples, f"about {count_nouns(need[1], samples)} would decide at the spread seen"))
    elif nouns & UNITS_OF_A_MODEL and not [part for part in leaves if part.reason]:
        texts.append(_what_decides(min(nouns & UNITS_OF_A_MODEL)))
    elif any(part.bound and _is_on_threshold(part.value, part.bound) for part in leaves):
        texts.append("the value is on the threshold, where no number of samples decides")
    return "; ".join(texts)


def _is_on_threshold(value: float, bound: Bound) -> bool:
    return value == bound.threshold or value == bound.upper


def _what_decides(samples: str, number: str = "") -> str:
    """How many samples would decide; for the units of one model, that others are needed."""
    if samples not in UNITS_OF_A_MODEL:
        return number
    others = f"more documents do not narrow this interval over the {samples} of one model, but another trained model"
    return f"{others} or seed may decide{f' ({number})' if number else ''}"


def sentence(result: Result) -> str:
    """A full sentence about the result; for a claim: statement, verdict, evidence and criterion."""
    question = questions()[result.question]
    if question.statement:
        ours = f" Our criterion: {criterion(result)}." if question.criterion else ""
        return f"{statement(result)}: {result.verdict}. {evidence(result)}.{ours}"
    return f"{_sentence(question.sentence, _places(result, question, brief=False))}{_undecided(result)}."


def headline(result: Result) -> str:
    """The result in one line, without the name of the interval and without a full stop."""
    question = questions()[result.question]
    return _sentence(question.headline or question.sentence, _places(result, question, brief=True))


def answer(results: Sequence[Result]) -> str:
    """A sentence with the results of several models to one question, for a card of the overview.

    The unit follows the values once: "7.96 in base and 9.92 in yarn (tokens)".
    """
    first, question = results[0], questions()[results[0].question]
    texts = [f"{_bare(result, question)} in {result.model}" for result in results]
    if len(texts) > MAX_LISTED_MODELS:
        order = sorted(range(len(results)), key=lambda index: results[index].value)
        values = f"from {texts[order[0]]} to {texts[order[-1]]}"
    else:
        values = join_words(texts)
    values += f" ({question.value_unit})" if question.value_unit else ""
    return f"{_sentence(question.answer, {**_places(first, question, brief=True), 'values': values})}."


def answers(results: Iterable[Result]) -> str:
    """The sentences of `answer` for results of several questions, which follow each other question by question."""
    return " ".join(answer([*group]) for _, group in groupby(results, key=lambda result: result.question))


def _bare(result: Result, question: Question) -> str:
    """The value alone, marked if it is an estimate."""
    return f"{'' if result.is_exact else ESTIMATE_MARK}{format_value(result.value, question.number)}"
