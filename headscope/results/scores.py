"""Scores of heads, declared once.

From a `Score` follow its column of the per-head table with the interval, its statistic, and if they are declared the
role of its heads, the questions of its top head and of its extremes with their results, and the rank of a head.
`headscope.rendering.score_charts` draws it.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Protocol

import pandas as pd

from headscope.results.head_results import kept_role_results, role_questions, role_results, top_head_result
from headscope.results.questions import Level, Question
from headscope.results.ranks import head_ranks
from headscope.results.result import Result, Scalar
from headscope.results.samples import Limits, extreme_head_result
from headscope.runs.aggregation import HEAD_KEYS, mean_with_interval, plain_types, rows_at_longest_length
from headscope.runs.column_metadata import Role, Statistic, exceeds
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from headscope.runs.summary import default_models


@dataclass(frozen=True, kw_only=True)
class ScoreRole:
    """The role of heads whose score is above a threshold."""

    name: str
    """Such as "induction", for induction heads."""
    meaning: str
    threshold: float
    level: Level = "detail"
    has_card: bool = False
    """Whether the overview has a card of its heads, and results say how many keep the role in other models."""

    @property
    def area(self) -> str:
        """The first part of the names of its questions, and of its column of the per-model table."""
        return self.name.replace("-", "_")


@dataclass(frozen=True, kw_only=True)
class Score:
    """A number of every head: its column of the per-head table, the rows that it is the mean of, and its meaning."""

    column: str
    statistic: Statistic
    rows: Callable[[RunTables], pd.DataFrame | None]
    """Rows with `value` by model, layer, head, kv_group and `doc`, the independent sample; None if the run lacks them.
    Without `doc`, a head has one row, no interval, and neither `top` nor `extremes`. `context_length` becomes a
    condition of results, and the mean of `chance` a detail of the top head."""
    limits: Limits = (-math.inf, math.inf)
    role: ScoreRole | None = None
    top: Question | None = None
    """The question of the head with the largest mean; without one there is no such result. Its sentence may state the
    `median` of the heads' means."""
    extremes: Question | None = None
    """The question of the heads with the largest and the smallest mean: `which` is "highest" or "lowest"."""
    is_ranked: bool = False
    """Whether results about a head include its rank by this score."""
    results_by: str = ""
    """A column of the rows, such as that of prompt sets: each of its values has results of its own, with it as a
    condition."""
    where: Mapping[str, Scalar] = field(default_factory=dict)
    """Conditions of its results besides the context length."""
    details: Mapping[str, Any] = field(default_factory=dict)
    """Further values that the sentence about the top head states."""
    heading: str = ""
    """Heading of its charts; scores of one heading share it. Without one it has no charts of its own."""
    caption: str = ""
    """What its matrix shows, by default its label and meaning."""


class ScoreParts:
    """Contract of the part of a probe with its scores."""

    def scores(self) -> Sequence[Score]:
        """Its scores of heads.

        Statistics, columns with intervals, roles, questions, results, charts, cards and `--json` data follow from them.
        """
        return ()


class HasScores(Protocol):
    """A probe, as far as the functions below need it."""

    name: ClassVar[str]
    title: ClassVar[str]

    def scores(self) -> Sequence[Score]:
        """Its scores."""


@dataclass(frozen=True)
class TableRows:
    """The rows of a score at the longest context length of each model: a column of a table, of one `kind` if given."""

    table: str
    value: str
    sample: str = "doc"
    kind: str = ""

    def __call__(self, run: RunTables) -> pd.DataFrame | None:
        if self.table not in run.tables:
            return None
        rows = run.derived(_longest_rows, self.table)
        rows = rows[(rows["kind"] == self.kind).to_numpy()] if self.kind else rows
        return rows.rename(columns={self.value: "value", self.sample: "doc"})


def _longest_rows(run: RunTables, table: str) -> pd.DataFrame:
    rows = plain_types(run.table(table))
    return rows_at_longest_length(rows) if "context_length" in rows else rows


def top_of_role(role: str, samples: str) -> Question:
    """The question of the head with the largest score of a role, over samples such as "sequences"."""
    sentence = f"The top {role} head of {{model}} is {{unit}}, with a score of {{value}}[; chance is {{chance:.3g}}]"
    return Question(name=f"{role.replace('-', '_')}.top_head", sentence=sentence, samples=samples)


def score_statistics(probe: HasScores) -> dict[str, Statistic]:
    """The statistic of every score, and of the number of heads with its role."""
    statistics = {score.column: score.statistic for score in probe.scores()}
    for role in _roles(probe):
        meaning = f"number of {role.name} heads: {role.meaning}"
        statistics[f"{role.area}_heads"] = Statistic(f"{role.name} heads", "", meaning, number_format=".0f")
    return statistics


def score_roles(probe: HasScores) -> dict[str, Role]:
    """The roles of heads with high scores, by name."""
    return {
        score.role.name: Role(
            score.role.meaning,
            partial(_has_role, score.column, score.role.threshold),
            score.column,
            threshold=score.role.threshold,
        )
        for score in probe.scores()
        if score.role
    }


def _has_role(column: str, threshold: float, heads: pd.DataFrame) -> pd.Series:
    mask: pd.Series = exceeds(heads[column], threshold)
    return mask


def score_head_columns(probe: HasScores, run: RunTables) -> pd.DataFrame | None:
    """The mean of every measured score over samples with its interval, by (model, layer, head, kv_group)."""
    return _head_columns(probe.scores(), run)


def _head_columns(scores: Iterable[Score], run: RunTables) -> pd.DataFrame | None:
    blocks = [_head_column(score, rows) for score in scores if (rows := _measured_rows(score, run)) is not None]
    return pd.concat(blocks, axis=1) if blocks else None


def _head_column(score: Score, rows: pd.DataFrame) -> pd.DataFrame:
    if "doc" in rows:
        return mean_with_interval(rows.set_index([*HEAD_KEYS, "doc"])["value"], score.column, *score.limits)
    return rows.set_index(HEAD_KEYS)[["value"]].set_axis([score.column], axis=1)


def score_model_columns(probe: HasScores, run: RunTables) -> pd.DataFrame | None:
    """The number of heads with each role, by model."""
    with_role = [score for score in probe.scores() if score.role]
    heads = _head_columns(with_role, run)
    if heads is None:
        return None
    counts = {
        f"{score.role.area}_heads": exceeds(heads[score.column], score.role.threshold)
        for score in with_role
        if score.role and score.column in heads
    }
    return pd.DataFrame(counts).groupby("model").sum().astype("float64")


def score_questions(probe: HasScores) -> list[Question]:
    """The questions of roles, top heads and extremes; scores may share one."""
    questions = [question for score in probe.scores() for question in _questions(score)]
    return [*{question.name: question for question in questions}.values()]


def _questions(score: Score) -> Iterator[Question]:
    if role := score.role:
        yield from role_questions(role.area, role.name, role.meaning, role.level)
    yield from filter(None, (score.top, score.extremes))


def score_results(probe: HasScores, run: Run) -> Iterator[Result]:
    """How many heads of each model have a role, which of the first model keep it, and the top and extreme heads."""
    models = default_models(run)
    for score in probe.scores():
        yield from role_answers(score, run, run.heads, models)
        for rows in _rows_of_results(score, run, models) if score.top or score.extremes else ():
            yield from _top_head(score, rows)
            yield from _extreme_heads(score, rows)


def role_answers(score: Score, run: Run, heads: pd.DataFrame, models: Iterable[str]) -> Iterator[Result]:
    """How many of these heads of each model have the role of a score; for one with a card also how many keep it."""
    rows = _measured_rows(score, run)
    if score.role is None or rows is None:
        return
    by_model = {str(label): _conditions(score, of_model) for label, of_model in rows.groupby("model")}
    conditions = {label: by_model[label] for label in models if label in by_model}
    for answer in (role_results, kept_role_results) if score.role.has_card else (role_results,):
        yield from answer(score.role.area, heads, conditions, score.column, score.role.threshold)


def _rows_of_results(score: Score, run: Run, models: Iterable[str]) -> Iterator[pd.DataFrame]:
    """The rows of one model and one value of `results_by`, for each value and model."""
    rows = _measured_rows(score, run)
    if rows is None:
        return
    groups: Any = rows.groupby(score.results_by, sort=False) if score.results_by else [("", rows)]
    for _, part in groups:
        yield from (of_model for label in models if len(of_model := part[part["model"] == label]))


def _top_head(score: Score, rows: pd.DataFrame) -> Iterator[Result]:
    """The head with the largest score, from the rows of one model."""
    values = rows.pivot(index=["layer", "head"], columns="doc", values="value").dropna()
    if score.top is None or values.empty:
        return
    details = {"median": float(values.mean(axis=1).median()), **score.details}
    top = top_head_result(
        score.top.name, values, *score.limits, model=rows["model"].iloc[0], where=_conditions(score, rows)
    )
    if "chance" in rows:
        of_head = rows[(rows["layer"] == top.layer) & (rows["head"] == top.head)]
        details["chance"] = float(of_head["chance"].mean())
    yield replace(top, details={**top.details, **details})


def _extreme_heads(score: Score, rows: pd.DataFrame) -> Iterator[Result]:
    """The heads with the largest and the smallest score, from the rows of one model."""
    if score.extremes is None:
        return
    heads, samples = _head_column(score, rows).reset_index(), rows["doc"].nunique()
    for which in ("highest", "lowest"):
        yield extreme_head_result(
            score.extremes.name,
            heads,
            score.column,
            samples,
            score.limits,
            which == "lowest",
            where={**_conditions(score, rows), "which": which},
            details=dict(score.details),
        )


def score_head_results(probe: HasScores, run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """The rank of a head in each model, by every score with `is_ranked`."""
    for score in probe.scores():
        if score.is_ranked:
            yield from head_ranks(run, score.column, layer, head)


def _conditions(score: Score, rows: pd.DataFrame) -> dict[str, Scalar]:
    """The conditions of the results of one model."""
    length = {"context_length": int(rows["context_length"].iloc[0])} if "context_length" in rows else {}
    part = {score.results_by: str(rows[score.results_by].iloc[0])} if score.results_by else {}
    return {**score.where, **length, **part}


def _measured_rows(score: Score, run: RunTables) -> pd.DataFrame | None:
    rows = run.derived(score.rows)
    return None if rows is None or rows.empty else rows


def _roles(probe: HasScores) -> list[ScoreRole]:
    return [score.role for score in probe.scores() if score.role]
