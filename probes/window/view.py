"""Charts and glossary of the window probe."""

from collections.abc import Iterator

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, shapes, style
from headscope.plots.colour_range import ZERO_CENTRED_SCALE
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term
from probes.window import PROBE
from probes.window.results import SCHEME_NAMES, accuracy_by_width, mass_bounds, solves_task


def plot_accuracy_by_width(window: pd.DataFrame) -> go.Figure:
    """Balanced accuracy by window width, one line per scheme: mean and 95 % confidence interval over seeds."""
    title = "Accuracy by window width"
    if reason := style.missing_data_reason(window, "scheme", "width", "accuracy"):
        return style.empty_figure(title, reason)
    widths = _with_scheme_names(accuracy_by_width(window)).rename(columns={"accuracy": "mean"})
    x, y = _width_axis(widths["width"]), {"title_text": "balanced accuracy", "range": [0.45, 1.03]}
    curves, hover = _by_width(widths, "mean", "low", "high"), "W = %{x:,}: accuracy %{y:.3f}"
    return shapes.bands(title, curves, hover, x, y, level=0.5, level_name="chance")


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
    y = {"title_text": "frequency mass M (rad/token)", **axes.log_axis([*bound_lines.values()])}
    return shapes.finish(figure, _width_axis(window["width"]), y)


def plot_dominant_frequency(window: pd.DataFrame) -> go.Figure:
    """Frequency of the strongest pair (rad/token) by window width: median over seeds, one line per scheme."""
    title = "Frequency of the strongest pair"
    if reason := style.missing_data_reason(window, "scheme", "width", "dominant_theta"):
        return style.empty_figure(title, reason)
    widths = _with_scheme_names(accuracy_by_width(window)).rename(columns={"dominant_theta": "y"})
    widths = widths[widths["y"] > 0]
    y = {"title_text": "θ of the strongest pair (rad/token)", **axes.log_axis(widths["y"])}
    hover = "W = %{x:,}: %{y:.3g} rad/token"
    return shapes.lines(title, _by_width(widths, "y"), hover, _width_axis(window["width"]), y)


def plot_pair_profile(pairs: pd.DataFrame, scheme: str, width: int, center: int) -> go.Figure:
    """Contribution of each rotary pair to the needle's logit by distance, for one model; lines mark the window."""
    title = f"Contribution of each pair: {SCHEME_NAMES[scheme]}, W = {width:,}"
    rows = pairs[(pairs["scheme"] == scheme) & (pairs["width"] == width)]
    if rows.empty:
        return style.empty_figure(title, "not measured")
    grid = rows.astype({"logit": "float64"}).pivot_table(index="pair", columns="distance", values="logit")
    theta = rows.groupby("pair")["theta"].first()
    y = {"title_text": "pair: θ (rad/token)", "autorange": "reversed", "showgrid": False, "type": "category"}
    figure = shapes.matrix(
        title,
        grid.rename(lambda pair: f"{pair}: {theta[pair]:.2g}"),
        "distance %{x:,} tokens, pair %{y} rad/token<br>%{z:+.3g} logits",
        {"title_text": "distance D (tokens)", "showgrid": False},
        y,
        unit="logits",
        height=260,
        gaps=False,
        **ZERO_CENTRED_SCALE,
    )
    for edge in (center - width / 2, center + width / 2):
        figure.add_vline(x=edge, line={"color": style.TEXT_COLOUR, "dash": "dash", "width": 1.5})
    return figure


def _with_scheme_names(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with the names of its schemes in column `model`, from which `style.model_styles` takes its styles."""
    order = [SCHEME_NAMES[scheme] for scheme in frame["scheme"].unique()]
    return frame.assign(model=pd.Categorical(frame["scheme"].astype("str").map(SCHEME_NAMES), order))


def _by_width(rows: pd.DataFrame, *columns: str) -> shapes.Series:
    """The columns by window width, a table per scheme."""
    table = rows.set_index("width").sort_index()
    return {styled: table.loc[table["model"] == name, [*columns]] for name, styled in style.model_styles(rows).items()}


def _width_axis(widths: pd.Series) -> dict[str, object]:
    measured = sorted(set(widths))
    ticks = {"tickvals": measured, "ticktext": [f"{width:,}" for width in measured]}
    return {"title_text": "window width W (tokens)", "type": "log", **ticks}


PROFILE_WIDTHS = (1, 32, 128, 512)
"""Window widths with a plot of their pairs, as in the paper."""

GLOSSARY = (
    Term(
        "Rotary pair and its usage",
        "Rotary position embedding rotates each pair of query and key dimensions by an angle, θ × distance. Fast pairs "
        "(large θ) distinguish nearby tokens; slow pairs hardly change with distance.",
        tables=("window_pairs",),
    ),
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """Accuracy and frequencies by window width, and the contribution of each pair by distance."""
    run = context.run
    if "window" in run.tables:
        yield ChartGroup(PROBE.title, "Accuracy and frequencies by window width", _width_charts(run.window))
        if "window_pairs" in run.tables:
            profiles = _profile_charts(run.window, run.window_pairs)
            yield ChartGroup(PROBE.title, "Contribution of each rotary pair", profiles)


def _width_charts(window: pd.DataFrame) -> Iterator[Chart]:
    yield Chart(
        plot_accuracy_by_width(window),
        "The model sees one needle in a sequence of background tokens and decides whether its distance is within a "
        "window around c. Lines are means over initial weights, bands their 95 % confidence intervals.",
        half_width=True,
    )
    yield Chart(
        plot_frequency_mass(window),
        "One point per trained model that solves the task. Its frequency mass is the mean of its frequencies, weighted "
        "by how much each pair can change the logit. Theorem 1 bounds it from both sides, up to two constants; the "
        "lines use the tightest constants for all points.",
        half_width=True,
    )
    yield Chart(
        plot_dominant_frequency(window),
        "Frequency of the pair that can change the needle's logit most: median over initial weights. The slowest pair "
        "hardly rotates within the context and may serve as an offset. Where it is the strongest, the frequency mass "
        "is more informative.",
    )


def _profile_charts(window: pd.DataFrame, pairs: pd.DataFrame) -> Iterator[Chart]:
    center, widths = int(window["center"].iloc[0]), set(window["width"])
    for width in (width for width in PROFILE_WIDTHS if width in widths):
        for scheme in ("fixed", "learned"):
            caption = "Contribution of each pair to the needle's logit. Dashed lines mark the window."
            yield Chart(plot_pair_profile(pairs, scheme, width, center), caption, half_width=True)
