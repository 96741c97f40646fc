"""Results about the heads of a model: the top head of a score, and how many heads have a role."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from headscope.base.heads import format_head
from headscope.results.questions import Level, Question
from headscope.results.result import Result, Scalar
from headscope.runs.aggregation import confidence_interval
from headscope.runs.column_metadata import capitalise, exceeds

LISTED_HEADS = 4
"""Heads that follow the top head in a sentence."""
TOP_HEADS = 6
"""Heads with a role in the first model that are followed in the others."""


def top_head_result(
    question: str, values: pd.DataFrame, low: float = -np.inf, high: float = np.inf, **fields: Any
) -> Result:
    """The head with the largest mean score, with an interval that allows for the choice among all heads.

    `values` are the scores [heads, samples] of one model, without gaps, with `layer` and `head` in the index; the
    interval is clipped to their range, `low` to `high`. `fields` are those of the result. Its detail `next` has the
    scores of the heads that follow.
    """
    means = values.mean(axis=1)
    order = (-means.to_numpy()).argsort(kind="stable")
    top, *followers = order[: LISTED_HEADS + 1]
    names = [format_head(*head) for head in zip(*map(values.index.get_level_values, ("layer", "head")), strict=True)]
    interval = confidence_interval(values.iloc[[top]].to_numpy(np.float64), choices=len(values))
    lower, upper = interval.clip(low, high).ravel().tolist()
    details = {"next": {names[index]: float(means.iloc[index]) for index in followers}}
    return Result(
        question=question,
        value=float(means.iloc[top]),
        low=lower,
        high=upper,
        n=values.shape[1],
        layer=int(values.index.get_level_values("layer")[top]),
        head=int(values.index.get_level_values("head")[top]),
        selected_from=len(values),
        by_sample={str(name): float(value) for name, value in values.iloc[top].items()},
        **{**fields, "details": details | fields.get("details", {})},
    )


def role_questions(area: str, role: str, meaning: str, level: Level = "detail") -> tuple[Question, Question]:
    """The questions of `role_results`, how many heads have a role, and of `kept_role_results`, which keep it."""
    return (
        Question(
            name=f"{area}.heads",
            sentence=f"{capitalise(role)} heads of {{model}} ({meaning}): {{number:.0f}} of {{n:n heads}}",
            headline=f"{{number:.0f}} of {{n:n heads}} are {role} heads[, first {{top:.2f}}]",
            answer=f"{capitalise(role)} heads: {{values}}[; first of {{n:n heads}} in {{model}}: {{top:.2f}}]",
            number=".0f",
            level=level,
        ),
        Question(
            name=f"{area}.kept_heads",
            sentence=f"{{number:.0f}} of the {{n:n top {role} heads}} of {{baseline}} keep the role in {{model}}",
            answer="Of the {n:n top heads} of {baseline}, {values} keep the role",
            number=".0f",
        ),
    )


def role_results(
    area: str, heads: pd.DataFrame, conditions: Mapping[str, Mapping[str, Scalar]], column: str, threshold: float
) -> Iterator[Result]:
    """How many heads of each model have a statistic above a threshold.

    `heads` is the per-head table, `conditions` has the `where` of the results by model. Models without the statistic
    are left out.
    """
    for label, values in _values_by_model(heads, conditions, column).items():
        has_role = exceeds(values, threshold)
        top = {format_head(*values.index[int(values.argmax())]): float(values.max())} if has_role.any() else {}
        count, where = int(has_role.sum()), conditions[label]
        yield Result(
            question=f"{area}.heads", model=label, value=count, n=len(values), where=where, details={"top": top}
        )


def kept_role_results(
    area: str, heads: pd.DataFrame, conditions: Mapping[str, Mapping[str, Scalar]], column: str, threshold: float
) -> Iterator[Result]:
    """How many of the top heads of the first model with a role have it in each other model, as `role_results`."""
    by_model = _values_by_model(heads, conditions, column)
    if len(by_model) < 2:
        return
    (first, values), *others = by_model.items()
    top_heads = values[exceeds(values, threshold)].sort_values(ascending=False, kind="stable").index[:TOP_HEADS]
    for label, other_values in others if len(top_heads) else ():
        kept, where = int(exceeds(other_values.reindex(top_heads), threshold).sum()), conditions[label]
        yield Result(
            question=f"{area}.kept_heads", model=label, baseline=first, value=kept, n=len(top_heads), where=where
        )


def _values_by_model(heads: pd.DataFrame, models: Iterable[str], column: str) -> dict[str, pd.Series]:
    """The statistic by (layer, head) of each of these models that has it."""
    scores = heads.dropna(subset=[column]).set_index(["layer", "head"]) if column in heads else heads[:0]
    by_model = {label: scores.loc[scores["model"] == label, column] for label in models if len(scores)}
    return {label: values for label, values in by_model.items() if len(values)}
