"""Effective length of a head against the number of visible keys."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.bins import bin_center
from headscope.plots import axes, style
from headscope.runs.aggregation import confidence_interval


def plot_effective_length(attention: pd.DataFrame, heads: Sequence[tuple[int, int]]) -> go.Figure:
    """Plot ESS2 (tokens) of the heads (layer, head) against visible keys, one panel per head and one line per model.

    A point is exp of the mean of ln ESS2 over the rows of a bin and all documents, at the model's longest context
    length. For a single head a band shows the 95 % confidence interval over documents if there are three or more.
    Both axes are logarithmic. The dotted line of slope 1 is uniform attention, ESS2 = n; the dotted line of slope 0
    starts at the first point of the first model.
    """
    title = "Effective length against context length"
    if reason := style.missing_data_reason(attention, "model", "log_ess2", "visible", "rows"):
        return style.empty_figure(title, reason)
    if not heads:
        return style.empty_figure(title, "no head is selected")
    styles = style.model_styles(attention)
    figure = style.panel_figure(title, [f"layer {layer}, head {head}" for layer, head in heads])
    curves = _length_curves(attention, heads)
    for index, (layer, head) in enumerate(heads):
        place = style.panel_row_col(index, heads)
        head_curves = curves[(curves["layer"] == layer) & (curves["head"] == head)]
        curve_by_model = dict([*head_curves.groupby("model", observed=True)])
        lines = []
        for label, model_style in styles.items():
            curve = curve_by_model.get(label, head_curves[:0])
            if len(heads) == 1 and (bounds := curve.dropna(subset=["low", "high"])).size:
                lines += style.band_traces(bounds.set_index("n"), model_style)
            lines.append(
                {
                    "type": "scatter",
                    "x": curve["n"],
                    "y": curve["ess2"],
                    "mode": "lines",
                    "line": {"color": model_style.colour, "dash": model_style.dash},
                    "name": model_style.name,
                    "legendgroup": label,
                    "showlegend": index == 0,
                    "hovertemplate": "%{x:,.0f} visible keys: ESS₂ %{y:.4g} tokens"
                    f"<extra>{model_style.name}</extra>",
                }
            )
        figure.add_traces(lines, rows=[place["row"]] * len(lines), cols=[place["col"]] * len(lines))
        if len(head_curves):
            _add_reference_lines(figure, head_curves, place)
    figure.update_xaxes(axes.log_axis(curves["n"], sparse=True))
    figure.update_yaxes(axes.log_axis(curves[["ess2", "n"]].to_numpy(), sparse=True))
    style.set_outer_axis_titles(figure, len(heads), "visible keys n", "ESS₂ (tokens)")
    return style.fit_legend(figure) if len(styles) > 1 else figure


def _length_curves(attention: pd.DataFrame, heads: Sequence[tuple[int, int]]) -> pd.DataFrame:
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
    table = values.groupby([*group_columns, "doc"], observed=True)["log_ess2"].mean().unstack()
    bounds = np.full((2, len(table)), np.nan)
    complete = table.notna().all(axis=1).to_numpy()
    bounds[:, complete] = np.exp(confidence_interval(table[complete].to_numpy(dtype=np.float64)))
    return pd.DataFrame({"low": bounds[0], "high": bounds[1]}, table.index)


def _add_reference_lines(figure: go.Figure, curves: pd.DataFrame, panel_position: dict[str, int]) -> None:
    ends = [curves["n"].min(), curves["n"].max()]
    flat = [curves["ess2"].iloc[0]] * 2
    for y, label in ((ends, "slope 1: uniform attention"), (flat, "slope 0")):
        line = {"color": style.TEXT_COLOUR, "dash": "dot", "width": 1}
        figure.add_scatter(
            x=ends,
            y=y,
            mode="lines",
            line=line,
            hovertemplate=f"{label}<extra></extra>",
            showlegend=False,
            **panel_position,
        )
