"""What a report shows of writing, and the sentence that says how to read each chart."""

from collections.abc import Iterator

from headscope.plots import heads as head_figures
from headscope.report.blocks import Chart, ChartGroup, RenderContext
from headscope.report.statistic_charts import comparison_chart
from headscope.report.text import default_models_with, describe_extremes, head_mask
from headscope.runs.run import Run
from probes.attribution import PROBE, plots


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """What every head adds to the next token's logit, and what else it is made of."""
    yield ChartGroup(PROBE.title, "What each head adds to the next token's logit", _contribution_charts(context))
    yield ChartGroup(PROBE.title, "What the logit is made of", _part_charts(context))


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """What one head adds along the context."""
    if "writes" not in run.tables:
        return
    rows = run.table("writes")
    rows = rows[head_mask(rows, layer, head)]
    if len(rows):
        yield Chart(
            plots.plot_by_position(rows, default_models_with(run, model), layer, head),
            "Directly, past every later layer: above zero the head makes the token that comes next more likely. The "
            "band is a 95 % interval over documents, where there are three or more.",
            half_width=True,
        )


def _contribution_charts(context: RenderContext) -> Iterator[Chart]:
    scored = list(context.finite_values("next_token_write"))
    for label in scored[:1]:
        yield Chart(
            head_figures.plot_matrix(context.heads, "next_token_write", label),
            "A cell is a head, the first layer at the bottom. Logits that the head adds directly to the token that "
            "comes next, less the mean over the vocabulary.",
            describe_extremes(context.heads, "next_token_write", label),
            half_width=True,
        )
    if len(scored) > 1:
        yield comparison_chart(context.heads, "next_token_write", scored[0])


def _part_charts(context: RenderContext) -> Iterator[Chart]:
    parts = context.table("write_parts")
    if parts is None:
        return
    for label in context.models:
        if (parts["model"] == label).any():
            yield Chart(
                plots.plot_by_layer(parts, label),
                "Mean over positions and documents. With the embedding and what is the same for all tokens the bars "
                "add up to the logit, less its mean over the vocabulary.",
                half_width=True,
            )
