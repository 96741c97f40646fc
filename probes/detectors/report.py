"""Report of the detectors probe: charts and glossary."""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

import pandas as pd

from headscope.plots.head_matrices import plot_matrix
from headscope.rendering.blocks import Card, Chart, ChartGroup, RenderContext, Term
from headscope.rendering.statistic_charts import comparison_chart, top_heads_card
from headscope.rendering.text import describe_extremes
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from headscope.runs.summary import default_models_with
from probes.detectors import PROBE, plots
from probes.detectors.analysis import KIND_COLUMNS, PROMPT_KIND_COLUMNS, ROLE_THRESHOLD, role_name
from probes.detectors.results import induction_results

GLOSSARY = (
    Term(
        "Previous-token and induction head",
        "In a random token sequence that is repeated once, only positions and the earlier copy can guide a head. A "
        "previous-token head attends to the previous token, a duplicate-token head to the earlier copy of the token, "
        "and an induction head to the token after that copy, which is the next token. A score is the mean weight on "
        "that key, 0 to 1; chance is the score of uniform weights. A head has a role if more than half of its weight "
        "is on one kind of key.",
        "induction: mean αᵢ,ᵢ₋ₘ₊₁ over the second m tokens",
        ("detectors",),
    ),
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The scores of all heads of the first model, and their comparison with the other models."""
    yield ChartGroup(
        PROBE.title, "Scores of each head on a repeated random token sequence", _matrix_charts(context, KIND_COLUMNS)
    )
    yield ChartGroup(PROBE.title, "Scores of each head in your prompts", _matrix_charts(context, PROMPT_KIND_COLUMNS))
    yield ChartGroup(PROBE.title, "Comparison with the other models", _comparison_charts(context))


def overview_cards(context: RenderContext) -> Iterator[Card]:
    """The induction heads."""
    yield from top_heads_card(
        context,
        KIND_COLUMNS["induction"],
        "Which heads are induction heads?",
        induction_results(context.run, context.heads, context.models),
        role_name("induction"),
        ROLE_THRESHOLD,
    )


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """The scores of one head, under every model and by context length."""
    if "detectors" not in run.tables:
        return
    rows = run.rows("detectors", layer=layer, head=head)
    if rows.empty:
        return
    yield _scores_chart(run, tuple(default_models_with(run, model)), layer, head)
    if rows["context_length"].nunique() > 1:
        yield Chart(
            plots.plot_scores_by_length(_means_by_length(run, layer, head), model),
            "A constant line means that the head attends to this kind of key at any distance.",
            half_width=True,
        )


@lru_cache(8)
def _means_by_length(run: Run, layer: int, head: int) -> pd.DataFrame:
    """The head's mean scores by context length, of all models; cached, because it is the same for every model."""
    return plots.mean_over_sequences(run.rows("detectors", layer=layer, head=head), "context_length")


@lru_cache(8)
def _scores_chart(run: Run, models: Sequence[str], layer: int, head: int) -> Chart:
    """The scores of one head under these models, cached: it does not depend on the selected model."""
    return Chart(
        plots.plot_head_scores(run.rows("detectors", model=models, layer=layer, head=head), [*models], layer, head),
        "Mean weight on each kind of key, on a repeated random token sequence, in the longest context. Horizontal "
        "marks: chance, the score of uniform weights. Error bars: 95 % confidence interval over sequences.",
        half_width=True,
    )


def _matrix_charts(context: RenderContext, columns: Mapping[str, str]) -> Iterator[Chart]:
    for name in columns.values():
        for label in list(context.finite_values(name))[:1]:
            yield Chart(
                plot_matrix(context.heads, name, label, context.scale_heads),
                f"One cell per head; the first layer is at the bottom. {statistic(name).title}: "
                f"{statistic(name).meaning}.",
                describe_extremes(context.heads, name, label),
                half_width=True,
            )


def _comparison_charts(context: RenderContext) -> Iterator[Chart]:
    for name in (*KIND_COLUMNS.values(), *PROMPT_KIND_COLUMNS.values()):
        models = list(context.finite_values(name))
        if len(models) > 1:
            yield comparison_chart(context.heads, name, models[0])
