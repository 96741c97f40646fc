"""Ranks of a head by any statistic of the per-head table, as results."""

from collections.abc import Collection, Iterator
from typing import Any

import pandas as pd

from headscope.base.heads import ESTIMATE_MARK, estimate_mask, method_column
from headscope.results.result import Result
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run


def head_ranks(
    run: Run, statistic_name: str, layer: int, head: int, models: Collection[str] | None = None
) -> Iterator[Result]:
    """The rank of a head by a statistic, highest first, with one part per model; none without values."""
    label = statistic(statistic_name).label
    rows = run.derived(_ranks_of_head, statistic_name, layer, head)
    parts = [
        Result(
            question="heads.rank",
            value=float(row["rank"]),
            n=int(row["heads"]),
            model=str(row["model"]),
            layer=int(layer),
            head=int(head),
            is_exact=not row["is_estimate"],
            where={"statistic": label},
            details={"score": float(row["score"]), "estimate": ESTIMATE_MARK if row["is_estimate"] else ""},
        )
        for row in rows
        if models is None or row["model"] in models
    ]
    if parts:
        yield Result(question="heads.ranks", layer=layer, head=head, where={"statistic": label}, parts=parts)


def _ranks_of_head(run: Run, statistic_name: str, layer: int, head: int) -> list[dict[str, Any]]:
    ranks = run.derived(_ranks, statistic_name)
    rows: Any = ranks[(ranks["layer"] == layer) & (ranks["head"] == head)].to_dict("records")
    return [*rows]


def _ranks(run: Run, statistic_name: str) -> pd.DataFrame:
    """The rank of every head in each model that has the statistic, among `heads` heads; a single head has no rank."""
    if statistic_name not in run.heads:
        return pd.DataFrame(columns=["model", "layer", "head", "score", "is_estimate", "rank", "heads"])
    columns = [name for name in (statistic_name, method_column(statistic_name)) if name in run.heads]
    heads = run.heads[["model", "layer", "head", *columns]].dropna(subset=[statistic_name])
    table = heads[["model", "layer", "head"]].assign(
        score=heads[statistic_name], is_estimate=estimate_mask(heads, statistic_name)
    )
    scores = table.groupby("model", observed=True)["score"]
    table["rank"] = scores.rank(ascending=False, method="min")
    table["heads"] = scores.transform("size")
    return table[table["heads"] > 1]
