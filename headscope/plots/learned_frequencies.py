"""What a KV group learned: its frequencies against where learning started and against the checkpoint's own."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import style

REFERENCE_LABELS = {"log_theta_base": "the checkpoint", "log_theta_init": "its initialisation"}
"""What a frequency is held against, by column."""


def plot_learned_frequencies(positions: pd.DataFrame, model: str, layer: int, kv_group: int) -> go.Figure:
    """Learned frequencies of one KV group against where learning started and against the checkpoint's own.

    Above log10 theta (rad/token) by pair, below ln of the ratio to the checkpoint's.
    """
    title = f"Spectrum of layer {layer}, key group {kv_group}: {style.escape_label(model)}"
    if why := style.missing_data_reason(positions, "model", "log_theta", "log_theta_init", "log_theta_base"):
        return style.empty_figure(title, why)
    place = (positions["model"] == model) & (positions["layer"] == layer) & (positions["kv_group"] == kv_group)
    rows = positions[place].sort_values("pair").astype({n: "float64" for n in positions if str(n).startswith("log_")})
    if rows.empty:
        return style.empty_figure(title, "this group was not measured")
    made = style.stacked_figure(title, 460)
    lines = {"base": "log_theta_base", "where learning started": "log_theta_init", "learned": "log_theta"}
    for at, (label, column) in enumerate(lines.items()):
        drawn = {
            "x": rows["pair"],
            "mode": "lines",
            "line": {"color": style.PALETTE[(7, 1, 0)[at]], "dash": style.LINE_DASHES[(2, 1, 0)[at]]},
            "name": label,
            "legendgroup": label,
        }
        values = rows[column].where(np.isfinite(rows[column]))
        hover = f"pair %{{x}}: %{{y:.3f}}<extra>{label}</extra>"
        made.add_scatter(y=values / np.log(10), showlegend=False, hovertemplate=hover, row=1, col=1, **drawn)
        made.add_scatter(y=values - rows["log_theta_base"], hovertemplate=hover, row=2, col=1, **drawn)
    made.update_yaxes(title_text="log₁₀ θ (rad/token)", row=1, col=1)
    made.update_yaxes(title_text="ln θ against base", row=2, col=1)
    made.update_xaxes(title_text="rotary pair f, from highest frequency to lowest", row=2, col=1)
    return style.fit_legend(made)


def plot_frequency_change(positions: pd.DataFrame, model: str, reference_column: str = "log_theta_base") -> go.Figure:
    """Change of ln theta of `model` by layer and pair, the mean over key groups; blue is slower, red is faster.

    Against the checkpoint's own frequencies, or with `log_theta_init` against where learning started. Pairs that do
    not rotate in either leave a gap. One scale for all models in `positions`.
    """
    title = f"Change of frequency: {style.escape_label(model)} against {REFERENCE_LABELS[reference_column]}"
    if why := style.missing_data_reason(positions, "model", "log_theta", reference_column):
        return style.empty_figure(title, why)
    every = frequency_changes(positions, reference_column)
    both = every[every["model"] == model]
    if both.empty:
        return style.empty_figure(title, "no pair of this model rotates")
    means = every.groupby(["model", "layer", "pair"], observed=True)["change"].mean()
    reach = float(means.abs().max()) or 1e-3
    grid = both.pivot_table(index="layer", columns="pair", values="change")
    made = style.new_figure(title, int(np.clip(150 + 14 * len(grid), 280, 640)))
    made.add_heatmap(
        x=list(grid.columns),
        y=list(grid.index),
        z=grid.to_numpy(),
        customdata=np.exp(grid.to_numpy()),
        hovertemplate="layer %{y}, pair %{x}<br>ln θ %{z:+.3g}, θ × %{customdata:.3g}<extra></extra>",
        colorbar={"title": {"text": "Δ ln θ"}},
        zmin=-reach,
        zmax=reach,
        colorscale=style.DIVERGING_SCALE,
    )
    made.update_xaxes(title_text="rotary pair f, from highest frequency to lowest", showgrid=False)
    made.update_yaxes(title_text="layer", showgrid=False)
    return style.set_metadata(style.set_top_margin(made), value="mean change of ln θ", model=style.escape_label(model))


def plot_layers_by_change(positions: pd.DataFrame, model: str, reference_column: str = "log_theta_base") -> go.Figure:
    """Layers by how far their frequencies moved, most first: the rms over pairs of the change of ln theta, a bar over
    all key groups of the layer and a dot for each. A mean would let groups that moved apart cancel."""
    title = f"Layers by change of frequency: {style.escape_label(model)} against {REFERENCE_LABELS[reference_column]}"
    if why := style.missing_data_reason(positions, "model", "log_theta", reference_column):
        return style.empty_figure(title, why)
    moved = frequency_changes(positions[positions["model"] == model], reference_column)
    if moved.empty:
        return style.empty_figure(title, "no pair of this model rotates")
    layers, groups = rms_change(moved, ["layer"]), rms_change(moved, ["layer", "kv_group"]).reset_index()
    order = layers.sort_values(ascending=False, kind="stable").index
    place = pd.Series(range(len(order)), order)
    made = style.new_figure(title)
    made.add_bar(
        x=list(place),
        y=layers[order],
        marker={"color": style.PALETTE[0], "opacity": 0.35, "line_width": 0},
        customdata=[[int(layer), -1, 0] for layer in order],
        hovertemplate="layer %{customdata[0]}: rms of Δ ln θ %{y:.3g}<extra></extra>",
        name="layer",
    )
    made.add_scatter(
        x=groups["layer"].map(place),
        y=groups["change"],
        mode="markers",
        marker={"color": style.PALETTE[0], "size": 7},
        customdata=groups.assign(head=-1)[["layer", "head", "kv_group"]].to_numpy(),
        hovertemplate="layer %{customdata[0]}, key group %{customdata[2]}: rms of Δ ln θ %{y:.3g}<extra></extra>",
        name="key group",
    )
    made.update_xaxes(
        title_text="layer, the most changed first",
        tickvals=list(place),
        ticktext=[str(layer) for layer in order],
        showgrid=False,
    )
    made.update_yaxes(title_text="rms of the change of ln θ", rangemode="tozero")
    return style.set_metadata(
        style.declare_head_points(style.fit_legend(made)), x="rank", value="rms of the change of ln θ"
    )


def frequency_changes(positions: pd.DataFrame, reference_column: str = "log_theta_base") -> pd.DataFrame:
    """The rows whose pair rotates before and after, with the `change` of ln theta."""
    rows = positions.astype({"log_theta": "float64", reference_column: "float64"})
    both = rows[np.isfinite(rows["log_theta"]) & np.isfinite(rows[reference_column])]
    moved: pd.DataFrame = both.assign(change=both["log_theta"] - both[reference_column])
    return moved


def rms_change(changes: pd.DataFrame, by: list[str]) -> pd.Series:
    """Root mean square of `change` over the pairs of each layer, or of each key group."""
    squares: pd.Series = changes.assign(change=changes["change"] ** 2).groupby(by)["change"].mean()
    return squares**0.5
