"""Figures of needle trials: success by context length and depth, retrieval scores of heads, agreement, ablation."""

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.base.ablation_names import describe_ablation
from headscope.plots import axes, head_scatter, shapes, style
from headscope.rendering.text import format_percent
from headscope.runs.column_metadata import capitalise, statistic
from probes.needle.analysis import seed_columns, success_rates
from probes.needle.scores import RETRIEVAL_THRESHOLD

SHARE_TICKS = {"tickvals": [0, 0.2, 0.4, 0.6, 0.8, 1], "ticktext": ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]}
"""Plotly settings of the ticks of a share; plotly's own format of per cent has no space."""
SHARE_AXIS = {"title_text": "share of trials", "range": [-0.02, 1.02], **SHARE_TICKS}


def plot_success_map(needles: pd.DataFrame, model: str, mode: str = "strict") -> go.Figure:
    """Heatmap of the share of successful trials of `model` by context length and depth; depth 0 is at the top."""
    title = f"{_needle_kind_label(mode)} retrieved: {style.escape_label(model)}"
    if reason := style.missing_data_reason(needles, "model", "mode", "context_length", "depth", "success"):
        return style.empty_figure(title, reason)
    trials = needles[(needles["model"] == model) & (needles["mode"] == mode)]
    success = success_rates(trials, ["depth", "context_length"])
    if success.empty:
        return style.empty_figure(title, "no data to plot")
    shares, counts, low, high = (success[name].unstack() for name in ("share", "trials", "low", "high"))
    hover = "%{text} of %{customdata[0]} trials<br>95 % confidence interval %{customdata[1]} to %{customdata[2]}"
    text, low_text, high_text = (
        frame.map(lambda share: "" if np.isnan(share) else format_percent(share)) for frame in (shares, low, high)
    )
    return _length_depth_heatmap(
        title,
        shares,
        hover,
        customdata=np.dstack([counts.map("{:.0f}".format), low_text, high_text]),
        text=text.to_numpy(),
        texttemplate="%{text}" if shares.size <= 60 else None,
        colorbar={"title": {"text": "share"}, **SHARE_TICKS},
    )


def plot_success_by_length(needles: pd.DataFrame, mode: str = "strict") -> go.Figure:
    """Share of successful trials by context length over all depths: one line per model with its 95 % confidence
    band."""
    title = f"{_needle_kind_label(mode)} retrieved, by context length"
    if reason := style.missing_data_reason(needles, "model", "mode", "context_length", "success"):
        return style.empty_figure(title, reason)
    trials = needles[needles["mode"] == mode]
    curves = {}
    for label, model_style in style.model_styles(trials).items():
        success = success_rates(trials[trials["model"] == label], ["context_length"]).rename(columns={"share": "mean"})
        curves[model_style] = success[["mean", "low", "high"]].assign(text=success["mean"].map(format_percent))
    axis = shapes.length_axis(trials["context_length"])
    return shapes.bands(title, curves, "%{x:,} tokens: %{text} of trials", axis, SHARE_AXIS)


def plot_ablation_curve(ablation_rows: pd.DataFrame, model: str) -> go.Figure:
    """Success by the number of ablated heads, for top heads and for random heads, with 95 % confidence bands.

    Thin lines are the minimum and the maximum over random sets. `ablation_rows` are rows of `analysis.ablation_curves`
    of one model, mode and kind of ablation.
    """
    (ablation,), (mode,) = ablation_rows["intervention"].unique(), ablation_rows["mode"].unique()
    change = f"{_needle_kind_label(mode)} retrieved under {describe_ablation(ablation)} of heads"
    figure = style.new_figure(f"{change}: {style.escape_label(model)}")
    sizes = sorted(ablation_rows["size"].unique())
    for heads, name, colour, dash in (("top", "top heads", 4, 0), ("random", "random heads of the same layers", 0, 1)):
        model_style = style.ModelStyle(
            name, style.CATEGORY_PALETTE[colour], style.LINE_DASHES[dash], style.MARKER_SYMBOLS[dash]
        )
        line = ablation_rows[ablation_rows["heads"] == heads].rename(columns={"effect": "mean", "size": "customdata"})
        if line.empty:
            continue
        line = line.assign(text=line["mean"].map(format_percent)).set_index(line["customdata"].map(sizes.index))
        if heads == "random":
            thin_line = {
                "mode": "lines",
                "line": {"color": model_style.colour, "width": 0.7, "dash": "dot"},
                "hoverinfo": "skip",
            }
            for extreme in ("minimum", "maximum"):
                figure.add_scatter(x=line.index, y=line[extreme], showlegend=False, legendgroup=name, **thin_line)
        curve = line[["mean", "low", "high", "text", "customdata"]]
        style.add_line_with_band(figure, curve, model_style, "heads ablated: %{customdata}; %{text} of trials")
    ticks = {"tickvals": [*range(len(sizes))], "ticktext": [str(size) for size in sizes]}
    return shapes.finish(figure, {"title_text": "ablated heads", **ticks}, SHARE_AXIS)


def plot_detector_comparison(heads: pd.DataFrame, model: str, x: str, y: str) -> go.Figure:
    """Scatter plot of two scores that detect retrieval heads: columns `x` and `y` of `heads`, one point per head."""
    first, second = statistic(x), statistic(y)
    title = f"{capitalise(second.label)} against {first.label}: {style.escape_label(model)}"
    labels = [score.label_with_unit.replace(" for ", "<br>for ") for score in (first, second)]
    return _plot_scores(heads, (x, y), title, "%{x:.3f} and %{y:.3f}", (labels[0], labels[1]), second.label, model)


def plot_head_retrieval(retrieval: pd.DataFrame, model: str, layer: int, head: int) -> go.Figure:
    """Heatmap of the retrieval score of one head over successful trials by context length and depth.

    `retrieval` are rows of `heads.retrieval_rows`. Cells without a successful trial are empty.
    """
    title = f"Retrieval of layer {layer}, head {head}: {style.escape_label(model)}"
    if reason := style.missing_data_reason(retrieval, "model", "context_length", "depth", "score"):
        return style.empty_figure(title, reason)
    is_head = (retrieval["model"] == model) & (retrieval["layer"] == layer) & (retrieval["head"] == head)
    rows = retrieval[is_head & retrieval["success"] & (retrieval["mode"] == "strict")]
    if rows.empty:
        return style.empty_figure(title, "no successful trial of this model")
    cells = rows.groupby(["depth", "context_length"])["score"].agg(["mean", "size"])
    scores, trials = (cells[name].unstack() for name in ("mean", "size"))
    hover, bar = "score %{z:.3f} over %{customdata:.0f} trials", {"title": {"text": "score"}}
    return _length_depth_heatmap(title, scores, hover, customdata=trials.to_numpy(), colorbar=bar)


def plot_ranked_scores(heads: pd.DataFrame) -> go.Figure:
    """Retrieval scores in descending order: one line per model, with the 95 % confidence interval of each score."""
    title = "Retrieval score, heads ranked"
    if reason := style.missing_data_reason(heads, "model", "retrieval"):
        return style.empty_figure(title, reason)
    scored = heads.dropna(subset=["retrieval"])
    hover = "rank %{x}: layer %{customdata[0]}, head %{customdata[1]}, score %{y:.3f}"
    columns = {"retrieval": "mean", "retrieval_low": "low", "retrieval_high": "high"}
    curves = {}
    for label, model_style in style.model_styles(scored).items():
        ranked = scored[scored["model"] == label].sort_values("retrieval", ascending=False, kind="stable")
        line = ranked.rename(columns=columns)[[*columns.values()]].set_axis(np.arange(1, len(ranked) + 1))
        line["customdata"] = ranked[head_scatter.HEAD_COLUMNS].to_numpy().tolist()
        curves[model_style] = line
    head_count = int(scored.groupby("model", observed=True).size().max())
    x = {"title_text": "rank of the head", **axes.log_axis([1, head_count])}
    y = {"title_text": "retrieval score", "rangemode": "tozero"}
    figure = shapes.bands(title, curves, hover, x, y, level=RETRIEVAL_THRESHOLD)
    return style.declare_head_points(figure)


def plot_against_growth(heads: pd.DataFrame, model: str) -> go.Figure:
    """Scatter plot of retrieval score and growth exponent of the heads of `model`; colour is the layer."""
    title = f"Retrieval against growth: {style.escape_label(model)}"
    names, hover = ("growth exponent", "retrieval score"), "growth exponent %{x:.3g}, score %{y:.3f}"
    return _plot_scores(heads, ("growth", "retrieval"), title, hover, names, names[1], model)


def _plot_scores(
    heads: pd.DataFrame,
    columns: tuple[str, str],
    title: str,
    hover: str,
    labels: tuple[str, str],
    value: str,
    model: str,
) -> go.Figure:
    """One column of the heads of a model against another; all models in `heads` have the same axes, because readers
    compare their charts."""
    if reason := style.missing_data_reason(heads, "model", *columns) or style.missing_data_reason(
        heads[heads["model"] == model], *columns
    ):
        return style.empty_figure(title, reason)
    points = heads[heads["model"] == model].dropna(subset=[*columns])
    x, y = (
        {"title_text": label, "range": _axis_range(heads[name])} for label, name in zip(labels, columns, strict=True)
    )
    figure = shapes.head_points(title, points, columns, hover, x, y)
    return style.set_metadata(figure, value=value, model=style.escape_label(model))


def plot_seed_agreement(scores: pd.DataFrame, model: str) -> go.Figure:
    """Scatter plot of the retrieval scores of the first and the last seed, from `analysis.scores_by_seed`.

    The dashed line is y = x; colour is the layer.
    """
    title = f"Retrieval in two haystacks: {style.escape_label(model)}"
    columns = seed_columns(scores)
    if reason := style.missing_data_reason(scores, "model"):
        return style.empty_figure(title, reason)
    seeds = [*columns[:1], *columns[1:][-1:]]
    points = scores[scores["model"] == model].dropna(subset=seeds)
    if len(seeds) < 2 or points.empty:
        return style.empty_figure(title, "a comparison needs two seeds with successful trials")
    limits = _axis_range(scores[seeds].max())
    x, y = ({"title_text": f"score with seed {seed}", "range": limits} for seed in seeds)
    hover = "score %{x:.3f} and %{y:.3f}"
    return shapes.head_points(title, points, (seeds[0], seeds[1]), hover, x, y, diagonal=(0, limits[1]))


def _needle_kind_label(mode: str) -> str:
    """Name of the kind of needle of a mode, for chart titles."""
    return "Indirect needle" if mode == "indirect" else "Needle"


def _axis_range(values: pd.Series) -> list[float]:
    """Axis range that contains the values and zero, with a margin of 4 %."""
    low, high = min(0.0, float(values.min())), float(values.max()) or 1.0
    return [low - 0.04 * (high - low), high + 0.04 * (high - low)]


def _length_depth_heatmap(title: str, z: pd.DataFrame, hover: str, **cells: Any) -> go.Figure:
    """Heatmap of values from 0 to 1 by depth (rows) and context length (columns)."""
    depths, lengths = z.shape
    x = {"title_text": "context length (tokens)", "type": "category", "dtick": -(-lengths // 7), "showgrid": False}
    y = {"autorange": "reversed", "type": "category", "dtick": -(-depths // 12), "showgrid": False}
    return shapes.matrix(
        title,
        z.rename(columns="{:,}".format, index=format_percent),
        f"%{{x}} tokens, depth %{{y}}: {hover}",
        x,
        {"title_text": "depth", **y},
        height=320,
        zmin=0,
        zmax=1,
        **cells,
    )
