"""Plots of activation patching: layer x head matrix, head x position, estimates against exact effects, one head."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.estimates import ESTIMATE_MARK
from headscope.plots import head_scatter, style
from headscope.plots.colour_range import mark_clipped_cells, symmetric_colorbar, symmetric_limit
from headscope.plots.rotary import ZERO_CENTRED_SCALE
from headscope.plots.unit_matrix import plot_unit_matrix
from headscope.report.text import to_visible_line
from probes.patching.analysis import UNIT_KEYS, SweepKey, largest_unit
from probes.patching.labels import describe_methods, describe_sweep, format_effect, unit_label
from probes.patching.schema import WHOLE_GROUP

MAX_POSITION_UNITS = 20
"""Units in a plot of effects by position."""


def plot_matrix(key: SweepKey, units: pd.DataFrame) -> go.Figure:
    """Heatmap of the mean effect by layer and unit. Estimated units are marked if others are exact."""
    texts = [f"effect {format_effect(unit)}" for _, unit in units.iterrows()]
    is_exact = units["method"] == "exact"
    marks = np.where(is_exact, "", ESTIMATE_MARK).tolist() if is_exact.any() and not is_exact.all() else None
    figure = plot_unit_matrix(units, "effect", texts, "effect", 1e-3, marks)
    style.set_top_margin(figure.update_layout(title=_title(key, describe_methods(units))), 62)
    return style.set_metadata(figure, value="effect", model=style.escape_label(key[0]))


def plot_positions(key: SweepKey, pair: str, rows: pd.DataFrame, tokens: pd.DataFrame) -> go.Figure:
    """Heatmap of one pair's effects by unit and token, for the units of largest effect at any position.

    `rows` are those of `analysis.position_effects`; `tokens` are the pair's rows of `patching_tokens`.
    """
    by_unit = rows.pivot_table(index=["layer", "kv_group", "head"], columns="position", values="effect")
    top = by_unit.loc[by_unit.abs().max(axis=1).nlargest(MAX_POSITION_UNITS).index].sort_index(ascending=False)
    words = tokens.set_index("position").reindex(top.columns)
    labels = [_token_label(clean, corrupted) for clean, corrupted in words[["clean", "corrupted"]].to_numpy()]
    limit = symmetric_limit(top.to_numpy(), 1e-3)
    method = "exact" if (rows["method"] == "exact").all() else "estimated"
    figure = style.new_figure("", 190 + 20 * len(top)).update_layout(title=_title(key, f"{pair}, {method}"))
    figure.add_heatmap(
        x=list(range(len(labels))),
        y=[_unit_tick(*unit) for unit in top.index],
        z=top.to_numpy(),
        zmin=-limit,
        zmax=limit,
        hovertemplate="%{y}, position %{x}<br>effect %{z:+.3f}<extra></extra>",
        colorbar={"title": {"text": "effect"}} | symmetric_colorbar(top.to_numpy(), limit),
        xgap=1,
        ygap=1,
        **ZERO_CENTRED_SCALE,
    )
    mark_clipped_cells(figure, top.to_numpy(), limit)
    figure.update_xaxes(tickvals=list(range(len(labels))), ticktext=labels, tickangle=-60, showgrid=False)
    figure.update_yaxes(type="category", showgrid=False)
    return style.set_metadata(style.set_top_margin(figure, 62), value="effect", x="position")


def plot_spans(key: SweepKey, effects: pd.DataFrame) -> go.Figure:
    """Heatmap of the mean effect by unit and named span, for the units of largest effect in any span.

    `effects` are those of `analysis.effects_by_span`. Estimated units are marked.
    """
    by_unit = effects.pivot_table(
        index=UNIT_KEYS, columns="span", values="effect", observed=False, dropna=False
    ).dropna(how="all")
    top = by_unit.loc[by_unit.abs().max(axis=1).nlargest(MAX_POSITION_UNITS).index].sort_index(ascending=False)
    cells = effects.set_index([*UNIT_KEYS, "span"])
    hover = [[format_effect(cells.loc[(*unit, span)]) for span in top.columns] for unit in top.index]
    marks = [["" if text.endswith("exact)") else ESTIMATE_MARK for text in row] for row in hover]
    pairs = int(effects["pairs"].max())
    figure = style.new_figure("", 190 + 20 * len(top)).update_layout(title=_title(key, f"by span, {pairs} pairs"))
    limit = max(float(np.nanmax(np.abs(top.to_numpy()))), 1e-3)
    figure.add_heatmap(
        x=[style.escape_label(name) for name in top.columns],
        y=[_unit_tick(*unit) for unit in top.index],
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
    figure.update_xaxes(type="category", showgrid=False)
    figure.update_yaxes(type="category", showgrid=False)
    return style.set_metadata(style.set_top_margin(figure, 62), value="effect", x="span")


def plot_agreement(key: SweepKey, units: pd.DataFrame) -> go.Figure:
    """Scatter plot of the estimated against the exact effect, one point per unit; the dashed line is y = x."""
    figure = style.new_figure("").update_layout(title=_title(key, f"{len(units)} units with estimate and exact effect"))
    head_scatter.add_points(figure, units, "exact", "estimate", "exact %{x:+.3f}<br>estimate %{y:+.3f}")
    values = units[["exact", "estimate"]].to_numpy(dtype=np.float64)
    head_scatter.add_diagonal(figure, [values.min(), values.max()])
    figure.update_xaxes(title_text="exact effect")
    figure.update_yaxes(title_text="estimated effect")
    head_scatter.add_layer_colorbar(figure, top_margin=62)
    return style.set_metadata(figure, model=style.escape_label(key[0]))


def plot_head(effects: pd.DataFrame, models: Sequence[str], layer: int, head: int) -> go.Figure:
    """Bars of one head's effect on every prompt set and activation, by model. Hollow bars are estimates.

    `effects` are the rows of the head or its KV group of `analysis.unit_effects`.
    """
    figure = style.new_figure(f"Patching effects of layer {layer}, head {head}")
    effects = effects.assign(model=effects["model"].astype(pd.CategoricalDtype(list(models))))
    for label, model_style in style.model_styles(effects).items():
        rows = effects[effects["model"] == label]
        figure.add_bar(
            x=[f"{row['prompts']}<br>{row['activation']}, {row['direction']}" for _, row in rows.iterrows()],
            y=rows["effect"],
            error_y=style.error_bars(rows["effect"], rows["low"], rows["high"]) if rows["low"].notna().any() else None,
            marker={
                "color": model_style.colour,
                "opacity": [1.0 if method == "exact" else 0.45 for method in rows["method"]],
            },
            text=[format_effect(row) for _, row in rows.iterrows()],
            textposition="none",
            hovertemplate="%{x}: %{text}<extra>" + model_style.name + "</extra>",
            name=model_style.name,
        )
    figure.update_yaxes(title_text="effect")
    figure.update_xaxes(type="category", showgrid=False)
    return figure.update_layout(barmode="group")


def describe_largest(units: pd.DataFrame) -> str:
    """A sentence with the unit of largest effect."""
    largest = largest_unit(units)
    return f"Largest effect: {unit_label(largest)}, {format_effect(largest)}."


def _title(key: SweepKey, subtitle: str) -> dict[str, object]:
    text = f"{describe_sweep(key)}, {style.escape_label(key[1])}: {style.escape_label(key[0])}"
    return style.title_with_subtitle(text, subtitle)


def _token_label(clean: str, corrupted: str) -> str:
    """The token of the clean prompt and, if it differs, that of the corrupted prompt."""
    first, second = (style.escape_label(to_visible_line(text), 20) for text in (clean, corrupted))
    return first if clean == corrupted else f"{first} | {second}"


def _unit_tick(layer: int, kv_group: int, head: int) -> str:
    return f"L{layer} group {kv_group}" if head == WHOLE_GROUP else f"L{layer}H{head}"
