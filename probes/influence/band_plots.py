"""Plots of influence by band of rotary pairs: for each unit, and for all units at once.

`sweeps` are from `analysis.band_sweeps`, of one kind of ablation; `sets` are from `analysis.ranked_sets`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.effects.sweep import UNIT_KEYS, Effects, effects_table
from headscope.plots import style
from headscope.plots.colour_range import mark_clipped_cells, symmetric_colorbar, symmetric_limit
from headscope.plots.rotary import ZERO_CENTRED_SCALE
from probes.influence import bands
from probes.influence.labels import describe_methods
from probes.influence.plots import influence_title

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
    figure = style.new_figure("", 180 + 36 * len(order))
    subtitle = f"{bands.KIND_DESCRIPTIONS[order[0].partition(':')[0]]}: {describe_methods(units)}"
    figure.update_layout(title=influence_title(sweeps[0], " by band of rotary pairs", subtitle))
    figure.add_heatmap(
        x=list(range(len(places))),
        y=[_band_axis_label(component, wavelengths) for component in order],
        z=grid,
        zmin=-limit,
        zmax=limit,
        customdata=head_ids,
        hovertemplate=f"layer %{{customdata[0]}}, {unit_name}, pairs %{{y}}<br>Δ %{{z:+.3g}} nats/token<extra></extra>",
        colorbar={"title": {"text": "nats/token"}} | symmetric_colorbar(grid, limit),
        **ZERO_CENTRED_SCALE,
    )
    mark_clipped_cells(figure, grid, limit)
    layer_starts = places.reset_index().groupby("layer")["index"].first()
    ticks = layer_starts.iloc[:: max(1, len(layer_starts) // 16)]
    figure.update_xaxes(
        title_text=f"layer, {'KV groups' if are_groups else 'heads'} from left to right",
        tickvals=ticks.to_list(),
        ticktext=[str(layer) for layer in ticks.index],
    )
    figure.update_yaxes(title_text="pairs", type="category", autorange="reversed", showgrid=False, showline=False)
    return style.set_metadata(
        style.declare_head_points(style.set_top_margin(figure, 62)),
        value="influence (nats/token)",
        model=style.escape_label(sweeps[0].model),
    )


def plot_joint_effects_by_band(sets: pd.DataFrame, wavelengths: BandWavelengths = NO_WAVELENGTHS) -> go.Figure:
    """Bars of the rise of the loss (nats/token) when a band is ablated in all units at once, by band and ablation.

    Mean over documents; error bars are 95 % confidence intervals.
    """
    title = "All heads at once, by band of rotary pairs"
    band_effects = sets[bands.band_mask(sets["intervention"])] if "intervention" in sets else sets
    if reason := style.missing_data_reason(band_effects, "intervention", "effect"):
        return style.empty_figure(title, reason)
    figure = style.new_figure(f"{title}: {style.escape_label(band_effects['model'].iloc[0])}")
    order = dict.fromkeys(
        _narrow_band_axis_label(component, wavelengths)
        for component in sorted(band_effects["intervention"], key=bands.band_sort_key)
    )
    for number, (kind, change) in enumerate(bands.KIND_DESCRIPTIONS.items()):
        rows = band_effects[band_effects["intervention"].str.startswith(kind)]
        if len(rows):
            above, below = rows["high"] - rows["effect"], rows["effect"] - rows["low"]
            bars = {"type": "data", "symmetric": False, "thickness": 1.5, "array": above, "arrayminus": below}
            figure.add_bar(
                x=[_narrow_band_axis_label(component, wavelengths) for component in rows["intervention"]],
                y=rows["effect"],
                error_y=bars if rows["low"].notna().any() else None,
                marker={"color": style.CATEGORY_PALETTE[number], "line_width": 0},
                name=change,
                hovertemplate=f"pairs %{{x}}, {change}<br>Δ %{{y:+.3g}} nats/token<extra></extra>",
            )
    figure.update_xaxes(type="category", categoryorder="array", categoryarray=list(order))
    figure.update_xaxes(title_text="pairs with their wavelengths (tokens)" if wavelengths else "pairs")
    figure.update_yaxes(title_text="rise of the loss Δ (nats/token)")
    return style.fit_legend(figure.update_layout(barmode="group", bargap=0.25))


def _band_axis_label(component: str, wavelengths: BandWavelengths) -> str:
    """The label of a band, with the wavelengths of its pairs on a second line."""
    band = bands.band_label(component)
    return f"{band}<br>{wavelengths[band]}" if band in wavelengths else band


def _narrow_band_axis_label(component: str, wavelengths: BandWavelengths) -> str:
    """The axis label, wrapped to the width of a bar."""
    return _band_axis_label(component, wavelengths).removesuffix(" tokens").replace(" to ", "<br>to ")
