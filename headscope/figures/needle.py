"""Needle-in-a-Haystack: where a model finds the needle, which heads copy it, and how far the scores can be trusted."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.figures import axes, style
from headscope.needles import seed_columns, success
from headscope.roles import RETRIEVAL_HEAD

OUTLINE = {"color": "rgba(128,128,128,0.8)", "width": 0.7}
FROM_ZERO = {"zmin": 0, "zmax": 1, "colorscale": style.SEQUENTIAL}


def success_map(needles: pd.DataFrame, model: str, mode: str = "strict") -> go.Figure:
    """Share of trials that succeed, context length by depth, over needles and haystacks; depth 0 is at the top."""
    title = f"Needle found: {style.text(model)}"
    if why := style.lacks(needles, "model", "mode", "context_length", "depth", "success"):
        return style.nothing(title, why)
    found = success(needles[(needles["model"] == model) & (needles["mode"] == mode)])
    if found.empty:
        return style.nothing(title, "no rows to show")
    shares, trials, low, high = (
        found.pivot_table(index="depth", columns="context_length", values=name, observed=True)
        for name in ("share", "trials", "low", "high")
    )
    made = style.figure(title, 320)
    made.add_heatmap(
        x=[f"{length:,}" for length in shares.columns],
        y=[f"{depth:.0%}" for depth in shares.index],
        z=shares.to_numpy(),
        customdata=np.dstack([trials, low, high]),
        hovertemplate="%{x} tokens, depth %{y}: %{z:.0%} of %{customdata[0]:.0f} trials"
        "<br>95 % Wilson interval %{customdata[1]:.0%} to %{customdata[2]:.0%}<extra></extra>",
        texttemplate="%{z:.0%}" if shares.size <= 60 else None,
        xgap=1,
        ygap=1,
        colorbar={"title": {"text": "share"}, "tickformat": ".0%"},
        **FROM_ZERO,
    )
    return _length_by_depth(made, *shares.shape)


def head_map(retrieval: pd.DataFrame, model: str, layer: int, head: int) -> go.Figure:
    """Copy score of one head over successful trials, context length by depth, mean over needles and haystacks.

    `retrieval` are rows of `summary.retrieval_rows`, of mode strict. A cell without a successful trial is a gap.
    """
    title = f"Retrieval of layer {layer}, head {head}: {style.text(model)}"
    if why := style.lacks(retrieval, "model", "context_length", "depth", "score"):
        return style.nothing(title, why)
    place = (retrieval["model"] == model) & (retrieval["layer"] == layer) & (retrieval["head"] == head)
    rows = retrieval[place & retrieval["success"] & (retrieval["mode"] == "strict")]
    if rows.empty:
        return style.nothing(title, "no successful trial of this model")
    scores, trials = (
        rows.pivot_table(index="depth", columns="context_length", values="score", aggfunc=how)
        for how in ("mean", "size")
    )
    made = style.figure(title, 320)
    made.add_heatmap(
        x=[f"{length:,}" for length in scores.columns],
        y=[f"{depth:.0%}" for depth in scores.index],
        z=scores.to_numpy(),
        customdata=trials.to_numpy(),
        hovertemplate="%{x} tokens, depth %{y}: score %{z:.3f} over %{customdata:.0f} trials<extra></extra>",
        xgap=1,
        ygap=1,
        colorbar={"title": {"text": "score"}},
        **FROM_ZERO,
    )
    return _length_by_depth(made, *scores.shape)


def ranked(heads: pd.DataFrame) -> go.Figure:
    """Retrieval score of every head, best first, one line a model with the 95 % interval of each head's mean."""
    title = "Retrieval score, heads ranked"
    if why := style.lacks(heads, "model", "retrieval"):
        return style.nothing(title, why)
    scored = heads.dropna(subset=["retrieval"])
    made = style.figure(title)
    for label, look in style.looks(scored).items():
        mine = scored[scored["model"] == label].sort_values("retrieval", ascending=False, kind="stable")
        line = pd.DataFrame(
            {"mean": mine["retrieval"], "low": mine["retrieval_low"], "high": mine["retrieval_high"]}
        ).set_axis(np.arange(1, len(mine) + 1))
        style.band(made, line, look, "rank %{x}: layer %{customdata[0]}, head %{customdata[1]}, score %{y:.3f}")
        made.data[-1].customdata = mine[["layer", "head", "kv_group"]].to_numpy()
    made.add_hline(y=RETRIEVAL_HEAD, line={"color": style.INK, "dash": "dot", "width": 1})
    most = int(scored.groupby("model", observed=True).size().max())
    made.update_xaxes(title_text="rank of the head", **axes.log_axis([1, most]))
    made.update_yaxes(title_text="retrieval score", rangemode="tozero")
    return style.of_heads(style.room_for_legend(made))


def against_growth(heads: pd.DataFrame, model: str) -> go.Figure:
    """Retrieval score of every head of `model` against its growth exponent; colour is the layer."""
    title = f"Retrieval against growth: {style.text(model)}"
    if why := style.lacks(heads, "model", "retrieval", "growth") or style.lacks(
        heads[heads["model"] == model], "retrieval", "growth"
    ):
        return style.nothing(title, why)
    mine = heads[heads["model"] == model].dropna(subset=["retrieval", "growth"])
    made = style.figure(title)
    hover = "growth exponent %{x:.3g}, score %{y:.3f}"
    made.add_scatter(x=mine["growth"], y=mine["retrieval"], **_dots(mine, hover))
    made.update_xaxes(title_text="growth exponent")
    made.update_yaxes(title_text="retrieval score", rangemode="tozero")
    return _with_layers(made)


def between_seeds(scores: pd.DataFrame, model: str) -> go.Figure:
    """Retrieval score of every head in one haystack against another, from `needles.by_seed`: its first and last seed.

    The dashed line is y = x; colour is the layer.
    """
    title = f"Retrieval in two haystacks: {style.text(model)}"
    ends = seed_columns(scores)
    if why := style.lacks(scores, "model"):
        return style.nothing(title, why)
    seeds = [*ends[:1], *ends[1:][-1:]]
    mine = scores[scores["model"] == model].dropna(subset=seeds)
    if len(seeds) < 2 or mine.empty:
        return style.nothing(title, "a comparison needs two seeds with successful trials")
    made = style.figure(title)
    made.add_scatter(x=mine[seeds[0]], y=mine[seeds[1]], **_dots(mine, "score %{x:.3f} and %{y:.3f}"))
    top = float(mine[seeds].to_numpy().max())
    line = {"color": style.HIGHLIGHT, "dash": "dash", "width": 1.3}
    made.add_scatter(x=[0, top], y=[0, top], mode="lines", line=line, hoverinfo="skip", showlegend=False)
    made.update_xaxes(title_text=f"score with seed {seeds[0]}")
    made.update_yaxes(title_text=f"score with seed {seeds[1]}")
    return _with_layers(made)


def _length_by_depth(made: go.Figure, depths: int, lengths: int) -> go.Figure:
    """Axes of a map by length and depth, with labels that have room."""
    made.update_xaxes(title_text="context length (tokens)", type="category", dtick=-(-lengths // 7), showgrid=False)
    made.update_yaxes(title_text="depth", autorange="reversed", type="category", dtick=-(-depths // 12), showgrid=False)
    return made.update_layout(margin_t=46)


def _dots(heads: pd.DataFrame, hover: str) -> dict[str, object]:
    """A dot a head, coloured by layer, that tells its name on hover."""
    return {
        "mode": "markers",
        "marker": {"color": heads["layer"], "coloraxis": "coloraxis", "size": 6, "line": OUTLINE},
        "customdata": heads[["layer", "head", "kv_group"]].to_numpy(),
        "hovertemplate": "layer %{customdata[0]}, head %{customdata[1]}, key group %{customdata[2]}<br>"
        f"{hover}<extra></extra>",
        "showlegend": False,
    }


def _with_layers(made: go.Figure) -> go.Figure:
    made.update_layout(coloraxis={"colorscale": style.SEQUENTIAL, "colorbar": {"title": {"text": "layer"}}})
    return style.of_heads(made.update_layout(margin_t=46))
