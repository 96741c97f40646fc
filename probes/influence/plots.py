"""Head influence: how it is spread, where it sits, what it goes with, and what sets of units carry.

`units` is the table of `found.units`, cut to one sweep; every title says what was reset to what, and how it was found.
"""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, head_scatter, style
from headscope.plots.rotary import ZERO_CENTRED_SCALE
from probes.influence.analysis import (
    describe_change,
    describe_methods,
    describe_uncertainty,
    format_q_value,
    unit_label,
    unit_of_head,
)
from probes.influence.objectives import TEXT_NOUNS
from probes.influence.tables import UNIT_COLUMNS

MAX_FOREST_UNITS = 20
"""Units in a forest plot."""


def plot_histogram(units: pd.DataFrame, marked_heads: Mapping[str, pd.Series] = MappingProxyType({})) -> go.Figure:
    """Units by influence (nats/token), counts on a log axis; a line marks the unit of each head in `marked`, by the
    words for it."""
    if why := style.missing_data_reason(units, "delta"):
        return style.empty_figure("Head influence", why)
    made = style.new_figure("").update_layout(title=_sweep_title(units))
    values = units["delta"].to_numpy(dtype=np.float64)
    counts, edges = np.histogram(values, bins=min(60, max(12, len(values) // 4)))
    made.add_bar(
        x=(edges[1:] + edges[:-1]) / 2,
        y=np.where(counts > 0, counts, np.nan),
        width=np.diff(edges),
        marker={"color": style.PALETTE[0], "line_width": 0},
        hovertemplate="Δ about %{x:.2g} nats/token: %{y} units<extra></extra>",
        showlegend=False,
    )
    made.add_vline(x=0, line={"color": style.TEXT_COLOUR, "dash": "dot", "width": 1})
    low, high = min(edges[0], 0.0), max(edges[-1], 0.0)
    found = [
        (called, unit) for called, head in marked_heads.items() for _, unit in unit_of_head(units, head).iterrows()
    ]
    for row, (called, unit) in enumerate(found):
        side = "left" if unit["delta"] > (low + high) / 2 else "right"  # where there is room for the words
        made.add_vline(
            x=unit["delta"],
            line={"color": style.HIGHLIGHT_COLOUR, "dash": "dash", "width": 1.5},
            annotation={"text": f"{called}: {unit_label(unit)}, Δ {unit['delta']:+.2g}", "yshift": -16 * row},
            annotation_position=f"top {side}",
        )
    # Words would widen the axis.
    made.update_xaxes(title_text="influence Δ (nats/token)", range=[low - (high - low) / 40, high + (high - low) / 40])
    made.update_yaxes(title_text="units", **axes.log_axis([1, counts.max()]))
    return style.set_top_margin(made.update_layout(bargap=0), 74)


def plot_matrix(units: pd.DataFrame) -> go.Figure:
    """Influence (nats/token) by layer and unit; red where the reset hurts. Colours reach the 99 % quantile of |Δ|."""
    if why := style.missing_data_reason(units, "delta"):
        return style.empty_figure("Head influence", why)
    whole = bool((units["head"] < 0).all())
    across = units["kv_group"] if whole else units["head"]
    grid = np.full((int(units["layer"].max()) + 1, int(across.max()) + 1), np.nan)
    told = np.full((*grid.shape, 3), np.nan)
    behind = np.full(grid.shape, "", dtype=object)
    grid[units["layer"], across] = units["delta"]
    told[units["layer"], across] = units[["layer", "head", "kv_group"]]
    behind[units["layer"], across] = [describe_uncertainty(unit) for _, unit in units.iterrows()]
    reach = max(float(np.nanquantile(np.abs(grid), 0.99)), 1e-9)
    called = "key group" if whole else "head"
    made = style.new_figure("", int(np.clip(146 + 18 * len(grid), 280, 760))).update_layout(title=_sweep_title(units))
    made.add_heatmap(
        x=list(range(grid.shape[1])),
        y=list(range(grid.shape[0])),
        z=grid,
        zmin=-reach,
        zmax=reach,
        customdata=told,
        text=behind,
        hovertemplate=f"layer %{{y}}, {called} %{{x}}<br>Δ %{{z:+.3g}} nats/token%{{text}}<extra></extra>",
        colorbar={"title": {"text": "nats/token"}},
        xgap=1,
        ygap=1,
        **ZERO_CENTRED_SCALE,
    )
    made.update_xaxes(title_text=called, dtick=max(1, grid.shape[1] // 16), showgrid=False, showline=False)
    made.update_yaxes(title_text="layer", dtick=max(1, len(grid) // 16), showgrid=False, showline=False)
    return style.set_metadata(style.declare_head_points(style.set_top_margin(made, 62)), value="influence (nats/token)")


def plot_forest(units: pd.DataFrame, document_rows: pd.DataFrame) -> go.Figure:
    """The units of largest influence (nats/token), most first: mean, 95 % interval where the documents can carry one,
    and a small dot a document. Filled where evaluated, hollow where estimated; `documents` are rows of `found.chosen`
    of the same sweep."""
    if why := style.missing_data_reason(units, "delta"):
        return style.empty_figure("Head influence", why)
    order = units.sort_values("delta", ascending=False, kind="stable").head(MAX_FOREST_UNITS).reset_index(drop=True)
    made = style.new_figure("", 120 + 22 * max(len(order), 4))
    made.update_layout(title=_sweep_title(units, ", the units that matter most"))
    own = document_rows.merge(order.reset_index(names="row")[[*UNIT_COLUMNS, "row"]], on=UNIT_COLUMNS)
    dots = {"color": style.TEXT_COLOUR, "size": 4, "opacity": 0.7}
    hover = "%{text}: Δ %{x:+.2g} nats/token<extra></extra>"
    made.add_scatter(
        x=own["delta_nll"],
        y=own["row"],
        mode="markers",
        marker=dots,
        text=own["doc"].astype(str).map(style.escape_label),
        hovertemplate=hover,
        name=f"one {TEXT_NOUNS[order['objective'].iloc[0]]}",
    )
    sure = order["low"].notna()
    for found, symbol in (("evaluated", "circle"), ("estimated", "circle-open")):
        mine = order[(order["method"] == "exact") == (found == "evaluated")]
        if mine.empty:
            continue
        bars = {"type": "data", "symmetric": False, "thickness": 1.5, "width": 3}
        reach = {
            "array": (mine["high"] - mine["delta"]).fillna(0),
            "arrayminus": (mine["delta"] - mine["low"]).fillna(0),
        }
        made.add_scatter(
            x=mine["delta"],
            y=mine.index,
            mode="markers",
            marker={"color": style.PALETTE[0], "size": 10, "symbol": symbol, "line": {"width": 2}},
            error_x={**bars, **reach} if sure.any() else None,
            customdata=mine[["layer", "head", "kv_group"]].to_numpy(),
            text=[
                f"{unit_label(unit)}{describe_uncertainty(unit)}{format_q_value(unit)}" for _, unit in mine.iterrows()
            ],
            hovertemplate="%{text}<br>Δ %{x:+.2g} nats/token<extra></extra>",
            name=f"mean, {found}",
        )
    made.add_vline(x=0, line={"color": style.TEXT_COLOUR, "dash": "dot", "width": 1})
    labels = [
        f"L{unit['layer']} {'group' if unit['head'] < 0 else 'H'}{' ' if unit['head'] < 0 else ''}"
        f"{unit['kv_group'] if unit['head'] < 0 else unit['head']}"
        for _, unit in order.iterrows()
    ]
    made.update_yaxes(tickvals=list(order.index), ticktext=labels, range=[len(order) - 0.4, -0.6], showgrid=False)
    made.update_xaxes(title_text="influence Δ (nats/token)")
    made.update_layout(legend={"y": 1, "yanchor": "bottom"})
    return style.set_metadata(
        style.declare_head_points(style.set_top_margin(made.update_layout(showlegend=True), 92)),
        x="influence (nats/token)",
        value="rank",
    )


def plot_against_statistic(units: pd.DataFrame, heads: pd.DataFrame, column: str, label: str) -> go.Figure:
    """Influence (nats/token) of every unit against a column of the per-head table, its mean over the heads of a
    group where units are groups; `label` names the axis. Colour is the layer."""
    if why := style.missing_data_reason(units, "delta") or style.missing_data_reason(heads, column):
        return style.empty_figure(f"Influence against {label}", why)
    place = UNIT_COLUMNS if (units["head"] >= 0).all() else UNIT_COLUMNS[:2]
    x = heads.groupby(place)[column].mean().rename("x")
    points = units.join(x, on=place).dropna(subset=["x", "delta"])
    if points.empty:
        return style.empty_figure(f"Influence against {label}", "no unit has both numbers")
    made = style.new_figure("").update_layout(title=_sweep_title(units, f" against {label}"))
    head_scatter.add_points(made, points, "x", "delta", f"{label} %{{x:.3g}}<br>Δ %{{y:+.3g}} nats/token")
    made.add_hline(y=0, line={"color": style.TEXT_COLOUR, "dash": "dot", "width": 1})
    made.update_xaxes(title_text=label)
    made.update_yaxes(title_text="influence Δ (nats/token)")
    return head_scatter.add_layer_colorbar(made, top_margin=62)


def plot_cumulative_effect(effects: pd.DataFrame) -> go.Figure:
    """Loss added (nats/token) when the top 1, 2, 4, ... units are changed together, against random sets of the same
    layers; mean over documents and draws with a 95 % band over documents. Rows of `found.curve` of one sweep."""
    title = "Units together"
    if why := style.missing_data_reason(effects, "model", "choice", "size", "mean"):
        return style.empty_figure(title, why)
    made = style.new_figure(f"{title}: {describe_change(*effects[['component', 'target', 'objective']].iloc[0])}")
    made.add_hline(y=0, line={"color": style.TEXT_COLOUR, "dash": "dot", "width": 1})
    kinds = {"top": ("most influential", 0), "random": ("random, same layers", 7)}
    unit = "key groups" if effects["unit"].iloc[0] == "group" else "heads"
    for choice, (label, colour) in kinds.items():
        line = effects[effects["choice"] == choice].set_index("size").sort_index()
        if len(line):
            look = style.ModelStyle(
                label, style.PALETTE[colour], style.LINE_DASHES[colour // 7], style.MARKER_SYMBOLS[colour // 7]
            )
            style.add_line_with_band(
                made, line[["mean", "low", "high"]], look, f"%{{x}} {unit}: Δ %{{y:+.4f}} nats/token"
            )
    sizes = sorted(set(effects["size"]))
    sizes = [size for size in sizes if size == sizes[-1] or size * 1.2 < sizes[-1]]  # the last, all units, may crowd
    made.update_xaxes(
        title_text=f"{unit} changed together", type="log", tickvals=sizes, ticktext=[str(s) for s in sizes]
    )
    made.update_yaxes(title_text="loss added Δ (nats/token)")
    return style.fit_legend(made)


def plot_named_sets(effects: pd.DataFrame) -> go.Figure:
    """Loss added (nats/token) when the heads of a named set are changed together, with a 95 % interval where there is
    one. Rows of `found.named` of one sweep."""
    made = style.new_figure(f"Named sets: {describe_change(*effects[['component', 'target', 'objective']].iloc[0])}")
    ends = {"array": effects["high"] - effects["mean"], "arrayminus": effects["mean"] - effects["low"]}
    bars = {"type": "data", "symmetric": False, "thickness": 1.5, **ends}
    made.add_bar(
        x=[f"{style.escape_label(name, 20)}<br>{size} heads" for name, size in effects[["choice", "size"]].to_numpy()],
        y=effects["mean"],
        error_y=bars if effects["low"].notna().any() else None,
        marker={"color": style.PALETTE[0], "line_width": 0},
        hovertemplate="%{x}: Δ %{y:+.3g} nats/token<extra></extra>",
        showlegend=False,
    )
    made.update_xaxes(type="category", showgrid=False)
    made.update_yaxes(title_text="loss added Δ (nats/token)")
    return made


def _sweep_title(units: pd.DataFrame, title_suffix: str = "") -> dict[str, object]:
    """What was reset to what in which model, and below it how that was found."""
    first = units.iloc[0]
    reset = first["component"] if first["target"] == "none" else f"{first['component']} to {first['target']}"
    return influence_title(units, title_suffix, f"{style.escape_label(reset)}: {describe_methods(units)}")


def influence_title(units: pd.DataFrame, title_suffix: str, subtitle: str) -> dict[str, object]:
    """A title that says whose influence on what, and a subtitle."""
    first = units.iloc[0]
    says = (
        f"Influence{' on answers' if first['objective'] == 'answer' else ''}"
        f"{title_suffix}: {style.escape_label(first['model'])}"
    )
    return {"text": says, "subtitle": {"text": subtitle, "font": {"size": 12, "color": style.TEXT_COLOUR}}}
