"""Influence by band of rotary pairs: of each unit, and of all at once.

Rows are those of `found.banded` and `found.curve`, cut to one model and one objective.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import style
from headscope.plots.rotary import ZERO_CENTRED_SCALE
from probes.influence import bands
from probes.influence.analysis import describe_methods
from probes.influence.plots import influence_title
from probes.influence.tables import UNIT_COLUMNS

BandWavelengths = Mapping[str, str]
"""The wavelengths of a band by its label, in words."""
NO_WAVELENGTHS: BandWavelengths = MappingProxyType({})


def plot_influence_by_band(units: pd.DataFrame, wavelengths: BandWavelengths = NO_WAVELENGTHS) -> go.Figure:
    """Influence (nats/token) of each band of pairs of each unit, one kind of knock-out: units across, layer by layer,
    bands down. Colours reach the 99 % quantile of |Δ|."""
    if why := style.missing_data_reason(units, "delta"):
        return style.empty_figure("Influence by band", why)
    order = sorted(units["component"].unique(), key=bands.band_sort_key)
    places = units[UNIT_COLUMNS].drop_duplicates().sort_values(UNIT_COLUMNS, ignore_index=True)
    table = units.pivot(index="component", columns=UNIT_COLUMNS, values="delta")
    grid = table.reindex(index=order, columns=pd.MultiIndex.from_frame(places)).to_numpy(dtype=np.float64)
    most = max(float(np.nanquantile(np.abs(grid), 0.99)), 1e-9)
    told = np.broadcast_to(places[["layer", "head", "kv_group"]].to_numpy(), (*grid.shape, 3))
    whole = bool((places["head"] < 0).all())
    called = "key group %{customdata[2]}" if whole else "head %{customdata[1]}"
    made = style.new_figure("", 180 + 36 * len(order))
    subtitle = f"{bands.KIND_DESCRIPTIONS[order[0].partition(':')[0]]}: {describe_methods(units)}"
    made.update_layout(title=influence_title(units, " by band of rotary pairs", subtitle))
    made.add_heatmap(
        x=list(range(len(places))),
        y=[_band_axis_label(component, wavelengths) for component in order],
        z=grid,
        zmin=-most,
        zmax=most,
        customdata=told,
        hovertemplate=f"layer %{{customdata[0]}}, {called}, pairs %{{y}}<br>Δ %{{z:+.3g}} nats/token<extra></extra>",
        colorbar={"title": {"text": "nats/token"}},
        **ZERO_CENTRED_SCALE,
    )
    first = places.reset_index().groupby("layer")["index"].first()
    shown = first.iloc[:: max(1, len(first) // 16)]
    made.update_xaxes(
        title_text=f"layer (its {'key groups' if whole else 'heads'} side by side)",
        tickvals=shown.to_list(),
        ticktext=[str(at) for at in shown.index],
    )
    made.update_yaxes(title_text="pairs", type="category", autorange="reversed", showgrid=False, showline=False)
    return style.set_metadata(style.declare_head_points(style.set_top_margin(made, 62)), value="influence (nats/token)")


def plot_joint_effects_by_band(effects: pd.DataFrame, wavelengths: BandWavelengths = NO_WAVELENGTHS) -> go.Figure:
    """Loss added (nats/token) when all units lose a band of pairs at once, by band and what they lose; mean over
    documents with a 95 % interval, where there is one. Rows of `found.curve` of one model and objective."""
    title = "All heads at once, by band of rotary pairs"
    mine = effects[bands.band_mask(effects["component"])] if "component" in effects else effects
    if why := style.missing_data_reason(mine, "component", "mean"):
        return style.empty_figure(title, why)
    made = style.new_figure(f"{title}: {style.escape_label(mine['model'].iloc[0])}")
    order = dict.fromkeys(
        _narrow_band_axis_label(each, wavelengths) for each in sorted(mine["component"], key=bands.band_sort_key)
    )
    for at, (kind, done) in enumerate(bands.KIND_DESCRIPTIONS.items()):
        line = mine[mine["component"].str.startswith(kind)]
        if len(line):
            ends = {"array": line["high"] - line["mean"], "arrayminus": line["mean"] - line["low"]}
            bars = {"type": "data", "symmetric": False, "thickness": 1.5, **ends}
            made.add_bar(
                x=[_narrow_band_axis_label(each, wavelengths) for each in line["component"]],
                y=line["mean"],
                error_y=bars if line["low"].notna().any() else None,
                marker={"color": style.PALETTE[at], "line_width": 0},
                name=done,
                hovertemplate=f"pairs %{{x}}, {done}<br>Δ %{{y:+.3g}} nats/token<extra></extra>",
            )
    made.update_xaxes(type="category", categoryorder="array", categoryarray=list(order))
    made.update_xaxes(title_text="pairs, and their wavelengths (tokens)" if wavelengths else "pairs")
    made.update_yaxes(title_text="loss added Δ (nats/token)")
    return style.fit_legend(made.update_layout(barmode="group", bargap=0.25))


def _band_axis_label(component: str, wavelengths: BandWavelengths) -> str:
    """The band, and below it the wavelengths of its pairs."""
    band = bands.band_label(component)
    return f"{band}<br>{wavelengths[band]}" if band in wavelengths else band


def _narrow_band_axis_label(component: str, wavelengths: BandWavelengths) -> str:
    """The same in lines as narrow as a bar."""
    return _band_axis_label(component, wavelengths).removesuffix(" tokens").replace(" to ", "<br>to ")
