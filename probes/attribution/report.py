"""Charts and glossary of direct logit attribution."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term
from headscope.rendering.statistic_charts import model_panels
from headscope.runs.run import Run
from headscope.runs.summary import default_models_with
from probes.attribution import PROBE, plots
from probes.attribution.answers import report as answers

GLOSSARY = (
    Term(
        "Direct logit attribution (DLA)",
        "The logit of a token is a sum: the embedding, every head and every MLP add a term. The direct logit "
        "attribution of a head is the term of its own output; effects through later layers are not counted. The mean "
        "over the vocabulary is subtracted, because a constant makes no token more likely; for an answer, the logit of "
        "a wrong answer. Norms are frozen at their observed scale.",
        "(z_h W_h) · g ∘ (U_y − mean U) / scale of the final norm",
        ("attribution",),
    ),
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """All terms of the next token's logit, and the same of answers."""
    yield ChartGroup(PROBE.title, "Terms of the logit by layer", _part_charts(context))
    yield from answers.charts(context, PROBE.title)


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """The contribution of one head by position, and to an answer by row."""
    if "attribution" in run.tables:
        yield from _position_chart(run, tuple(default_models_with(run, model)), layer, head)
    yield from answers.head_charts(run, model, layer, head)


@lru_cache(8)
def _position_chart(run: Run, models: Sequence[str], layer: int, head: int) -> Sequence[Chart]:
    """The chart of a head by position, if the head has rows; cached: it does not depend on the selected model."""
    rows = run.rows("attribution", model=models, layer=layer, head=head)
    if rows.empty:
        return []
    chart = Chart(
        plots.plot_by_position(rows, [*models], layer, head),
        "Direct contribution, without effects through later layers: above zero the head makes the next token more "
        "likely. The band is the 95 % confidence interval over documents, shown for three or more.",
        half_width=True,
    )
    return [chart]


def _part_charts(context: RenderContext) -> Iterator[Chart]:
    parts = context.table("attribution_parts")
    if parts is None:
        return
    caption = (
        "Mean over positions and documents. The bars, the embedding and the biases add up to the logit, minus its mean "
        "over the vocabulary."
    )
    yield from model_panels(
        (label, Chart(plots.plot_by_layer(parts, label), caption, half_width=True))
        for label in context.models
        if (parts["model"] == label).any()
    )
