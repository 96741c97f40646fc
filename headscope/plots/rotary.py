"""Rotary pairs of a head: their frequencies, their usage, and their contribution by distance."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import style
from headscope.runs.aggregation import mean_with_interval

DISTANCE_TITLE = "distance i − j (tokens)"
PAIR_TITLE = "rotary pair f (0 is fastest)"
ZERO_CENTRED_SCALE = {"colorscale": style.DIVERGING_SCALE, "zmid": 0}


def plot_spectrum(pairs: pd.DataFrame, layer: int, head: int) -> go.Figure:
    """Plot the rotary frequencies of one head, log10 theta (rad/token), above their usage E|c_f| (logits).

    There is one line per model, at its longest context length. Error bars are 95 % confidence intervals over documents
    if there are enough. A pair without rotation (theta 0) is a gap in the upper plot.
    """
    title = f"Rotary spectrum of layer {layer}, head {head}"
    if reason := style.missing_data_reason(pairs, "model", "mean_abs", "theta"):
        return style.empty_figure(title, reason)
    rows = pairs[(pairs["layer"] == layer) & (pairs["head"] == head)]
    if rows.empty:
        return style.empty_figure(title, "this head was not measured")
    figure = style.stacked_figure(title, 520)
    usage_by_model = _pair_usage(_rows_at_longest_context(pairs, layer, head))
    lines: list[dict[str, Any]] = []
    for label, model_style in style.model_styles(rows).items():
        usage = usage_by_model.loc[label]
        line = {
            "type": "scatter",
            "x": usage.index,
            "line": {"color": model_style.colour, "dash": model_style.dash},
            "name": model_style.name,
            "legendgroup": label,
            "customdata": usage["theta"],
        }
        hover, name = "pair %{x}: θ = %{customdata:.3g} rad/token", f"<extra>{model_style.name}</extra>"
        frequencies = {"y": usage["log_theta"], "mode": "lines", "showlegend": False, "hovertemplate": hover + name}
        sizes = {
            "y": usage["mean_abs"],
            "mode": "lines+markers",
            "marker": {"size": 5, "symbol": model_style.symbol},
            "error_y": style.error_bars(usage["mean_abs"], usage["low"], usage["high"]),
            "showlegend": True,
            "hovertemplate": f"{hover}<br>E|c| %{{y:.3g}} logits{name}",
        }
        lines += [line | frequencies, line | sizes]
    figure.add_traces(lines, rows=[1, 2] * (len(lines) // 2), cols=[1] * len(lines))
    figure.update_yaxes(title_text="log₁₀ θ (rad/token)", row=1, col=1)
    figure.update_yaxes(title_text="mean |dot product| (logits)", rangemode="tozero", row=2, col=1)
    figure.update_xaxes(title_text="rotary pair f, highest frequency first", row=2, col=1)
    return style.fit_legend(figure)


def plot_pair_profile(contributions: pd.DataFrame, layer: int, head: int, model: str) -> go.Figure:
    """Plot the mean contribution (logits) of each rotary pair of one head by distance i - j (tokens).

    The context length is the longest one of the model.
    """
    title = f"Pairs by distance: {style.escape_label(model)}, layer {layer}, head {head}"
    if reason := style.missing_data_reason(contributions, "model", "pair", "distance", "mean_signed"):
        return style.empty_figure(title, reason)
    rows = _rows_at_longest_context(contributions[contributions["model"] == model], layer, head)
    if rows.empty:
        return style.empty_figure(title, "this head was not measured")
    grid = _pair_distance_grid(rows)
    figure = style.new_figure(title, 420)
    figure.add_heatmap(**_pair_heatmap(grid), colorbar={"title": {"text": "logits"}}, **ZERO_CENTRED_SCALE)
    figure.update_xaxes(title_text=DISTANCE_TITLE, **_distance_ticks([int(distance) for distance in grid.columns]))
    figure.update_yaxes(title_text=PAIR_TITLE, autorange="reversed")
    return style.set_top_margin(figure)


def plot_pair_profiles(contributions: pd.DataFrame, layer: int, head: int) -> go.Figure:
    """Plot the pair profile of one head under every model side by side, with one colour scale."""
    title = f"Pairs by distance: layer {layer}, head {head}"
    if reason := style.missing_data_reason(contributions, "model", "pair", "distance", "mean_signed"):
        return style.empty_figure(title, reason)
    rows = _rows_at_longest_context(contributions, layer, head)
    if rows.empty:
        return style.empty_figure(title, "this head was not measured")
    styles = style.model_styles(rows)
    figure = style.panel_figure(title, [model_style.name for model_style in styles.values()], columns=4, height=300)
    limit = float(rows["mean_signed"].abs().max()) or 1.0
    distances = sorted({int(value) for value in rows["distance"]})
    for index, (label, model_style) in enumerate(styles.items()):
        grid = _pair_distance_grid(rows[rows["model"] == label]).reindex(columns=distances)
        figure.add_heatmap(
            **_pair_heatmap(grid),
            coloraxis="coloraxis",
            name=model_style.name,
            **style.panel_row_col(index, [*styles], 4),
        )
    bar = {"title": {"text": "logits"}}
    figure.update_layout(
        coloraxis={"cmin": -limit, "cmax": limit, "colorscale": style.DIVERGING_SCALE, "colorbar": bar}
    )
    figure.update_xaxes(**_distance_ticks(distances, tick_step=2), showgrid=False)
    figure.update_yaxes(autorange="reversed", showgrid=False)
    style.set_outer_axis_titles(figure, len(styles), DISTANCE_TITLE, PAIR_TITLE, 4)
    return style.set_metadata(
        style.set_top_margin(figure, 74), value="mean contribution (logits)", x="index of the distance"
    )


def plot_logit_by_distance(contributions: pd.DataFrame, layer: int, head: int) -> go.Figure:
    """Plot the mean logit of one head, summed over rotary pairs, by distance i - j (tokens).

    There is one line per model, at its longest context length.
    """
    title = f"Logit by distance: layer {layer}, head {head}"
    if reason := style.missing_data_reason(contributions, "model", "pair", "distance", "mean_signed"):
        return style.empty_figure(title, reason)
    rows = _rows_at_longest_context(contributions, layer, head)
    if rows.empty:
        return style.empty_figure(title, "this head was not measured")
    figure = style.new_figure(title)
    distances = sorted({int(value) for value in rows["distance"]})
    sums = rows["mean_signed"].astype("float64").groupby([rows["model"], rows["distance"]], observed=True).sum()
    lines = []
    for label, model_style in style.model_styles(rows).items():
        logits: Any = sums.loc[label]
        lines.append(
            {
                "type": "scatter",
                "x": [distances.index(int(value)) for value in logits.index],
                "y": logits,
                "mode": "lines",
                "line": {"color": model_style.colour, "dash": model_style.dash},
                "name": model_style.name,
                "customdata": logits.index,
                "hovertemplate": "%{customdata:,} tokens back: mean logit %{y:+.3g}"
                f"<extra>{model_style.name}</extra>",
            }
        )
    figure.add_traces(lines)
    figure.update_xaxes(title_text=DISTANCE_TITLE, **_distance_ticks(distances))
    figure.update_yaxes(title_text="mean logit, sum over pairs")
    return style.set_metadata(style.fit_legend(figure), x="index of the distance")


def _pair_distance_grid(rows: pd.DataFrame) -> pd.DataFrame:
    """Mean contribution of the rotary pairs (rows) by distance (columns)."""
    return rows.groupby(["pair", "distance"])["mean_signed"].mean().unstack()  # four times as fast as pivot_table


def _rows_at_longest_context(contributions: pd.DataFrame, layer: int, head: int) -> pd.DataFrame:
    """The head's rows at the longest context length of each model."""
    rows = contributions[(contributions["layer"] == layer) & (contributions["head"] == head)]
    longest = rows.groupby("model", observed=True)["context_length"].transform("max")
    at_longest: pd.DataFrame = rows[rows["context_length"] == longest]
    return at_longest


def _pair_heatmap(grid: pd.DataFrame) -> dict[str, Any]:
    """Plotly settings of a heatmap of pairs (rows) by distance (columns), with one column per measured distance."""
    return {
        "x": list(range(grid.shape[1])),
        "y": list(grid.index),
        "z": grid.to_numpy(dtype=np.float64),
        "customdata": np.broadcast_to([int(column) for column in grid.columns], grid.shape),
        "hovertemplate": "pair %{y}, %{customdata:,} tokens back<br>mean contribution %{z:+.3g} logits<extra></extra>",
    }


def _distance_ticks(distances: Sequence[int], tick_step: int = 1) -> dict[str, Any]:
    """Plotly settings of ticks at 0 and at powers of two; `tick_step` keeps every n-th of these ticks."""
    ticks = [index for index, value in enumerate(distances) if value & (value - 1) == 0]
    ticks = (ticks if len(ticks) <= 9 else [ticks[0], *ticks[3::2]])[::tick_step]
    return {"tickvals": ticks, "ticktext": [f"{distances[index]:,}" for index in ticks]}


def _pair_usage(rows: pd.DataFrame) -> pd.DataFrame:
    """Columns theta, log_theta, and mean_abs over documents with its interval (low, high), by model and rotary pair."""
    rows, keys = rows.astype({"mean_abs": "float64"}), ["model", "pair"]
    documents = rows.groupby([*keys, "doc"], observed=True)["mean_abs"].mean()
    values = mean_with_interval(documents, "mean_abs").set_axis(["mean_abs", "low", "high"], axis=1)
    theta = rows.groupby(keys, observed=True)["theta"].first()
    rotating = theta.where(theta > 0).astype("float64")
    return values.assign(theta=theta, log_theta=np.log10(rotating))
