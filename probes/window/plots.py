"""Needle retrieval from a window: accuracy and frequency mass against the width, and what each pair contributes."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, style
from headscope.plots.rotary import ZERO_CENTRED_SCALE
from probes.window.analysis import SCHEME_NAMES, SOLVED_ACCURACY, accuracy_by_width, mass_bounds


def plot_accuracy_by_width(window: pd.DataFrame) -> go.Figure:
    """Balanced accuracy against the window's width, a line per scheme: mean and 95 % interval over seeds."""
    title = "Does the needle lie in the window?"
    if why := style.missing_data_reason(window, "scheme", "width", "accuracy"):
        return style.empty_figure(title, why)
    found = _with_scheme_names(accuracy_by_width(window)).rename(columns={"accuracy": "mean"})
    made = style.new_figure(title)
    made.add_hline(y=0.5, line={"color": style.TEXT_COLOUR, "dash": "dot", "width": 1}, annotation_text="chance")
    for label, look in style.model_styles(found).items():
        line = found[found["model"] == label].set_index("width").sort_index()
        style.add_line_with_band(made, line[["mean", "low", "high"]], look, "W = %{x:,}: accuracy %{y:.3f}")
    made.update_xaxes(title_text="window width W (tokens)", **_width_axis(found["width"]))
    made.update_yaxes(title_text="balanced accuracy", range=[0.45, 1.03])
    return style.fit_legend(made)


def plot_frequency_mass(window: pd.DataFrame) -> go.Figure:
    """Frequency mass M (rad/token) of each solved model against the width, with the form of Theorem 1's bounds.

    The dashed lines are C1 / (W/2 + 1) and pi / (W + 1) + C2 with the tightest constants that hold for all points.
    """
    title = "Frequency mass of the models that solve the task"
    if why := style.missing_data_reason(window, "scheme", "width", "frequency_mass"):
        return style.empty_figure(title, why)
    bounds = mass_bounds(window)
    if bounds is None:
        return style.empty_figure(title, "no trained model solves the task")
    made = style.new_figure(title)
    named = _with_scheme_names(window)
    for label, look in style.model_styles(named).items():
        mine = named[(named["model"] == label) & (named["accuracy"] >= SOLVED_ACCURACY) & (named["frequency_mass"] > 0)]
        if len(mine):
            made.add_scatter(
                x=mine["width"],
                y=mine["frequency_mass"],
                mode="markers",
                name=look.name,
                marker={"color": look.colour, "symbol": look.symbol, "size": 7, "opacity": 0.7},
                customdata=mine["seed"],
                hovertemplate=f"W = %{{x:,}}, seed %{{customdata}}: M %{{y:.4g}} rad/token<extra>{look.name}</extra>",
            )
    widths = np.geomspace(max(1, window["width"].min()), window["width"].max(), 60)
    forms = {
        f"C₁/(W/2 + 1), C₁ = {bounds.c1:.3g}": [bounds.lower_bound(w) for w in widths],
        f"π/(W + 1) + C₂, C₂ = {bounds.c2:.3g}": [bounds.upper_bound(w) for w in widths],
    }
    for (name, form), dash in zip(forms.items(), ("dash", "dot"), strict=True):
        made.add_scatter(
            x=widths, y=form, mode="lines", name=name, line={"color": style.TEXT_COLOUR, "dash": dash, "width": 1.5}
        )
    made.update_xaxes(title_text="window width W (tokens)", **_width_axis(window["width"]))
    made.update_yaxes(title_text="frequency mass M (rad/token)", **axes.log_axis([*forms.values()]))
    return style.fit_legend(made)


def plot_dominant_frequency(window: pd.DataFrame) -> go.Figure:
    """Frequency of the strongest pair (rad/token) against the width: the median over seeds, a line per scheme."""
    title = "Frequency of the strongest pair"
    if why := style.missing_data_reason(window, "scheme", "width", "dominant_theta"):
        return style.empty_figure(title, why)
    found = _with_scheme_names(accuracy_by_width(window))
    found = found[found["dominant_theta"] > 0]
    made = style.new_figure(title)
    for label, look in style.model_styles(found).items():
        mine = found[found["model"] == label].sort_values("width")
        made.add_scatter(
            x=mine["width"],
            y=mine["dominant_theta"],
            mode="lines+markers",
            name=look.name,
            line={"color": look.colour, "dash": look.dash},
            marker={"symbol": look.symbol, "size": 6},
            hovertemplate=f"W = %{{x:,}}: %{{y:.3g}} rad/token<extra>{look.name}</extra>",
        )
    made.update_xaxes(title_text="window width W (tokens)", **_width_axis(window["width"]))
    made.update_yaxes(title_text="θ of the strongest pair (rad/token)", **axes.log_axis(found["dominant_theta"]))
    return style.fit_legend(made)


def plot_pair_profile(pairs: pd.DataFrame, scheme: str, width: int, center: int) -> go.Figure:
    """What each rotary pair adds to the needle's logit at each distance, for one model; lines mark the window."""
    title = f"Pairs by distance: {SCHEME_NAMES[scheme]}, W = {width:,}"
    mine = pairs[(pairs["scheme"] == scheme) & (pairs["width"] == width)]
    if mine.empty:
        return style.empty_figure(title, "not measured")
    grid = mine.astype({"logit": "float64"}).pivot_table(index="pair", columns="distance", values="logit")
    theta = mine.groupby("pair")["theta"].first()
    made = style.new_figure(title, 260)
    made.add_heatmap(
        x=list(grid.columns),
        y=[f"{pair}: {theta[pair]:.2g}" for pair in grid.index],
        z=grid.to_numpy(),
        hovertemplate="distance %{x:,} tokens, pair %{y} rad/token<br>%{z:+.3g} logits<extra></extra>",
        colorbar={"title": {"text": "logits"}},
        **ZERO_CENTRED_SCALE,
    )
    for edge in (center - width / 2, center + width / 2):
        made.add_vline(x=edge, line={"color": style.TEXT_COLOUR, "dash": "dash", "width": 1.5})
    made.update_xaxes(title_text="distance D (tokens)", showgrid=False)
    made.update_yaxes(title_text="pair: θ (rad/token)", autorange="reversed", showgrid=False, type="category")
    return style.set_top_margin(made)


def _with_scheme_names(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with its schemes in words under `model`, where the house style looks for what to tell apart."""
    order = [SCHEME_NAMES[scheme] for scheme in frame["scheme"].unique()]
    return frame.assign(model=pd.Categorical(frame["scheme"].astype("str").map(SCHEME_NAMES), order))


def _width_axis(widths: pd.Series) -> dict[str, object]:
    measured = sorted(set(widths))
    return {"type": "log", "tickvals": measured, "ticktext": [f"{width:,}" for width in measured]}
