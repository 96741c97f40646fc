"""Writes: what the next token's logit is made of, layer by layer, and what one head adds along the context."""

import pandas as pd
import plotly.graph_objects as go

from headscope.bins import middle
from headscope.plots import axes, style
from headscope.runs.aggregation import at_longest, interval, plain
from probes.attribution.analysis import mean_over_positions

PART_LABELS = {"heads": "all heads of the layer", "other": "the rest of the layer (MLP)"}


def plot_by_layer(parts: pd.DataFrame, model: str) -> go.Figure:
    """Bars of what the heads and the rest of each layer add, at the longest context."""
    title = f"What the next token's logit is made of: {style.escape_label(model)}"
    rows = parts[parts["model"] == model]
    if rows.empty:
        return style.empty_figure(title, "no rows to show")
    means = mean_over_positions(at_longest(plain(rows)), "part", "layer")
    made = style.new_figure(title)
    for at, (part, name) in enumerate(PART_LABELS.items()):
        mine = means[means.index.get_level_values("part") == part].droplevel("part")
        hover = "layer %{x}: %{y:+.3f} logits<extra>" + name + "</extra>"
        made.add_bar(x=mine.index, y=mine, name=name, marker_color=style.PALETTE[at], hovertemplate=hover)
    made.update_xaxes(title_text="layer")
    made.update_yaxes(title_text="added (logits)")
    return style.fit_legend(made.update_layout(barmode="relative"))


def plot_by_position(rows: pd.DataFrame, models: list[str], layer: int, head: int) -> go.Figure:
    """A line for each model along the context, with the interval over documents; `rows` are the head's of `writes`."""
    made = style.new_figure(f"What layer {layer}, head {head} adds to the next token's logit")
    rows = rows[rows["context_length"] == rows["context_length"].max()]
    rows = rows.assign(model=rows["model"].astype(pd.CategoricalDtype(models)))
    length = int(rows["context_length"].max())
    for label, look in style.model_styles(rows).items():
        table = rows[rows["model"] == label].pivot_table(index="position", columns="doc", values="write", observed=True)
        values = table.to_numpy(dtype="float64")
        low, high = interval(values)
        line = pd.DataFrame({"mean": values.mean(1), "low": low, "high": high}, index=middle(table.index, length))
        style.add_line_with_band(made, line, look, "around position %{x:,.0f}: %{y:+.3f} logits")
    made.update_xaxes(title_text="position of the predicted token", **axes.log_axis([1, length]))
    made.update_yaxes(title_text="added (logits)")
    return style.fit_legend(made)
