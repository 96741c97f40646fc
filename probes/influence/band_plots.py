"""Plots of influence by band of rotary pairs: for each unit, and for all units at once.

`sweeps` are from `analysis.band_sweeps`, of one kind of ablation; `sets` are from `analysis.ranked_sets`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.effects.sweep import UNIT_KEYS, Effects, effects_table
from headscope.plots import shapes, style
from headscope.plots.colour_range import mark_clipped_cells, signed_colours, symmetric_limit
from probes.influence import bands
from probes.influence.labels import describe_methods
from probes.influence.plots import LOSS_RISE, influence_title

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
    ticks = layer_starts.iloc[:: max(1, len(layer_starts) // 16)]
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
    return style.set_metadata(figure, value="influence (nats/token)", model=style.escape_label(sweeps[0].model))


def plot_joint_effects_by_band(sets: pd.DataFrame, wavelengths: BandWavelengths = NO_WAVELENGTHS) -> go.Figure:
    """Bars of the rise of the loss (nats/token) when a band is ablated in all units at once, by band and ablation.

    Mean over documents; error bars are 95 % confidence intervals.
    """
    title = "All heads at once, by band of rotary pairs"
    band_effects = sets[bands.band_mask(sets["intervention"])] if "intervention" in sets else sets
    if reason := style.missing_data_reason(band_effects, "intervention", "effect"):
        return style.empty_figure(title, reason)
    title = f"{title}: {style.escape_label(band_effects['model'].iloc[0])}"
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
    return figure.update_layout(bargap=0.25)


def _band_axis_label(component: str, wavelengths: BandWavelengths) -> str:
    """The label of a band, with the wavelengths of its pairs on a second line."""
    band = bands.band_label(component)
    return f"{band}<br>{wavelengths[band]}" if band in wavelengths else band


def _narrow_band_axis_label(component: str, wavelengths: BandWavelengths) -> str:
    """The axis label, wrapped to the width of a bar."""
    return _band_axis_label(component, wavelengths).removesuffix(" tokens").replace(" to ", "<br>to ")
