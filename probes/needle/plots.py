"""Figures of needle trials: success by context length and depth, retrieval scores of heads, agreement, ablation."""

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from headscope.ablation_names import describe_ablation
from headscope.plots import axes, head_scatter, style
from headscope.rendering.text import format_percent
from headscope.runs.column_metadata import capitalise, statistic
from probes.needle.analysis import seed_columns, success_rates
from probes.needle.head_columns import RETRIEVAL_THRESHOLD

SHARE_TICKS = {"tickvals": [0, 0.2, 0.4, 0.6, 0.8, 1], "ticktext": ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]}
"""Plotly settings of the ticks of a share; plotly's own format of per cent has no space."""


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
    hover_data = np.dstack([counts.map("{:.0f}".format), low_text, high_text])
    figure = _length_depth_heatmap(title, shares, hover_data, hover)
    figure.update_traces(text=text.to_numpy(), colorbar={"title": {"text": "share"}, **SHARE_TICKS})
    return figure.update_traces(texttemplate="%{text}" if shares.size <= 60 else None)


def plot_success_by_length(needles: pd.DataFrame, mode: str = "strict") -> go.Figure:
    """Share of successful trials by context length over all depths: one line per model with its 95 % confidence
    band."""
    title = f"{_needle_kind_label(mode)} retrieved, by context length"
    if reason := style.missing_data_reason(needles, "model", "mode", "context_length", "success"):
        return style.empty_figure(title, reason)
    trials = needles[needles["mode"] == mode]
    figure = style.new_figure(title)
    for label, model_style in style.model_styles(trials).items():
        success = success_rates(trials[trials["model"] == label], ["context_length"])
        line = success.rename(columns={"share": "mean"})[["mean", "low", "high"]]
        style.add_line_with_band(figure, line, model_style, "%{x:,} tokens: %{text} of trials")
        figure.data[-1].text = [format_percent(share) for share in line["mean"]]
    figure.update_xaxes(title_text="context length (tokens)", tickformat=",")
    figure.update_yaxes(title_text="share of trials", range=[-0.02, 1.02], **SHARE_TICKS)
    return style.fit_legend(figure)


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
        line = ablation_rows[ablation_rows["heads"] == heads].set_index("size").rename(columns={"effect": "mean"})
        if line.empty:
            continue
        line.index = pd.Index([sizes.index(size) for size in line.index])
        if heads == "random":
            thin_line = {
                "mode": "lines",
                "line": {"color": model_style.colour, "width": 0.7, "dash": "dot"},
                "hoverinfo": "skip",
            }
            for extreme in ("minimum", "maximum"):
                figure.add_scatter(x=line.index, y=line[extreme], showlegend=False, legendgroup=name, **thin_line)
        style.add_line_with_band(
            figure, line[["mean", "low", "high"]], model_style, "heads ablated: %{customdata}; %{text} of trials"
        )
        figure.data[-1].text = [format_percent(share) for share in line["mean"]]
        figure.data[-1].customdata = [sizes[index] for index in line.index]
    ticks = {"tickvals": [*range(len(sizes))], "ticktext": [str(size) for size in sizes]}
    figure.update_xaxes(title_text="ablated heads", **ticks)
    figure.update_yaxes(title_text="share of trials", range=[-0.02, 1.02], **SHARE_TICKS)
    return style.fit_legend(figure)


def plot_detector_comparison(heads: pd.DataFrame, model: str, x: str, y: str) -> go.Figure:
    """Scatter plot of two scores that detect retrieval heads: columns `x` and `y` of `heads`, one point per head."""
    first, second = statistic(x), statistic(y)
    figure = style.new_figure(f"{capitalise(second.label)} against {first.label}: {style.escape_label(model)}")
    if reason := style.missing_data_reason(heads[heads["model"] == model], x, y):
        return style.empty_figure(figure.layout.title.text, reason)
    points = heads[heads["model"] == model].dropna(subset=[x, y])
    head_scatter.add_points(figure, points, x, y, "%{x:.3f} and %{y:.3f}")
    for update_axis, name, score in ((figure.update_xaxes, x, first), (figure.update_yaxes, y, second)):
        label = score.label.replace(" for ", "<br>for ") + (f" ({score.unit})" if score.unit else "")
        update_axis(title_text=label, range=_axis_range(heads[name].dropna()))
    return style.set_metadata(
        head_scatter.add_layer_colorbar(figure), value=second.label, model=style.escape_label(model)
    )


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
    hover = "score %{z:.3f} over %{customdata:.0f} trials"
    figure = _length_depth_heatmap(title, scores, trials.to_numpy(), hover)
    return figure.update_traces(colorbar={"title": {"text": "score"}})


def plot_ranked_scores(heads: pd.DataFrame) -> go.Figure:
    """Retrieval scores in descending order: one line per model, with the 95 % confidence interval of each score."""
    title = "Retrieval score, heads ranked"
    if reason := style.missing_data_reason(heads, "model", "retrieval"):
        return style.empty_figure(title, reason)
    scored = heads.dropna(subset=["retrieval"])
    figure = style.new_figure(title)
    for label, model_style in style.model_styles(scored).items():
        ranked = scored[scored["model"] == label].sort_values("retrieval", ascending=False, kind="stable")
        line = pd.DataFrame(
            {"mean": ranked["retrieval"], "low": ranked["retrieval_low"], "high": ranked["retrieval_high"]}
        ).set_axis(np.arange(1, len(ranked) + 1))
        style.add_line_with_band(
            figure, line, model_style, "rank %{x}: layer %{customdata[0]}, head %{customdata[1]}, score %{y:.3f}"
        )
        figure.data[-1].customdata = ranked[head_scatter.HEAD_COLUMNS].to_numpy()
    figure.add_hline(y=RETRIEVAL_THRESHOLD, line={"color": style.TEXT_COLOUR, "dash": "dot", "width": 1})
    head_count = int(scored.groupby("model", observed=True).size().max())
    figure.update_xaxes(title_text="rank of the head", **axes.log_axis([1, head_count]))
    figure.update_yaxes(title_text="retrieval score", rangemode="tozero")
    return style.declare_head_points(style.fit_legend(figure))


def plot_against_growth(heads: pd.DataFrame, model: str) -> go.Figure:
    """Scatter plot of retrieval score and growth exponent of the heads of `model`; colour is the layer."""
    title = f"Retrieval against growth: {style.escape_label(model)}"
    if reason := style.missing_data_reason(heads, "model", "retrieval", "growth") or style.missing_data_reason(
        heads[heads["model"] == model], "retrieval", "growth"
    ):
        return style.empty_figure(title, reason)
    points = heads[heads["model"] == model].dropna(subset=["retrieval", "growth"])
    figure = style.new_figure(title)
    head_scatter.add_points(figure, points, "growth", "retrieval", "growth exponent %{x:.3g}, score %{y:.3f}")
    # All models in `heads` have the same axes, because readers compare their charts.
    figure.update_xaxes(title_text="growth exponent", range=_axis_range(heads["growth"]))
    figure.update_yaxes(title_text="retrieval score", range=_axis_range(heads["retrieval"]))
    return style.set_metadata(
        head_scatter.add_layer_colorbar(figure), value="retrieval score", model=style.escape_label(model)
    )


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
    figure = style.new_figure(title)
    head_scatter.add_points(figure, points, seeds[0], seeds[1], "score %{x:.3f} and %{y:.3f}")
    limits = _axis_range(scores[seeds].max())
    head_scatter.add_diagonal(figure, [0, limits[1]])
    figure.update_xaxes(title_text=f"score with seed {seeds[0]}", range=limits)
    figure.update_yaxes(title_text=f"score with seed {seeds[1]}", range=limits)
    return head_scatter.add_layer_colorbar(figure)


def _needle_kind_label(mode: str) -> str:
    """Name of the kind of needle of a mode, for chart titles."""
    return "Indirect needle" if mode == "indirect" else "Needle"


def _axis_range(values: pd.Series) -> list[float]:
    """Axis range that contains the values and zero, with a margin of 4 %."""
    low, high = min(0.0, float(values.min())), float(values.max()) or 1.0
    return [low - 0.04 * (high - low), high + 0.04 * (high - low)]


def _length_depth_heatmap(title: str, z: pd.DataFrame, hover_data: npt.ArrayLike, hover_template: str) -> go.Figure:
    """Heatmap of values from 0 to 1 by depth (rows) and context length (columns)."""
    figure = style.new_figure(title, 320)
    figure.add_heatmap(
        x=[f"{length:,}" for length in z.columns],
        y=[format_percent(depth) for depth in z.index],
        z=z.to_numpy(),
        customdata=hover_data,
        hovertemplate=f"%{{x}} tokens, depth %{{y}}: {hover_template}<extra></extra>",
        xgap=1,
        ygap=1,
        zmin=0,
        zmax=1,
        colorscale=style.SEQUENTIAL_SCALE,
    )
    depths, lengths = z.shape
    figure.update_xaxes(title_text="context length (tokens)", type="category", dtick=-(-lengths // 7), showgrid=False)
    figure.update_yaxes(
        title_text="depth", autorange="reversed", type="category", dtick=-(-depths // 12), showgrid=False
    )
    return style.set_top_margin(figure)
