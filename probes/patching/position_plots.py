"""Plots of patches at single positions: head or layer x position of a pair, with a menu of pairs."""

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from headscope.effects.sweep import UNIT_KEYS
from headscope.estimates import EXACT
from headscope.plots import shapes, style
from headscope.plots.colour_range import mark_clipped_cells, signed_colours, symmetric_limit
from headscope.plots.selector import combine_figures, first_choices
from headscope.rendering.token_axis import MAX_TOKEN_LABELS, token_axis, token_hover
from probes.patching.plots import MAX_POSITION_UNITS, unit_tick
from probes.patching.position_maps import PositionMap


def pairs_in_menu(position_map: PositionMap) -> list[str]:
    """The first pairs of a map, as many as its menu shows."""
    return first_choices({pair: len(rows) for pair, rows in position_map.pairs.items()})


def plot_positions(position_map: PositionMap) -> go.Figure:
    """Heatmap of effects by layer and token, or by head or KV group and token, with a menu of pairs.

    The units are those of largest effect at any position of any pair; the colour scale is that of all pairs. A map of
    more than `MAX_TOKEN_LABELS` tokens starts at the first one that differs between the prompts.
    """
    units = _top_units(position_map.rows)
    grids = {pair: _grid(position_map, pair, units) for pair in pairs_in_menu(position_map)}
    cells = np.concatenate([grid.to_numpy().ravel() for grid in grids.values()])
    return combine_figures({pair: _plot_grid(position_map, pair, grid, cells) for pair, grid in grids.items()}, "pair")


def _plot_grid(position_map: PositionMap, pair: str, grid: pd.DataFrame, cells: npt.NDArray[np.float64]) -> go.Figure:
    """The map of one pair; `cells` are the effects in the maps of all pairs."""
    has_layers, limit = grid.index.nlevels == 1, symmetric_limit(cells, 1e-3)
    labels = [*position_map.tokens_by_pair[pair]["label"].reindex(grid.columns)]
    texts, place = token_hover(labels, len(grid))
    layer_axis = {"title_text": "layer", "dtick": max(1, len(grid) // 16), "showgrid": False}
    figure = shapes.matrix(
        title_of_pair(position_map, pair),
        (grid if has_layers else grid.set_axis([unit_tick(*unit) for unit in grid.index])).astype("float32"),
        f"{'layer ' * has_layers}%{{y}}, {place}<br>effect %{{z:+.3f}}",
        {"showgrid": False, **token_axis([int(position) for position in grid.columns], labels)},
        layer_axis if has_layers else {"type": "category", "showgrid": False},
        height=220 + 14 * len(grid) if has_layers else 200 + 20 * len(grid),
        top_margin=62,
        xgap=1 if len(labels) <= MAX_TOKEN_LABELS else 0,  # a gap would hide cells of less than a pixel
        **signed_colours(limit, "effect", cells),
        **texts,
    )
    mark_clipped_cells(figure, grid.to_numpy(), limit)
    model = style.escape_label(position_map.key["model"])
    return style.set_metadata(figure, value="effect", x="position", model=model)


def title_of_pair(position_map: PositionMap, pair: str) -> dict[str, object]:
    """Plotly settings of the title of the map of one pair."""
    prompts, model = (style.escape_label(position_map.key[name]) for name in ("prompts", "model"))
    method = "exact" if (position_map.pairs[pair]["method"] == EXACT).all() else "estimated"
    return style.title_with_subtitle(f"{position_map.title}, {prompts}: {model}", f"{pair}, {method}")


def _grid(position_map: PositionMap, pair: str, units: pd.Index) -> pd.DataFrame:
    """The effects of one pair by unit and position."""
    rows, tokens = position_map.pairs[pair], position_map.tokens_by_pair[pair]
    grid = rows.pivot_table(index=units.names, columns="position", values="effect").reindex(units)
    if len(grid.columns) > MAX_TOKEN_LABELS and (differs := tokens["clean"] != tokens["corrupted"]).any():
        grid = grid.loc[:, differs.idxmax() :]
    return grid


def _top_units(rows: pd.DataFrame) -> pd.Index:
    """All layers; or the heads or KV groups of largest effect at any position of any pair, the last layer first."""
    if "head" not in rows:
        return pd.Index(sorted(map(int, rows["layer"].unique())), name="layer")
    largest = rows["effect"].abs().groupby([rows[name] for name in UNIT_KEYS]).max().nlargest(MAX_POSITION_UNITS)
    units: pd.Index = largest.sort_index(ascending=False).index
    return units
