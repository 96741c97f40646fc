"""A statistic of all heads of a model: a layer x head matrix, its change against a baseline, and its distribution.

`heads` is always the wide per-head table of `headscope.runs.summary.head_table`.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go
from plotly.colors import make_colorscale

from headscope.base.heads import ESTIMATE_MARK, estimate_mask
from headscope.plots import axes, shapes, style
from headscope.plots.colour_range import mark_clipped_cells, signed_colours, symmetric_colorbar, symmetric_limit
from headscope.plots.draft import Draft
from headscope.runs.column_metadata import statistic
from headscope.runs.summary import compare_with_baseline

MAX_LABEL_CHARACTERS = 48
"""Total length of the tick labels above which they are slanted in a chart of half the page width."""
MAX_LARGE_POINTS = 1000
"""Points of one box that are drawn large."""


def plot_matrix(
    heads: pd.DataFrame, statistic_name: str, model: str, scale_heads: pd.DataFrame | None = None
) -> go.Figure:
    """Plot a statistic of every head of a model as a layer x head matrix.

    All models in `scale_heads`, by default `heads`, share one colour scale: filters of heads do not change it. It is
    logarithmic if the statistic has a log scale. For a signed statistic it is symmetric and white is zero.
    """
    stat = statistic(statistic_name)
    title = f"{stat.title}: {style.escape_label(model)}"
    if reason := style.missing_data_reason(heads, "model", statistic_name) or style.missing_data_reason(
        heads.loc[heads["model"] == model, [statistic_name]], statistic_name
    ):
        return style.empty_figure(title, reason)
    scale_heads = heads if scale_heads is None else scale_heads
    of_model = heads[heads["model"] == model]
    grid = _layer_head_grid(of_model, statistic_name)
    all_values = scale_heads[statistic_name].to_numpy(dtype=np.float64)
    bar = _colorbar(statistic_name, all_values, grid)
    draft = _new_heatmap(title, of_model, grid, f"{stat.label} %{{customdata[3]:.4g}}{style.unit_suffix(stat.unit)}")
    limit = symmetric_limit(all_values)
    if stat.is_signed:
        low, high = -limit, limit
    else:
        colours = _log10(all_values) if stat.log_scale else all_values
        ends = colours[np.isfinite(colours)]
        low, high = (ends.min(), ends.max()) if len(ends) else (0, 1)
        high = high if high > low else low + 1
    colour = _log10(grid) if stat.log_scale else grid
    draft.traces[0] |= {
        "z": colour,
        "zmin": low,
        "zmax": high,
        "colorscale": make_colorscale(colour_scale(statistic_name)),
    }
    draft.traces[0]["colorbar"] = bar
    draft.layout["meta"] |= {
        "value": stat.label_with_unit,
        "model": style.escape_label(model),
        "value_index": 3,
    }
    figure = draft.figure()
    if stat.is_signed:
        mark_clipped_cells(figure, grid, limit)
    marked = of_model[["layer", "head"]].assign(mark=estimate_mask(of_model, statistic_name))
    _mark_estimates(figure, marked, grid.shape)
    return figure


def plot_head_values(heads: pd.DataFrame, title: str, model: str, label: str, unit: str, is_signed: bool) -> go.Figure:
    """Plot column `value` of the heads of one model, in `unit`, as a layer x head matrix.

    `heads` has columns layer, head, kv_group and value. If the values are signed, the scale is symmetric and white is
    zero; otherwise it starts at 0.
    """
    if reason := style.missing_data_reason(heads, "value"):
        return style.empty_figure(title, reason)
    grid = _layer_head_grid(heads, "value")
    hover = f"{label} %{{customdata[3]:.4g}}{style.unit_suffix(unit)}"
    figure = _new_heatmap(title, heads, grid, hover).figure().update_traces(z=grid)
    limit = symmetric_limit(grid) if is_signed else float(np.nanmax(grid)) or 1.0
    if is_signed:
        scale = {"colorscale": style.DIVERGING_SCALE, "colorbar": symmetric_colorbar(grid, limit)}
        figure.update_traces(zmin=-limit, zmax=limit, **scale)
        mark_clipped_cells(figure, grid, limit)
    else:
        figure.update_traces(zmin=0, zmax=limit, colorscale=style.SEQUENTIAL_SCALE)
    return style.set_metadata(figure, value=label, model=style.escape_label(model), value_index=3)


def _colorbar(
    statistic_name: str, values: npt.NDArray[np.float64], shown_values: npt.NDArray[np.float64]
) -> dict[str, object]:
    """Plotly settings of the colour bar of a statistic on the scale of `values`; a clipped end states the extreme of
    the values that are drawn."""
    stat = statistic(statistic_name)
    bar: dict[str, object] = {"title": {"text": stat.unit}}
    if stat.is_signed:
        return bar | symmetric_colorbar(shown_values, symmetric_limit(values))
    return bar | (axes.log_colorbar(values) if stat.log_scale else {})


def plot_small_matrices(heads: pd.DataFrame, statistic_name: str, scale_heads: pd.DataFrame | None = None) -> go.Figure:
    """Plot the layer x head matrices of all models side by side with the colour scale of `scale_heads`, by default
    `heads`."""
    stat = statistic(statistic_name)
    title = f"{stat.title} of every head"
    if reason := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, reason)
    measured_heads = heads[heads["model"].isin(heads.loc[heads[statistic_name].notna(), "model"])]
    styles = style.model_styles(measured_heads)
    figure = style.panel_figure(title, [model_style.name for model_style in styles.values()], columns=4, height=250)
    for index, (label, model_style) in enumerate(styles.items()):
        matrix = plot_matrix(measured_heads, statistic_name, label, scale_heads)
        trace = matrix.data[0].update(
            coloraxis="coloraxis", colorscale=None, colorbar=None, xgap=0, ygap=0, name=model_style.name
        )
        scale = {"cmin": trace.zmin, "cmax": trace.zmax, "colorscale": colour_scale(statistic_name)}
        figure.add_trace(trace.update(zmin=None, zmax=None), **style.panel_row_col(index, [*styles], 4))
        if index == 0:
            all_values = (heads if scale_heads is None else scale_heads)[statistic_name].to_numpy(dtype=np.float64)
            bar = _colorbar(statistic_name, all_values, measured_heads[statistic_name].to_numpy(dtype=np.float64))
            figure.update_layout(coloraxis={**scale, "colorbar": bar})
    figure.update_xaxes(showgrid=False, showline=False, ticks="", showticklabels=False)
    figure.update_yaxes(showgrid=False, showline=False, ticks="")
    style.set_outer_axis_titles(figure, len(styles), "head", "layer", 4)
    figure.update_xaxes(showticklabels=False)
    return style.set_metadata(
        style.set_top_margin(style.declare_head_points(figure), 74), value=stat.label_with_unit, value_index=3
    )


def colour_scale(statistic_name: str) -> object:
    """The colour scale of a statistic: diverging from blue to red if the statistic is signed, else sequential."""
    return style.DIVERGING_SCALE if statistic(statistic_name).is_signed else style.SEQUENTIAL_SCALE


def plot_change(
    heads: pd.DataFrame, statistic_name: str, model: str, baseline: str, scale_heads: pd.DataFrame | None = None
) -> go.Figure:
    """Plot the change of a statistic from the baseline to a model as a layer x head matrix.

    The change is a ratio if the statistic has a log scale, else a difference. White is no change. All models in
    `scale_heads`, by default `heads`, share one symmetric colour scale, which ends at the 99 % quantile of the absolute
    change.
    """
    stat = statistic(statistic_name)
    title = f"Change of {stat.label}: {style.escape_label(model)} relative to {style.escape_label(baseline)}"
    for label in (model, baseline):
        if reason := style.missing_data_reason(heads, "model", statistic_name) or style.missing_data_reason(
            heads[heads["model"] == label], statistic_name
        ):
            return style.empty_figure(title, reason)
    shapes = [_layer_head_grid(heads[heads["model"] == label], statistic_name).shape for label in (model, baseline)]
    if shapes[0] != shapes[1]:
        return style.empty_figure(title, "the two models have different heads")
    all_changes = _all_changes(heads if scale_heads is None else scale_heads, statistic_name, baseline)
    model_change = compare_with_baseline(heads, statistic_name, model, baseline)[["layer", "head", "change"]]
    grid = _layer_head_grid(
        heads[heads["model"] == model].merge(model_change, on=["layer", "head"], how="left"), "change"
    )
    scaled = _log10(all_changes) if stat.log_scale else all_changes
    limit = symmetric_limit(scaled)
    format_change = (lambda power: f"×{10**power:.3g}") if stat.log_scale else "{:+.2g}".format
    bar = {"title": {"text": "ratio" if stat.log_scale else stat.unit}}
    if stat.log_scale:
        bar |= axes.log_colorbar([10**-limit, 10**limit])
        hover = f"{stat.label} × %{{customdata[3]:.3f}}"
    else:
        hover = f"{stat.label} %{{customdata[3]:+.3g}}{style.unit_suffix(stat.unit)}"
    colour = _log10(grid) if stat.log_scale else grid
    bar |= symmetric_colorbar(colour, limit, format_change)
    figure = _new_heatmap(title, heads[heads["model"] == model], grid, hover).figure()
    figure.update_traces(z=colour, zmin=-limit, zmax=limit, colorscale=style.DIVERGING_SCALE, colorbar=bar)
    mark_clipped_cells(figure, colour, limit, format_change)
    quantity = "ratio" if stat.log_scale else f"difference of {stat.label_with_unit}"
    return style.set_metadata(
        figure, value=f"{quantity} to {style.escape_label(baseline)}", model=style.escape_label(model), value_index=3
    )


def _all_changes(heads: pd.DataFrame, statistic_name: str, baseline: str) -> npt.NDArray[np.float64]:
    """The changes of all other models from the baseline."""
    other_models = [str(label) for label in heads["model"].unique() if label != baseline]
    changes = [compare_with_baseline(heads, statistic_name, label, baseline)["change"] for label in other_models]
    values: npt.NDArray[np.float64] = pd.concat(changes).to_numpy(dtype=np.float64)
    return values


def plot_distribution(heads: pd.DataFrame, statistic_name: str = "cov") -> go.Figure:
    """Plot the distribution of a statistic over heads: one box per model and one point per head.

    A box shows minimum, quartiles, median, maximum and mean. The points of a model are ordered by layer, the first
    layer on the left.
    """
    stat = statistic(statistic_name)
    title = f"{stat.title} over all heads"
    if reason := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, reason)
    heads = heads[np.isfinite(heads[statistic_name])]
    styles = style.model_styles(heads)
    figure = style.new_figure(title, 420)
    crowding = max(1.0, len(heads) / len(styles) / MAX_LARGE_POINTS)  # many points would hide each other
    for index, (label, model_style) in enumerate(styles.items()):
        model_heads = heads[heads["model"] == label]
        values = model_heads[statistic_name].to_numpy(dtype=np.float64)
        low, lower, median, upper, high = np.quantile(values, [0, 0.25, 0.5, 0.75, 1])
        depth = model_heads["layer"] / max(int(heads["layer"].max()), 1)
        figure.add_scatter(
            x=index + 0.06 + 0.34 * depth,
            y=values,
            mode="markers",
            marker={
                "color": model_style.colour,
                "size": max(2, 5 / crowding**0.5),
                "opacity": max(0.2, 0.55 / crowding**0.25),
            },
            customdata=model_heads[["layer", "head", "kv_group"]].to_numpy(),
            name=model_style.name,
            hovertemplate="layer %{customdata[0]}, head %{customdata[1]}, KV group %{customdata[2]}<br>"
            f"{stat.label} %{{y:.4g}}{style.unit_suffix(stat.unit)}<extra>{model_style.name}</extra>",
        )
        figure.add_box(
            x=[index - 0.2],
            lowerfence=[low],
            q1=[lower],
            median=[median],
            q3=[upper],
            upperfence=[high],
            mean=[values.mean()],
            width=0.3,
            name=model_style.name,
            line_color=model_style.colour,
            fillcolor=model_style.fill_colour,
            hoverinfo="y",
        )
    style.set_top_margin(figure.update_layout(showlegend=False))
    width = min(16, max(8, 40 // len(styles)))  # of a line, so that labels on a card stay apart
    labels = [style.escape_label(label, width) for label in styles]
    angle = -35 if sum(map(len, labels)) > MAX_LABEL_CHARACTERS else 0
    figure.update_xaxes(tickvals=list(range(len(styles))), ticktext=labels, tickangle=angle)
    figure.update_xaxes(range=[-0.55, len(styles) - 0.4])
    figure.update_yaxes(title_text=stat.label_with_unit)
    if stat.log_scale:
        figure.update_yaxes(axes.log_axis(heads[statistic_name]))
    return style.set_metadata(style.declare_head_points(figure), x="position")


def _new_heatmap(title: str, heads: pd.DataFrame, grid: npt.NDArray[np.float64], hover: str) -> Draft:
    """A matrix of the heads of one model, without its values `z`."""
    layer_count, head_count = grid.shape
    layer, head = np.indices(grid.shape)
    figure = Draft.single(title, int(np.clip(130 + 18 * layer_count, 280, 760)))
    matrix = {
        "type": "heatmap",
        "x": list(range(head_count)),
        "y": list(range(layer_count)),
        "customdata": np.dstack([layer, head, _layer_head_grid(heads, "kv_group"), grid]),
        "hovertemplate": f"layer %{{y}}, head %{{x}}, KV group %{{customdata[2]}}<br>{hover}<extra></extra>",
        "xgap": 1,
        "ygap": 1,
    }
    figure.add([matrix])
    ticks = ("xaxis", "head", head_count // 8), ("yaxis", "layer", layer_count // 16)
    for name, title, step in ticks:
        settings = {"title": {"text": title}, "dtick": max(1, step), "showgrid": False, "showline": False}
        figure.update_axis(name, settings)
    figure.layout["meta"] = {"heads": True}
    return figure.set_top_margin()


def _mark_estimates(figure: go.Figure, heads: pd.DataFrame, shape: tuple[int, ...]) -> None:
    """Write `ESTIMATE_MARK` on the cells of the heads whose column `mark` is True, in place."""
    if heads["mark"].any():
        marks = np.full(shape, "", dtype="<U1")
        marks[heads["layer"], heads["head"]] = np.where(heads["mark"], ESTIMATE_MARK, "")
        figure.update_traces(text=marks.tolist(), texttemplate="%{text}")
        hover = figure.data[0].hovertemplate.replace("<extra>", " %{text}<extra>")
        figure.update_traces(hovertemplate=hover)


def _layer_head_grid(heads: pd.DataFrame, column: str) -> npt.NDArray[np.float64]:
    """The column as an array [layers, heads]; NaN for a missing head."""
    grid = np.full((int(heads["layer"].max()) + 1, int(heads["head"].max()) + 1), np.nan)
    grid[heads["layer"], heads["head"]] = heads[column]
    return grid


def _log10(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """log10 of the values; NaN, which plotly leaves blank, where it is not finite."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs: npt.NDArray[np.float64] = np.log10(values)
    return np.where(np.isfinite(logs), logs, np.nan)


def plot_unit_matrix(
    title: style.Title,
    units: pd.DataFrame,
    column: str,
    hover_texts: Sequence[str],
    colorbar_title: str,
    minimum_limit: float,
    marks: Sequence[str] | None = None,
) -> go.Figure:
    """Heatmap of a column of `units` by layer and unit: red above zero, blue below.

    `units` has one row per unit: layer, head (-1: whole KV group) and kv_group, either all heads or all KV groups.
    `hover_texts` and `marks`, which stand in the cells, are in the order of the rows. Colours saturate at the 99 %
    quantile of the absolute values, but not below `minimum_limit`.
    """
    are_groups = bool((units["head"] < 0).all())
    unit_name, columns = ("KV group", units["kv_group"]) if are_groups else ("head", units["head"])
    cells = units["layer"].to_numpy(), columns.to_numpy()
    grid = np.full((int(cells[0].max()) + 1, int(cells[1].max()) + 1), np.nan)
    grid[cells] = units[column]
    head_ids = np.full((*grid.shape, 3), np.nan)
    head_ids[cells] = units[["layer", "head", "kv_group"]]
    hover, cell_marks = (np.full(grid.shape, "", dtype=object) for _ in range(2))
    hover[cells] = hover_texts
    limit = symmetric_limit(grid, minimum_limit)
    if marks is not None:
        cell_marks[cells] = marks
    figure = shapes.matrix(
        title,
        pd.DataFrame(grid),
        f"layer %{{y}}, {unit_name} %{{x}}<br>%{{hovertext}}",
        {"title_text": unit_name, "dtick": max(1, grid.shape[1] // 8), "showgrid": False, "showline": False},
        {"title_text": "layer", "dtick": max(1, len(grid) // 16), "showgrid": False, "showline": False},
        height=int(np.clip(160 + 18 * len(grid), 280, 760)),
        top_margin=62,
        customdata=head_ids,
        hovertext=hover,
        **signed_colours(limit, colorbar_title, grid),
        text=None if marks is None else cell_marks,
        texttemplate=None if marks is None else "%{text}",
    )
    return style.declare_head_points(mark_clipped_cells(figure, grid, limit))
