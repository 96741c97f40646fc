"""Plots of activation patching: layer x head matrix, head x position, estimates against exact effects, one head."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.effects.agreement import compared_units
from headscope.effects.results import effect_text
from headscope.effects.sweep import UNIT_KEYS, Effects, effects_table
from headscope.effects.units import estimate_marks, unit_nouns
from headscope.estimates import ESTIMATE_MARK, EXACT
from headscope.plots import head_scatter, style
from headscope.plots.rotary import ZERO_CENTRED_SCALE
from headscope.plots.unit_matrix import plot_unit_matrix
from headscope.results.words import count_nouns
from probes.patching.labels import describe_methods, describe_sweep
from probes.patching.questions import EFFECT

MAX_POSITION_UNITS = 20
"""Units in a plot of effects by position."""


def plot_matrix(effects: Effects) -> go.Figure:
    """Heatmap of the mean effect by layer and unit. Estimated units are marked if others are exact."""
    texts = [f"effect {effect_text(effects, unit, EFFECT)}" for _, unit in effects.units.iterrows()]
    figure = plot_unit_matrix(effects.units, "effect", texts, "effect", 1e-3, estimate_marks(effects))
    subtitle = describe_methods(effects, unit_nouns(effects.units))
    style.set_top_margin(figure.update_layout(title=_title(effects, subtitle)), 62)
    return style.set_metadata(figure, value="effect", model=style.escape_label(effects.model))


def plot_parts(effects: Effects, parts: Sequence[Effects], name: str) -> go.Figure:
    """Heatmap of the mean effect by unit and part of a sweep, for the units of largest effect in any part.

    `parts` are those of `analysis.parts_of_sweep`; `name` is the key that names them: span, or subset for a pair or a
    group. Estimated units are marked.
    """
    names = [one.key[name] for one in parts]
    units = effects_table(parts)
    by_unit = units.pivot_table(index=[*UNIT_KEYS], columns=name, values="effect")[names]
    top = by_unit.loc[by_unit.abs().max(axis=1).nlargest(MAX_POSITION_UNITS).index].sort_index(ascending=False)
    cells = {
        (*one.unit_key(unit), part): unit
        for one, part in zip(parts, names, strict=True)
        for _, unit in one.units.iterrows()
    }
    effect_rows = [[cells.get((*unit, part)) for part in names] for unit in top.index]
    hover = [
        ["" if unit is None else effect_text(one, unit, EFFECT) for one, unit in zip(parts, row, strict=True)]
        for row in effect_rows
    ]
    marks = [["" if unit is None or unit["method"] == EXACT else ESTIMATE_MARK for unit in row] for row in effect_rows]
    pairs = int(effects.units["n"].max())
    noun = "span" if name == "span" else "pair or group"
    title = _title(effects, f"by {noun}, {count_nouns(pairs, 'pairs')}")
    figure = style.new_figure("", 190 + 20 * len(top)).update_layout(title=title)
    limit = max(float(np.nanmax(np.abs(top.to_numpy()))), 1e-3)
    figure.add_heatmap(
        x=[style.escape_label(part) for part in top.columns],
        y=[unit_tick(*unit) for unit in top.index],
        z=top.to_numpy(),
        zmin=-limit,
        zmax=limit,
        text=marks,
        texttemplate="%{text}",
        hovertext=hover,
        hovertemplate="%{y}, %{x}<br>effect %{hovertext}<extra></extra>",
        colorbar={"title": {"text": "effect"}},
        xgap=1,
        ygap=1,
        **ZERO_CENTRED_SCALE,
    )
    figure.update_xaxes(type="category", showgrid=False, **style.turned_labels(names, style.UPRIGHT_LABELS // 2))
    figure.update_yaxes(type="category", showgrid=False)
    return style.set_metadata(style.set_top_margin(figure, 62), value="effect", x=noun)


def plot_agreement(effects: Effects) -> go.Figure:
    """Scatter plot of the estimated against the exact effect, one point per unit; the dashed line is y = x."""
    units = compared_units(effects, "estimate")
    subtitle = f"{len(units)} {unit_nouns(units)} with estimate and exact effect"
    figure = style.new_figure("").update_layout(title=_title(effects, subtitle))
    head_scatter.add_points(figure, units, "exact", "estimate", "exact %{x:+.3f}<br>estimate %{y:+.3f}")
    values = units[["exact", "estimate"]].to_numpy(dtype=np.float64)
    head_scatter.add_diagonal(figure, [values.min(), values.max()])
    figure.update_xaxes(title_text="exact effect")
    figure.update_yaxes(title_text="estimated effect")
    head_scatter.add_layer_colorbar(figure, top_margin=62)
    return style.set_metadata(figure, model=style.escape_label(effects.model))


def plot_head(rows: pd.DataFrame, models: Sequence[str], layer: int, head: int) -> go.Figure:
    """Bars of one head's effect on every prompt set and activation, by model. Pale bars are estimates.

    `rows` have a sweep each: its keys, the columns of the unit that is or contains the head, and the effect as `text`.
    """
    figure = style.new_figure(f"Patching effects of layer {layer}, head {head}")
    rows = rows.assign(model=rows["model"].astype(pd.CategoricalDtype(list(models))))
    for label, model_style in style.model_styles(rows).items():
        bars = rows[rows["model"] == label]
        conditions = zip(bars["prompts"], bars["intervention"], bars["direction"], strict=True)
        figure.add_bar(
            x=[f"{prompts}<br>{intervention}, {direction}" for prompts, intervention, direction in conditions],
            y=bars["effect"],
            error_y=style.error_bars(bars["effect"], bars["low"], bars["high"]) if bars["low"].notna().any() else None,
            marker={
                "color": model_style.colour,
                "opacity": [1.0 if method == EXACT else 0.45 for method in bars["method"]],
            },
            text=bars["text"],
            textposition="none",
            hovertemplate="%{x}: %{text}<extra>" + model_style.name + "</extra>",
            name=model_style.name,
        )
    figure.update_yaxes(title_text="effect")
    figure.update_xaxes(type="category", showgrid=False)
    return style.fit_legend(figure.update_layout(barmode="group"))


def _title(effects: Effects, subtitle: str) -> dict[str, object]:
    prompts, model = style.escape_label(effects.key["prompts"]), style.escape_label(effects.model)
    return style.title_with_subtitle(f"{describe_sweep(effects)}, {prompts}: {model}", subtitle)


def unit_tick(layer: int, kv_group: int, head: int) -> str:
    """The name of a head or KV group on an axis."""
    return f"L{layer} group {kv_group}" if head < 0 else f"L{layer}H{head}"
