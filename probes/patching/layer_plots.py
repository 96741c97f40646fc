"""Plots of patched layers: effect by layer."""

import plotly.graph_objects as go

from headscope.effects.results import effect_text
from headscope.effects.sweep import Effects
from headscope.plots import shapes, style
from headscope.results.words import count_nouns
from probes.patching.labels import describe_methods, describe_sweep
from probes.patching.plots import effect_bars
from probes.patching.questions import LAYER_EFFECT


def plot_layers(effects: Effects) -> go.Figure:
    """Mean effect of each layer with its interval over pairs. Pale points are estimates."""
    prompts, model = style.escape_label(effects.key["prompts"]), style.escape_label(effects.model)
    place = f" at {style.escape_label(effects.key['span'])}" if effects.key["span"] else ""
    subtitle = f"{describe_methods(effects, 'layers')}, {count_nouns(int(effects.units['n'].max()), 'pairs')}"
    title = style.title_with_subtitle(f"{describe_sweep(effects)}{place}, {prompts}: {model}", subtitle)
    texts = [effect_text(effects, unit, LAYER_EFFECT) for _, unit in effects.units.iterrows()]
    layers = effect_bars(effects.units.assign(text=texts).set_index("layer"))
    series = {style.UNNAMED: layers}
    x = {"title_text": "layer", "showgrid": False}
    figure = shapes.bars(title, series, "layer %{x}: effect %{text}<extra></extra>", x, "effect", top_margin=62)
    return style.set_metadata(figure, value="effect", x="layer", model=model)
