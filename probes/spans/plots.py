"""Plots of the spans probe: span by span, ranking of heads, two groups, steps of the generated text."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.effects.groups import HeldOut
from headscope.heads import format_head
from headscope.plots import shapes, style

RANKED_HEADS = 20
MAX_LEVEL_NAMES = 3
"""Key spans whose names fit beside each other in a chart of half the width."""


def plot_span_matrix(means: pd.DataFrame, title: str) -> go.Figure:
    """Mean mass as a query span x key span matrix; `means` has `query`, `key`, `mass` and `chance`."""
    if means.empty:
        return style.empty_figure(title, "no data to plot")
    queries, keys = (list(dict.fromkeys(means[name])) for name in ("query", "key"))
    mass, chance = (
        means.pivot(index="query", columns="key", values=name).reindex(index=queries, columns=keys)
        for name in ("mass", "chance")
    )
    figure = shapes.matrix(
        title,
        mass.rename(index=style.escape_label, columns=style.escape_label),
        "from %{y} to %{x}: mass %{z:.3f}, chance %{customdata[0]:.3f}",
        {"title_text": "key span", "type": "category"},
        {"title_text": "query span", "type": "category", "autorange": "reversed"},
        unit="mass",
        height=120 + 34 * max(len(queries), 6),
        top_margin=70,
        gaps=False,
        customdata=chance.to_numpy()[..., None],
        zmin=0,
        zmax=1,
        texttemplate="%{z:.2f}" if len(keys) <= 10 else None,
    )
    if len(keys) > MAX_LEVEL_NAMES:
        figure.update_xaxes(tickangle=-40)
        figure.update_layout(margin_b=110, height=figure.layout.height + 54)
    return figure


def plot_ranking(heads: pd.DataFrame, model: str, pair: tuple[str, str]) -> go.Figure:
    """The heads of one model with the largest mass, with intervals over texts."""
    query, key = map(style.escape_label, pair)
    title = f"Largest mass from {query} to {key}: {style.escape_label(model)}"
    rows = heads[heads["model"] == model].dropna(subset=["spans_mass"])
    rows = rows.sort_values("spans_mass", ascending=False, kind="stable")[:RANKED_HEADS]
    if rows.empty:
        return style.empty_figure(title, "no head sees both spans")
    low, high = (rows[f"spans_mass_{end}"].fillna(rows["spans_mass"]) for end in ("low", "high"))
    figure = style.new_figure(title, 120 + 18 * len(rows))
    figure.add_scatter(
        x=rows["spans_mass"],
        y=[format_head(int(layer), int(head)) for layer, head in zip(rows["layer"], rows["head"], strict=True)],
        error_x=style.error_bars(rows["spans_mass"], low, high),
        customdata=np.stack([rows["layer"], rows["head"], rows["kv_group"]], -1),
        mode="markers",
        marker_color=style.PALETTE[0],
        name=style.escape_label(model),
        showlegend=False,
        hovertemplate="%{y}: mass %{x:.3f}<extra></extra>",
    )
    x = {"title_text": "attention mass", "rangemode": "tozero"}
    return shapes.label_axes(figure, x, {"autorange": "reversed", "type": "category"})


def plot_groups(judged: HeldOut, is_second: np.ndarray, names: list[str], model: str) -> go.Figure:
    """Distributions of the held-out scores of the prompts of two groups."""
    title = f"Held-out scores, AUROC {judged.auroc:.2f}: {style.escape_label(model)}"
    figure = style.new_figure(title)
    for number, name in enumerate(names):
        figure.add_box(
            y=judged.scores[is_second == bool(number)],
            name=style.escape_label(name),
            boxpoints="all",
            jitter=0.4,
            pointpos=0,
            marker={"color": style.PALETTE[number], "size": 5},
            showlegend=False,
            hovertemplate="%{y:.2f} standard deviations<extra></extra>",
        )
    figure.update_yaxes(title_text="score (standard deviations)")
    return figure


def plot_steps(rows: pd.DataFrame, title: str) -> go.Figure:
    """Mean mass of the generated text on each key span, by step; `rows` are those of `span_steps`."""
    if rows.empty:
        return style.empty_figure(title, "no data to plot")
    means = rows.groupby(["key", "step"], observed=True)["mass"].mean()
    styles = style.category_styles([*means.index.unique("key")], style.PALETTE)
    curves = {line_style: means[key].to_frame("y") for key, line_style in styles.items()}
    steps = sorted({*means.index.get_level_values("step")})
    ticks = {"type": "log", "tickvals": steps, "ticktext": [*map(str, steps)]}
    x, y = {"title_text": "step of the generated text", **ticks}, {"title_text": "mass", "rangemode": "tozero"}
    return shapes.lines(title, curves, "step %{x}: %{y:.3f}", x, y)


def plot_steering(rows: pd.DataFrame) -> go.Figure:
    """Log-probability of the continuations with steering against without, by model; `rows` are of `span_steering`."""
    rows = rows[rows["metric"] == "logprob"]
    spans = ", ".join(style.escape_label(key) for key in dict.fromkeys(rows["key"].astype(str)))
    figure = style.new_figure(f"Continuation without and with steering to {spans}")
    ends = [
        float(min(rows["plain"].min(), rows["steered"].min())),
        float(max(rows["plain"].max(), rows["steered"].max())),
    ]
    figure.add_scatter(
        x=ends, y=ends, mode="lines", line={"color": style.GRID_COLOUR}, showlegend=False, hoverinfo="skip"
    )
    for number, label in enumerate(dict.fromkeys(rows["model"].astype(str))):
        of_model = rows[rows["model"] == label]
        figure.add_scatter(
            x=of_model["plain"],
            y=of_model["steered"],
            mode="markers",
            marker={"color": style.PALETTE[number % len(style.PALETTE)]},
            name=style.escape_label(label),
            text=[style.escape_label(doc) for doc in of_model["doc"].astype(str)],
            hovertemplate="%{text}: %{x:.2f} without, %{y:.2f} with<extra>%{fullData.name}</extra>",
        )
    return shapes.finish(figure, "without steering (nats/token)", "with steering (nats/token)")
