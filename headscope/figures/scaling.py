"""The scaling theorems: effective length over its target against the length of the row."""

import pandas as pd
import plotly.graph_objects as go

from headscope.figures import axes, style


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
