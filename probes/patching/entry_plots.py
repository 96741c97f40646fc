"""Plots of patched entries of attention patterns: destination x source for the heads of largest effect."""

from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go

from headscope.heads import Head, format_head
from headscope.plots import style
from headscope.plots.selector import combine_figures
from headscope.rendering.token_axis import MAX_PANEL_TOKEN_LABELS, token_axis
from probes.patching.position_maps import PositionMap
from probes.patching.position_plots import pairs_in_menu, title_of_pair

MAX_ENTRY_HEADS = 6
"""Heads in a plot of pattern entries."""
MAX_NARROW_TOKENS = 15
"""Tokens of a prompt up to which three panels stand side by side; labels of more tokens need wider panels."""


def plot_entries(position_map: PositionMap) -> go.Figure:
    """Heatmaps of effects by destination and source, one per head, in one colour scale, with a menu of pairs.

    The heads are those of the largest absolute effect of an entry in any pair; the colour scale is that of all pairs.
    """
    effects = position_map.rows["effect"].abs().groupby([position_map.rows["layer"], position_map.rows["head"]])
    largest = effects.max().nlargest(MAX_ENTRY_HEADS)
    limit = max(float(largest.max()), 1e-3)  # few entries matter: a quantile would hide them
    pairs = pairs_in_menu(position_map)
    return combine_figures(
        {pair: _plot_pair(position_map, pair, sorted(largest.index), limit) for pair in pairs}, "pair"
    )


def _plot_pair(position_map: PositionMap, pair: str, heads: Sequence[Head], limit: float) -> go.Figure:
    names = [format_head(layer, head) for layer, head in heads]
    rows, tokens = position_map.pairs[pair], position_map.tokens_by_pair[pair]
    most_tokens = max(map(len, position_map.tokens_by_pair.values()))
    columns = 2 if MAX_NARROW_TOKENS < most_tokens <= MAX_PANEL_TOKEN_LABELS else 3
    figure = style.panel_figure("", names, columns, 330 if columns == 3 else 430)
    figure.update_layout(title=title_of_pair(position_map, pair))
    positions = np.sort(rows["destination"].unique())
    for index, (layer, head) in enumerate(heads):
        entries = rows[(rows["layer"] == layer) & (rows["head"] == head)]
        grid = entries.pivot_table(index="destination", columns="source", values="effect")
        grid = grid.reindex(index=positions, columns=positions)
        figure.add_heatmap(
            x=positions,
            y=positions,
            z=grid.to_numpy(np.float32),
            coloraxis="coloraxis",
            hoverongaps=False,
            name=names[index],
            hovertemplate="from %{y}<br>to %{x}<br>effect %{z:+.3f}<extra></extra>",
            **style.panel_row_col(index, heads, columns),
        )
    scale = {"colorscale": style.DIVERGING_SCALE, "cmin": -limit, "cmax": limit}
    figure.update_layout(coloraxis=scale | {"colorbar": {"title": {"text": "effect"}}})
    axis = token_axis(positions, [*tokens["label"].reindex(positions)], MAX_PANEL_TOKEN_LABELS, "")
    figure.update_xaxes(axis, showgrid=False)
    figure.update_yaxes(axis | {"tickangle": 0}, showgrid=False, autorange="reversed")
    style.set_outer_axis_titles(figure, len(heads), "source", "destination", columns)
    model = style.escape_label(position_map.key["model"])
    return style.set_metadata(
        style.set_top_margin(figure, 98), value="effect", x="source", y="destination", model=model
    )
