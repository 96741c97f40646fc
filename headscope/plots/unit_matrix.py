"""A matrix of effects by layer and unit: what changes if one head, or one KV group, is changed at a time."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import shapes, style
from headscope.plots.colour_range import mark_clipped_cells, signed_colours, symmetric_limit


def plot_unit_matrix(
    title: style.Title,
    units: pd.DataFrame,
    column: str,
    hover_texts: Sequence[str],
    colorbar_title: str,
    minimum_limit: float,
    marks: Sequence[str] | None = None,
) -> go.Figure:
    """Heatmap of a column of `units` by layer and unit: red above zero, blue below.

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
    limit = symmetric_limit(grid, minimum_limit)
    if marks is not None:
        cell_marks[cells] = marks
    figure = shapes.matrix(
        title,
        pd.DataFrame(grid),
        f"layer %{{y}}, {unit_name} %{{x}}<br>%{{hovertext}}",
        {"title_text": unit_name, "dtick": max(1, grid.shape[1] // 8), "showgrid": False, "showline": False},
        {"title_text": "layer", "dtick": max(1, len(grid) // 16), "showgrid": False, "showline": False},
        height=int(np.clip(160 + 18 * len(grid), 280, 760)),
        top_margin=62,
        customdata=head_ids,
        hovertext=hover,
        **signed_colours(limit, colorbar_title, grid),
        text=None if marks is None else cell_marks,
        texttemplate=None if marks is None else "%{text}",
    )
    return style.declare_head_points(mark_clipped_cells(figure, grid, limit))
