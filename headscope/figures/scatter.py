"""One number of heads against another: a dot a head, or a group of them, coloured by layer."""

from collections.abc import Sequence

import pandas as pd
import plotly.graph_objects as go

from headscope.figures import style

UNIT = ["layer", "head", "kv_group"]
OUTLINE = {"color": "rgba(128,128,128,0.8)", "width": 0.7}


def dots(
    made: go.Figure, points: pd.DataFrame, x: str | int, y: str | int, hover: str, name: str = "", **place: int
) -> None:
    """Draw column `y` of `points` against `x`, a dot a row, in the panel `place`.

    A dot tells its layer, head and key group (no head where a row is a whole group, head -1), then `hover`; `name` is
    the model that the dots are of.
    """
    whole = (points["head"] < 0).all()
    made.add_scatter(
        x=points[x],
        y=points[y],
        mode="markers",
        marker={"color": points["layer"], "coloraxis": "coloraxis", "size": 6, "line": OUTLINE},
        customdata=points[UNIT].to_numpy(),
        hovertemplate=f"layer %{{customdata[0]}},{'' if whole else ' head %{customdata[1]},'} "
        f"key group %{{customdata[2]}}<br>{hover}<extra></extra>",
        name=name or None,
        showlegend=False,
        **place,
    )


def diagonal(made: go.Figure, ends: Sequence[float], **place: int) -> None:
    """Draw the dashed line y = x between two ends."""
    line = {"color": style.HIGHLIGHT, "dash": "dash", "width": 1.3}
    made.add_scatter(x=ends, y=ends, mode="lines", line=line, hoverinfo="skip", showlegend=False, **place)


def coloured(made: go.Figure, top: int = 46) -> go.Figure:
    """Add the colour bar of the layers; `top` is the margin in px that the title needs."""
    deepest = max((max(dots.marker.color, default=0) for dots in made.data if dots.marker.coloraxis), default=0)
    bar = {"title": {"text": "layer"}, "dtick": 1 if deepest < 8 else None}  # no half layers
    made.update_layout(coloraxis={"colorscale": style.SEQUENTIAL, "colorbar": bar})
    return style.of_heads(style.top(made, top))
