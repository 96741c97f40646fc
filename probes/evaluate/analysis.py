"""What evaluating found: of each task the metric that the paper reports, and means over tasks."""

import numpy as np
import pandas as pd

PREFERRED_METRICS = ("acc_norm", "acc", "match")
"""The paper reports length-normalised accuracy where the harness has it, else accuracy; RULER has one metric."""


def preferred_metric_rows(tasks: pd.DataFrame) -> pd.DataFrame:
    """The rows of one metric and filter a task: the preferred metric, else the first that is stored."""
    plain = tasks.astype({"task": "str", "metric": "str", "filter": "str", "score": "float64", "stderr": "float64"})
    chosen = {
        task: min(
            dict.fromkeys(zip(rows["metric"], rows["filter"], strict=True)),
            key=lambda pair: PREFERRED_METRICS.index(pair[0]) if pair[0] in PREFERRED_METRICS else len(PREFERRED_METRICS),
        )
        for task, rows in plain.groupby("task", sort=False)
    }
    pairs = zip(plain["task"], plain["metric"], plain["filter"], strict=True)
    return plain[[chosen[task] == (metric, name) for task, metric, name in pairs]].reset_index(drop=True)


def means_over_tasks(rows: pd.DataFrame) -> pd.DataFrame:
    """By model, kind of metric and length: mean score over the `tasks`, two or more, that each of the models has.

    `rows` are `reported`. The standard error is that of independent tasks.
    """
    shares = rows[rows["metric"].isin(PREFERRED_METRICS)].assign(
        kind=lambda each: np.where(each["metric"] == "match", "match", "accuracy")
    )
    alike = shares.groupby(["kind", "context_length"], observed=True, sort=False)["model"].transform("nunique")
    have = shares.groupby(["kind", "context_length", "task"], observed=True, sort=False)["model"].transform("nunique")
    groups = shares[have == alike].groupby(["model", "kind", "context_length"], observed=True, sort=False)
    found = groups.agg(
        score=("score", "mean"),
        stderr=("stderr", lambda each: np.sqrt((each**2).sum()) / len(each)),
        tasks=("task", len),
    ).reset_index()
    return found[found["tasks"] > 1]
