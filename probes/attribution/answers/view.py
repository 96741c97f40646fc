"""Plots of the attribution of answers: along the residual stream, by component, by row of a prompt, and of one head."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import plotly.graph_objects as go

from headscope.plots import shapes, style
from headscope.plots.axes import MAX_PANEL_TOKEN_LABELS, token_axis, token_hover
from headscope.plots.colour_range import mark_clipped_cells, signed_colours, symmetric_limit
from headscope.plots.selector import combine_figures, describe_choices, first_choices
from headscope.plots.shapes import mean_curve
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext
from headscope.rendering.text import to_visible_line
from headscope.rendering.token_spans import token_labels
from headscope.runs.aggregation import plain_types
from headscope.runs.run import Run
from headscope.runs.summary import default_models_with
from probes.attribution.answers.declaration import ANSWER_HEADS, ANSWER_PARTS, ANSWER_TOKENS
from probes.attribution.answers.results import (
    END,
    START,
    accumulated,
    add_stages,
    by_stage,
    parts_at_answer,
    sets_of,
    stage_name,
)

LOGIT_AXIS = "logit difference (logits)"
COMPONENTS = {"attention": "attention of the layer", "MLP": "MLP of the layer", "rest": "embedding, biases"}


def plot_accumulated(parts: Mapping[str, pd.DataFrame], prompts: str) -> go.Figure:
    """The answer's logit in the residual stream after each stage: mean over pairs and interval, a line per model.

    `parts` are the rows of `analysis.parts_at_answer` of one set by model.
    """
    title = f"Logit of the answer along the residual stream: {style.escape_label(prompts)}"
    curves = {
        line_style: mean_curve(accumulated(parts[label]).rename(stage_name))
        for label, line_style in style.line_styles([*parts]).items()
    }
    x = {"title_text": "stage of the residual stream", "type": "category", "nticks": 16, "tickangle": -45}
    return shapes.bands(title, curves, "after %{x}: %{y:+.3f} logits", x, LOGIT_AXIS)


def plot_components(parts: pd.DataFrame, model: str, prompts: str) -> go.Figure:
    """Bars of what the attention and the MLP of each layer, the embedding and the biases add: mean over pairs."""
    means = mean_curve(by_stage(parts)).rename(columns={"mean": "y"})
    kinds = np.array(["rest" if stage in (START, END) else stage_name(stage).split()[0] for stage in means.index])
    title = f"What each layer adds to the answer, {style.escape_label(prompts)}: {style.escape_label(model)}"
    series = {
        kind_style: means[kinds == kind].rename(_layer_name)
        for kind, kind_style in zip(COMPONENTS, style.category_styles([*COMPONENTS.values()]).values(), strict=True)
    }
    order = {"categoryorder": "array", "categoryarray": [*dict.fromkeys(map(_layer_name, means.index))]}
    x = {"title_text": "layer", "type": "category", **order, "nticks": 20, "tickangle": -45}
    return shapes.bars(title, series, "%{x}: %{y:+.3f} logits", x, "contribution (logits)", barmode="group")


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
    step = max(1, len(grid) // 16)
    ticks = {"tickvals": list(range(0, len(grid), step)), "ticktext": [*grid.index][::step]}
    figure = shapes.matrix(
        title,
        grid.set_axis(range(len(grid))).set_axis(range(grid.shape[1]), axis=1).astype("float32"),
        f"after layer %{{customdata}}, {place}<br>%{{z:+.3f}} logits",
        {"showgrid": False, **token_axis(tokens["position"].sort_values(), labels)},
        {"title_text": "layer", **ticks, "showgrid": False},
        height=int(np.clip(200 + 16 * len(grid), 330, 790)),
        customdata=[[name] * grid.shape[1] for name in grid.index],
        **signed_colours(limit, "logits", cells),
        **texts,
    )
    mark_clipped_cells(figure, grid.to_numpy(), limit)
    return style.set_metadata(figure, value="logits", x="position")


def plot_head_rows(rows: pd.DataFrame, tokens: pd.DataFrame, title: str) -> go.Figure:
    """Bars of what one head adds to the answer in every row of a prompt, by model."""
    by_position = rows.set_index("position").sort_index().rename(columns={"contribution": "y"})
    series = {
        model_style: by_position.loc[by_position["model"] == label, ["y"]]
        for label, model_style in style.model_styles(rows).items()
    }
    axis = token_axis(tokens["position"].sort_values(), _token_labels(tokens), MAX_PANEL_TOKEN_LABELS)
    return shapes.bars(title, series, "position %{x}: %{y:+.3f} logits", axis, "contribution (logits)")


def _layer_name(stage: int) -> str:
    return stage_name(stage) if stage in (START, END) else str(stage // 2)


def _token_labels(tokens: pd.DataFrame) -> list[str]:
    tokens = tokens.sort_values("position")
    return token_labels(tokens["position"], tokens["token"])


STREAM_CAPTION = (
    "What the residual stream gives to the answer after each stage, with the final norm frozen at its scale at the "
    "end: the sum of the terms so far, in the last row of the prompt, mean over pairs. Band: 95 % confidence interval "
    "over pairs, from three pairs on."
)
COMPONENT_CAPTION = (
    "Mean over pairs, in the last row of the prompt. All bars add up to the logit difference. Error bars: 95 % "
    "confidence interval over pairs, from three pairs on."
)
ROW_CAPTION = (
    "The same sum in every row of one prompt: above zero (red) the residual stream of this token favours the answer "
    "after this layer, below zero (blue) the wrong answer."
)


def charts(context: RenderContext, chapter: str) -> Iterator[ChartGroup]:
    """The answer's logit along the residual stream, by component and by row."""
    if ANSWER_PARTS.name not in context.run.tables:
        return
    yield ChartGroup(chapter, "What each layer adds to the answer", _stream_charts(context))


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Chart]:
    """What one head adds in every row of the prompts of the first set, with a menu of prompts."""
    if ANSWER_HEADS.name not in run.tables:
        return
    rows = run.rows(ANSWER_HEADS.name, model=tuple(default_models_with(run, model)), layer=layer, head=head)
    if rows.empty:
        return
    prompts = rows["prompts"].iloc[0]
    groups: Any = rows[rows["prompts"] == prompts].groupby("pair", sort=False, observed=True)
    pairs: dict[str, pd.DataFrame] = dict(iter(groups))
    figures = {}
    for pair in first_choices({pair: len(of_pair) for pair, of_pair in pairs.items()}):
        tokens = _tokens(run, str(rows["model"].iloc[0]), prompts, pair)
        title = f"Direct contribution of L{layer}H{head} to {_answer_text(tokens)}, {style.escape_label(pair)}"
        figures[pair] = plot_head_rows(pairs[pair], tokens, title)
    caption = "Every row of the prompt; the last one predicts the answer."
    yield Chart(combine_figures(figures, "prompt"), caption, half_width=True)


def _stream_charts(context: RenderContext) -> Iterator[Chart]:
    models = [*context.models]
    parts = [*sets_of(context.run.derived(parts_at_answer), models)]
    for prompts in dict.fromkeys(name for _, name, _ in parts):
        of_set = {model: rows for model, name, rows in parts if name == prompts}
        yield Chart(plot_accumulated(of_set, prompts), STREAM_CAPTION)
        for model, rows in of_set.items():
            yield Chart(plot_components(rows, model, prompts), COMPONENT_CAPTION, half_width=True)
            yield _row_chart(context.run, model, prompts)


def _row_chart(run: Run, model: str, prompts: str) -> Chart:
    """Layer x row of the prompts of a set, with a menu of prompts."""
    parts = add_stages(plain_types(run.rows(ANSWER_PARTS.name, model=model, prompts=prompts)))
    groups: Any = parts.groupby("pair", sort=False)
    pairs: dict[str, pd.DataFrame] = dict(iter(groups))
    shown = first_choices({pair: len(rows) for pair, rows in pairs.items()})
    grids = {pair: row_grid(pairs[pair]) for pair in shown}
    cells = np.concatenate([grid.to_numpy().ravel() for grid in grids.values()])
    figures = {}
    for pair, grid in grids.items():
        tokens = _tokens(run, model, prompts, pair)
        title = f"{_answer_text(tokens)} by layer and row, {style.escape_label(pair)}: {style.escape_label(model)}"
        figures[pair] = plot_rows(grid, tokens, title, cells)
    menu = describe_choices(len(shown), len(pairs), "prompts")
    return Chart(combine_figures(figures, "prompt"), ROW_CAPTION + menu, half_width=True)


def _tokens(run: Run, model: str, prompts: str, pair: str) -> pd.DataFrame:
    return plain_types(run.rows(ANSWER_TOKENS.name, model=model, prompts=prompts, pair=pair))


def _answer_text(tokens: pd.DataFrame) -> str:
    """The answer and, if there is one, the wrong answer, such as "' Mary' − ' John'"."""
    answer, wrong = (to_visible_line(tokens[name].iloc[0]) for name in ("answer", "wrong"))
    return style.escape_label(f"'{answer}' − '{wrong}'" if wrong else f"'{answer}'")
