"""Plots of the window probe: accuracy and frequencies by window width, and the logit of each pair by distance."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, style
from headscope.plots.rotary import ZERO_CENTRED_SCALE
from probes.window.analysis import SCHEME_NAMES, accuracy_by_width, mass_bounds, solves_task


def plot_accuracy_by_width(window: pd.DataFrame) -> go.Figure:
    """Balanced accuracy by window width, one line per scheme: mean and 95 % confidence interval over seeds."""
    title = "Accuracy by window width"
    if reason := style.missing_data_reason(window, "scheme", "width", "accuracy"):
        return style.empty_figure(title, reason)
    widths = _with_scheme_names(accuracy_by_width(window)).rename(columns={"accuracy": "mean"})
    figure = style.new_figure(title)
    figure.add_hline(y=0.5, line={"color": style.TEXT_COLOUR, "dash": "dot", "width": 1}, annotation_text="chance")
    for label, model_style in style.model_styles(widths).items():
        line = widths[widths["model"] == label].set_index("width").sort_index()
        style.add_line_with_band(figure, line[["mean", "low", "high"]], model_style, "W = %{x:,}: accuracy %{y:.3f}")
    figure.update_xaxes(title_text="window width W (tokens)", **_width_axis(widths["width"]))
    figure.update_yaxes(title_text="balanced accuracy", range=[0.45, 1.03])
    return style.fit_legend(figure)


def plot_frequency_mass(window: pd.DataFrame) -> go.Figure:
    """Frequency mass M (rad/token) of each model that solves the task by window width, with Theorem 1's bounds.

    The dashed lines are C1 / (W/2 + 1) and pi / (W + 1) + C2 with the tightest constants for all points.
    """
    title = "Frequency mass of the models that solve the task"
    if reason := style.missing_data_reason(window, "scheme", "width", "frequency_mass"):
        return style.empty_figure(title, reason)
    bounds = mass_bounds(window)
    if bounds is None:
        return style.empty_figure(title, "no trained model solves the task")
    figure = style.new_figure(title)
    named_rows = _with_scheme_names(window)
    for label, model_style in style.model_styles(named_rows).items():
        rows = named_rows[
            (named_rows["model"] == label) & solves_task(named_rows["accuracy"]) & (named_rows["frequency_mass"] > 0)
        ]
        if len(rows):
            figure.add_scatter(
                x=rows["width"],
                y=rows["frequency_mass"],
                mode="markers",
                name=model_style.name,
                marker={"color": model_style.colour, "symbol": model_style.symbol, "size": 7, "opacity": 0.7},
                customdata=rows["seed"],
                hovertemplate="W = %{x:,}, seed %{customdata}: M %{y:.4g} rad/token"
                f"<extra>{model_style.name}</extra>",
            )
    widths = np.geomspace(max(1, window["width"].min()), window["width"].max(), 60)
    bound_lines = {
        f"C₁/(W/2 + 1), C₁ = {bounds.c1:.3g}": [bounds.lower_bound(w) for w in widths],
        f"π/(W + 1) + C₂, C₂ = {bounds.c2:.3g}": [bounds.upper_bound(w) for w in widths],
    }
    for (name, bound), dash in zip(bound_lines.items(), ("dash", "dot"), strict=True):
        figure.add_scatter(
            x=widths, y=bound, mode="lines", name=name, line={"color": style.TEXT_COLOUR, "dash": dash, "width": 1.5}
        )
    figure.update_xaxes(title_text="window width W (tokens)", **_width_axis(window["width"]))
    figure.update_yaxes(title_text="frequency mass M (rad/token)", **axes.log_axis([*bound_lines.values()]))
    return style.fit_legend(figure)


def plot_dominant_frequency(window: pd.DataFrame) -> go.Figure:
    """Frequency of the strongest pair (rad/token) by window width: median over seeds, one line per scheme."""
    title = "Frequency of the strongest pair"
    if reason := style.missing_data_reason(window, "scheme", "width", "dominant_theta"):
        return style.empty_figure(title, reason)
    widths = _with_scheme_names(accuracy_by_width(window))
    widths = widths[widths["dominant_theta"] > 0]
    figure = style.new_figure(title)
    for label, model_style in style.model_styles(widths).items():
        line = widths[widths["model"] == label].sort_values("width")
        figure.add_scatter(
            x=line["width"],
            y=line["dominant_theta"],
            mode="lines+markers",
            name=model_style.name,
            line={"color": model_style.colour, "dash": model_style.dash},
            marker={"symbol": model_style.symbol, "size": 6},
            hovertemplate=f"W = %{{x:,}}: %{{y:.3g}} rad/token<extra>{model_style.name}</extra>",
        )
    figure.update_xaxes(title_text="window width W (tokens)", **_width_axis(window["width"]))
    figure.update_yaxes(title_text="θ of the strongest pair (rad/token)", **axes.log_axis(widths["dominant_theta"]))
    return style.fit_legend(figure)


def plot_pair_profile(pairs: pd.DataFrame, scheme: str, width: int, center: int) -> go.Figure:
    """Contribution of each rotary pair to the needle's logit by distance, for one model; lines mark the window."""
    title = f"Contribution of each pair: {SCHEME_NAMES[scheme]}, W = {width:,}"
    rows = pairs[(pairs["scheme"] == scheme) & (pairs["width"] == width)]
    if rows.empty:
        return style.empty_figure(title, "not measured")
    grid = rows.astype({"logit": "float64"}).pivot_table(index="pair", columns="distance", values="logit")
    theta = rows.groupby("pair")["theta"].first()
    figure = style.new_figure(title, 260)
    figure.add_heatmap(
        x=list(grid.columns),
        y=[f"{pair}: {theta[pair]:.2g}" for pair in grid.index],
        z=grid.to_numpy(),
        hovertemplate="distance %{x:,} tokens, pair %{y} rad/token<br>%{z:+.3g} logits<extra></extra>",
        colorbar={"title": {"text": "logits"}},
        **ZERO_CENTRED_SCALE,
    )
    for edge in (center - width / 2, center + width / 2):
        figure.add_vline(x=edge, line={"color": style.TEXT_COLOUR, "dash": "dash", "width": 1.5})
    figure.update_xaxes(title_text="distance D (tokens)", showgrid=False)
    figure.update_yaxes(title_text="pair: θ (rad/token)", autorange="reversed", showgrid=False, type="category")
    return style.set_top_margin(figure)


def _with_scheme_names(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the names of its schemes in column `model`, from which `style.model_styles` takes its styles."""
    order = [SCHEME_NAMES[scheme] for scheme in frame["scheme"].unique()]
    return frame.assign(model=pd.Categorical(frame["scheme"].astype("str").map(SCHEME_NAMES), order))


def _width_axis(widths: pd.Series) -> dict[str, object]:
    measured = sorted(set(widths))
    return {"type": "log", "tickvals": measured, "ticktext": [f"{width:,}" for width in measured]}
