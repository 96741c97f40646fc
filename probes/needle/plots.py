"""Needle-in-a-Haystack: where a model finds the needle, which heads copy it, and how far the scores can be trusted."""

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, head_scatter, style
from headscope.runs.column_metadata import statistic
from probes.needle.analysis import seed_columns, success_by_cell
from probes.needle.heads import RETRIEVAL_THRESHOLD


def plot_success_map(needles: pd.DataFrame, model: str, mode: str = "strict") -> go.Figure:
    """Share of trials that succeed, context length by depth, over needles and haystacks; depth 0 is at the top."""
    title = f"{_needle_kind_label(mode)} found: {style.escape_label(model)}"
    if why := style.missing_data_reason(needles, "model", "mode", "context_length", "depth", "success"):
        return style.empty_figure(title, why)
    counted = success_by_cell(needles[(needles["model"] == model) & (needles["mode"] == mode)])
    if counted.empty:
        return style.empty_figure(title, "no data to plot")
    shares, trials, low, high = (
        counted.pivot_table(index="depth", columns="context_length", values=name, observed=True)
        for name in ("share", "trials", "low", "high")
    )
    hover = (
        "%{z:.0%} of %{customdata[0]:.0f} trials<br>95 % Wilson interval %{customdata[1]:.0%} to %{customdata[2]:.0%}"
    )
    told = np.dstack([trials, low, high])
    made = _length_depth_heatmap(title, shares, told, hover)
    made.update_traces(colorbar={"title": {"text": "share"}, "tickformat": ".0%"})
    return made.update_traces(texttemplate="%{z:.0%}" if shares.size <= 60 else None)


def plot_success_by_length(needles: pd.DataFrame, mode: str = "strict") -> go.Figure:
    """Share of trials that succeed by context length, over depths: a line a model in its 95 % Wilson interval."""
    title = f"{_needle_kind_label(mode)} found, by context length"
    if why := style.missing_data_reason(needles, "model", "mode", "context_length", "success"):
        return style.empty_figure(title, why)
    trials = needles[needles["mode"] == mode]
    made = style.new_figure(title)
    for label, look in style.model_styles(trials).items():
        counted = success_by_cell(trials[trials["model"] == label].assign(depth=0.0)).set_index("context_length")
        line = counted.rename(columns={"share": "mean"})[["mean", "low", "high"]]
        style.add_line_with_band(made, line, look, "%{x:,} tokens: %{y:.0%} of trials")
    made.update_xaxes(title_text="context length (tokens)", tickformat=",")
    made.update_yaxes(title_text="share of trials", tickformat=".0%", range=[-0.02, 1.02])
    return style.fit_legend(made)


def plot_ablation_curve(ablation_rows: pd.DataFrame, model: str) -> go.Figure:
    """Success against the number of heads silenced, the top ones and random ones, each in its Wilson interval; from
    rows of `found.curve` of one model, mode and way. Thin lines are the extremes of the random draws."""
    (how,), (mode,) = ablation_rows["ablation"].unique(), ablation_rows["mode"].unique()
    made = style.new_figure(
        f"{_needle_kind_label(mode)} found with heads silenced ({how}): {style.escape_label(model)}"
    )
    sizes = sorted(ablation_rows["size"].unique())
    for top, name, colour, dash in ((True, "top heads", 4, 0), (False, "random heads of the same layers", 0, 1)):
        look = style.ModelStyle(name, style.PALETTE[colour], style.LINE_DASHES[dash], style.MARKER_SYMBOLS[dash])
        mine = ablation_rows[ablation_rows["top"] == top].set_index("size").rename(columns={"share": "mean"})
        mine.index = pd.Index([sizes.index(size) for size in mine.index])
        if not top:
            thin = {"mode": "lines", "line": {"color": look.colour, "width": 0.7, "dash": "dot"}, "hoverinfo": "skip"}
            for end in ("least", "most"):
                made.add_scatter(x=mine.index, y=mine[end], showlegend=False, legendgroup=name, **thin)
        style.add_line_with_band(made, mine[["mean", "low", "high"]], look, "%{customdata} heads: %{y:.0%} of trials")
        made.data[-1].customdata = [sizes[at] for at in mine.index]
    ticks = {"tickvals": [*range(len(sizes))], "ticktext": [str(size) for size in sizes]}
    made.update_xaxes(title_text="heads silenced", **ticks)
    made.update_yaxes(title_text="share of trials", tickformat=".0%", range=[-0.02, 1.02])
    return style.fit_legend(made)


def plot_detector_comparison(heads: pd.DataFrame, model: str, x: str, y: str) -> go.Figure:
    """One score that detects retrieval heads against another, a dot a head."""
    first, second = statistic(x), statistic(y)
    made = style.new_figure(f"{second.label.capitalize()} against {first.label}: {style.escape_label(model)}")
    if why := style.missing_data_reason(heads[heads["model"] == model], x, y):
        return style.empty_figure(made.layout.title.text, why)
    points = heads[heads["model"] == model].dropna(subset=[x, y])
    head_scatter.add_points(made, points, x, y, "%{x:.3f} and %{y:.3f}")
    for axis, name, told in ((made.update_xaxes, x, first), (made.update_yaxes, y, second)):
        label = told.label.replace(", ", ",<br>") + (f" ({told.unit})" if told.unit else "")
        axis(title_text=label, range=_axis_range(heads[name].dropna()))
    return style.set_metadata(
        head_scatter.add_layer_colorbar(made), value=second.label, model=style.escape_label(model)
    )


def _needle_kind_label(mode: str) -> str:
    """What a mode's trials hide."""
    return "Indirect needle" if mode == "indirect" else "Needle"


def plot_head_retrieval(retrieval: pd.DataFrame, model: str, layer: int, head: int) -> go.Figure:
    """Copy score of one head over successful trials, context length by depth, mean over needles and haystacks.

    `retrieval` are rows of `heads.retrieval_rows`. A cell without a successful trial is a gap.
    """
    title = f"Retrieval of layer {layer}, head {head}: {style.escape_label(model)}"
    if why := style.missing_data_reason(retrieval, "model", "context_length", "depth", "score"):
        return style.empty_figure(title, why)
    place = (retrieval["model"] == model) & (retrieval["layer"] == layer) & (retrieval["head"] == head)
    rows = retrieval[place & retrieval["success"] & (retrieval["mode"] == "strict")]
    if rows.empty:
        return style.empty_figure(title, "no successful trial of this model")
    scores, trials = (
        rows.pivot_table(index="depth", columns="context_length", values="score", aggfunc=how)
        for how in ("mean", "size")
    )
    hover = "score %{z:.3f} over %{customdata:.0f} trials"
    made = _length_depth_heatmap(title, scores, trials.to_numpy(), hover)
    return made.update_traces(colorbar={"title": {"text": "score"}})


def plot_ranked_scores(heads: pd.DataFrame) -> go.Figure:
    """Retrieval score of every head, best first, one line a model with the 95 % interval of each head's mean."""
    title = "Retrieval score, heads ranked"
    if why := style.missing_data_reason(heads, "model", "retrieval"):
        return style.empty_figure(title, why)
    scored = heads.dropna(subset=["retrieval"])
    made = style.new_figure(title)
    for label, look in style.model_styles(scored).items():
        order = scored[scored["model"] == label].sort_values("retrieval", ascending=False, kind="stable")
        line = pd.DataFrame(
            {"mean": order["retrieval"], "low": order["retrieval_low"], "high": order["retrieval_high"]}
        ).set_axis(np.arange(1, len(order) + 1))
        style.add_line_with_band(
            made, line, look, "rank %{x}: layer %{customdata[0]}, head %{customdata[1]}, score %{y:.3f}"
        )
        made.data[-1].customdata = order[head_scatter.HEAD_COLUMNS].to_numpy()
    made.add_hline(y=RETRIEVAL_THRESHOLD, line={"color": style.TEXT_COLOUR, "dash": "dot", "width": 1})
    most = int(scored.groupby("model", observed=True).size().max())
    made.update_xaxes(title_text="rank of the head", **axes.log_axis([1, most]))
    made.update_yaxes(title_text="retrieval score", rangemode="tozero")
    return style.declare_head_points(style.fit_legend(made))


def plot_against_growth(heads: pd.DataFrame, model: str) -> go.Figure:
    """Retrieval score of every head of `model` against its growth exponent; colour is the layer."""
    title = f"Retrieval against growth: {style.escape_label(model)}"
    if why := style.missing_data_reason(heads, "model", "retrieval", "growth") or style.missing_data_reason(
        heads[heads["model"] == model], "retrieval", "growth"
    ):
        return style.empty_figure(title, why)
    points = heads[heads["model"] == model].dropna(subset=["retrieval", "growth"])
    made = style.new_figure(title)
    head_scatter.add_points(made, points, "growth", "retrieval", "growth exponent %{x:.3g}, score %{y:.3f}")
    # One scale for all models in `heads`, whose charts stand side by side.
    made.update_xaxes(title_text="growth exponent", range=_axis_range(heads["growth"]))
    made.update_yaxes(title_text="retrieval score", range=_axis_range(heads["retrieval"]))
    return style.set_metadata(
        head_scatter.add_layer_colorbar(made), value="retrieval score", model=style.escape_label(model)
    )


def plot_seed_agreement(scores: pd.DataFrame, model: str) -> go.Figure:
    """Retrieval score of every head in one haystack against another, from `found.by_seed`: its first and last seed.

    The dashed line is y = x; colour is the layer.
    """
    title = f"Retrieval in two haystacks: {style.escape_label(model)}"
    columns = seed_columns(scores)
    if why := style.missing_data_reason(scores, "model"):
        return style.empty_figure(title, why)
    seeds = [*columns[:1], *columns[1:][-1:]]
    points = scores[scores["model"] == model].dropna(subset=seeds)
    if len(seeds) < 2 or points.empty:
        return style.empty_figure(title, "a comparison needs two seeds with successful trials")
    made = style.new_figure(title)
    head_scatter.add_points(made, points, seeds[0], seeds[1], "score %{x:.3f} and %{y:.3f}")
    ends = _axis_range(scores[seeds].max())
    head_scatter.add_diagonal(made, [0, ends[1]])
    made.update_xaxes(title_text=f"score with seed {seeds[0]}", range=ends)
    made.update_yaxes(title_text=f"score with seed {seeds[1]}", range=ends)
    return head_scatter.add_layer_colorbar(made)


def _axis_range(values: pd.Series) -> list[float]:
    """The ends of an axis over the values and zero, with a little room."""
    low, high = min(0.0, float(values.min())), float(values.max()) or 1.0
    return [low - 0.04 * (high - low), high + 0.04 * (high - low)]


def _length_depth_heatmap(title: str, z: pd.DataFrame, hover_data: npt.ArrayLike, hover_template: str) -> go.Figure:
    """A map of numbers from 0 to 1, rows depths and columns context lengths; `told` is what `hover` refers to."""
    made = style.new_figure(title, 320)
    made.add_heatmap(
        x=[f"{length:,}" for length in z.columns],
        y=[f"{depth:.0%}" for depth in z.index],
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
    made.update_xaxes(title_text="context length (tokens)", type="category", dtick=-(-lengths // 7), showgrid=False)
    made.update_yaxes(title_text="depth", autorange="reversed", type="category", dtick=-(-depths // 12), showgrid=False)
    return style.set_top_margin(made)
