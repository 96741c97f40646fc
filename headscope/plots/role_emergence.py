"""Emergence of head roles: a statistic and roles by training step, for one training run or several."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.base.heads import Head
from headscope.plots import axes, shapes, style
from headscope.plots.axes import CountAxis
from headscope.plots.top_heads import fit_to_card, hide_long_legend
from headscope.runs.column_metadata import heads_with_role, statistic
from headscope.runs.trainings import with_training_steps

SLIDER_COLUMNS, SLIDER_HEIGHT, ROLE_LABELS_HEIGHT = 4, 150, 80
"""Panels per row of a figure with a slider; height in px of the slider with the labels of roles, and of these alone."""
MAX_LAYER_PANELS = 12
"""Maximum number of layer panels."""


def plot_training_by_layer(
    heads: pd.DataFrame, statistic_name: str, training_steps: pd.DataFrame, selected_heads: Collection[Head] = ()
) -> go.Figure:
    """Plot a statistic by training step, one panel per layer.

    One training run: one line per head. Several training runs: one line per run, the median over the heads of the
    layer, and the selected heads. With more than twelve layers, twelve evenly spaced layers are drawn.
    """
    stat = statistic(statistic_name)
    title = f"{stat.title} during training, by layer"
    if reason := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, reason)
    rows = with_training_steps(heads, training_steps).dropna(subset=[statistic_name])
    if rows.empty:
        return style.empty_figure(title, "no model has a training step")
    all_layers = sorted(rows["layer"].unique())
    layers = [
        all_layers[index]
        for index in np.unique(
            np.linspace(0, len(all_layers) - 1, min(len(all_layers), MAX_LAYER_PANELS)).round().astype(int)
        )
    ]
    styles = _training_line_styles(training_steps["training"])
    panels: dict[str, list[Line]] = {f"layer {layer}": [] for layer in layers}
    for layer, lines in zip(layers, panels.values(), strict=True):
        layer_heads = rows[rows["layer"] == layer]
        if len(styles) == 1:
            for head, curve in layer_heads.groupby("head"):
                line_style = _head_line_style(int(head), not selected_heads or (layer, head) in selected_heads)
                lines.append(Line(f"head {head}", line_style, curve.set_index("step")[statistic_name]))
            continue
        for training, line_style in styles.items():
            training_heads, label = layer_heads[layer_heads["training"] == training], style.escape_label(training)
            lines.append(Line(label, line_style, training_heads.groupby("step")[statistic_name].median()))
            for head in sorted(head for head_layer, head in selected_heads if head_layer == layer):
                values = training_heads[training_heads["head"] == head].set_index("step")[statistic_name]
                thin_line = {**line_style, "width": 1, "dash": "dot"}
                lines.append(Line(f"{label}, head {head}", thin_line, values, in_legend=False))
    y = axes.log_axis(rows[statistic_name], sparse=True) if stat.log_scale else {}
    figure = _plot_panels(title, panels, rows["step"], stat.label_with_unit, y, height=300)
    return figure.update_layout(showlegend=True)


def plot_head_during_training(
    heads: pd.DataFrame, head: Head, statistic_names: Sequence[str], training_steps: pd.DataFrame
) -> go.Figure:
    """Plot statistics of one head by training step: one panel per statistic, one line per training run."""
    title = f"Layer {head[0]}, head {head[1]} during training"
    rows = with_training_steps(heads[(heads["layer"] == head[0]) & (heads["head"] == head[1])], training_steps)
    measured = [name for name in statistic_names if name in rows and rows[name].notna().any()]
    if not measured:
        return style.empty_figure(title, "no checkpoint has a score of this head")
    styles = _training_line_styles(training_steps["training"])
    panels = {
        statistic(name).label: [
            Line(style.escape_label(training), line_style, rows[rows["training"] == training].set_index("step")[name])
            for training, line_style in styles.items()
        ]
        for name in measured
    }
    figure = _plot_panels(title, panels, rows["step"], "score", {})
    return figure.update_layout(showlegend=len(styles) > 1)


def plot_role_counts(heads: pd.DataFrame, training_steps: pd.DataFrame, roles: Sequence[str]) -> go.Figure:
    """Plot the number of heads with each role by training step: one panel per role, one line per training run."""
    title = "Heads with a role during training"
    rows = with_training_steps(heads, training_steps)
    styles = _training_line_styles(training_steps["training"])
    panels = {role: _count_lines(rows, role, styles) for role in roles}
    panels = {role: lines for role, lines in panels.items() if any(line.values.any() for line in lines)}
    if not panels:
        return style.empty_figure(title, "no head has a role at any step")
    figure = _plot_panels(title, panels, rows["step"], "heads", {"rangemode": "tozero"})
    return figure.update_layout(showlegend=len(styles) > 1)


def plot_role_count(heads: pd.DataFrame, training_steps: pd.DataFrame, role: str) -> go.Figure:
    """Plot the number of heads with one role by training step, one line per training run, for a card."""
    rows = with_training_steps(heads, training_steps)
    figure, step_axis = style.new_figure(f"Heads with the role {role} during training"), CountAxis(rows["step"])
    lines = _count_lines(rows, role, _training_line_styles(training_steps["training"]))
    figure.add_traces([line.trace(step_axis, True) for line in lines])
    x = {"title_text": "training step", **step_axis.settings}
    fit_to_card(shapes.label_axes(figure, x, {"title_text": "heads", "rangemode": "tozero"}))
    if len(figure.data) == 1:
        return figure.update_layout(showlegend=False)
    return hide_long_legend(style.fit_legend(figure))


def plot_roles_by_layer(heads: pd.DataFrame, training_steps: pd.DataFrame, roles: Sequence[str]) -> go.Figure:
    """Plot the number of heads with each role in each layer at one step, selected with a slider if there are several.

    One panel per training run; it shows the run's last step up to that of the slider.
    """
    title = "Heads with each role by layer"
    rows = with_training_steps(heads, training_steps)
    rows = rows[["training", "step", "layer"]].join(pd.DataFrame({role: heads_with_role(rows, role) for role in roles}))
    present = [role for role in roles if rows[role].any()]
    if not present:
        return style.empty_figure(title, "no head has a role at any step")
    trainings, steps = list(dict.fromkeys(training_steps["training"])), sorted(rows["step"].unique().tolist())
    figure = style.panel_figure(title, [style.escape_label(name) for name in trainings], SLIDER_COLUMNS, 200)
    scale = {"coloraxis": "coloraxis", "xgap": 1, "ygap": 1}
    visible: list[int] = []
    for index, training in enumerate(trainings):
        of_training = rows[rows["training"] == training]
        for position, step in enumerate(steps):
            last = of_training.loc[of_training["step"] <= step, "step"].max()
            counts = of_training[of_training["step"] == last].groupby("layer")[present].sum()
            figure.add_heatmap(
                x=present,
                y=counts.index.tolist(),
                z=counts.to_numpy(dtype=np.float64),
                visible=position == len(steps) - 1,
                name=style.escape_label(training),
                hovertemplate=f"%{{x}}, layer %{{y}}, heads: %{{z}}<extra>step {last:,.0f}</extra>",
                **scale,
                **style.panel_row_col(index, trainings, SLIDER_COLUMNS),
            )
            visible.append(position)
    marks = [
        {"label": f"{step:,}", "method": "restyle", "args": [{"visible": [mark == position for mark in visible]}]}
        for position, step in enumerate(steps)
    ]
    slider = {"active": len(steps) - 1, "steps": marks, "currentvalue": {"prefix": "step "}, "pad": {"t": 80}}
    figure.update_xaxes(tickangle=-40, showgrid=False)
    figure.update_yaxes(showgrid=False, dtick=max(1, int(rows["layer"].max()) // 8))
    style.set_outer_axis_titles(figure, len(trainings), "", "layer", SLIDER_COLUMNS)
    bar = {"title": {"text": "heads"}}
    figure.update_layout(coloraxis={"colorscale": style.SEQUENTIAL_SCALE, "cmin": 0, "colorbar": bar})
    labels_height = SLIDER_HEIGHT if len(steps) > 1 else ROLE_LABELS_HEIGHT
    figure.update_layout(height=figure.layout.height + labels_height, margin_b=labels_height)
    if len(steps) > 1:
        figure.update_layout(sliders=[slider])
    return style.set_metadata(style.set_top_margin(figure, 74), value="heads", x="role", y="layer")


def plot_role_onsets(onsets: pd.DataFrame, trainings: Sequence[str], measured_steps: Sequence[int]) -> go.Figure:
    """Plot the result of `role_onsets`: one row per role, one point per head at the step where it acquires the role."""
    title = "Steps at which heads acquire their roles"
    if onsets.empty:
        return style.empty_figure(title, "no head has a role at the last step")
    roles = list(dict.fromkeys(onsets["role"]))
    step_axis = CountAxis(pd.Series(measured_steps))
    figure = style.new_figure(title, 160 + 46 * len(roles))
    line_styles = _training_line_styles(trainings)
    for index, (training, line_style) in enumerate(line_styles.items()):
        training_onsets = onsets[onsets["training"] == training]
        # Spread the heads of one role and step vertically, with a separate band for each training run.
        rank = training_onsets.groupby(["role", "step"]).cumcount()
        count = training_onsets.groupby(["role", "step"])["head"].transform("size")
        row = training_onsets["role"].map({role: row_index for row_index, role in enumerate(roles)})
        offset = 0.7 * ((index + 0.5) / len(line_styles) - 0.5) + 0.6 / len(line_styles) * ((rank + 0.5) / count - 0.5)
        figure.add_scatter(
            x=step_axis.positions(training_onsets["step"]),
            y=row + offset,
            mode="markers",
            marker={"color": line_style["color"], "size": 7, "opacity": 0.75},
            name=style.escape_label(training),
            customdata=np.stack(
                [training_onsets["layer"], training_onsets["head"], training_onsets["step"]], 1
            ).tolist(),
            hovertemplate="layer %{customdata[0]}, head %{customdata[1]}: from step %{customdata[2]:,}<extra></extra>",
        )
    figure.update_xaxes(title_text="training step", range=step_axis.range, **step_axis.settings)
    figure.update_yaxes(tickvals=list(range(len(roles))), ticktext=roles, range=[len(roles) - 0.5, -0.5])
    return style.fit_legend(figure) if len(line_styles) > 1 else figure.update_layout(showlegend=False)


def _training_line_styles(trainings: Iterable[str]) -> dict[str, dict[str, Any]]:
    return {
        training: {"color": style.PALETTE[index % 8], "dash": style.LINE_DASHES[index // 8 % 4], "width": 2}
        for index, training in enumerate(dict.fromkeys(trainings))
    }


def _head_line_style(head: int, is_highlighted: bool) -> dict[str, Any]:
    line_style = {"color": style.CATEGORY_PALETTE[head % 8], "dash": style.LINE_DASHES[head // 8 % 4], "width": 1.6}
    return line_style if is_highlighted else {**line_style, "color": style.GRID_COLOUR}


class Line(NamedTuple):
    """Values by training step, with the plotly settings of their line."""

    label: str
    line: dict[str, Any]
    values: pd.Series
    in_legend: bool = True

    def trace(self, step_axis: CountAxis, in_legend: bool) -> dict[str, Any]:
        """The plotly settings of the line."""
        return {
            "type": "scatter",
            "x": step_axis.positions(self.values.index.to_series()),
            "y": self.values,
            "mode": "lines+markers",
            "line": self.line,
            "marker": {"size": 4},
            "name": self.label,
            "legendgroup": self.label,
            "showlegend": in_legend and self.in_legend,
            "customdata": self.values.index,
            "hovertemplate": f"step %{{customdata:,}}: %{{y:.4g}}<extra>{self.label}</extra>",
        }


def _count_lines(rows: pd.DataFrame, role: str, styles: Mapping[str, dict[str, Any]]) -> list[Line]:
    """The number of heads with a role by step, a line per training run."""
    counts = heads_with_role(rows, role).groupby([rows["training"], rows["step"]]).sum()
    measured = [training for training in styles if training in counts.index.unique("training")]
    return [Line(style.escape_label(training), styles[training], counts.loc[training]) for training in measured]


def _plot_panels(
    title: str,
    panels: Mapping[str, Sequence[Line]],
    steps: pd.Series,
    y_title: str,
    y: dict[str, Any],
    height: int = 260,
) -> go.Figure:
    """Panels of lines by training step; `y` are further settings of the y axes. The first panel is for the legend."""
    figure, step_axis = style.panel_figure(title, [*panels], height=height), CountAxis(steps)
    for index, lines in enumerate(panels.values()):
        place = {f"{name}s": [number] * len(lines) for name, number in style.panel_row_col(index, panels).items()}
        figure.add_traces([line.trace(step_axis, index == 0) for line in lines], **place)
    figure.update_xaxes(step_axis.settings)
    figure.update_yaxes(y)
    style.set_outer_axis_titles(figure, len(panels), "training step", y_title)
    return figure
