"""Results of the evaluate probe: the score of every model on each task, and means over tasks of one kind."""

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Literal

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from headscope.rendering.blocks import Overview
from headscope.results.questions import Question
from headscope.results.result import Result
from headscope.runs.aggregation import MIN_DOCUMENTS, NORMAL_QUANTILE, wilson_interval
from headscope.runs.column_metadata import Statistic, statistic, statistics
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from headscope.runs.summary import longest_common_ess_column

PREFERRED_METRICS = ("acc_norm", "acc", "match")
"""The paper reports length-normalised accuracy if the harness has it, else accuracy; RULER has one metric."""
TOP_COUNT = 10
"""Number of heads in a mean over a model's top heads."""
MAX_LENGTH_RATIO = 1.25
"""Factor within which an effective length counts as unchanged."""

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        f"task_{kind}": Statistic(
            f"mean {kind} on tasks", "", f"mean {kind} over the tasks that all models have", by_length=True
        )
        for kind in ("accuracy", "match")
    }
)


def model_statistics(run: RunTables) -> pd.DataFrame | None:
    """Columns by model and length L: `task_accuracy_<L>` and `task_match_<L>` with `_low` and `_high`."""
    if "tasks" not in run.tables:
        return None
    values: dict[str, dict[str, float]] = {}
    for row in means_over_tasks(preferred_metric_rows(run.table("tasks"))).to_dict("records"):
        column = f"task_{row['kind']}_{row['context_length']}"
        columns = {column: row["score"], f"{column}_low": row["low"], f"{column}_high": row["high"]}
        values.setdefault(str(row["model"]), {}).update(columns)
    return pd.DataFrame.from_dict(values, orient="index") if values else None


def with_intervals(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with the 95 % confidence interval `low` to `high` of each score over documents.

    Wilson's for shares of documents, whose standard error follows from the share; else Student's t.
    """
    score, documents = rows["score"], rows["documents"].astype("float64")
    shares = score.where(score.between(0, 1))
    is_share = np.isclose(rows["stderr"], np.sqrt(shares * (1 - shares) / (documents - 1)), rtol=1e-4, atol=1e-7)
    half_width = stdtrit(documents - 1, 0.975) * rows["stderr"]
    low, high = wilson_interval(shares, documents)
    has_interval = documents >= MIN_DOCUMENTS
    return rows.assign(
        low=low.where(is_share, score - half_width).where(has_interval),
        high=high.where(is_share, score + half_width).where(has_interval),
    )


def preferred_metric_rows(tasks: pd.DataFrame) -> pd.DataFrame:
    """The rows of one metric and filter per task: the preferred metric, else the first one stored."""
    rows = tasks.astype({"task": "str", "metric": "str", "filter": "str", "score": "float64", "stderr": "float64"})
    preferred = {
        task: min(
            dict.fromkeys(zip(task_rows["metric"], task_rows["filter"], strict=True)),
            key=lambda pair: (
                PREFERRED_METRICS.index(pair[0]) if pair[0] in PREFERRED_METRICS else len(PREFERRED_METRICS)
            ),
        )
        for task, task_rows in rows.groupby("task", sort=False)
    }
    keys = zip(rows["task"], rows["metric"], rows["filter"], strict=True)
    return rows[[preferred[task] == (metric, name) for task, metric, name in keys]].reset_index(drop=True)


def means_over_tasks(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean score by model, kind of metric and length, over the tasks that all the models have; only of two or more.

    `rows` come from `preferred_metric_rows`. The standard error, and the normal interval `low` to `high` from it,
    assume independent tasks.
    """
    fractions = rows[rows["metric"].isin(PREFERRED_METRICS)]
    fractions = fractions.assign(kind=np.where(fractions["metric"] == "match", "match", "accuracy"))
    by_length = fractions.groupby(["kind", "context_length"], observed=True, sort=False)
    by_task = fractions.groupby(["kind", "context_length", "task"], observed=True, sort=False)
    is_common = by_task["model"].transform("nunique") == by_length["model"].transform("nunique")
    groups = fractions[is_common].groupby(["model", "kind", "context_length"], observed=True, sort=False)
    means = groups.agg(
        score=("score", "mean"),
        stderr=("stderr", lambda errors: np.sqrt((errors**2).sum()) / len(errors)),
        tasks=("task", len),
    ).reset_index()
    half_width = NORMAL_QUANTILE * means["stderr"]
    return means.assign(low=means["score"] - half_width, high=means["score"] + half_width)[means["tasks"] > 1]


def summarise_heads(heads: pd.DataFrame) -> pd.DataFrame:
    """One row per model with single numbers about its heads; the column names are titles.

    The numbers are the means over the top heads of each statistic with a `best_head_name`, the median growth exponent,
    and the fraction of heads with the same effective length as under the first model (of models with the same heads).
    Numbers that only one model has are omitted.
    """
    by_model = heads.astype({"model": "str"}).groupby("model", sort=False)
    summaries = {
        f"{metadata.title}, mean of the top {TOP_COUNT} heads": by_model[name].apply(
            lambda values: values.nlargest(TOP_COUNT).mean()
        )
        for name, metadata in statistics().items()
        if metadata.best_head_name and name in heads
    }
    if "growth" in heads:
        summaries[f"{statistic('growth').title}, median over heads"] = by_model["growth"].median()
    if len(heads) and (name := longest_common_ess_column(heads)) is not None:
        wide = heads.astype({"model": "str"}).pivot(index=["layer", "head"], columns="model", values=name)
        first = str(heads["model"].iloc[0])
        has_same_heads = wide.notna().eq(wide[first].notna(), axis=0).all()
        ratio = wide[wide.columns[has_same_heads]].div(wide[first], axis=0)
        unchanged = ratio.apply(lambda values: values.dropna().between(1 / MAX_LENGTH_RATIO, MAX_LENGTH_RATIO).mean())
        summaries[f"Fraction of heads with the same effective length as under {first}"] = unchanged.drop(first)
    table = pd.DataFrame(summaries)
    return table.loc[:, table.notna().sum() > 1]


def _score(name: str, better: Literal["higher", "lower"]) -> Question:
    return Question(
        name=name,
        sentence="{task} at {context_length:,} tokens ({metric}): {model} scores {value}, with a standard error of "
        "{stderr:.3f}",
        headline="{task} at {context_length:,} tokens ({metric}): {value}",
        number=".3f",
        samples="documents",
        level="headline",
        better=better,
    )


QUESTIONS = (
    Question(
        name="tasks.mean_score",
        sentence="Mean {kind} of {tasks:n tasks} at {context_length:,} tokens: {model} scores {value}",
        headline="mean {kind} of {tasks:n tasks} at {context_length:,} tokens: {value}",
        number=".3f",
        level="headline",
        better="higher",
    ),
    _score("tasks.score", "higher"),
    _score("tasks.error", "lower"),
)


def results(run: Run) -> Iterator[Result]:
    """The scores with their intervals over documents; the standard error of a mean assumes independent tasks."""
    if "tasks" not in run.tables:
        return
    rows = preferred_metric_rows(run.tasks)
    for row in means_over_tasks(rows).to_dict("records"):
        where = {name: row[name] for name in ("kind", "context_length")}
        yield Result(
            question="tasks.mean_score",
            model=str(row["model"]),
            value=row["score"],
            low=row["low"],
            high=row["high"],
            where=where,
            details={"tasks": row["tasks"]},
        )
    for row in with_intervals(rows).to_dict("records"):
        yield Result(
            question="tasks.score" if row["higher_is_better"] else "tasks.error",
            model=str(row["model"]),
            value=row["score"],
            low=row["low"],
            high=row["high"],
            n=int(row["documents"]),
            where={name: row[name] for name in ("task", "context_length", "metric")},
            details={"stderr": row["stderr"]},
        )


def overview(run: Run) -> Overview | None:
    """The scores by model, task and length, for JSON."""
    if "tasks" not in run.tables:
        return None
    return Overview("tasks", preferred_metric_rows(run.tasks))
