"""What a KV group learned: its frequencies against where learning started and against the checkpoint's own."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import style


def plot_learned_frequencies(positions: pd.DataFrame, model: str, layer: int, kv_group: int) -> go.Figure:
    """Learned frequencies of one KV group against where learning started and against the checkpoint's own.

    Above log10 theta (rad/token) by pair, below ln of the ratio to the checkpoint's.
    """
    title = f"Spectrum of layer {layer}, key group {kv_group}: {style.escape_label(model)}"
    if why := style.missing_data_reason(positions, "model", "log_theta", "log_theta_init", "log_theta_base"):
        return style.empty_figure(title, why)
    place = (positions["model"] == model) & (positions["layer"] == layer) & (positions["kv_group"] == kv_group)
    rows = positions[place].sort_values("pair").astype({n: "float64" for n in positions if str(n).startswith("log_")})
    if rows.empty:
        return style.empty_figure(title, "this group was not measured")
    made = style.stacked_figure(title, 460)
    lines = {"base": "log_theta_base", "where learning started": "log_theta_init", "learned": "log_theta"}
    for at, (label, column) in enumerate(lines.items()):
        drawn = {
            "x": rows["pair"],
            "mode": "lines",
            "line": {"color": style.PALETTE[(7, 1, 0)[at]], "dash": style.LINE_DASHES[(2, 1, 0)[at]]},
            "name": label,
            "legendgroup": label,
        }
        values = rows[column].where(np.isfinite(rows[column]))
        hover = f"pair %{{x}}: %{{y:.3f}}<extra>{label}</extra>"
        made.add_scatter(y=values / np.log(10), showlegend=False, hovertemplate=hover, row=1, col=1, **drawn)
        made.add_scatter(y=values - rows["log_theta_base"], hovertemplate=hover, row=2, col=1, **drawn)
    made.update_yaxes(title_text="log₁₀ θ (rad/token)", row=1, col=1)
    made.update_yaxes(title_text="ln θ against base", row=2, col=1)
    made.update_xaxes(title_text="rotary pair f, from highest frequency to lowest", row=2, col=1)
    return style.fit_legend(made)
