"""What the scaling check shows: effective length over its target against the length of the row."""

from collections.abc import Iterator

import pandas as pd
import plotly.graph_objects as go

from headscope.figures import axes, style
from headscope.report.content import Chart, Finding, Group, Shown, Term
from headscope.runs.run import Run

TITLE = "Scaling theorems"

GLOSSARY = (
    Term(
        "Effective length, ESS₂",
        "The number of tokens that a head attends to in effect. All weight on one token gives 1; equal weight on n "
        "tokens gives n.",
        "ESS₂(i) = 1 / Σⱼ αᵢⱼ²",
        ("scaling",),
    ),
)


def charts(shown: Shown) -> Iterator[Group]:
    """The ratio to the target, a chart for each kind of means."""
    if "scaling" in shown.run.tables:
        yield Group(TITLE, "Effective length over its target", _convergences(shown.run.scaling))


def _convergences(scaling: pd.DataFrame) -> Iterator[Chart]:
    caption = "Means over sampled rows of Gaussian logits; bars are one standard error. At 1 the theorem holds."
    for scheme in scaling["scheme"].unique():
        yield Chart(convergence(scaling, scheme), caption, half=True)


def findings(run: Run) -> Iterator[Finding]:
    """How close the effective length comes to its target at the largest length."""
    if "scaling" not in run.tables:
        return
    far = run.scaling[run.scaling["context_length"] == run.scaling["context_length"].max()]
    for (scheme, beta, exponent), rows in far.groupby(["scheme", "beta", "exponent"], observed=True, sort=False):
        ratio = rows["ratio"].astype("float64")
        yield Finding(
            TITLE,
            f"{scheme} logits, ESS_{beta:g} with target L^{exponent:g} (case {rows['regime'].iloc[0]}): at "
            f"L = {rows['context_length'].iloc[0]:,} the effective length is {ratio.mean():.3f} times its target "
            f"(standard error {ratio.sem():.3f}, {len(rows)} rows).",
        )


def convergence(scaling: pd.DataFrame, scheme: str) -> go.Figure:
    """ESS / target against L for logits with the means of `scheme`: a line a target, mean and standard error."""
    title = f"Effective length over its target: {style.text(scheme)} means"
    if why := style.lacks(scaling, "scheme", "exponent", "context_length", "ratio"):
        return style.nothing(title, why)
    mine = scaling[scaling["scheme"] == scheme].astype({"ratio": "float64"})
    names = {
        key: f"L^{key[1]:g}, ESS_{key[0]:g} (case {rows['regime'].iloc[0]})"
        for key, rows in mine.groupby(["beta", "exponent"], sort=False)
    }
    made = style.figure(title)
    made.add_hline(y=1, line={"color": style.INK, "dash": "dot", "width": 1})
    labelled = mine.assign(model=[names[key] for key in zip(mine["beta"], mine["exponent"], strict=True)])
    for label, look in style.looks(labelled).items():
        groups = labelled[labelled["model"] == label].groupby("context_length")["ratio"]
        made.add_scatter(
            x=list(groups.groups),
            y=groups.mean(),
            error_y={"array": groups.sem(), "thickness": 1, "width": 3},
            mode="lines+markers",
            name=look.name,
            line={"color": look.colour, "dash": look.dash},
            marker={"symbol": look.symbol, "size": 6},
            hovertemplate=f"L = %{{x:,}}: %{{y:.3f}} times the target<extra>{look.name}</extra>",
        )
    made.update_xaxes(title_text="length L (tokens)", **axes.log_axis(mine["context_length"]))
    made.update_yaxes(title_text="ESS / target", rangemode="tozero")
    return style.room_for_legend(made)
