"""One number of heads against another: a dot a head, or a group of them, coloured by layer."""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from headscope.plots import style

HEAD_COLUMNS = ["layer", "head", "kv_group"]
MARKER_OUTLINE = {"color": "rgba(128,128,128,0.8)", "width": 0.7}


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
