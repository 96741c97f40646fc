"""Plots of patched entries of attention patterns: destination x source for the heads of largest effect."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.heads import format_head
from headscope.plots import style
from probes.patching.plots import token_label

MAX_ENTRY_HEADS = 6
"""Heads in a plot of pattern entries."""
MAX_ENTRY_TOKEN_LABELS = 24
"""Tokens of a prompt up to which the axes name each of them."""


def plot_entries(rows: pd.DataFrame, tokens: pd.DataFrame) -> go.Figure:
    """Heatmaps of one pair's effects by destination and source, one per head, in one colour scale.

    `rows` are those of `analysis.entry_effects`; the heads are those of the largest absolute effect of an entry.
    `tokens` are the pair's rows of `patching_tokens`.
    """
    largest = rows["effect"].abs().groupby([rows["layer"], rows["head"]]).max().nlargest(MAX_ENTRY_HEADS)
    heads = sorted(largest.index)
    names = [format_head(layer, head) for layer, head in heads]
    first = rows.iloc[0]
    labels = {name: style.escape_label(first[name]) for name in ("prompts", "model", "pair")}
    method = "exact" if (rows["method"] == "exact").all() else "estimated"
    title = f"{first['direction'].capitalize()} of pattern entries, {labels['prompts']}: {labels['model']}"
    figure = style.panel_figure("", names)
    figure.update_layout(title=style.title_with_subtitle(title, f"{labels['pair']}, {method}"))
    positions = np.sort(rows["destination"].unique())
    limit = max(float(largest.max()), 1e-3)  # few entries matter: a quantile would hide them
    for index, (layer, head) in enumerate(heads):
        entries = rows[(rows["layer"] == layer) & (rows["head"] == head)]
        grid = entries.pivot_table(index="destination", columns="source", values="effect")
        grid = grid.reindex(index=positions, columns=positions)
        figure.add_heatmap(
            x=positions,
            y=positions,
            z=grid.to_numpy(),
            coloraxis="coloraxis",
            hoverongaps=False,
            name=names[index],
            hovertemplate="destination %{y}, source %{x}<br>effect %{z:+.3f}<extra></extra>",
            **style.panel_row_col(index, heads),
        )
    scale = {"colorscale": style.DIVERGING_SCALE, "cmin": -limit, "cmax": limit}
    figure.update_layout(coloraxis=scale | {"colorbar": {"title": {"text": "effect"}}})
    figure.update_xaxes(showgrid=False)
    figure.update_yaxes(showgrid=False, autorange="reversed")
    style.set_outer_axis_titles(figure, len(heads), "source", "destination")
    if len(positions) <= MAX_ENTRY_TOKEN_LABELS:
        words = tokens.set_index("position").reindex(positions)
        texts = [token_label(clean, corrupted) for clean, corrupted in words[["clean", "corrupted"]].to_numpy()]
        ticks = {"tickvals": positions, "ticktext": texts}
        figure.update_xaxes(**ticks, tickangle=-60, tickfont={"size": 10})
        figure.update_yaxes(**ticks, tickfont={"size": 10})
    return style.set_metadata(style.set_top_margin(figure, 98), value="effect", x="source", y="destination")
