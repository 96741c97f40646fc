"""Ranks of a head by any statistic of the per-head table, as results."""

from collections.abc import Collection, Iterator

from headscope.estimates import ESTIMATE_MARK, estimate_mask, method_column
from headscope.heads import Head
from headscope.results.questions import Question
from headscope.results.result import Result
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run

TOPIC = "Heads"
QUESTIONS = (
    Question(name="heads.ranks", sentence="Rank by {statistic}: {parts}", topic=TOPIC),
    Question(
        name="heads.rank",
        sentence="{number:,.0f} of {n:,} in {model} ([{estimate}]{score:number})",
        number=",.0f",
        topic=TOPIC,
    ),
)


def head_ranks(
    run: Run, statistic_name: str, layer: int, head: int, models: Collection[str] | None = None
) -> Iterator[Result]:
    """The rank of a head by a statistic, highest first, with one part per model; none without values."""
    ranks = run.derived(_ranks, statistic_name).get((layer, head), {})
    parts = [result for model, result in ranks.items() if models is None or model in models]
    if parts:
        yield Result(
            question="heads.ranks",
            layer=layer,
            head=head,
            where={"statistic": statistic(statistic_name).label},
            parts=parts,
        )


def _ranks(run: Run, statistic_name: str) -> dict[Head, dict[str, Result]]:
    """The rank of every head in each model that has the statistic."""
    ranks: dict[Head, dict[str, Result]] = {}
    if statistic_name not in run.heads:
        return ranks
    label = statistic(statistic_name).label
    columns = [name for name in (statistic_name, method_column(statistic_name)) if name in run.heads]
    heads = run.heads[["model", "layer", "head", *columns]].dropna(subset=[statistic_name])
    for model, rows in heads.groupby("model", observed=True):
        if len(rows) < 2:  # the only head has rank 1
            continue
        order = rows[statistic_name].rank(ascending=False, method="min")
        for layer, head, score, rank, is_estimate in zip(
            rows["layer"], rows["head"], rows[statistic_name], order, estimate_mask(rows, statistic_name), strict=True
        ):
            ranks.setdefault((layer, head), {})[str(model)] = Result(
                question="heads.rank",
                value=float(rank),
                n=len(rows),
                model=str(model),
                layer=int(layer),
                head=int(head),
                is_exact=not is_estimate,
                where={"statistic": label},
                details={"score": float(score), "estimate": ESTIMATE_MARK if is_estimate else ""},
            )
    return ranks
