"""Which rotary pairs a head uses, at which distances they speak, and where learning moved their frequencies."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import style
from headscope.runs.aggregation import interval

DISTANCE_TITLE = "distance i − j (tokens)"
PAIR_TITLE = "rotary pair f (0 is fastest)"
ZERO_CENTRED_SCALE = {"colorscale": style.DIVERGING_SCALE, "zmid": 0}


def plot_spectrum(pairs: pd.DataFrame, layer: int, head: int) -> go.Figure:
    """One head's frequencies above, log10 of theta (rad/token), and its use of them below, E|c_f| (logits).

    A line a model, at its longest length. Error bars are 95 % intervals over documents, where there are enough. A
    pair that does not rotate (theta 0) leaves a gap above.
    """
    title = f"Rotary spectrum of layer {layer}, head {head}"
    if why := style.missing_data_reason(pairs, "model", "mean_abs", "theta"):
        return style.empty_figure(title, why)
    rows = pairs[(pairs["layer"] == layer) & (pairs["head"] == head)]
    if rows.empty:
        return style.empty_figure(title, "this head was not measured")
    made = style.stacked_figure(title, 520)
    for label, look in style.model_styles(rows).items():
        mine = rows[rows["model"] == label]
        line = _pair_usage(mine[mine["context_length"] == mine["context_length"].max()])
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
            error_y=style.error_bars(line["mean_abs"], line["low"], line["high"]),
            showlegend=True,
            hovertemplate=f"{frequency}<br>E|c| %{{y:.3g}} logits<extra>{look.name}</extra>",
            row=2,
            col=1,
            **drawn,
        )
    made.update_yaxes(title_text="log₁₀ θ (rad/token)", row=1, col=1)
    made.update_yaxes(title_text="mean |dot product| (logits)", rangemode="tozero", row=2, col=1)
    made.update_xaxes(title_text="rotary pair f, from highest frequency to lowest", row=2, col=1)
    return style.fit_legend(made)


def plot_pair_profile(contributions: pd.DataFrame, layer: int, head: int, model: str) -> go.Figure:
    """Mean contribution (logits) of each rotary pair of one head by distance i - j (tokens), at the longest length."""
    title = f"Pairs by distance: {style.escape_label(model)}, layer {layer}, head {head}"
    if why := style.missing_data_reason(contributions, "model", "pair", "distance", "mean_signed"):
        return style.empty_figure(title, why)
    rows = _rows_at_longest_context(contributions[contributions["model"] == model], layer, head)
    if rows.empty:
        return style.empty_figure(title, "this head was not measured")
    grid = _pair_distance_grid(rows)
    made = style.new_figure(title, 420)
    made.add_heatmap(**_pair_heatmap(grid), colorbar={"title": {"text": "logits"}}, **ZERO_CENTRED_SCALE)
    made.update_xaxes(title_text=DISTANCE_TITLE, **_distance_ticks([int(distance) for distance in grid.columns]))
    made.update_yaxes(title_text=PAIR_TITLE, autorange="reversed")
    return style.set_top_margin(made)


def plot_pair_profiles(contributions: pd.DataFrame, layer: int, head: int) -> go.Figure:
    """`profile` of one head under every model in `distance`, side by side on one scale."""
    title = f"Pairs by distance: layer {layer}, head {head}"
    if why := style.missing_data_reason(contributions, "model", "pair", "distance", "mean_signed"):
        return style.empty_figure(title, why)
    rows = _rows_at_longest_context(contributions, layer, head)
    if rows.empty:
        return style.empty_figure(title, "this head was not measured")
    looks = style.model_styles(rows)
    made = style.panel_figure(title, [look.name for look in looks.values()], columns=4, height=300)
    reach = float(rows["mean_signed"].abs().max()) or 1.0
    far = sorted({int(value) for value in rows["distance"]})
    for at, (label, look) in enumerate(looks.items()):
        grid = _pair_distance_grid(rows[rows["model"] == label]).reindex(columns=far)
        made.add_heatmap(
            **_pair_heatmap(grid), coloraxis="coloraxis", name=look.name, **style.panel_row_col(at, [*looks], 4)
        )
    bar = {"title": {"text": "logits"}}
    made.update_layout(coloraxis={"cmin": -reach, "cmax": reach, "colorscale": style.DIVERGING_SCALE, "colorbar": bar})
    made.update_xaxes(**_distance_ticks(far, tick_step=2), showgrid=False)
    made.update_yaxes(autorange="reversed", showgrid=False)
    style.set_outer_axis_titles(made, len(looks), DISTANCE_TITLE, PAIR_TITLE, 4)
    return style.set_metadata(
        style.set_top_margin(made, 74), value="mean contribution (logits)", x="place of the distance"
    )


def plot_logit_by_distance(contributions: pd.DataFrame, layer: int, head: int) -> go.Figure:
    """Mean logit of one head by distance i - j (tokens), all pairs together: a line a model, at its longest length."""
    title = f"Logit by distance: layer {layer}, head {head}"
    if why := style.missing_data_reason(contributions, "model", "pair", "distance", "mean_signed"):
        return style.empty_figure(title, why)
    rows = _rows_at_longest_context(contributions, layer, head)
    if rows.empty:
        return style.empty_figure(title, "this head was not measured")
    made = style.new_figure(title)
    far = sorted({int(value) for value in rows["distance"]})
    for label, look in style.model_styles(rows).items():
        mine = rows[rows["model"] == label].astype({"mean_signed": "float64"})
        line = mine.groupby("distance")["mean_signed"].sum()
        made.add_scatter(
            x=[far.index(int(value)) for value in line.index],
            y=line,
            mode="lines",
            line={"color": look.colour, "dash": look.dash},
            name=look.name,
            customdata=line.index,
            hovertemplate=f"%{{customdata:,}} tokens back: mean logit %{{y:+.3g}}<extra>{look.name}</extra>",
        )
    made.update_xaxes(title_text=DISTANCE_TITLE, **_distance_ticks(far))
    made.update_yaxes(title_text="mean logit, all pairs")
    return style.set_metadata(style.fit_legend(made), x="place of the distance")


def _pair_distance_grid(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean contribution of the pairs (rows) by distance (columns)."""
    return rows.groupby(["pair", "distance"])["mean_signed"].mean().unstack()  # a fourth of what pivot_table takes


def _rows_at_longest_context(contributions: pd.DataFrame, layer: int, head: int) -> pd.DataFrame:
    """The head's rows at the longest length of each model."""
    rows = contributions[(contributions["layer"] == layer) & (contributions["head"] == head)]
    longest = rows.groupby("model", observed=True)["context_length"].transform("max")
    kept: pd.DataFrame = rows[rows["context_length"] == longest]
    return kept


def _pair_heatmap(grid: pd.DataFrame) -> dict[str, Any]:
    """Contributions of pairs (rows) by distance (columns), which stand side by side."""
    return {
        "x": list(range(grid.shape[1])),
        "y": list(grid.index),
        "z": grid.to_numpy(dtype=np.float64),
        "customdata": np.broadcast_to([int(column) for column in grid.columns], grid.shape),
        "hovertemplate": "pair %{y}, %{customdata:,} tokens back<br>mean contribution %{z:+.3g} logits<extra></extra>",
    }


def _distance_ticks(distances: Sequence[int], tick_step: int = 1) -> dict[str, Any]:
    """Ticks where 0 and the powers of two stand among distances, not too many of them; of these each `every`-th."""
    named = [at for at, value in enumerate(distances) if value & (value - 1) == 0]
    named = (named if len(named) <= 9 else [named[0], *named[3::2]])[::tick_step]
    return {"tickvals": named, "ticktext": [f"{distances[at]:,}" for at in named]}


def _pair_usage(rows: pd.DataFrame) -> pd.DataFrame:
    """theta, log_theta, mean_abs with its interval, by pair, over documents."""
    values = rows.astype({"mean_abs": "float64"}).groupby(["pair", "doc"], observed=True)["mean_abs"].mean().unstack()
    low, high = interval(values.to_numpy())
    theta = rows.groupby("pair")["theta"].first()
    line = pd.DataFrame({"theta": theta, "mean_abs": values.mean(axis=1), "low": low, "high": high})
    turning = line["theta"].where(line["theta"] > 0).astype("float64")
    return line.assign(log_theta=np.log10(turning))
