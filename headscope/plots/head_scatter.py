"""One number of heads against another: a dot a head, or a group of them, coloured by layer."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, style
from headscope.runs.column_metadata import statistic

HEAD_COLUMNS = ["layer", "head", "kv_group"]
MARKER_OUTLINE = {"color": "rgba(128,128,128,0.8)", "width": 0.7}


def plot_against_baseline(heads: pd.DataFrame, statistic_name: str, baseline: str) -> go.Figure:
    """The statistic `name` of every head under each other model against `baseline`, one panel a model.

    Both axes are equal, the dashed line is y = x; colour is the layer.
    """
    shown = statistic(statistic_name)
    title = f"{shown.title} of each head, against {style.escape_label(baseline)}"
    if why := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, why)
    looks = style.model_styles(heads)
    having = [label for label in looks if heads.loc[heads["model"] == label, statistic_name].notna().any()]
    others = [label for label in having if label != baseline]
    if baseline not in having or not others:
        known = f"; it was measured of {style.escape_label(', '.join(having))} alone" if len(looks) > 1 else ""
        return style.empty_figure(title, f"a comparison needs the base model and at least one other{known}")
    base = heads[heads["model"] == baseline].set_index(HEAD_COLUMNS)[statistic_name].rename("x")
    names = [looks[label].name for label in others]
    made = style.panel_figure(title, names, height=360)
    for at, label in enumerate(others):
        both = (
            heads[heads["model"] == label]
            .set_index(HEAD_COLUMNS)[statistic_name]
            .rename("y")
            .to_frame()
            .join(base)
            .reset_index()
        )
        hover = (
            f"{style.escape_label(baseline)} %{{x:.4g}}{style.unit_suffix(shown.unit)}<br>"
            f"{looks[label].name} %{{y:.4g}}{style.unit_suffix(shown.unit)}"
        )
        add_points(made, both, "x", "y", hover, looks[label].name, **style.panel_row_col(at, others))
    values = heads.loc[heads["model"].isin([baseline, *others]), statistic_name].to_numpy(dtype=np.float64)
    values = values[np.isfinite(values) & ((values > 0) | (not shown.log_scale))]
    if not len(values):
        return style.empty_figure(title, "no finite values to show")
    ends = [values.min() / 1.2, values.max() * 1.2] if shown.log_scale else [values.min(), values.max()]
    for at in range(len(others)):
        add_diagonal(made, ends, **style.panel_row_col(at, others))
    axis = axes.log_axis(values, sparse=True) | {"range": list(np.log10(ends))} if shown.log_scale else {}
    made.update_xaxes(axis)
    made.update_yaxes(axis)
    unit = f" ({shown.unit})" if shown.unit else ""
    style.set_outer_axis_titles(made, len(others), f"{style.escape_label(baseline)}{unit}", f"model named above{unit}")
    style.set_metadata(
        made, x=f"{shown.worded} under {style.escape_label(baseline)}", value=f"{shown.worded} under the model"
    )
    return add_layer_colorbar(made, 74)


def add_points(
    figure: go.Figure,
    points: pd.DataFrame,
    x: str | int,
    y: str | int,
    hover: str,
    model_name: str = "",
    **panel_position: int,
) -> None:
    """Draw column `y` of `points` against `x`, a dot a row, in the panel `place`.

    A dot tells its layer, head and key group (no head where a row is a whole group, head -1), then `hover`; `name` is
    the model that the dots are of.
    """
    whole = (points["head"] < 0).all()
    figure.add_scatter(
        x=points[x],
        y=points[y],
        mode="markers",
        marker={"color": points["layer"], "coloraxis": "coloraxis", "size": 6, "line": MARKER_OUTLINE},
        customdata=points[HEAD_COLUMNS].to_numpy(),
        hovertemplate=f"layer %{{customdata[0]}},{'' if whole else ' head %{customdata[1]},'} "
        f"key group %{{customdata[2]}}<br>{hover}<extra></extra>",
        name=model_name or None,
        showlegend=False,
        **panel_position,
    )


def add_diagonal(figure: go.Figure, ends: Sequence[float], **panel_position: int) -> None:
    """Draw the dashed line y = x between two ends."""
    line = {"color": style.HIGHLIGHT_COLOUR, "dash": "dash", "width": 1.3}
    figure.add_scatter(x=ends, y=ends, mode="lines", line=line, hoverinfo="skip", showlegend=False, **panel_position)


def add_layer_colorbar(figure: go.Figure, top_margin: int = 46) -> go.Figure:
    """Add the colour bar of the layers; `top` is the margin in px that the title needs."""
    deepest = max((max(dots.marker.color, default=0) for dots in figure.data if dots.marker.coloraxis), default=0)
    bar = {"title": {"text": "layer"}, "dtick": 1 if deepest < 8 else None}  # no half layers
    figure.update_layout(coloraxis={"colorscale": style.SEQUENTIAL_SCALE, "colorbar": bar})
    return style.declare_head_points(style.set_top_margin(figure, top_margin))
