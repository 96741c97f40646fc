"""Plots of head influence: distribution, layer-by-head matrix, largest units, correlations, sets of units.

Every title names the change and the method.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, shapes, style
from headscope.plots.colour_range import mark_clipped_cells, signed_colours, symmetric_limit
from headscope.plots.head_matrices import plot_unit_matrix
from headscope.plots.style import UNNAMED
from headscope.results.effects.results import effect_text
from headscope.results.effects.sweep import UNIT_KEYS, Effects, effects_table
from headscope.results.effects.units import estimate_marks, unit_name, unit_nouns
from headscope.results.words import count_nouns, q_value
from headscope.runs.column_metadata import capitalise
from probes.influence import bands
from probes.influence.analysis import TEXT_NOUNS, unit_of_head
from probes.influence.declaration import EFFECTS
from probes.influence.results import describe_change, describe_methods, unit_noun

INFLUENCE, LOSS_RISE = "influence Δ (nats/token)", "rise of the loss Δ (nats/token)"
"""Titles of axes."""
MAX_FOREST_UNITS = 20
"""Units in a forest plot."""


def plot_histogram(effects: Effects, marked_heads: Mapping[str, pd.Series] = MappingProxyType({})) -> go.Figure:
    """Histogram of influence (nats/token) with counts on a log axis.

    A line marks the unit of each head in `marked_heads`, which maps labels to rows of the per-head table.
    """
    units, nouns = effects.units, unit_nouns(effects.units)
    figure = style.new_figure(_sweep_title(effects))
    values = units["effect"].to_numpy(dtype=np.float64)
    counts, edges = np.histogram(values, bins=min(60, max(12, len(values) // 4)))
    figure.add_bar(
        x=(edges[1:] + edges[:-1]) / 2,
        y=np.where(counts > 0, counts, np.nan),
        width=np.diff(edges),
        marker={"color": style.CATEGORY_PALETTE[0], "line_width": 0},
        hovertemplate=f"Δ about %{{x:.2g}} nats/token: %{{y}} {nouns}<extra></extra>",
        showlegend=False,
    )
    figure.add_vline(x=0, line=style.REFERENCE_LINE)
    low, high = min(edges[0], 0.0), max(edges[-1], 0.0)
    marked_units = [(label, unit) for label, head in marked_heads.items() for unit in unit_of_head(effects, head)]
    for row, (label, unit) in enumerate(marked_units):
        line = {"color": style.HIGHLIGHT_COLOUR, "dash": "dash", "width": 1.5}
        text = f"{label}: {unit_name(unit)}, Δ {unit['effect']:+.2g}"
        place = {"x": 0, "xref": "paper", "xanchor": "left", "y": 1, "yref": "paper", "yanchor": "bottom"}
        figure.add_vline(x=unit["effect"], line=line)  # its label stands above the plot, whose axis it would hide
        figure.add_annotation(text=text, showarrow=False, yshift=2 + 16 * row, font_size=12, **place)
    # Annotations would widen the axis.
    x = {"title_text": INFLUENCE, "range": [low - (high - low) / 40, high + (high - low) / 40]}
    shapes.label_axes(figure, x, {"title_text": nouns, **axes.log_axis([1, counts.max()])})
    style.set_metadata(figure, model=style.escape_label(effects.model))
    return style.set_top_margin(figure.update_layout(bargap=0), 62 + 16 * len(marked_units))


def plot_matrix(effects: Effects) -> go.Figure:
    """Heatmap of influence (nats/token) by layer and unit; red: the loss rises. Estimates are marked if others are
    exact."""
    texts = [f"Δ {_text(effects, unit)}" for _, unit in effects.units.iterrows()]
    figure = plot_unit_matrix(
        _sweep_title(effects), effects.units, "effect", texts, "nats/token", 1e-9, estimate_marks(effects)
    )
    return style.set_metadata(figure, value="influence (nats/token)", model=style.escape_label(effects.model))


def plot_forest(effects: Effects) -> go.Figure:
    """Forest plot of the units of largest influence (nats/token), in descending order.

    Mean, 95 % confidence interval (from three documents on) and a small dot per document. Filled: exact; hollow:
    estimated.
    """
    order = effects.units.sort_values("effect", ascending=False, kind="stable").head(MAX_FOREST_UNITS)
    order = order.reset_index(drop=True)
    title = _sweep_title(effects, f", top {unit_nouns(effects.units)}")
    figure = style.new_figure(title, 120 + 22 * max(len(order), 4))
    dots = [
        (change, row, style.escape_label(sample), unit[["layer", "head", "kv_group"]].tolist())
        for row, unit in order.iterrows()
        for sample, change in effects.by_sample(unit).items()
    ]
    changes, rows_of_dots, samples, heads = zip(*dots, strict=True)
    figure.add_scatter(
        x=changes,
        y=rows_of_dots,
        mode="markers",
        marker={"color": style.TEXT_COLOUR, "size": 4, "opacity": 0.7},
        text=samples,
        customdata=heads,
        hovertemplate="%{text}: Δ %{x:+.2g} nats/token<extra></extra>",
        name=f"one {TEXT_NOUNS[effects.key['objective']]}",
    )
    has_interval = order["low"].notna()
    for method, symbol in (("exact", "circle"), ("estimated", "circle-open")):
        rows = order[(order["method"] == "exact") == (method == "exact")]
        if rows.empty:
            continue
        bars = style.error_bars(rows["effect"], rows["low"], rows["high"]) | {"thickness": 1.5, "width": 3}
        figure.add_scatter(
            x=rows["effect"],
            y=rows.index,
            mode="markers",
            marker={"color": style.CATEGORY_PALETTE[0], "size": 10, "symbol": symbol, "line": {"width": 2}},
            error_x=bars if has_interval.any() else None,
            customdata=rows[["layer", "head", "kv_group"]].to_numpy(),
            text=[
                f"{unit_name(unit)}: Δ {_text(effects, unit)}{q_value(unit['p_adjusted'])}"
                for _, unit in rows.iterrows()
            ],
            hovertemplate="%{text}<extra></extra>",
            name=f"mean, {method}",
        )
    figure.add_vline(x=0, line=style.REFERENCE_LINE)
    ticks = {"tickvals": list(order.index), "ticktext": [unit_name(unit) for _, unit in order.iterrows()]}
    shapes.label_axes(figure, INFLUENCE, {**ticks, "range": [len(order) - 0.4, -0.6], "showgrid": False})
    figure.update_layout(legend={"y": 1, "yanchor": "bottom"}, margin_l=104)
    return style.set_metadata(
        style.declare_head_points(style.set_top_margin(figure.update_layout(showlegend=True), 92)),
        x="influence (nats/token)",
        value="rank",
        model=style.escape_label(effects.model),
    )


def _text(effects: Effects, unit: pd.Series) -> str:
    """The effect of a unit with its interval, or marked as an estimate."""
    return effect_text(effects, unit, EFFECTS[effects.key["objective"]])


def plot_against_statistic(effects: Effects, heads: pd.DataFrame, column: str, label: str) -> go.Figure:
    """Scatter plot of the influence (nats/token) of every unit against a column of the per-head table.

    The column is averaged over the heads of a KV group. `label` names the axis. Colour is the layer.
    """
    units = effects.units
    if reason := style.missing_data_reason(heads, column):
        return style.empty_figure(f"Influence against {label}", reason)
    unit_columns = [*UNIT_KEYS] if (units["head"] >= 0).all() else [*UNIT_KEYS[:2]]
    x = heads.groupby(unit_columns)[column].mean().rename("x")
    points = units.join(x, on=unit_columns).dropna(subset=["x", "effect"])
    if points.empty:
        return style.empty_figure(f"Influence against {label}", f"no {unit_noun(units)} has both values")
    title, hover = _sweep_title(effects, f" against {label}"), f"{label} %{{x:.3g}}<br>Δ %{{y:+.3g}} nats/token"
    figure = shapes.head_points(title, points, ("x", "effect"), hover, label, INFLUENCE, level=0, top_margin=62)
    return style.set_metadata(figure, model=style.escape_label(effects.model))


def plot_cumulative_effect(sets: pd.DataFrame) -> go.Figure:
    """Rise of the loss (nats/token) when the top 1, 2, 4, ... units are changed together, and when random units are.

    Random units are from the same layers. Mean over documents and draws, 95 % confidence band over documents.
    `sets` are `analysis.ranked_sets` of one sweep.
    """
    if reason := style.missing_data_reason(sets, "model", "choice", "size", "effect"):
        return style.empty_figure("Heads changed together", reason)
    unit = "KV groups" if sets["unit"].iloc[0] == "group" else "heads"
    change = describe_change(*sets[["intervention", "target", "objective"]].iloc[0])
    by_size = sets.rename(columns={"effect": "mean"}).set_index("size").sort_index()
    styles = {
        "top": style.ModelStyle("top by influence", style.CATEGORY_PALETTE[0], "solid", "circle"),
        "random": style.ModelStyle("random, same layers", style.CATEGORY_PALETTE[7], "dash", "diamond"),
    }
    curves = {
        line_style: by_size.loc[by_size["choice"] == choice, ["mean", "low", "high"]]
        for choice, line_style in styles.items()
        if (by_size["choice"] == choice).any()
    }
    sizes = sorted(set(sets["size"]))
    # The label of the last tick, all units, needs room.
    sizes = [size for size in sizes if size == sizes[-1] or size * 1.2 < sizes[-1]]
    ticks = {"type": "log", "tickvals": sizes, "ticktext": [str(size) for size in sizes]}
    title, x = f"{capitalise(unit)} changed together: {change}", {"title_text": f"{unit} changed together", **ticks}
    return shapes.bands(title, curves, f"%{{x}} {unit}: Δ %{{y:+.4f}} nats/token", x, LOSS_RISE, level=0)


def plot_named_sets(sets: pd.DataFrame) -> go.Figure:
    """Bars of the rise of the loss (nats/token) when the heads of a named set are changed together.

    Error bars are 95 % confidence intervals. `sets` are `analysis.named_sets` of one sweep.
    """
    title = f"Named sets: {describe_change(*sets[['intervention', 'target', 'objective']].iloc[0])}"
    names = [
        f"{style.escape_label(name, 20)}<br>{count_nouns(size, 'heads')}"
        for name, size in sets[["choice", "size"]].to_numpy()
    ]
    bars = sets.rename(columns={"effect": "y"})[["y", "low", "high"]].set_axis(names)
    x, hover = {"type": "category", "showgrid": False}, "%{x}: Δ %{y:+.3g} nats/token<extra></extra>"
    return shapes.bars(title, {UNNAMED: bars}, hover, x, LOSS_RISE, top_margin=70)


def _sweep_title(effects: Effects, title_suffix: str = "") -> dict[str, object]:
    """A title with the model, and a subtitle with the change and the method."""
    change = describe_change(effects.key["intervention"], effects.key["target"])
    return influence_title(effects, title_suffix, f"{change}: {describe_methods(effects.units)}")


def influence_title(effects: Effects, title_suffix: str, subtitle: str) -> dict[str, object]:
    """A title that names the objective and the model, with a subtitle."""
    answers = " on answers" if effects.key["objective"] == "answer" else ""
    return style.title_with_subtitle(f"Influence{answers}{title_suffix}: {style.escape_label(effects.model)}", subtitle)


BandWavelengths = Mapping[str, str]
"""Text with the wavelengths of a band, by the band's label."""
NO_WAVELENGTHS: BandWavelengths = MappingProxyType({})


def plot_influence_by_band(sweeps: Sequence[Effects], wavelengths: BandWavelengths = NO_WAVELENGTHS) -> go.Figure:
    """Heatmap of the influence (nats/token) of each unit by band of rotary pairs, under one kind of ablation.

    Columns are units, layer by layer; rows are bands, fastest pairs on top. Colours saturate at the 99 % quantile of
    |Δ|.
    """
    units, keys = effects_table(sweeps), [*UNIT_KEYS]
    order = sorted(units["intervention"].unique(), key=bands.band_sort_key)
    places = units[keys].drop_duplicates().sort_values(keys, ignore_index=True)
    table = units.pivot(index="intervention", columns=keys, values="effect")
    grid = table.reindex(index=order, columns=pd.MultiIndex.from_frame(places)).to_numpy(dtype=np.float64)
    limit = symmetric_limit(grid, 1e-9)
    head_ids = np.broadcast_to(places[["layer", "head", "kv_group"]].to_numpy(), (*grid.shape, 3))
    are_groups = bool((places["head"] < 0).all())
    unit_name = "KV group %{customdata[2]}" if are_groups else "head %{customdata[1]}"
    subtitle = f"{bands.KIND_DESCRIPTIONS[order[0].partition(':')[0]]}: {describe_methods(units)}"
    layer_starts = places.reset_index().groupby("layer")["index"].first()
    ticks = layer_starts.iloc[:: -(-len(layer_starts) // 16)]
    x = {"title_text": f"layer, {'KV groups' if are_groups else 'heads'} from left to right"}
    y = {"title_text": "pairs", "type": "category", "autorange": "reversed", "showgrid": False, "showline": False}
    figure = shapes.matrix(
        influence_title(sweeps[0], " by band of rotary pairs", subtitle),
        pd.DataFrame(grid, [_band_axis_label(component, wavelengths) for component in order]),
        f"layer %{{customdata[0]}}, {unit_name}, pairs %{{y}}<br>Δ %{{z:+.3g}} nats/token",
        x | {"tickvals": ticks.to_list(), "ticktext": [str(layer) for layer in ticks.index]},
        y,
        height=180 + 36 * len(order),
        top_margin=62,
        gaps=False,
        customdata=head_ids,
        **signed_colours(limit, "nats/token", grid),
    )
    style.declare_head_points(mark_clipped_cells(figure, grid, limit))
    model = style.escape_label(sweeps[0].model)
    return style.set_metadata(figure, value="influence (nats/token)", y="pairs", model=model)


def plot_joint_effects_by_band(sets: pd.DataFrame, wavelengths: BandWavelengths = NO_WAVELENGTHS) -> go.Figure:
    """Bars of the rise of the loss (nats/token) when a band is ablated in all units at once, by band and ablation.

    Mean over documents; error bars are 95 % confidence intervals.
    """
    title = "All heads at once, by band of rotary pairs"
    band_effects = sets[bands.band_mask(sets["intervention"])] if "intervention" in sets else sets
    if reason := style.missing_data_reason(band_effects, "intervention", "effect"):
        return style.empty_figure(title, reason)
    model = style.escape_label(band_effects["model"].iloc[0])
    title = f"{title}: {model}"
    table = band_effects.rename(columns={"effect": "y"}).set_index("intervention")[["y", "low", "high"]]
    labels = {
        component: _narrow_band_axis_label(component, wavelengths)
        for component in sorted(table.index, key=bands.band_sort_key)
    }
    styles = style.category_styles([*bands.KIND_DESCRIPTIONS.values()]).values()
    series = {
        kind_style: table[table.index.str.startswith(kind)].rename(labels)
        for kind, kind_style in zip(bands.KIND_DESCRIPTIONS, styles, strict=True)
        if table.index.str.startswith(kind).any()
    }
    order = {"type": "category", "categoryorder": "array", "categoryarray": [*dict.fromkeys(labels.values())]}
    x = {**order, "title_text": "pairs with their wavelengths (tokens)" if wavelengths else "pairs"}
    hover = f"pairs %{{x}}, {shapes.NAME}<br>Δ %{{y:+.3g}} nats/token<extra></extra>"
    figure = shapes.bars(title, series, hover, x, LOSS_RISE, barmode="group")
    return style.set_metadata(figure.update_layout(bargap=0.25), model=model)


def _band_axis_label(component: str, wavelengths: BandWavelengths) -> str:
    """The label of a band, with the wavelengths of its pairs on a second line."""
    band = bands.band_label(component)
    return f"{band}<br>{wavelengths[band]}" if band in wavelengths else band


def _narrow_band_axis_label(component: str, wavelengths: BandWavelengths) -> str:
    """The axis label, wrapped to the width of a bar."""
    return _band_axis_label(component, wavelengths).removesuffix(" tokens").replace(" to ", "<br>to ")
