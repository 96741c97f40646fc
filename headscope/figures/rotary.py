"""Which rotary pairs a head uses, at which distances they speak, and where learning moved their frequencies."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.figures import style

MIDDLE = {"colorscale": style.DIVERGING, "zmid": 0}


def spectrum(pairs: pd.DataFrame, layer: int, head: int) -> go.Figure:
    """One head's frequencies above, log10 of theta (rad/token), and its use of them below, E|c_f| (logits).

    A line a model, at its longest length. Error bars are one standard error: over documents where there are
    several, else over the sampled rows. A pair that does not rotate (theta 0) leaves a gap above.
    """
    title = f"Rotary spectrum of layer {layer}, head {head}"
    if why := style.lacks(pairs, "model", "mean_abs", "theta"):
        return style.nothing(title, why)
    rows = pairs[(pairs["layer"] == layer) & (pairs["head"] == head)]
    if rows.empty:
        return style.nothing(title, "this head was not measured")
    made = style.stack(title, 520)
    for label, look in style.looks(rows).items():
        mine = rows[rows["model"] == label]
        line = _usage(mine[mine["context_length"] == mine["context_length"].max()])
        drawn = {
            "x": line.index,
            "line": {"color": look.colour, "dash": look.dash},
            "name": look.name,
            "legendgroup": label,
            "customdata": line["theta"],
        }
        frequency = "pair %{x}: θ = %{customdata:.3g} rad/token"
        made.add_scatter(
            y=line["log_theta"],
            mode="lines",
            showlegend=False,
            hovertemplate=f"{frequency}<extra>{look.name}</extra>",
            row=1,
            col=1,
            **drawn,
        )
        made.add_scatter(
            y=line["mean_abs"],
            mode="lines+markers",
            marker={"size": 5, "symbol": look.symbol},
            error_y={"array": line["error"], "thickness": 1, "width": 2},
            showlegend=True,
            hovertemplate=f"{frequency}<br>E|c| %{{y:.3g}} logits<extra>{look.name}</extra>",
            row=2,
            col=1,
            **drawn,
        )
    made.update_yaxes(title_text="log₁₀ θ (rad/token)", row=1, col=1)
    made.update_yaxes(title_text="mean |dot product| (logits)", rangemode="tozero", row=2, col=1)
    made.update_xaxes(title_text="rotary pair f, from highest frequency to lowest", row=2, col=1)
    return style.room_for_legend(made)


def profile(distance: pd.DataFrame, layer: int, head: int, model: str) -> go.Figure:
    """Mean contribution (logits) of each rotary pair of one head by distance i - j (tokens), at the longest length."""
    title = f"Pairs by distance: {style.text(model)}, layer {layer}, head {head}"
    if why := style.lacks(distance, "model", "pair", "distance", "mean_signed"):
        return style.nothing(title, why)
    rows = distance[(distance["model"] == model) & (distance["layer"] == layer) & (distance["head"] == head)]
    rows = rows[rows["context_length"] == rows["context_length"].max()]
    if rows.empty:
        return style.nothing(title, "this head was not measured")
    grid = rows.pivot_table(index="pair", columns="distance", values="mean_signed")
    far = [int(column) for column in grid.columns]
    made = style.figure(title, 420)
    made.add_heatmap(
        x=list(range(len(far))),
        y=list(grid.index),
        z=grid.to_numpy(dtype=np.float64),
        customdata=np.broadcast_to(far, grid.shape),
        hovertemplate="pair %{y}, %{customdata:,} tokens back<br>mean contribution %{z:+.3g} logits<extra></extra>",
        colorbar={"title": {"text": "logits"}},
        **MIDDLE,
    )
    named = [at for at, value in enumerate(far) if value & (value - 1) == 0]  # 0 and the powers of two
    named = named if len(named) <= 9 else [named[0], *named[3::2]]
    made.update_xaxes(title_text="distance i − j (tokens)", tickvals=named, ticktext=[f"{far[at]:,}" for at in named])
    made.update_yaxes(title_text="rotary pair f (0 is fastest)", autorange="reversed")
    return made.update_layout(margin_t=46)


def frequency_change(positions: pd.DataFrame, model: str, against: str = "log_theta_base") -> go.Figure:
    """Change of ln theta of `model` by layer and pair, the mean over key groups; blue is slower, red is faster.

    Against the checkpoint's own frequencies, or with `log_theta_init` against where learning started. Pairs
    that do not rotate in either leave a gap.
    """
    origin = {"log_theta_base": "the checkpoint", "log_theta_init": "its initialisation"}[against]
    title = f"Change of frequency: {style.text(model)} against {origin}"
    if why := style.lacks(positions, "model", "log_theta", against):
        return style.nothing(title, why)
    rows = positions[positions["model"] == model].astype({"log_theta": "float64", against: "float64"})
    both = rows[np.isfinite(rows["log_theta"]) & np.isfinite(rows[against])]
    if both.empty:
        return style.nothing(title, "no pair of this model rotates")
    both = both.assign(change=both["log_theta"] - both[against])
    grid = both.pivot_table(index="layer", columns="pair", values="change")
    made = style.figure(title, int(np.clip(150 + 14 * len(grid), 280, 640)))
    made.add_heatmap(
        x=list(grid.columns),
        y=list(grid.index),
        z=grid.to_numpy(),
        customdata=np.exp(grid.to_numpy()),
        hovertemplate="layer %{y}, pair %{x}<br>ln θ %{z:+.3g}, θ × %{customdata:.3g}<extra></extra>",
        colorbar={"title": {"text": "Δ ln θ"}},
        **MIDDLE,
    )
    made.update_xaxes(title_text="rotary pair f, from highest frequency to lowest", showgrid=False)
    made.update_yaxes(title_text="layer", showgrid=False)
    return made.update_layout(margin_t=46)


def _usage(rows: pd.DataFrame) -> pd.DataFrame:
    """theta, log_theta, mean_abs, error by pair, over documents."""
    groups = rows.astype({"mean_abs": "float64", "mean_abs_se": "float64"}).groupby("pair")
    error = groups["mean_abs"].sem(ddof=1).fillna(groups["mean_abs_se"].mean())
    line = pd.DataFrame({"theta": groups["theta"].first(), "mean_abs": groups["mean_abs"].mean(), "error": error})
    turning = line["theta"].where(line["theta"] > 0).astype("float64")
    return line.assign(log_theta=np.log10(turning))
