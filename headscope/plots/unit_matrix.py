"""A matrix of effects by layer and unit: what changes if one head, or one KV group, is changed at a time."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import style
from headscope.plots.colour_range import mark_clipped_cells, symmetric_colorbar, symmetric_limit


def plot_unit_matrix(
    units: pd.DataFrame,
    column: str,
    hover_texts: Sequence[str],
    colorbar_title: str,
    minimum_limit: float,
    marks: Sequence[str] | None = None,
) -> go.Figure:
    """Heatmap of a column of `units` by layer and unit, without a title: red above zero, blue below.

    `units` has one row per unit: layer, head (-1: whole KV group) and kv_group, either all heads or all KV groups.
    `hover_texts` and `marks`, which stand in the cells, are in the order of the rows. Colours saturate at the 99 %
    quantile of the absolute values, but not below `minimum_limit`.
    """
    are_groups = bool((units["head"] < 0).all())
    unit_name, columns = ("KV group", units["kv_group"]) if are_groups else ("head", units["head"])
    cells = units["layer"].to_numpy(), columns.to_numpy()
    grid = np.full((int(cells[0].max()) + 1, int(cells[1].max()) + 1), np.nan)
    grid[cells] = units[column]
    head_ids = np.full((*grid.shape, 3), np.nan)
    head_ids[cells] = units[["layer", "head", "kv_group"]]
    hover, cell_marks = (np.full(grid.shape, "", dtype=object) for _ in range(2))
    hover[cells] = hover_texts
    figure = style.new_figure("", int(np.clip(160 + 18 * len(grid), 280, 760)))
    limit = symmetric_limit(grid, minimum_limit)
    figure.add_heatmap(
        x=list(range(grid.shape[1])),
        y=list(range(grid.shape[0])),
        z=grid,
        zmin=-limit,
        zmax=limit,
        zmid=0,
        colorscale=style.DIVERGING_SCALE,
        colorbar={"title": {"text": colorbar_title}} | symmetric_colorbar(grid, limit),
        customdata=head_ids,
        hovertext=hover,
        hovertemplate=f"layer %{{y}}, {unit_name} %{{x}}<br>%{{hovertext}}<extra></extra>",
        xgap=1,
        ygap=1,
    )
    if marks is not None:
        cell_marks[cells] = marks
        figure.update_traces(text=cell_marks, texttemplate="%{text}")
    mark_clipped_cells(figure, grid, limit)
    figure.update_xaxes(title_text=unit_name, dtick=max(1, grid.shape[1] // 8), showgrid=False, showline=False)
    figure.update_yaxes(title_text="layer", dtick=max(1, len(grid) // 16), showgrid=False, showline=False)
    return style.declare_head_points(figure)
