"""Each head under a method against the same head in the base model: the paper's scatter of effective lengths."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import axes, head_scatter, style
from headscope.runs.column_metadata import statistic


def plot_against_baseline(heads: pd.DataFrame, statistic_name: str, baseline: str) -> go.Figure:
    """The statistic `name` of every head under each other model against `baseline`, one panel a model.

    Both axes are equal, the dashed line is y = x; colour is the layer.
    """
    shown = statistic(statistic_name)
    title = f"{shown.title} of each head, against {style.escape_label(baseline)}"
    if why := style.missing_data_reason(heads, "model", statistic_name):
        return style.empty_figure(title, why)
    looks = style.model_styles(heads)
    having = [label for label in looks if heads.loc[heads["model"] == label, statistic_name].notna().any()]
    others = [label for label in having if label != baseline]
    if baseline not in having or not others:
        known = f"; it was measured of {style.escape_label(', '.join(having))} alone" if len(looks) > 1 else ""
        return style.empty_figure(title, f"a comparison needs the base model and at least one other{known}")
    base = heads[heads["model"] == baseline].set_index(head_scatter.HEAD_COLUMNS)[statistic_name].rename("x")
    names = [looks[label].name for label in others]
    made = style.panel_figure(title, names, height=360)
    for at, label in enumerate(others):
        both = (
            heads[heads["model"] == label]
            .set_index(head_scatter.HEAD_COLUMNS)[statistic_name]
            .rename("y")
            .to_frame()
            .join(base)
            .reset_index()
        )
        hover = (
            f"{style.escape_label(baseline)} %{{x:.4g}}{style.unit_suffix(shown.unit)}<br>"
            f"{looks[label].name} %{{y:.4g}}{style.unit_suffix(shown.unit)}"
        )
        head_scatter.add_points(made, both, "x", "y", hover, looks[label].name, **style.panel_row_col(at, others))
    values = heads.loc[heads["model"].isin([baseline, *others]), statistic_name].to_numpy(dtype=np.float64)
    values = values[np.isfinite(values) & ((values > 0) | (not shown.log_scale))]
    if not len(values):
        return style.empty_figure(title, "no finite values to show")
    ends = [values.min() / 1.2, values.max() * 1.2] if shown.log_scale else [values.min(), values.max()]
    for at in range(len(others)):
        head_scatter.add_diagonal(made, ends, **style.panel_row_col(at, others))
    axis = axes.log_axis(values, sparse=True) | {"range": list(np.log10(ends))} if shown.log_scale else {}
    made.update_xaxes(axis)
    made.update_yaxes(axis)
    unit = f" ({shown.unit})" if shown.unit else ""
    style.set_outer_axis_titles(made, len(others), f"{style.escape_label(baseline)}{unit}", f"model named above{unit}")
    style.set_metadata(
        made, x=f"{shown.worded} under {style.escape_label(baseline)}", value=f"{shown.worded} under the model"
    )
    return head_scatter.add_layer_colorbar(made, 74)
