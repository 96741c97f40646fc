"""Curves by context length and position: effective length, and next-token loss with its difference from a baseline."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from headscope.base.bins import bin_center
from headscope.plots import axes, shapes, style
from headscope.plots.draft import Draft
from headscope.plots.shapes import mean_curve
from headscope.runs.aggregation import confidence_interval

TITLE = "Effective length against context length"
Values = npt.NDArray[np.float64]


def plot_effective_length(attention: pd.DataFrame, heads: Sequence[tuple[int, int]]) -> go.Figure:
    """Plot ESS2 (tokens) of the heads (layer, head) against visible keys, one panel per head and one line per model.

    A point is exp of the mean of ln ESS2 over the rows of a bin and all documents, at the model's longest context
    length. For a single head a band shows the 95 % confidence interval over documents if there are three or more.
    Both axes are logarithmic. The dotted line of slope 1 is uniform attention, ESS2 = n; the dotted line of slope 0
    starts at the first point of the first model.
    """
    title = TITLE
    if reason := style.missing_data_reason(attention, "model", "log_ess2", "visible", "rows"):
        return style.empty_figure(title, reason)
    if not heads:
        return style.empty_figure(title, "no head is selected")
    curves = length_curves(attention, heads)
    return draw_effective_length(curves, style.model_styles(attention), heads)


class LengthCurve(NamedTuple):
    """ESS2 (tokens) of one head and model by visible keys `n`; `low` and `high` are NaN without an interval."""

    n: Values
    ess2: Values
    low: Values
    high: Values


NO_CURVE = LengthCurve(*[np.empty(0)] * 4)
HeadCurves = Mapping[tuple[int, int], Mapping[str, LengthCurve]]
"""Curves by head (layer, head) and model."""


def draw_effective_length(
    curves: HeadCurves,
    styles: Mapping[str, style.ModelStyle],
    heads: Sequence[tuple[int, int]],
    height: int | None = None,
) -> go.Figure:
    """The figure of `plot_effective_length` from curves; `height` in px."""
    figure = Draft.panels(TITLE, [f"layer {layer}, head {head}" for layer, head in heads])
    all_curves = []
    for index, head in enumerate(heads):
        head_curves = [(label, curves.get(head, {}).get(label, NO_CURVE)) for label in styles]
        lines = []
        for label, curve in head_curves:
            model_style = styles[label]
            has_band = ~np.isnan(curve.low) & ~np.isnan(curve.high)
            if len(heads) == 1 and has_band.any():
                bounds = pd.DataFrame({"low": curve.low, "high": curve.high}, curve.n)[has_band]
                lines += style.band_traces(bounds, model_style)
            lines.append(
                {
                    "type": "scatter",
                    "x": curve.n,
                    "y": curve.ess2,
                    "mode": "lines",
                    "line": {"color": model_style.colour, "dash": model_style.dash},
                    "name": model_style.name,
                    "legendgroup": label,
                    "showlegend": index == 0,
                    "hovertemplate": "%{x:,.0f} visible keys: ESS₂ %{y:.4g} tokens"
                    f"<extra>{model_style.name}</extra>",
                }
            )
        measured = [curve for _, curve in head_curves if len(curve.n)]
        figure.add(lines + (_reference_lines(measured) if measured else []), index + 1)
        all_curves += measured
    visible = [curve.n for curve in all_curves]
    figure.update_axes("x", axes.log_axis(np.concatenate([[], *visible]), sparse=True))
    lengths = [curve.ess2 for curve in all_curves]
    figure.update_axes("y", axes.log_axis(np.concatenate([[], *lengths, *visible]), sparse=True))
    figure.set_outer_axis_titles(len(heads), "visible keys n", "ESS₂ (tokens)")
    if len(styles) > 1:
        figure.fit_legend()
    if height is not None:
        figure.layout["height"] = height
    return figure.figure()


def length_curves(attention: pd.DataFrame, heads: Sequence[tuple[int, int]]) -> HeadCurves:
    """The curves of these heads under every model, at its longest context length; intervals for a single head."""
    table = _length_table(attention, heads)
    curves: dict[tuple[int, int], dict[str, LengthCurve]] = {}
    groups: Any = table.groupby(["model", "layer", "head"], observed=True)
    for (label, layer, head), rows in groups:
        no_interval = np.full(len(rows), np.nan)
        low, high = (rows[end].to_numpy() if end in rows else no_interval for end in ("low", "high"))
        curves.setdefault((layer, head), {})[label] = LengthCurve(
            rows["n"].to_numpy(), rows["ess2"].to_numpy(), low, high
        )
    return curves


def _length_table(attention: pd.DataFrame, heads: Sequence[tuple[int, int]]) -> pd.DataFrame:
    selected_heads = pd.MultiIndex.from_tuples(heads)
    rows = attention[pd.MultiIndex.from_frame(attention[["layer", "head"]]).isin(selected_heads)]
    longest = rows.groupby("model", observed=True)["context_length"].transform("max")
    rows = rows[rows["context_length"] == longest]
    group_columns = ["model", "layer", "head", "context_length", "visible"]
    weighted_logs = rows["log_ess2"].astype("float64") * rows["rows"]
    sums = (
        rows[[*group_columns, "rows"]]
        .assign(logs=weighted_logs)
        .groupby(group_columns, observed=True)[["logs", "rows"]]
        .sum()
        .reset_index()
    )
    ess2 = np.exp(sums["logs"] / sums["rows"])
    curves = sums.assign(ess2=ess2, n=bin_center(sums["visible"], sums["context_length"]))
    return curves.join(_document_intervals(rows, group_columns), on=group_columns) if len(heads) == 1 else curves


def _document_intervals(rows: pd.DataFrame, group_columns: Sequence[str]) -> pd.DataFrame:
    """Columns low and high: 95 % confidence interval over documents of each bin's mean; NaN with too few documents."""
    if "doc" not in rows:
        return pd.DataFrame(columns=["low", "high"])
    values = rows.astype({"log_ess2": "float64", "doc": "str"})
    documents = values[["model", "doc"]].drop_duplicates().groupby("model", observed=True)["doc"].agg(frozenset)
    parts = []
    for _, same_documents in values.groupby(values["model"].map(documents.to_dict()).to_numpy(), sort=False):
        table = same_documents.groupby([*group_columns, "doc"], observed=True)["log_ess2"].mean().unstack()
        bounds = np.full((2, len(table)), np.nan)
        complete = table.notna().all(axis=1).to_numpy()
        bounds[:, complete] = np.exp(confidence_interval(table[complete].to_numpy(dtype=np.float64)))
        parts.append(pd.DataFrame({"low": bounds[0], "high": bounds[1]}, table.index))
    return pd.concat(parts) if parts else pd.DataFrame(columns=["low", "high"])


def _reference_lines(curves: Sequence[LengthCurve]) -> list[dict[str, Any]]:
    ends = [min(curve.n.min() for curve in curves), max(curve.n.max() for curve in curves)]
    flat = [curves[0].ess2[0]] * 2
    return [
        {
            "type": "scatter",
            "x": ends,
            "y": y,
            "mode": "lines",
            "line": style.REFERENCE_LINE,
            "hovertemplate": f"{label}<extra></extra>",
            "showlegend": False,
        }
        for y, label in ((ends, "slope 1: uniform attention"), (flat, "slope 0"))
    ]


def plot_loss_by_position(nll: pd.DataFrame) -> go.Figure:
    """Plot the mean loss over documents (nats/token) by position at the longest context length, one line per model.

    The band is one standard deviation over documents.
    """
    title = "Loss by position in the context"
    if reason := style.missing_data_reason(nll, "model", "position", "nll"):
        return style.empty_figure(title, reason)
    losses = _losses_by_document(nll)
    curves = {}
    for label, model_style in style.model_styles(nll).items():
        if label in losses:
            mean, deviation = losses[label].mean(axis=1), losses[label].std(axis=1, ddof=1)
            curves[model_style] = pd.DataFrame({"mean": mean, "low": mean - deviation, "high": mean + deviation})
    hover = "up to position %{x:,}: %{y:.4f} nats/token"
    return shapes.bands(title, curves, hover, shapes.position_axis(nll["position"]), "loss (nats/token)")


def plot_loss_difference(nll: pd.DataFrame, baseline: str) -> go.Figure:
    """Plot the loss minus the baseline's loss on the same documents (nats/token) by position, one line per model.

    Values below zero are better than the baseline. The context length is the longest one. The band is the 95 %
    confidence interval over documents; with fewer than three documents there is no band.
    """
    title = f"Loss relative to {style.escape_label(baseline)}, by position"
    if reason := style.missing_data_reason(nll, "model", "position", "nll"):
        return style.empty_figure(title, reason)
    losses = _losses_by_document(nll)
    curves = {
        model_style: mean_curve((losses[label] - losses[baseline]).dropna(axis=1, how="all").dropna())
        for label, model_style in style.model_styles(nll).items()
        if {label, baseline} <= {*losses} and label != baseline
    }
    if not curves:
        return style.empty_figure(title, "a comparison needs the baseline and at least one other model")
    hover = f"up to position %{{x:,}}: %{{y:+.4f}} nats/token relative to {style.escape_label(baseline)}"
    axis = shapes.position_axis(nll["position"])
    return shapes.bands(title, curves, hover, axis, "loss difference (nats/token)", level=0)


def _losses_by_document(nll: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By model, the loss at the longest context length: one row per position and one column per document."""
    longest = nll[nll["context_length"] == nll["context_length"].max()]
    rows = longest.astype({"model": "str", "doc": "str", "nll": "float64"})
    return {
        str(label): block.groupby(["position", "doc"], observed=True)["nll"].mean().unstack()
        for label, block in rows.groupby("model")
    }
