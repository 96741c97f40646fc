"""The pairs of a run: their metrics, which of them count, and results about them."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from headscope.effects.sweep import shared_samples
from headscope.prompts.answers import ANSWER_CRITERIA, count_exchanged, gives_answer
from headscope.prompts.pairs import METRICS_WITH_WRONG, metric_label, metric_unit
from headscope.results.answers import answered_result
from headscope.results.questions import Question
from headscope.results.result import Result
from headscope.results.samples import mean_result
from headscope.runs.aggregation import plain_types
from headscope.runs.run_tables import RunTables
from probes.patching.effects import describe_min_difference
from probes.patching.schema import PATCHING, PATCHING_LAYERS

DOUBT = "Answer and wrong answer, or clean and corrupted prompts, may be exchanged"
MAX_NAMES = 8
"""Pairs that a warning names."""
FAILURES = {
    "wrong": "the unchanged model does not give the answer to the clean prompt",
    "same": "both prompts prefer the same answer, so that a small difference of the metric gives large effects",
}


def pair_questions(area: str) -> tuple[Question, ...]:
    """The questions of `pair_results`, named "<area>.metric" and so on."""
    return (
        Question(
            name=f"{area}.exchanged",
            sentence="{model}, {prompts}: are clean and corrupted prompts exchanged? In {number:.0f} of {n:n pairs} "
            "the corrupted prompt favours the answer",
            number=".0f",
            level="warning",
        ),
        *(
            Question(
                name=f"{area}.{name}",
                sentence=f"{{model}}, {{prompts}}: {{number:.0f}} of {{n:n pairs}} are left out of means, because "
                f"{reason}: "
                "{names:+.2f}[ and {more} more] ({label}). Use other pairs, or --keep-failing",
                number=".0f",
                level="warning",
            )
            for name, reason in FAILURES.items()
        ),
        Question(
            name=f"{area}.metric",
            sentence="{model}, {prompts}: the mean {label} ({label_unit}) over all pairs is {value} for clean and "
            "{corrupted:.2f} for corrupted prompts[. {excluded:n pairs} with a difference below {limit} "
            "are left out of means of effects][. Means are over the {shared:n pairs} that count in every model]",
            number=".2f",
            samples="pairs",
        ),
        Question(
            name=f"{area}.answered",
            sentence="{model}, {prompts}: the unchanged model gives the answer ({answer_criterion}) in {value}[. "
            "Means include {unanswered:n pairs} without it, whose effects do not show how the model answers]"
            "[. {doubt}]",
            number="percent",
            samples="pairs",
            better="higher",
        ),
    )


def patch_tables(run: RunTables) -> list[str]:
    """The tables of the run with patches of heads and of layers."""
    return [table.name for table in (PATCHING, PATCHING_LAYERS) if table.name in run.tables]


def pair_metrics(run: RunTables, table: str = "") -> pd.DataFrame:
    """One row per pair of every model, set and metric: clean and corrupted metric, whether they differ enough, and
    whether means include the pair. Without a `table`, the pairs of all patches of heads and layers."""
    keys = ["model", "prompts", "metric", "pair"]
    columns = [*keys, "metric_clean", "metric_corrupted", "is_normalised", "is_counted"]
    rows = [
        plain_types(run.table(name)[columns].drop_duplicates(keys))
        for name in [table] * bool(table) or patch_tables(run)
    ]
    return pd.concat(rows).drop_duplicates(keys, ignore_index=True)


def pairs_usable_in_all_models(run: RunTables) -> pd.DataFrame:
    """The pairs that means are over, one row each: prompts, metric, pair.

    Such a pair counts in every model. Models in which no pair of the set counts are disregarded.
    """
    return shared_samples(run.derived(pair_metrics).query("is_counted"), ["prompts", "metric"], "pair")


def pair_results(run: RunTables, area: str, table: str = "") -> Iterator[Result]:
    """The metric of the clean and corrupted prompts of each model and set, and how many answers the model gives."""
    groups: Any = run.derived(pair_metrics, table).groupby(["model", "prompts", "metric"], sort=False)
    for (model, prompts, metric), pairs in groups:
        place = {"model": model, "where": {"prompts": prompts, "metric": metric}}
        clean = pairs.set_index("pair")["metric_clean"].astype("float64")
        corrupted = pairs["metric_corrupted"].to_numpy(np.float64)
        exchanged = count_exchanged(metric, clean.to_numpy(), corrupted)
        if 2 * exchanged > len(pairs):
            yield Result(question=f"{area}.exchanged", value=exchanged, n=len(pairs), **place)
        details = {
            "corrupted": corrupted.mean(),
            "label": metric_label(metric),
            "label_unit": metric_unit(metric),
            "limit": describe_min_difference(metric),
            "excluded": int((~pairs["is_normalised"]).sum()) or None,
            "shared": _shared_count(run, table, prompts, metric, pairs),
        }
        yield mean_result(f"{area}.metric", clean, details=details, **place)
        if metric in ANSWER_CRITERIA:
            is_answered = pd.Series(gives_answer(metric, clean.to_numpy()), clean.index)
            is_counted = pairs.set_index("pair")["is_counted"]
            yield from _failure_results(area, pairs.set_index("pair"), is_answered, metric, place)
            unanswered = int((is_counted & ~is_answered).sum())
            criterion, doubt = ANSWER_CRITERIA[metric], DOUBT if metric in METRICS_WITH_WRONG else ""
            yield answered_result(f"{area}.answered", criterion, is_answered, unanswered, doubt, **place)


def _failure_results(
    area: str, pairs: pd.DataFrame, is_answered: pd.Series, metric: str, place: dict[str, Any]
) -> Iterator[Result]:
    """The pairs that means leave out because they do not show how the model answers, with their metrics by name."""
    is_left_out = pairs["is_normalised"] & ~pairs["is_counted"]
    for name, column, is_failing in (
        ("wrong", "metric_clean", is_left_out & ~is_answered),
        ("same", "metric_corrupted", is_left_out & is_answered),
    ):
        values = pairs.loc[is_failing, column].astype("float64")
        if len(values):
            details = {
                "names": {str(pair): float(value) for pair, value in values[:MAX_NAMES].items()},
                "more": len(values) - MAX_NAMES if len(values) > MAX_NAMES else None,
                "label": f"{metric_label(metric)} of the {column.removeprefix('metric_')} prompt",
            }
            yield Result(question=f"{area}.{name}", value=len(values), n=len(pairs), details=details, **place)


def _shared_count(run: RunTables, table: str, prompts: str, metric: str, pairs: pd.DataFrame) -> int | None:
    """Number of the pairs that count in every model, if that is fewer than count in this one."""
    if table:  # means of paths are over the pairs of one model
        return None
    usable = run.derived(pairs_usable_in_all_models)
    shared = int(((usable["prompts"] == prompts) & (usable["metric"] == metric)).sum())
    return shared if shared < int(pairs["is_counted"].sum()) else None
