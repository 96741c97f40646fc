"""Charts and glossary of direct logit attribution."""

from collections.abc import Iterator, Sequence

import pandas as pd
import plotly.graph_objects as go

from headscope.base.bins import bin_center
from headscope.plots import axes, shapes, style
from headscope.plots.shapes import mean_curve
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term
from headscope.rendering.statistic_charts import model_panels
from headscope.runs.aggregation import plain_types, rows_at_longest_length
from headscope.runs.run import Run
from headscope.runs.summary import default_models_with
from probes.attribution import PROBE
from probes.attribution.answers import view as answers
from probes.attribution.declaration import mean_over_positions

PART_LABELS = {"heads": "all heads of the layer", "other": "the rest of the layer (MLP)"}


def plot_by_layer(parts: pd.DataFrame, model: str) -> go.Figure:
    """Bars of what the heads and the rest of each layer add, at the longest context."""
    title = f"Terms of the next token's logit: {style.escape_label(model)}"
    rows = parts[parts["model"] == model]
    if rows.empty:
        return style.empty_figure(title, "no data for this model")
    means = mean_over_positions(rows_at_longest_length(plain_types(rows)), "part", "layer")
    series = {
        part_style: means[means.index.get_level_values("part") == part].droplevel("part").to_frame("y")
        for part, part_style in zip(PART_LABELS, style.category_styles([*PART_LABELS.values()]).values(), strict=True)
    }
    hover = "layer %{x}: %{y:+.3f} logits"
    return shapes.bars(title, series, hover, "layer", "contribution (logits)", barmode="relative")


def plot_by_position(rows: pd.DataFrame, models: list[str], layer: int, head: int) -> go.Figure:
    """The head's contribution by position, a line with its interval over documents per model.

    `rows` are the rows of this head in the table `attribution`.
    """
    title, rows = f"Direct logit attribution of layer {layer}, head {head}", rows[rows["model"].isin(models)]
    if rows.empty:
        return style.empty_figure(title, "not measured in these models")
    rows = rows[rows["context_length"] == rows["context_length"].max()]
    rows = rows.assign(model=rows["model"].astype(pd.CategoricalDtype(models)))
    length = int(rows["context_length"].max())
    curves = {}
    for label, model_style in style.model_styles(rows).items():
        of_model = rows[rows["model"] == label]
        table = of_model.pivot_table(index="position", columns="doc", values="contribution", observed=True)
        is_by_token = (of_model["tokens"] == 1).all()
        curves[model_style] = mean_curve(
            table.set_axis(table.index if is_by_token else bin_center(table.index, length))
        )
    x = {"title_text": "position of the predicted token", **axes.log_axis([1, length])}
    return shapes.bands(title, curves, "around position %{x:,.0f}: %{y:+.3f} logits", x, "contribution (logits)")


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
        yield from run.derived(_position_chart, tuple(default_models_with(run, model)), layer, head)
    yield from answers.head_charts(run, model, layer, head)


def _position_chart(run: Run, models: Sequence[str], layer: int, head: int) -> Sequence[Chart]:
    """The chart of a head by position, if the head has rows; it does not depend on the selected model."""
    rows = run.rows("attribution", model=models, layer=layer, head=head)
    if rows.empty:
        return []
    chart = Chart(
        plot_by_position(rows, [*models], layer, head),
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
        (label, Chart(plot_by_layer(parts, label), caption, half_width=True))
        for label in context.models
        if (parts["model"] == label).any()
    )
