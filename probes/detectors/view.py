"""Glossary of the detectors probe, and charts of one head."""

from collections.abc import Iterator, Sequence
from functools import lru_cache

import pandas as pd
import plotly.graph_objects as go

from headscope.plots import shapes, style
from headscope.rendering.blocks import Chart, Term
from headscope.runs.aggregation import mean_with_interval, plain_types
from headscope.runs.run import Run
from headscope.runs.summary import default_models_with
from probes.detectors.declaration import TARGETS

WEIGHT_AXIS = {"title_text": "mean weight", "range": [0, 1]}


def mean_over_sequences(rows: pd.DataFrame, *group_columns: str) -> pd.DataFrame:
    """Mean `score` over sequences with its interval (`low`, `high`) and mean `chance`, by model, kind and group
    columns."""
    keys = ["model", *group_columns, "kind"]
    by_sequence = plain_types(rows).rename(columns={"sequence": "doc"}).set_index([*keys, "doc"])
    means = mean_with_interval(by_sequence["score"], "score", 0, 1)
    means = means.join(by_sequence.groupby(level=keys)["chance"].mean()).reset_index()
    return means.rename(columns={"score_low": "low", "score_high": "high"}).astype({"model": rows["model"].dtype})


def plot_head_scores(rows: pd.DataFrame, models: list[str], layer: int, head: int) -> go.Figure:
    """One bar per model and kind at the longest length, with chance as a mark; `rows` are the head's of `detectors`."""
    title, rows = f"Detector scores of layer {layer}, head {head}", rows[rows["model"].isin(models)]
    if rows.empty:
        return style.empty_figure(title, "not measured in these models")
    longest = rows[rows["context_length"] == rows["context_length"].max()]
    means = mean_over_sequences(longest.assign(model=longest["model"].astype(pd.CategoricalDtype(models))))
    figure = style.new_figure(title)
    columns, hover = {"score": "y", "chance": "customdata"}, "%{x}: %{y:.3f}, chance %{customdata:.4f}"
    for label, model_style in style.model_styles(means).items():
        by_kind = means[means["model"] == label].set_index("kind").reindex(list(TARGETS))
        table = by_kind.rename(columns=columns)[["y", "low", "high", "customdata"]]
        figure.add_traces([shapes.bar_trace(model_style, table, hover)])
    chance = means.groupby("kind", observed=True)["chance"].max().reindex(list(TARGETS))
    figure.add_scatter(
        x=list(TARGETS),
        y=chance,
        mode="markers",
        marker={"symbol": "line-ew", "size": 26, "line": {"color": style.TEXT_COLOUR, "width": 2}},
        hovertemplate="chance %{y:.4f}<extra></extra>",
        name="chance",
    )
    figure.update_traces(error_y_color=style.TEXT_COLOUR, selector={"type": "bar"})
    return shapes.finish(figure.update_layout(barmode="group"), {}, WEIGHT_AXIS)


def plot_scores_by_length(means: pd.DataFrame, model: str) -> go.Figure:
    """One line per kind over the context lengths of one model, with the confidence interval over sequences.

    `means` are those of one head, of all models (`mean_over_sequences`).
    """
    title = f"Detector scores by context length: {style.escape_label(model)}"
    means = means[means["model"] == model]
    if means.empty:
        return style.empty_figure(title, "no data to plot")
    by_length = means.rename(columns={"score": "mean"}).set_index("context_length")
    curves = {
        kind_style: by_length.loc[by_length["kind"] == kind, ["mean", "low", "high"]]
        for kind, kind_style in style.line_styles([*TARGETS]).items()
        if (by_length["kind"] == kind).any()
    }
    axis = shapes.length_axis(means["context_length"])
    return shapes.bands(title, curves, "%{x:,} tokens: %{y:.3f}", axis, WEIGHT_AXIS)


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
            plot_scores_by_length(_means_by_length(run, layer, head), model),
            "A constant line means that the head attends to this kind of key at any distance.",
            half_width=True,
        )


@lru_cache(8)
def _means_by_length(run: Run, layer: int, head: int) -> pd.DataFrame:
    """The head's mean scores by context length, of all models; cached, because it is the same for every model."""
    return mean_over_sequences(run.rows("detectors", layer=layer, head=head), "context_length")


@lru_cache(8)
def _scores_chart(run: Run, models: Sequence[str], layer: int, head: int) -> Chart:
    """The scores of one head under these models, cached: it does not depend on the selected model."""
    return Chart(
        plot_head_scores(run.rows("detectors", model=models, layer=layer, head=head), [*models], layer, head),
        "Mean weight on each kind of key, on a repeated random token sequence, in the longest context. Horizontal "
        "marks: chance, the score of uniform weights. Error bars: 95 % confidence interval over sequences.",
        half_width=True,
    )
