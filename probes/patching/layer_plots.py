"""Plots of patched layers: effect by layer, and layer x position of one pair."""

import pandas as pd
import plotly.graph_objects as go

from headscope.effects.results import effect_text
from headscope.effects.sweep import Effects
from headscope.estimates import EXACT
from headscope.plots import style
from headscope.plots.colour_range import mark_clipped_cells, symmetric_colorbar, symmetric_limit
from headscope.plots.rotary import ZERO_CENTRED_SCALE
from headscope.results.words import count_nouns
from probes.patching.labels import describe_methods, describe_sweep
from probes.patching.plots import MAX_AXIS_TOKEN_LABELS, label_token_axis, token_label
from probes.patching.questions import LAYER_EFFECT
from probes.patching.schema import LAYER_ACTIVATION_LABELS


def plot_layers(effects: Effects) -> go.Figure:
    """Mean effect of each layer with its interval over pairs. Pale points are estimates."""
    prompts, model = style.escape_label(effects.key["prompts"]), style.escape_label(effects.model)
    place = f" at {style.escape_label(effects.key['span'])}" if effects.key["span"] else ""
    subtitle = f"{describe_methods(effects, 'layers')}, {count_nouns(int(effects.units['n'].max()), 'pairs')}"
    title = style.title_with_subtitle(f"{describe_sweep(effects)}{place}, {prompts}: {model}", subtitle)
    units = effects.units
    figure = style.new_figure("").update_layout(title=title)
    figure.add_bar(
        x=units["layer"],
        y=units["effect"],
        error_y=style.error_bars(units["effect"], units["low"], units["high"]) if units["low"].notna().any() else None,
        marker={
            "color": style.CATEGORY_PALETTE[0],
            "opacity": [1.0 if method == EXACT else 0.45 for method in units["method"]],
        },
        text=[effect_text(effects, unit, LAYER_EFFECT) for _, unit in units.iterrows()],
        textposition="none",
        hovertemplate="layer %{x}: effect %{text}<extra></extra>",
    )
    figure.update_xaxes(title_text="layer", showgrid=False)
    figure.update_yaxes(title_text="effect")
    return style.set_metadata(style.set_top_margin(figure, 62), value="effect", x="layer", model=model)


def plot_layer_positions(rows: pd.DataFrame, tokens: pd.DataFrame) -> go.Figure:
    """Heatmap of one pair's effects by layer and token. `rows` are those of `analysis.layer_position_effects`.

    With more than `MAX_AXIS_TOKEN_LABELS` tokens it starts at the first one that differs between the prompts.
    """
    grid = rows.pivot_table(index="layer", columns="position", values="effect")
    words = tokens.set_index("position").reindex(grid.columns)
    differs = words["clean"].ne(words["corrupted"])
    if len(words) > MAX_AXIS_TOKEN_LABELS and differs.any():
        words = words.loc[differs.idxmax() :]
        grid = grid[words.index]
    labels = [token_label(clean, corrupted) for clean, corrupted in words[["clean", "corrupted"]].to_numpy()]
    first = rows.iloc[0]
    names = [style.escape_label(first[name]) for name in ("prompts", "model", "pair")]
    label = LAYER_ACTIVATION_LABELS[first["intervention"]]
    method = "exact" if (rows["method"] == "exact").all() else "estimated"
    title = f"{first['direction'].capitalize()} of the {label}, {names[0]}: {names[1]}"
    figure = style.new_figure("", 220 + 14 * len(grid)).update_layout(
        title=style.title_with_subtitle(title, f"{names[2]}, {method}")
    )
    limit = symmetric_limit(grid.to_numpy(), 1e-3)
    figure.add_heatmap(
        x=grid.columns.tolist(),
        y=grid.index.tolist(),
        z=grid.to_numpy(),
        zmin=-limit,
        zmax=limit,
        hovertemplate="layer %{y}, position %{x}<br>effect %{z:+.3f}<extra></extra>",
        colorbar={"title": {"text": "effect"}} | symmetric_colorbar(grid.to_numpy(), limit),
        xgap=1 if len(labels) <= MAX_AXIS_TOKEN_LABELS else 0,  # a gap would hide cells of less than a pixel
        ygap=1,
        **ZERO_CENTRED_SCALE,
    )
    mark_clipped_cells(figure, grid.to_numpy(), limit)
    label_token_axis(figure, grid.columns, labels)
    figure.update_yaxes(title_text="layer", dtick=max(1, len(grid) // 16), showgrid=False)
    return style.set_metadata(style.set_top_margin(figure, 62), value="effect", x="position")
