"""Plots of the attribution of answers: along the residual stream, by component, by row of a prompt, and of one head."""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import style
from headscope.plots.colour_range import mark_clipped_cells, symmetric_colorbar, symmetric_limit
from headscope.rendering.token_axis import MAX_PANEL_TOKEN_LABELS, token_axis, token_hover
from headscope.rendering.token_spans import token_labels
from headscope.runs.aggregation import confidence_interval
from probes.attribution.answers.analysis import END, START, accumulated, by_stage, stage_name

LOGIT_AXIS = "logit difference (logits)"
COMPONENTS = {"attention": "attention of the layer", "MLP": "MLP of the layer", "rest": "embedding, biases"}


def plot_accumulated(parts: Mapping[str, pd.DataFrame], prompts: str) -> go.Figure:
    """The answer's logit in the residual stream after each stage: mean over pairs and interval, a line per model.

    `parts` are the rows of `analysis.parts_at_answer` of one set by model.
    """
    figure = style.new_figure(f"Logit of the answer along the residual stream: {style.escape_label(prompts)}")
    for label, model_style in style.line_styles([*parts]).items():
        table = accumulated(parts[label])
        figure_rows = _means(table).set_axis([stage_name(stage) for stage in table.index])
        style.add_line_with_band(figure, figure_rows, model_style, "after %{x}: %{y:+.3f} logits")
    figure.update_xaxes(title_text="stage of the residual stream", type="category", nticks=16, tickangle=-45)
    figure.update_yaxes(title_text=LOGIT_AXIS)
    return style.fit_legend(figure)


def plot_components(parts: pd.DataFrame, model: str, prompts: str) -> go.Figure:
    """Bars of what the attention and the MLP of each layer, the embedding and the biases add: mean over pairs."""
    table = by_stage(parts)
    means = _means(table)
    names = [_layer_name(stage) for stage in table.index]
    kinds = ["rest" if stage in (START, END) else stage_name(stage).split()[0] for stage in table.index]
    title = f"What each layer adds to the answer, {style.escape_label(prompts)}: {style.escape_label(model)}"
    figure = style.new_figure(title)
    for number, (kind, name) in enumerate(COMPONENTS.items()):
        chosen = np.array([one == kind for one in kinds])
        bars = means[chosen]
        hover = "%{x}: %{y:+.3f} logits<extra>" + name + "</extra>"
        figure.add_bar(
            x=[one for one, is_chosen in zip(names, chosen, strict=True) if is_chosen],
            y=bars["mean"],
            error_y=style.error_bars(bars["mean"], bars["low"], bars["high"]) if bars["low"].notna().any() else None,
            name=name,
            marker_color=style.CATEGORY_PALETTE[number],
            hovertemplate=hover,
        )
    order = list(dict.fromkeys(names))
    axis = {"type": "category", "categoryorder": "array", "categoryarray": order, "nticks": 20, "tickangle": -45}
    figure.update_xaxes(title_text="layer", **axis)
    figure.update_yaxes(title_text="contribution (logits)")
    return style.fit_legend(figure.update_layout(barmode="group"))


def row_grid(parts: pd.DataFrame) -> pd.DataFrame:
    """The answer's logit in the residual stream of one prompt, by layer, after its MLP, and position.

    `parts` are all rows of the prompt with their stages.
    """
    table = accumulated(parts, "position")
    last_stages = {_layer_name(stage): stage for stage in table.index}  # the last stage of each layer
    return table.loc[[*last_stages.values()]].set_axis([*last_stages])


def plot_rows(grid: pd.DataFrame, tokens: pd.DataFrame, title: str, cells: npt.ArrayLike) -> go.Figure:
    """Heatmap of a grid of `row_grid`; `tokens` are the prompt's rows of `attribution_answer_tokens`.

    `cells` are the values that set the colour scale, of all grids that share it.
    """
    limit = symmetric_limit(cells, 1e-3)
    labels = _token_labels(tokens)
    texts, place = token_hover(labels, len(grid))
    figure = style.new_figure(title, int(np.clip(200 + 16 * len(grid), 330, 790)))
    figure.add_heatmap(
        x=list(range(grid.shape[1])),
        y=list(range(len(grid))),
        z=grid.to_numpy(np.float32),
        zmin=-limit,
        zmax=limit,
        zmid=0,
        colorscale=style.DIVERGING_SCALE,
        colorbar={"title": {"text": "logits"}} | symmetric_colorbar(cells, limit),
        customdata=[[name] * grid.shape[1] for name in grid.index],
        hovertemplate=f"after layer %{{customdata}}, {place}<br>%{{z:+.3f}} logits<extra></extra>",
        xgap=1,
        ygap=1,
        **texts,
    )
    mark_clipped_cells(figure, grid.to_numpy(), limit)
    figure.update_xaxes(showgrid=False, **token_axis(tokens["position"].sort_values(), labels))
    step = max(1, len(grid) // 16)
    figure.update_yaxes(
        title_text="layer",
        tickvals=list(range(0, len(grid), step)),
        ticktext=[*grid.index][::step],
        showgrid=False,
    )
    return style.set_metadata(style.set_top_margin(figure), value="logits", x="position")


def plot_head_rows(rows: pd.DataFrame, tokens: pd.DataFrame, title: str) -> go.Figure:
    """Bars of what one head adds to the answer in every row of a prompt, by model."""
    figure = style.new_figure(title)
    for label, model_style in style.model_styles(rows).items():
        bars = rows[rows["model"] == label].sort_values("position")
        hover = "position %{x}: %{y:+.3f} logits<extra>" + model_style.name + "</extra>"
        figure.add_bar(
            x=bars["position"],
            y=bars["contribution"],
            name=model_style.name,
            marker_color=model_style.colour,
            hovertemplate=hover,
        )
    figure.update_xaxes(token_axis(tokens["position"].sort_values(), _token_labels(tokens), MAX_PANEL_TOKEN_LABELS))
    figure.update_yaxes(title_text="contribution (logits)")
    return style.fit_legend(figure)


def _means(table: pd.DataFrame) -> pd.DataFrame:
    """Mean over the columns of a table, with its interval: mean, low, high."""
    values = table.to_numpy(np.float64)
    low, high = confidence_interval(values)
    return pd.DataFrame({"mean": values.mean(1), "low": low, "high": high}, index=table.index)


def _layer_name(stage: int) -> str:
    return stage_name(stage) if stage in (START, END) else str(stage // 2)


def _token_labels(tokens: pd.DataFrame) -> list[str]:
    tokens = tokens.sort_values("position")
    return token_labels(tokens["position"], tokens["token"])
