"""Plots of the sparsity probe: recall by kept keys, shared sets by layer, answer rows against text rows."""

from collections.abc import Mapping

import pandas as pd
import plotly.graph_objects as go

from headscope.heads import format_head
from headscope.plots import axes, shapes, style


def plot_recall_curves(curves: pd.DataFrame, title: str) -> go.Figure:
    """Recall by mean number of kept keys, a line per family of rules; `curves` has rule, family, recall and kept."""
    return _plot_curves(curves, "recall", title, "recall", "recall %{y:.3f}")


def plot_loss_changes(curves: pd.DataFrame, title: str) -> go.Figure:
    """Change of the loss by mean number of kept keys, a line per family; `curves` has rule, family, change and kept."""
    return _plot_curves(curves, "change", title, "change of the loss (nats/token)", "%{y:+.4f} nats/token")


def plot_answers(curves: pd.DataFrame, title: str) -> go.Figure:
    """Share of right answers by kept keys; `curves` has rule, family, value, kept, and dense, which is dotted."""
    figure = _plot_curves(curves, "value", title, "right answers", "%{y:.0%} right")
    figure.add_hline(y=curves["dense"].max(), line=style.REFERENCE_LINE, annotation_text="dense attention")
    return figure.update_yaxes(tickformat=".0%", range=[-0.03, 1.03])


def _plot_curves(curves: pd.DataFrame, column: str, title: str, label: str, hover: str) -> go.Figure:
    """A column by mean number of kept keys, a line per family of rules."""
    rows = curves[curves["kept"] > 0].set_index("kept").rename(columns={column: "y", "rule": "customdata"})
    if rows.empty:
        return style.empty_figure(title, "no data to plot")
    styles = style.category_styles([*rows["family"].unique()])
    families = {styles[name]: rows.loc[rows["family"] == name, ["y", "customdata"]] for name in styles}
    hover = f"%{{customdata}}: %{{x:.0f}} keys, {hover}<extra></extra>"
    return shapes.lines(title, families, hover, _kept_axis(rows.index), label, height=420)


def plot_recall_bands(curves: Mapping[str, pd.DataFrame], title: str) -> go.Figure:
    """Recall by mean number of kept keys (index): a line of medians and a band (mean, low, high) by group of layers."""
    styled = dict(zip(style.line_styles([*curves]).values(), curves.values(), strict=True))
    kept = _kept_axis(pd.concat([*curves.values()]).index)
    return shapes.bands(title, styled, "%{x:.0f} keys: median recall %{y:.3f}", kept, "recall", height=420)


def plot_shared_sets(recall: pd.DataFrame, title: str) -> go.Figure:
    """Mean recall by layer, a line per rule (columns)."""
    if recall.empty:
        return style.empty_figure(title, "no sizes of top and layer-top to compare")
    rules = {
        line_style: recall[[rule]].set_axis(["y"], axis=1)
        for rule, line_style in style.category_styles([*recall]).items()
    }
    return shapes.lines(title, rules, "layer %{x}: recall %{y:.3f}", "layer", "recall")


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
    x = {"title_text": "keys, rows of text", **axes.log_axis(rows["sparse_keys"])}
    y = {"title_text": "keys, rows of answers", **axes.log_axis(rows["sparse_keys_answer"])}
    return style.declare_head_points(shapes.label_axes(figure, x, y))


def _kept_axis(kept: pd.Index) -> dict[str, object]:
    return {"title_text": "kept keys per row", **axes.log_axis(kept)}
