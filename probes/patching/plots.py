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
from headscope.plots import shapes, style
from headscope.plots.colour_range import signed_colours
from headscope.plots.unit_matrix import plot_unit_matrix
from headscope.results.words import count_nouns
from probes.patching.labels import describe_methods, describe_sweep
from probes.patching.questions import EFFECT

MAX_POSITION_UNITS = 20
"""Units in a plot of effects by position."""


def plot_matrix(effects: Effects) -> go.Figure:
    """Heatmap of the mean effect by layer and unit. Estimated units are marked if others are exact."""
    texts = [f"effect {effect_text(effects, unit, EFFECT)}" for _, unit in effects.units.iterrows()]
    title = _title(effects, describe_methods(effects, unit_nouns(effects.units)))
    figure = plot_unit_matrix(title, effects.units, "effect", texts, "effect", 1e-3, estimate_marks(effects))
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
    limit = max(float(np.nanmax(np.abs(top.to_numpy()))), 1e-3)
    figure = shapes.matrix(
        _title(effects, f"by {noun}, {count_nouns(pairs, 'pairs')}"),
        top.rename(columns=style.escape_label).set_axis([unit_tick(*unit) for unit in top.index]),
        "%{y}, %{x}<br>effect %{hovertext}",
        {"type": "category", "showgrid": False, **style.turned_labels(names, style.UPRIGHT_LABELS // 2)},
        {"type": "category", "showgrid": False},
        height=190 + 20 * len(top),
        top_margin=62,
        text=marks,
        texttemplate="%{text}",
        hovertext=hover,
        **signed_colours(limit, "effect"),
    )
    return style.set_metadata(figure, value="effect", x=noun)


def plot_agreement(effects: Effects) -> go.Figure:
    """Scatter plot of the estimated against the exact effect, one point per unit; the dashed line is y = x."""
    units = compared_units(effects, "estimate")
    subtitle = f"{len(units)} {unit_nouns(units)} with estimate and exact effect"
    values = units[["exact", "estimate"]].to_numpy(dtype=np.float64)
    figure = shapes.head_points(
        _title(effects, subtitle),
        units,
        ("exact", "estimate"),
        "exact %{x:+.3f}<br>estimate %{y:+.3f}",
        "exact effect",
        "estimated effect",
        diagonal=(values.min(), values.max()),
        top_margin=62,
    )
    return style.set_metadata(figure, model=style.escape_label(effects.model))


def plot_head(rows: pd.DataFrame, models: Sequence[str], layer: int, head: int) -> go.Figure:
    """Bars of one head's effect on every prompt set and activation, by model. Pale bars are estimates.

    `rows` have a sweep each: its keys, the columns of the unit that is or contains the head, and the effect as `text`.
    """
    rows = rows.assign(model=rows["model"].astype(pd.CategoricalDtype(list(models))))
    conditions = zip(rows["prompts"], rows["intervention"], rows["direction"], strict=True)
    bars = effect_bars(rows).set_axis(
        [f"{prompts}<br>{change}, {direction}" for prompts, change, direction in conditions]
    )
    of_model = rows["model"].to_numpy()
    series = {model_style: bars[of_model == label] for label, model_style in style.model_styles(rows).items()}
    title, x = f"Patching effects of layer {layer}, head {head}", {"type": "category", "showgrid": False}
    return shapes.bars(title, series, "%{x}: %{text}", x, "effect", barmode="group")


def effect_bars(rows: pd.DataFrame) -> pd.DataFrame:
    """Bars of effects with their intervals and `text`; pale bars are estimates."""
    opacity = np.where(rows["method"] == EXACT, 1.0, 0.45)
    return rows.rename(columns={"effect": "y"})[["y", "low", "high", "text"]].assign(opacity=opacity)


def _title(effects: Effects, subtitle: str) -> dict[str, object]:
    prompts, model = style.escape_label(effects.key["prompts"]), style.escape_label(effects.model)
    return style.title_with_subtitle(f"{describe_sweep(effects)}, {prompts}: {model}", subtitle)


def unit_tick(layer: int, kv_group: int, head: int) -> str:
    """The name of a head or KV group on an axis."""
    return f"L{layer} group {kv_group}" if head < 0 else f"L{layer}H{head}"
