"""Results about the prompts of a set: the metric of the unchanged model, its answers, and which prompts count."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from headscope.prompts.answers import ANSWER_CRITERIA, count_exchanged, gives_answer
from headscope.prompts.pairs import METRICS_WITH_WRONG, metric_label, metric_unit
from headscope.results.questions import Question
from headscope.results.result import Result
from headscope.results.samples import mean_result, share_result

MAX_NAMES = 8
"""Prompts that a warning names."""
FAILURES = {
    "wrong": "the unchanged model does not give the answer to the clean prompt",
    "same": "both prompts prefer the same answer, so that a small difference of the metric gives large effects",
}


def answer_questions(area: str, samples: str = "prompts", *, has_corrupted: bool = False) -> tuple[Question, ...]:
    """The questions of `answer_results`, named "<area>.metric" and so on. `samples` is the noun of the prompts."""
    exchanged = Question(
        name=f"{area}.exchanged",
        sentence="{model}, {prompts}: are clean and corrupted prompts exchanged? In {number:.0f} of {n:n pairs} "
        "the corrupted prompt favours the answer",
        number=".0f",
        level="warning",
    )
    failures = (
        Question(
            name=f"{area}.{name}",
            sentence=f"{{model}}, {{prompts}}: {{number:.0f}} of {{n:n {samples}}} are left out of means, because "
            f"{reason if has_corrupted else reason.removesuffix(' to the clean prompt')}: "
            f"{{names:+.2f}}[ and {{more}} more] ({{label}}). Use other {samples}, or --keep-failing[. {{doubt}}]",
            number=".0f",
            level="warning",
        )
        for name, reason in FAILURES.items()
        if has_corrupted or name == "wrong"
    )
    return (
        *([exchanged] if has_corrupted else []),
        *failures,
        Question(
            name=f"{area}.no_effects",
            sentence=f"no {samples.removesuffix('s')} counts, because "
            + ("its metric differs too little between the two prompts or " if has_corrupted else "")
            + f"the model does not answer it, so there are no effects. Use other {samples}, fewer models, or "
            "--keep-failing",
            level="warning",
        ),
        Question(
            name=f"{area}.metric",
            sentence=f"{{model}}, {{prompts}}: the mean {{label}} ({{label_unit}}) over all {samples} is {{value}}"
            + (" for clean and {corrupted:.2f} for corrupted prompts" if has_corrupted else " in the unchanged model")
            + f"[. {{excluded:n {samples}}} with a difference below {{limit}} are left out of means of effects]"
            f"[. Means are over the {{shared:n {samples}}} that count in every model]",
            number=".2f",
            samples=samples,
        ),
        Question(
            name=f"{area}.answered",
            sentence="{model}, {prompts}: the unchanged model gives the answer ({answer_criterion}) in {value}"
            f"[. Means include {{unanswered:n {samples}}} without it, whose effects do not show how the model answers]"
            "[. {doubt}]",
            number="percent",
            samples=samples,
            better="higher",
        ),
    )


def answer_results(
    area: str, prompts: pd.DataFrame, shared: pd.DataFrame | None = None, limits: Mapping[str, str] | None = None
) -> Iterator[Result]:
    """The metric of the prompts of each model and set, how many answers the model gives, which prompts are left out.

    `prompts` has a row per model, prompts, metric and pair, with `metric_clean` and `is_counted`, and with
    `metric_corrupted` and `is_normalised` if corrupted prompts were run. `shared` has the prompts that count in every
    model, if means are over these; `limits` are the least differences of the metric between the prompts of a pair, in
    words.
    """
    if shared is not None and len(prompts) and shared.empty:
        yield Result(question=f"{area}.no_effects")
    groups: Any = prompts.groupby(["model", "prompts", "metric"], sort=False)
    for (model, name, metric), rows in groups:
        place = {"model": model, "where": {"prompts": name, "metric": metric}}
        by_prompt = rows.set_index("pair")
        clean = by_prompt["metric_clean"].astype("float64")
        details: dict[str, Any] = {"label": metric_label(metric), "label_unit": metric_unit(metric)}
        details["shared"] = _shared_count(shared, name, metric, int(rows["is_counted"].sum()))
        if "metric_corrupted" in rows:
            corrupted = rows["metric_corrupted"].to_numpy(np.float64)
            exchanged = count_exchanged(metric, clean.to_numpy(), corrupted)
            if 2 * exchanged > len(rows):
                yield Result(question=f"{area}.exchanged", value=exchanged, n=len(rows), **place)
            details["corrupted"] = corrupted.mean()
            details["excluded"] = int((~rows["is_normalised"]).sum()) or None
            details["limit"] = (limits or {}).get(metric)
        yield mean_result(f"{area}.metric", clean, details=details, **place)
        if metric in ANSWER_CRITERIA:
            is_answered = pd.Series(gives_answer(metric, clean.to_numpy()), clean.index)
            may_be_exchanged = is_answered.mean() < 0.5 and metric in METRICS_WITH_WRONG
            exchange = ", or clean and corrupted prompts," if "metric_corrupted" in rows else ""
            doubt = f"Answer and wrong answer{exchange} may be exchanged" if may_be_exchanged else ""
            yield from _failure_results(area, by_prompt, is_answered, metric, doubt, place)
            unanswered = int((by_prompt["is_counted"] & ~is_answered).sum())
            answers = {
                "answer_criterion": ANSWER_CRITERIA[metric],
                "unanswered": unanswered or None,
                "doubt": doubt,
            }
            yield share_result(f"{area}.answered", is_answered, details=answers, **place)


def _failure_results(
    area: str, prompts: pd.DataFrame, is_answered: pd.Series, metric: str, doubt: str, place: dict[str, Any]
) -> Iterator[Result]:
    """The prompts that means leave out because they do not show how the model answers, with their metrics by name."""
    is_left_out = ~prompts["is_counted"]
    if "is_normalised" in prompts:
        is_left_out &= prompts["is_normalised"]
    for name, column, is_failing in (
        ("wrong", "metric_clean", is_left_out & ~is_answered),
        ("same", "metric_corrupted", is_left_out & is_answered),
    ):
        if not is_failing.any():
            continue
        values = prompts.loc[is_failing, column].astype("float64")
        prompt = f" of the {column.removeprefix('metric_')} prompt" if "metric_corrupted" in prompts else ""
        details = {
            "names": {str(pair): float(value) for pair, value in values[:MAX_NAMES].items()},
            "more": len(values) - MAX_NAMES if len(values) > MAX_NAMES else None,
            "label": f"{metric_label(metric)}{prompt}",
            "doubt": doubt,
        }
        yield Result(question=f"{area}.{name}", value=len(values), n=len(prompts), details=details, **place)


def _shared_count(shared: pd.DataFrame | None, name: str, metric: str, counted: int) -> int | None:
    """Number of the prompts of a set that count in every model, if that is fewer than count in this one."""
    if shared is None:
        return None
    count = int(((shared["prompts"] == name) & (shared["metric"] == metric)).sum())
    return count if count < counted else None
