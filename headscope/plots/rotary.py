"""Rotary pairs of a head: their frequencies, their usage, and their contribution by distance."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import make_colorscale

from headscope.plots import shapes, style
from headscope.plots.colour_range import ZERO_CENTRED_SCALE
from headscope.plots.draft import Draft, HeadPlot
from headscope.runs.aggregation import mean_with_interval, without_samples

DISTANCE_TITLE = "distance i − j (tokens)"
PAIR_TITLE = "rotary pair f (0 is fastest)"
Values = npt.NDArray[np.float64]


class PairUsage(NamedTuple):
    """Usage (logits) of the rotary pairs of one head and model, its interval, and their frequencies (rad/token)."""

    pair: Values
    mean: Values
    low: Values
    high: Values
    theta: Values
    log_theta: Values


def pair_usage(pairs: pd.DataFrame, layer: int, head: int) -> dict[str, PairUsage]:
    """The usage of the pairs of one head by model, at its longest context length."""
    usage = _pair_usage(_rows_at_longest_context(pairs, layer, head))
    return {
        str(label): PairUsage(
            rows.index.get_level_values("pair").to_numpy(),
            *(rows[name].to_numpy() for name in ("mean_abs", "low", "high", "theta", "log_theta")),
        )
        for label, rows in usage.groupby(level="model", observed=True)
    }


def draw_spectrum(
    usage_by_model: Mapping[str, PairUsage], styles: Mapping[str, style.ModelStyle], layer: int, head: int
) -> go.Figure:
    """Plot the rotary frequencies of one head, log10 theta (rad/token), above their usage E|c_f| (logits).

    There is one line per model. Error bars are 95 % confidence intervals over documents if there are enough. A pair
    without rotation (theta 0) is a gap in the upper plot.
    """
    figure = Draft.stacked(SPECTRUM.title_of(layer, head), 520)
    for label, model_style in styles.items():
        usage = usage_by_model[label]
        line = {
            "type": "scatter",
            "x": usage.pair,
            "line": {"color": model_style.colour, "dash": model_style.dash},
            "name": model_style.name,
            "legendgroup": label,
            "customdata": usage.theta,
        }
        hover, name = "pair %{x}: θ = %{customdata:.3g} rad/token", f"<extra>{model_style.name}</extra>"
        frequencies = {"y": usage.log_theta, "mode": "lines", "showlegend": False, "hovertemplate": hover + name}
        sizes = {
            "y": usage.mean,
            "mode": "lines+markers",
            "marker": {"size": 5, "symbol": model_style.symbol},
            "error_y": style.error_bars(usage.mean, usage.low, usage.high),
            "showlegend": True,
            "hovertemplate": f"{hover}<br>E|c| %{{y:.3g}} logits{name}",
        }
        figure.add([line | frequencies], 1)
        figure.add([line | sizes], 2)
    figure.update_axis("yaxis", {"title": {"text": "log₁₀ θ (rad/token)"}})
    figure.update_axis("yaxis2", {"title": {"text": "mean |dot product| (logits)"}, "rangemode": "tozero"})
    figure.update_axis("xaxis2", {"title": {"text": "rotary pair f, highest frequency first"}})
    return figure.fit_legend().figure()


SPECTRUM = HeadPlot("pairs", ("model", "mean_abs", "theta"), "Rotary spectrum of", pair_usage, draw_spectrum)
plot_spectrum = SPECTRUM.plot


def plot_pair_profile(contributions: pd.DataFrame, layer: int, head: int, model: str) -> go.Figure:
    """Plot the mean contribution (logits) of each rotary pair of one head by distance i - j (tokens).

    The context length is the longest one of the model.
    """
    title = f"Pairs by distance: {style.escape_label(model)}, layer {layer}, head {head}"
    if reason := style.missing_data_reason(contributions, *DISTANCE_COLUMNS):
        return style.empty_figure(title, reason)
    rows = _rows_at_longest_context(contributions[contributions["model"] == model], layer, head)
    if rows.empty:
        return style.empty_figure(title, "this head was not measured")
    grid = _pair_distance_grid(rows)
    figure, distances = style.new_figure(title, 420), [int(distance) for distance in grid.columns]
    heatmap = _pair_heatmap([*grid.index], distances, grid.to_numpy(dtype=np.float64))
    figure.add_heatmap(**heatmap, colorbar={"title": {"text": "logits"}}, **ZERO_CENTRED_SCALE)
    x = {"title_text": DISTANCE_TITLE, **_distance_ticks(distances)}
    return style.set_top_margin(shapes.label_axes(figure, x, {"title_text": PAIR_TITLE, "autorange": "reversed"}))


class PairProfile(NamedTuple):
    """Mean contributions [pairs, distances] (logits) of the rotary pairs of one head and model.

    `limit` is the largest absolute contribution in any document.
    """

    pairs: list[int]
    distances: list[int]
    contributions: Values
    limit: float


def pair_profiles(contributions: pd.DataFrame, layer: int, head: int) -> dict[str, PairProfile]:
    """The pair profile of one head by model, at its longest context length."""
    rows = _rows_at_longest_context(contributions, layer, head)
    grids = _pair_distance_grid(rows, ["model"])
    limits = rows["mean_signed"].abs().groupby(rows["model"], observed=True).max()
    profiles = {}
    distances_by_model: dict[Any, Any] = rows.groupby("model", observed=True)["distance"].unique().to_dict()
    for label, distances in distances_by_model.items():
        grid = grids.loc[label][sorted(distances.tolist())]
        profiles[str(label)] = PairProfile(
            grid.index.tolist(), grid.columns.tolist(), grid.to_numpy(dtype=np.float64), float(limits[label])
        )
    return profiles


def draw_pair_profiles(
    profiles: Mapping[str, PairProfile], styles: Mapping[str, style.ModelStyle], layer: int, head: int
) -> go.Figure:
    """Plot the pair profile of one head under every model side by side, with one colour scale."""
    names = [model_style.name for model_style in styles.values()]
    figure = Draft.panels(PROFILES.title_of(layer, head), names, columns=4, height=300)
    shown = {label: profiles[label] for label in styles}
    limit = float(np.fmax.reduce([profile.limit for profile in shown.values()])) or 1.0
    distances = sorted({distance for profile in shown.values() for distance in profile.distances})
    for index, (label, profile) in enumerate(shown.items()):
        values = profile.contributions
        if profile.distances != distances:
            values = pd.DataFrame(values, columns=profile.distances).reindex(columns=distances).to_numpy()
        heatmap = _pair_heatmap(profile.pairs, distances, values)
        figure.add([{"type": "heatmap", **heatmap, "coloraxis": "coloraxis", "name": styles[label].name}], index + 1)
    bar = {"title": {"text": "logits"}}
    scale = make_colorscale(style.DIVERGING_SCALE)
    figure.layout["coloraxis"] = {"cmin": -limit, "cmax": limit, "colorscale": scale, "colorbar": bar}
    figure.update_axes("x", _distance_ticks(distances, tick_step=2) | {"showgrid": False})
    figure.update_axes("y", {"autorange": "reversed", "showgrid": False})
    figure.set_outer_axis_titles(len(styles), DISTANCE_TITLE, PAIR_TITLE, 4)
    figure.layout["meta"] = {"value": "mean contribution (logits)", "x": "index of the distance"}
    return figure.set_top_margin(74).figure()


DISTANCE_COLUMNS = ("model", "pair", "distance", "mean_signed")
PROFILES = HeadPlot("distance", DISTANCE_COLUMNS, "Pairs by distance:", pair_profiles, draw_pair_profiles)
plot_pair_profiles = PROFILES.plot


class LogitByDistance(NamedTuple):
    """Mean logit of one head and model by distance (tokens)."""

    distances: npt.NDArray[np.int64]
    logits: Values


def logit_by_distance(contributions: pd.DataFrame, layer: int, head: int) -> dict[str, LogitByDistance]:
    """The mean logit of one head by model, at its longest context length."""
    rows = _rows_at_longest_context(contributions, layer, head)
    sums = rows["mean_signed"].astype("float64").groupby([rows["model"], rows["distance"]], observed=True).sum()
    return {
        str(label): LogitByDistance(
            logits.index.get_level_values("distance").to_numpy(), np.asarray(logits, np.float64)
        )
        for label, logits in sums.groupby(level="model", observed=True)
    }


def draw_logit_by_distance(
    lines: Mapping[str, LogitByDistance], styles: Mapping[str, style.ModelStyle], layer: int, head: int
) -> go.Figure:
    """Plot the mean logit of one head, summed over rotary pairs, by distance i - j (tokens): one line per model."""
    figure = Draft.single(LOGITS.title_of(layer, head))
    distances = sorted({*np.concatenate([lines[label].distances for label in styles]).tolist()})
    position = {distance: index for index, distance in enumerate(distances)}
    for label, model_style in styles.items():
        line = {
            "type": "scatter",
            "x": [position[distance] for distance in lines[label].distances.tolist()],
            "y": lines[label].logits,
            "mode": "lines",
            "line": {"color": model_style.colour, "dash": model_style.dash},
            "name": model_style.name,
            "customdata": lines[label].distances,
            "hovertemplate": f"%{{customdata:,}} tokens back: mean logit %{{y:+.3g}}<extra>{model_style.name}</extra>",
        }
        figure.add([line])
    figure.update_axis("xaxis", {"title": {"text": DISTANCE_TITLE}, **_distance_ticks(distances)})
    figure.update_axis("yaxis", {"title": {"text": "mean logit, sum over pairs"}})
    figure.layout["meta"] = {"x": "index of the distance"}
    return figure.fit_legend().figure()


LOGITS = HeadPlot("distance", DISTANCE_COLUMNS, "Logit by distance:", logit_by_distance, draw_logit_by_distance)
plot_logit_by_distance = LOGITS.plot


def _pair_distance_grid(rows: pd.DataFrame, by: Sequence[str] = ()) -> pd.DataFrame:
    """Mean contribution of the rotary pairs (rows, in groups of the `by` columns) by distance (columns)."""
    means = rows.groupby([*by, "pair", "distance"], observed=True)["mean_signed"].mean()
    return means.unstack()  # four times as fast as pivot_table


def _rows_at_longest_context(contributions: pd.DataFrame, layer: int, head: int) -> pd.DataFrame:
    """The head's rows at the longest context length of each model."""
    rows = contributions[(contributions["layer"] == layer) & (contributions["head"] == head)]
    longest = rows.groupby("model", observed=True)["context_length"].transform("max")
    at_longest: pd.DataFrame = rows[rows["context_length"] == longest]
    return at_longest


def _pair_heatmap(pairs: list[int], distances: list[int], contributions: Values) -> dict[str, Any]:
    """Plotly settings of a heatmap of pairs (rows) by distance (columns), with one column per measured distance."""
    return {
        "x": [*range(len(distances))],
        "y": pairs,
        "z": contributions,
        "customdata": np.broadcast_to(distances, contributions.shape),
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
    values = without_samples(mean_with_interval(documents, "mean_abs")).set_axis(["mean_abs", "low", "high"], axis=1)
    theta = rows.groupby(keys, observed=True)["theta"].first()
    rotating = theta.where(theta > 0).astype("float64")
    return values.assign(theta=theta, log_theta=np.log10(rotating))
