"""Each head under a method against the same head in the base model: the paper's scatter of effective lengths."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.figures import axes, scatter, style
from headscope.runs.statistics import statistic


def against(heads: pd.DataFrame, name: str, baseline: str) -> go.Figure:
    """The statistic `name` of every head under each other model against `baseline`, one panel a model.

    Both axes are equal, the dashed line is y = x; colour is the layer.
    """
    shown = statistic(name)
    title = f"{shown.title} of each head, against {style.text(baseline)}"
    if why := style.lacks(heads, "model", name):
        return style.nothing(title, why)
    looks = style.looks(heads)
    having = [label for label in looks if heads.loc[heads["model"] == label, name].notna().any()]
    others = [label for label in having if label != baseline]
    if baseline not in having or not others:
        known = f"; it was measured of {style.text(', '.join(having))} alone" if len(looks) > 1 else ""
        return style.nothing(title, f"a comparison needs the base model and at least one other{known}")
    base = heads[heads["model"] == baseline].set_index(scatter.UNIT)[name].rename("x")
    names = [looks[label].name for label in others]
    made = style.panels(title, names, height=360)
    for at, label in enumerate(others):
        both = (
            heads[heads["model"] == label].set_index(scatter.UNIT)[name].rename("y").to_frame().join(base).reset_index()
        )
        hover = (
            f"{style.text(baseline)} %{{x:.4g}}{style.suffix(shown.unit)}<br>"
            f"{looks[label].name} %{{y:.4g}}{style.suffix(shown.unit)}"
        )
        scatter.dots(made, both, "x", "y", hover, looks[label].name, **style.place(at, others))
    values = heads.loc[heads["model"].isin([baseline, *others]), name].to_numpy(dtype=np.float64)
    values = values[np.isfinite(values) & ((values > 0) | (not shown.log_scale))]
    if not len(values):
        return style.nothing(title, "no finite values to show")
    ends = [values.min() / 1.2, values.max() * 1.2] if shown.log_scale else [values.min(), values.max()]
    for at in range(len(others)):
        scatter.diagonal(made, ends, **style.place(at, others))
    axis = axes.log_axis(values, sparse=True) | {"range": list(np.log10(ends))} if shown.log_scale else {}
    made.update_xaxes(axis)
    made.update_yaxes(axis)
    unit = f" ({shown.unit})" if shown.unit else ""
    style.outer_titles(made, len(others), f"{style.text(baseline)}{unit}", f"model named above{unit}")
    style.says(made, x=f"{shown.worded} under {style.text(baseline)}", value=f"{shown.worded} under the model")
    return scatter.coloured(made, 74)
