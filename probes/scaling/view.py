"""Charts and glossary of the scaling probe: ratio of the effective length to its target, by row length."""

from collections.abc import Iterator

import pandas as pd
import plotly.graph_objects as go

from headscope.plots import shapes, style
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext, Term
from probes.scaling.results import mean_with_interval

TITLE = "Scaling theorems"

GLOSSARY = (
    Term(
        "Effective length, ESS₂",
        "Effective number of attended tokens. All weight on one token gives 1; equal weight on n tokens gives n.",
        "ESS₂(i) = 1 / Σⱼ αᵢⱼ²",
        ("scaling",),
    ),
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The ratio to the target, one chart per scheme of the logit means."""
    if "scaling" in context.run.tables:
        yield ChartGroup(TITLE, "Effective length relative to its target", _convergence_charts(context.run.scaling))


def _convergence_charts(scaling: pd.DataFrame) -> Iterator[Chart]:
    caption = (
        "Geometric means over sampled rows of Gaussian logits, with 95 % confidence intervals if there are at least "
        "three rows. The theorem predicts 1."
    )
    for scheme in scaling["scheme"].unique():
        yield Chart(plot_convergence(scaling, scheme), caption, half_width=True)


def plot_convergence(scaling: pd.DataFrame, scheme: str) -> go.Figure:
    """ESS / target by L for logits with the means of `scheme`: a line of geometric means with intervals per target."""
    title = f"Effective length relative to its target: {style.escape_label(scheme)} means"
    if reason := style.missing_data_reason(scaling, "scheme", "exponent", "context_length", "ratio"):
        return style.empty_figure(title, reason)
    rows = scaling[scaling["scheme"] == scheme].astype({"ratio": "float64"})
    names = {
        key: f"L^{key[1]:g}, ESS_{key[0]:g} (case {target_rows['regime'].iloc[0]})"
        for key, target_rows in rows.groupby(["beta", "exponent"], sort=False)
    }
    labelled = rows.assign(model=[names[key] for key in zip(rows["beta"], rows["exponent"], strict=True)])
    curves = {}
    for label, model_style in style.model_styles(labelled).items():
        groups = labelled[labelled["model"] == label].groupby("context_length")["ratio"]
        means = {length: mean_with_interval(ratio) for length, ratio in groups}
        curves[model_style] = pd.DataFrame(means, index=["y", "low", "high"]).T
    x = shapes.length_axis(rows["context_length"], "length L (tokens)")
    y = {"title_text": "geometric mean of ESS / target", "rangemode": "tozero"}
    return shapes.lines(title, curves, "L = %{x:,}: %{y:.3f} times the target", x, y, level=1)
