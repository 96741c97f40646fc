"""Plots of the sparsity probe: recall by kept keys, shared sets by layer, answer rows against text rows."""

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from headscope.heads import format_head
from headscope.plots import axes, style


def plot_recall_curves(curves: pd.DataFrame, title: str) -> go.Figure:
    """Recall by mean number of kept keys, a line per family of rules; `curves` has rule, family, recall and kept."""
    return _plot_curves(curves, "recall", title, "recall", "recall %{y:.3f}")


def plot_loss_changes(curves: pd.DataFrame, title: str) -> go.Figure:
    """Change of the loss by mean number of kept keys, a line per family; `curves` has rule, family, change and kept."""
    label = "change of the loss (nats/token)"
    return _plot_curves(curves, "change", title, label, "%{y:+.4f} nats/token")


def plot_answers(curves: pd.DataFrame, title: str) -> go.Figure:
    """Share of right answers by kept keys; `curves` has rule, family, value, kept, and dense, which is dotted."""
    figure = _plot_curves(curves, "value", title, "right answers", "%{y:.0%} right")
    line = {"color": style.TEXT_COLOUR, "dash": "dot", "width": 1}
    figure.add_hline(y=curves["dense"].max(), line=line, annotation_text="dense attention")
    return figure.update_yaxes(tickformat=".0%", range=[-0.03, 1.03])


def _plot_curves(curves: pd.DataFrame, column: str, title: str, label: str, hover: str) -> go.Figure:
    """A column by mean number of kept keys, a line per family of rules."""
    curves = curves[curves["kept"] > 0]
    if curves.empty:
        return style.empty_figure(title, "no data to plot")
    figure = style.new_figure(title, 420)
    families = [*dict.fromkeys(curves["family"])]
    for number, family in enumerate(families):
        line = curves[curves["family"] == family]
        figure.add_scatter(
            x=line["kept"],
            y=line[column],
            mode="lines+markers",
            name=style.escape_label(family),
            customdata=line["rule"],
            line={
                "color": style.CATEGORY_PALETTE[number % len(style.CATEGORY_PALETTE)],
                "dash": style.LINE_DASHES[number // len(style.CATEGORY_PALETTE) % len(style.LINE_DASHES)],
            },
            marker={"symbol": style.MARKER_SYMBOLS[number % len(style.MARKER_SYMBOLS)]},
            hovertemplate=f"%{{customdata}}: %{{x:.0f}} keys, {hover}<extra></extra>",
        )
    figure.update_xaxes(title_text="kept keys per row", **axes.log_axis(curves["kept"]))
    figure.update_yaxes(title_text=label)
    return style.fit_legend(figure)


def plot_recall_bands(curves: Mapping[str, pd.DataFrame], title: str) -> go.Figure:
    """Recall by mean number of kept keys (index): a line of medians and a band (mean, low, high) by group of layers."""
    figure = style.new_figure(title, 420)
    for number, (name, curve) in enumerate(curves.items()):
        colour, dash = style.CATEGORY_PALETTE[number], style.LINE_DASHES[number]
        line_style = style.ModelStyle(style.escape_label(name), colour, dash, style.MARKER_SYMBOLS[number], len(curves))
        style.add_line_with_band(figure, curve, line_style, "%{x:.0f} keys: median recall %{y:.3f}")
    kept = pd.concat([*curves.values()]).index.to_series()
    figure.update_xaxes(title_text="kept keys per row", **axes.log_axis(kept))
    figure.update_yaxes(title_text="recall")
    return style.fit_legend(figure)


def plot_shared_sets(recall: pd.DataFrame, title: str) -> go.Figure:
    """Mean recall by layer, a line per rule (columns)."""
    if recall.empty:
        return style.empty_figure(title, "no sizes of top and layer-top to compare")
    figure = style.new_figure(title)
    for number, rule in enumerate(recall):
        figure.add_scatter(
            x=recall.index,
            y=recall[rule],
            mode="lines+markers",
            name=style.escape_label(rule),
            line={"color": style.CATEGORY_PALETTE[number]},
            marker={"symbol": style.MARKER_SYMBOLS[number]},
            hovertemplate="layer %{x}: recall %{y:.3f}<extra>%{fullData.name}</extra>",
        )
    figure.update_xaxes(title_text="layer")
    figure.update_yaxes(title_text="recall")
    return style.fit_legend(figure)


def plot_answer_rows(heads: pd.DataFrame, title: str) -> go.Figure:
    """Keys for 95 % of the mass in answer rows (y) and rows of text (x), a point per head of one model."""
    rows = heads.dropna(subset=["sparse_keys", "sparse_keys_answer"])
    if rows.empty:
        return style.empty_figure(title, "no rows that produce an answer")
    figure = style.new_figure(title)
    figure.add_scatter(
        x=rows["sparse_keys"],
        y=rows["sparse_keys_answer"],
        mode="markers",
        customdata=rows[["layer", "head", "kv_group"]],
        text=[format_head(int(layer), int(head)) for layer, head in zip(rows["layer"], rows["head"], strict=True)],
        marker={"color": style.CATEGORY_PALETTE[0], "size": 6},
        showlegend=False,
        hovertemplate="%{text}: %{x:.0f} keys in text, %{y:.0f} in answers<extra></extra>",
    )
    figure.update_xaxes(title_text="keys, rows of text", **axes.log_axis(rows["sparse_keys"]))
    figure.update_yaxes(title_text="keys, rows of answers", **axes.log_axis(rows["sparse_keys_answer"]))
    return style.declare_head_points(figure)
