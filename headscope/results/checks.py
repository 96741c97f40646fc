"""Outcomes of checks: bounds on the results of a run and on statistics of its heads.

A check passes only if the whole 95 % confidence interval is on the allowed side, fails only if it is on the other side,
and else is undecided.
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal

from headscope.errors import BadInput, did_you_mean
from headscope.results.check_file import Check, Share
from headscope.results.collection import results_with_parts
from headscope.results.comparison import Change, change
from headscope.results.head_statistics import HEAD_QUESTION, head_statistic, statistic_change
from headscope.results.pairing import MATCHING, RunPair
from headscope.results.questions import questions
from headscope.results.result import Bound, Result, Scalar
from headscope.results.verdicts import samples_needed
from headscope.runs.column_metadata import exceeds, falls_below, is_statistic
from headscope.runs.run import Run

Outcome = Literal["passes", "fails", "undecided"]


@dataclass(frozen=True)
class CheckResult:
    """The outcome of one check for one result or model.

    `value` with `low` and `high` is what the bound is compared with: the value, its change, or the value minus a share
    of the earlier one. `needed` is the number of samples that would decide an undecided check at the spread seen.
    """

    name: str
    subject: str
    outcome: Outcome
    value: float
    low: float
    high: float
    bound: str
    measure: str
    is_change: bool = False
    """Whether the value is relative to the earlier run."""
    is_share: bool = False
    """Whether the bound is a share of the earlier value."""
    reason: str = ""
    needed: int | None = None
    samples: str = ""


def run_checks(run: Run, checks: Iterable[Check], earlier: Run | None = None) -> list[CheckResult]:
    """The outcome of every check, one for each result or model that it matches.

    Raises BadInput for a check that matches nothing, or that needs an earlier run if there is none.
    """
    runs = None if earlier is None else RunPair(earlier, run)
    return [outcome for check in checks for outcome in _outcomes(run, check, runs)]


def _outcomes(run: Run, check: Check, runs: RunPair | None) -> Iterator[CheckResult]:
    if check.needs_earlier_run and runs is None:
        raise BadInput(f"check '{check.title}' is relative to another run. Give that run with --against")
    for result in _subjects(run, check):
        yield _judge(check, result, _change(runs, check, result) if runs and check.needs_earlier_run else result)


def _judge(check: Check, result: Result, compared: Result | Change) -> CheckResult:
    """Compare the value, or its change, with the bound of the check."""
    name, bound = check.bound_name, getattr(check, check.bound_name)
    value, low, high = (
        (compared.value, compared.low, compared.high)
        if isinstance(compared, Result)
        else (compared.difference, compared.low, compared.high)
    )
    threshold = {"rises_at_most": 1.0, "falls_at_most": -1.0}.get(name, 1.0) * (
        0.0 if isinstance(bound, Share) else float(bound)
    )
    is_minimum = name in ("at_least", "falls_at_most")
    is_exact = result.is_exact and (isinstance(compared, Result) or compared.before.is_exact)
    outcome, reason = _compare(replace(result, is_exact=is_exact), value, low, high, threshold, is_minimum)
    needed = None
    if outcome == "undecided" and math.isfinite(low):
        side: Literal["above", "below"] = "above" if is_minimum else "below"
        n = result.n if isinstance(compared, Result) or compared.n is None else compared.n
        bounded = Result(question=result.question, n=n, value=value, low=low, high=high, bound=Bound(side, threshold))
        needed = samples_needed(bounded)
    return CheckResult(
        check.title,
        _subject(check, result),
        outcome,
        value,
        low,
        high,
        check.bound_text,
        check.measure,
        is_change=isinstance(compared, Change),
        is_share=isinstance(bound, Share),
        reason=reason,
        needed=needed,
        samples="" if result.question == HEAD_QUESTION else questions()[result.question].samples,
    )


def _compare(
    result: Result, value: float, low: float, high: float, threshold: float, is_minimum: bool
) -> tuple[Outcome, str]:
    """The outcome by the interval, and the reason if it is undecided or if there is no interval."""
    if math.isnan(value):
        return "undecided", "there is no value"
    if not result.is_exact:
        return "undecided", "an estimate decides nothing"
    reason = ""
    if math.isnan(low):
        if _is_sampled(result):
            return "undecided", "too few samples for an interval"
        low, high, reason = value, value, "it has no interval, so the value alone decides"
    passes, fails = not falls_below(low, threshold), falls_below(high, threshold)
    if not is_minimum:
        passes, fails = not exceeds(high, threshold), exceeds(low, threshold)
    if not (passes or fails):
        return "undecided", "the interval contains the bound"
    return ("passes" if passes else "fails"), reason


def _is_sampled(result: Result) -> bool:
    """Whether the value has a sampling error: means over documents, pairs or trials have one."""
    if result.question == HEAD_QUESTION:
        return bool(result.details["is_sampled"])
    return bool(questions()[result.question].samples)


# What a check is about ----------------------------------------------------------------------------------------------


def _subjects(run: Run, check: Check) -> list[Result]:
    """The results that the check matches. Raises BadInput if there are none."""
    if check.model is not None and check.model not in run.models:
        raise BadInput(
            f"check '{check.title}': the run has no model '{check.model}'{did_you_mean(check.model, run.models)}. "
            f"Use one of: {', '.join(run.models)}; or remove 'model' to check all"
        )
    if check.statistic is not None:
        return [head_statistic(run, check, model) for model in _models_with_statistic(run, check)]
    return _matching_results(run, check)


def _matching_results(run: Run, check: Check) -> list[Result]:
    results = [result for result in results_with_parts(run) if result.has_value]
    of_question = [result for result in results if result.question == check.result]
    names = sorted({result.question for result in results})
    if not of_question:
        known = check.result in questions()
        problem = "the run has no result" if known else "there is no result"
        raise BadInput(
            f"{problem} '{check.result}'{'' if known else did_you_mean(str(check.result), questions())}. "
            f"The run has: {', '.join(names) or 'none'}"
        )
    matching = [
        result
        for result in of_question
        if check.model in {None, result.model} and all(_meets(result, *item) for item in check.where.items())
    ]
    if not matching:
        wanted = {"model": check.model, **check.where}
        texts = ", ".join(f"{name} {value}" for name, value in wanted.items() if value is not None)
        conditions = "; ".join(dict.fromkeys(map(_place, of_question)))
        raise BadInput(
            f"check '{check.title}' matches no result for {texts}. The run has {check.result} for: {conditions}"
        )
    return matching


def _meets(result: Result, name: str, value: Scalar) -> bool:
    actual = result.baseline if name == "baseline" else result.where.get(name)
    return actual == value or str(actual) == str(value)


def _models_with_statistic(run: Run, check: Check) -> list[str]:
    name, heads = str(check.statistic), run.heads
    if name not in heads or not is_statistic(name):
        raise BadInput(
            f"check '{check.title}': no statistic '{name}' in this run"
            f"{did_you_mean(name, filter(is_statistic, map(str, heads)))}. Use a column of run.heads"
        )
    measured = {*heads.dropna(subset=[name])["model"]}
    if models := [model for model in run.models if model in measured and check.model in (None, model)]:
        return models
    raise BadInput(f"check '{check.title}': '{name}' has no value in {check.model or 'any model'}. Use another one")


def _change(runs: RunPair, check: Check, result: Result) -> Change:
    """The change since the earlier run. Raises BadInput if that has no such result."""
    bound = getattr(check, check.bound_name)
    share = bound.value if isinstance(bound, Share) else 1.0
    if check.statistic is None:
        if old := runs.partner(result):
            return change(old, result, runs, share)
    elif (model := runs.earlier_label(result.model)) in runs.before.models and check.statistic in runs.before.heads:
        return statistic_change(check, head_statistic(runs.before, check, model), result, runs, share)
    missing = " for ".join(filter(None, [check.measure, _place(result)]))
    raise BadInput(f"check '{check.title}': the run of --against has no {missing}. {MATCHING}. Measure it there, too")


def _subject(check: Check, result: Result) -> str:
    """What was compared: model, conditions and head."""
    if check.statistic is not None:
        return f"{result.model}: {check.measure}"
    return ", ".join(filter(None, [_place(result), result.unit]))


def _place(result: Result) -> str:
    return ", ".join(filter(None, [result.models, result.conditions]))
