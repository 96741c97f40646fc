"""Glossary of the detectors probe, and charts of one head."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import pandas as pd

from headscope.rendering.blocks import Chart, Term
from headscope.runs.run import Run
from headscope.runs.summary import default_models_with
from probes.detectors import plots

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
