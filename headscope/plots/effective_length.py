"""How many tokens a head attends to as it sees more of them: effective length against visible keys."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.bins import middle
from headscope.plots import axes, style
from headscope.runs.aggregation import interval


def plot_effective_length(attention: pd.DataFrame, heads: Sequence[tuple[int, int]]) -> go.Figure:
    """ESS2 (tokens) against visible keys for chosen (layer, head), one panel a head and one line a model.

    A point is exp of the mean of ln ESS2 over the rows of a bin, all documents, at the model's longest length. Of a
    single head a band shows the 95 % interval over documents, where there are three or more.
    Both axes are logarithmic: the dotted line of slope 1 is uniform attention, ESS2 = n; the dotted line of
    slope 0 starts at the first model's first point.
    """
    title = "Effective length as the context grows"
    if why := style.missing_data_reason(attention, "model", "log_ess2", "visible", "rows"):
        return style.empty_figure(title, why)
    if not heads:
        return style.empty_figure(title, "choose a head")
    looks = style.model_styles(attention)
    made = style.panel_figure(title, [f"layer {layer}, head {head}" for layer, head in heads])
    lines = _length_curves(attention, heads)
    for at, (layer, head) in enumerate(heads):
        panel = lines[(lines["layer"] == layer) & (lines["head"] == head)]
        for label, look in looks.items():
            line = panel[panel["model"] == label]
            if len(heads) == 1 and (between := line.dropna(subset=["low", "high"])).size:
                style.add_band(made, between.set_index("n"), look, **style.panel_row_col(at, heads))
            made.add_scatter(
                x=line["n"],
                y=line["ess2"],
                mode="lines",
                line={"color": look.colour, "dash": look.dash},
                name=look.name,
                legendgroup=label,
                showlegend=at == 0,
                hovertemplate=f"%{{x:,.0f}} visible keys: ESS₂ %{{y:.4g}} tokens<extra>{look.name}</extra>",
                **style.panel_row_col(at, heads),
            )
        if len(panel):
            _add_reference_lines(made, panel, style.panel_row_col(at, heads))
    made.update_xaxes(axes.log_axis(lines["n"], sparse=True))
    made.update_yaxes(axes.log_axis(lines[["ess2", "n"]].to_numpy(), sparse=True))
    style.set_outer_axis_titles(made, len(heads), "visible keys n", "ESS₂ (tokens)")
    return made


def _length_curves(attention: pd.DataFrame, heads: Sequence[tuple[int, int]]) -> pd.DataFrame:
    wanted = pd.MultiIndex.from_tuples(heads)
    rows = attention[pd.MultiIndex.from_frame(attention[["layer", "head"]]).isin(wanted)]
    longest = rows.groupby("model", observed=True)["context_length"].transform("max")
    rows = rows[rows["context_length"] == longest]
    unit = ["model", "layer", "head", "context_length", "visible"]
    logs = rows["log_ess2"].astype("float64") * rows["rows"]
    sums = rows[[*unit, "rows"]].assign(logs=logs).groupby(unit, observed=True)[["logs", "rows"]].sum().reset_index()
    ess2 = np.exp(sums["logs"] / sums["rows"])
    lines = sums.assign(ess2=ess2, n=middle(sums["visible"], sums["context_length"]))
    return lines.join(_document_intervals(rows, unit), on=unit) if len(heads) == 1 else lines


def _document_intervals(rows: pd.DataFrame, group_columns: Sequence[str]) -> pd.DataFrame:
    """low, high of the mean over documents of each bin; NaN where too few documents have it."""
    if "doc" not in rows:
        return pd.DataFrame(columns=["low", "high"])
    logs = rows.astype({"log_ess2": "float64", "doc": "str"})
    table = logs.groupby([*group_columns, "doc"], observed=True)["log_ess2"].mean().unstack()
    bounds = np.full((2, len(table)), np.nan)
    whole = table.notna().all(axis=1).to_numpy()
    bounds[:, whole] = np.exp(interval(table[whole].to_numpy(dtype=np.float64)))
    return pd.DataFrame({"low": bounds[0], "high": bounds[1]}, table.index)


def _add_reference_lines(figure: go.Figure, curves: pd.DataFrame, panel_position: dict[str, int]) -> None:
    ends = [curves["n"].min(), curves["n"].max()]
    flat = [curves["ess2"].iloc[0]] * 2
    for y, says in ((ends, "slope 1: uniform attention"), (flat, "slope 0")):
        line = {"color": style.TEXT_COLOUR, "dash": "dot", "width": 1}
        figure.add_scatter(
            x=ends,
            y=y,
            mode="lines",
            line=line,
            hovertemplate=f"{says}<extra></extra>",
            showlegend=False,
            **panel_position,
        )
