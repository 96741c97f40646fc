"""Results of imported scores: the top heads, and the measures that rank the heads most like them."""

from collections.abc import Iterator

from headscope.plugin_api import Result, Run
from headscope.results.questions import Question
from headscope.runs.column_metadata import statistic
from headscope.runs.summary import default_models
from probes.imported.declaration import NAME, correlations

QUESTIONS = (
    Question(
        name="imported.top_heads",
        sentence="In {model}, the largest imported scores of {n:n heads} are {top:.3g}",
        headline="Largest imported scores of {n:n heads}: {top:.3g}",
        level="headline",
    ),
    Question(
        name="imported.agreement",
        sentence="In {model}, the measures that rank the {n:n heads} with a score most like the imported scores are "
        "{measures:.2f}; in parentheses, Spearman's rank correlation",
        headline="Imported scores rank {n:n heads} most like {closest:.2f} (rank correlation)",
        number=".2f",
        level="headline",
    ),
)


LISTED_MEASURES, LISTED_HEADS = 3, 5


def results(run: Run) -> Iterator[Result]:
    """The top heads, and the strongest rank correlation with a measure of the run, for each model."""
    for label in default_models(run):
        count = int(run.heads.loc[run.heads["model"] == label, NAME].count()) if NAME in run.heads else 0
        if count:
            top = run.top_heads(NAME, min(count, LISTED_HEADS), label)
            scores = dict(zip(top.identifiers, top.weights or (), strict=True))
            yield Result(question="imported.top_heads", n=count, model=label, details={"top": scores})
        rows = correlations(run.heads, label).head(LISTED_MEASURES)
        if rows.empty:
            continue
        labels = [statistic(name).label for name in rows["name"]]
        measures = dict(zip(labels, rows["correlation"].tolist(), strict=True))
        closest = {labels[0]: measures[labels[0]]}
        yield Result(
            question="imported.agreement",
            value=measures[labels[0]],
            n=int(rows["heads"].iloc[0]),
            model=label,
            details={"measures": measures, "closest": closest},
        )
