"""Plots of patched layers: effect by layer."""

import plotly.graph_objects as go

from headscope.effects.results import effect_text
from headscope.effects.sweep import Effects
from headscope.estimates import EXACT
from headscope.plots import style
from headscope.results.words import count_nouns
from probes.patching.labels import describe_methods, describe_sweep
from probes.patching.questions import LAYER_EFFECT


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
