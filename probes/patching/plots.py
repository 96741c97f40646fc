"""Plots of activation patching: layer x head matrix, head x position, estimates against exact effects, one head."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from headscope.base.heads import ESTIMATE_MARK, EXACT, Head, format_head
from headscope.plots import shapes, style
from headscope.plots.axes import MAX_PANEL_TOKEN_LABELS, MAX_TOKEN_LABELS, token_axis, token_hover
from headscope.plots.colour_range import mark_clipped_cells, signed_colours, symmetric_limit
from headscope.plots.head_matrices import plot_unit_matrix
from headscope.plots.selector import combine_figures, first_choices
from headscope.results.effects.comparison import compared_units
from headscope.results.effects.results import effect_text
from headscope.results.effects.sweep import UNIT_KEYS, Effects, effects_table
from headscope.results.effects.units import estimate_marks, unit_nouns
from headscope.results.words import count_nouns
from probes.patching.analysis import describe_methods, describe_sweep
from probes.patching.position_maps import PositionMap
from probes.patching.results import EFFECT, LAYER_EFFECT

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
        customdata=[[[layer, head, kv_group]] * len(names) for layer, kv_group, head in top.index],
        **signed_colours(limit, "effect"),
    )
    model = style.escape_label(effects.model)
    return style.set_metadata(figure, value="effect", x=noun, heads=True, model=model)


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
