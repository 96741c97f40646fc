"""Learned rotary frequencies, and their change against the initialisation and the checkpoint's frequencies."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import shapes, style
from headscope.plots.colour_range import signed_colours
from headscope.plots.draft import Draft

REFERENCE_LABELS = {"log_theta_base": "the checkpoint", "log_theta_init": "the initialisation"}
"""Name of the reference frequencies in a chart title, by column."""
MIN_LEARNED_CHANGE = 1e-6
"""Change of ln theta from its initialisation beyond which it was learned."""
LINES = {"log_theta_base": (7, 2), "log_theta_init": (1, 1), "log_theta": (0, 0)}
"""Palette index and dash of a line, by column."""


def plot_learned_frequencies(positions: pd.DataFrame, model: str, layer: int, kv_group: int) -> go.Figure:
    """Plot the frequencies of one KV group and those of the checkpoint; learned ones beside their initialisation.

    The upper plot shows log10 theta (rad/token) by rotary pair, the lower one the ln of the ratio to the checkpoint's.
    """
    title = _frequencies_title(model, layer, kv_group)
    if reason := style.missing_data_reason(positions, "model", "log_theta", "log_theta_init", "log_theta_base"):
        return style.empty_figure(title, reason)
    rows = group_frequencies(positions, layer, kv_group).get(model)
    if rows is None:
        return style.empty_figure(title, "this KV group was not measured")
    return draw_learned_frequencies(rows, model, layer, kv_group)


def _frequencies_title(model: str, layer: int, kv_group: int) -> str:
    return f"Frequencies of layer {layer}, KV group {kv_group}: {style.escape_label(model)}"


def group_frequencies(positions: pd.DataFrame, layer: int, kv_group: int) -> dict[str, pd.DataFrame]:
    """The frequencies of one KV group by model: the columns log_theta, log_theta_init and log_theta_base by pair."""
    rows = positions[(positions["layer"] == layer) & (positions["kv_group"] == kv_group)].sort_values("pair")
    columns = {column: rows[column].to_numpy(np.float64) for column in LINES}
    table = pd.DataFrame(columns, rows["pair"].to_numpy())
    return {str(label): of_model for label, of_model in table.groupby(rows["model"].to_numpy(), sort=False)}


def draw_learned_frequencies(rows: pd.DataFrame, model: str, layer: int, kv_group: int) -> go.Figure:
    """The figure of `plot_learned_frequencies` from the frequencies of a model."""
    title = _frequencies_title(model, layer, kv_group)
    figure = Draft.stacked(title, 460)
    columns = {"base": "log_theta_base", "initialisation": "log_theta_init", "learned": "log_theta"}
    if not ((rows["log_theta"] - rows["log_theta_init"]).abs() > MIN_LEARNED_CHANGE).any():  # such as those of YaRN
        columns = {"base": "log_theta_base", style.escape_label(model): "log_theta"}
    for label, column in columns.items():
        colour, dash = LINES[column]
        line_settings: dict[str, Any] = {
            "type": "scatter",
            "x": rows.index.to_numpy(),
            "mode": "lines",
            "line": {"color": style.CATEGORY_PALETTE[colour], "dash": style.LINE_DASHES[dash]},
            "name": label,
            "legendgroup": label,
            "hovertemplate": f"pair %{{x}}: %{{y:.3f}}<extra>{label}</extra>",
        }
        values = rows[column].where(np.isfinite(rows[column]))
        upper = {"y": (values / np.log(10)).to_numpy(), "showlegend": False}
        lower = {"y": (values - rows["log_theta_base"]).to_numpy()}
        figure.add([line_settings | upper], 1)
        figure.add([line_settings | lower], 2)
    figure.update_axis("yaxis", {"title": {"text": "log₁₀ θ (rad/token)"}})
    figure.update_axis("yaxis2", {"title": {"text": "ln θ relative to base"}})
    figure.update_axis("xaxis2", {"title": {"text": "rotary pair f, highest frequency first"}})
    return figure.fit_legend().figure()


def plot_frequency_change(positions: pd.DataFrame, model: str, reference_column: str = "log_theta_base") -> go.Figure:
    """Plot the change of ln theta of a model by layer and rotary pair, the mean over KV groups.

    The change is relative to the checkpoint's frequencies (`log_theta_base`) or to the initialisation
    (`log_theta_init`). Blue is slower, red is faster. Pairs without rotation in either one are blank. All models in
    `positions` share one colour scale.
    """
    title = f"Frequency change: {style.escape_label(model)} relative to {REFERENCE_LABELS[reference_column]}"
    if reason := style.missing_data_reason(positions, "model", "log_theta", reference_column):
        return style.empty_figure(title, reason)
    changes = frequency_changes(positions, reference_column)
    model_changes = changes[changes["model"] == model]
    if model_changes.empty:
        return style.empty_figure(title, "no pair of this model rotates")
    mean_changes = changes.groupby(["model", "layer", "pair"], observed=True)["change"].mean()
    limit = float(mean_changes.abs().max()) or 1e-3
    grid = model_changes.pivot_table(index="layer", columns="pair", values="change")
    figure = shapes.matrix(
        title,
        grid,
        "layer %{y}, pair %{x}<br>ln θ %{z:+.3g}, θ × %{customdata:.3g}",
        {"title_text": "rotary pair f, highest frequency first", "showgrid": False},
        {"title_text": "layer", "showgrid": False},
        height=int(np.clip(150 + 14 * len(grid), 280, 640)),
        gaps=False,
        customdata=np.exp(grid.to_numpy()),
        **signed_colours(limit, "Δ ln θ"),
    )
    return style.set_metadata(figure, value="mean change of ln θ", model=style.escape_label(model))


def plot_layers_by_change(positions: pd.DataFrame, model: str, reference_column: str = "log_theta_base") -> go.Figure:
    """Rank the layers of a model by the rms change of ln theta, the largest first.

    A bar is the rms over the rotary pairs of all KV groups of a layer, a point the rms of one KV group. A mean would
    cancel changes of opposite sign.
    """
    title = f"Layers by frequency change: {style.escape_label(model)} relative to {REFERENCE_LABELS[reference_column]}"
    if reason := style.missing_data_reason(positions, "model", "log_theta", reference_column):
        return style.empty_figure(title, reason)
    changes = frequency_changes(positions[positions["model"] == model], reference_column)
    if changes.empty:
        return style.empty_figure(title, "no pair of this model rotates")
    layers, groups = rms_change(changes, ["layer"]), rms_change(changes, ["layer", "kv_group"]).reset_index()
    order = layers.sort_values(ascending=False, kind="stable").index
    positions_on_axis = pd.Series(range(len(order)), order)
    figure = style.new_figure(title)
    figure.add_bar(
        x=list(positions_on_axis),
        y=layers[order],
        marker={"color": style.CATEGORY_PALETTE[0], "opacity": 0.35, "line_width": 0},
        customdata=[[int(layer), -1, 0] for layer in order],
        hovertemplate="layer %{customdata[0]}: rms change of ln θ %{y:.3g}<extra></extra>",
        name="layer",
    )
    figure.add_scatter(
        x=groups["layer"].map(positions_on_axis),
        y=groups["change"],
        mode="markers",
        marker={"color": style.CATEGORY_PALETTE[0], "size": 7},
        customdata=groups.assign(head=-1)[["layer", "head", "kv_group"]].to_numpy(),
        hovertemplate="layer %{customdata[0]}, KV group %{customdata[2]}: rms change of ln θ %{y:.3g}<extra></extra>",
        name="KV group",
    )
    ticks = {"tickvals": list(positions_on_axis), "ticktext": [str(layer) for layer in order], "showgrid": False}
    y = {"title_text": "rms change of ln θ", "rangemode": "tozero"}
    return style.set_metadata(
        style.declare_head_points(shapes.finish(figure, {"title_text": "layer, largest change first", **ticks}, y)),
        x="rank",
        value="rms change of ln θ",
        model=style.escape_label(model),
    )


def frequency_changes(positions: pd.DataFrame, reference_column: str = "log_theta_base") -> pd.DataFrame:
    """The rows whose pair rotates in the model and in the reference, with the `change` of ln theta."""
    rows = positions.astype({"log_theta": "float64", reference_column: "float64"})
    rotating = rows[np.isfinite(rows["log_theta"]) & np.isfinite(rows[reference_column])]
    changes: pd.DataFrame = rotating.assign(change=rotating["log_theta"] - rotating[reference_column])
    return changes


def rms_change(changes: pd.DataFrame, by: list[str]) -> pd.Series:
    """Root mean square of `change` over the rotary pairs of each group of the `by` columns."""
    mean_squares: pd.Series = changes.assign(change=changes["change"] ** 2).groupby(by)["change"].mean()
    return mean_squares**0.5
