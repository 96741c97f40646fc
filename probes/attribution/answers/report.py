"""Charts of the attribution of answers."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from headscope.plots import style
from headscope.plots.selector import combine_figures, describe_choices, first_choices
from headscope.rendering.blocks import Chart, ChartGroup, RenderContext
from headscope.rendering.text import to_visible_line
from headscope.runs.aggregation import plain_types
from headscope.runs.run import Run
from headscope.runs.summary import default_models_with
from probes.attribution.answers import plots
from probes.attribution.answers.analysis import add_stages, parts_at_answer, sets_of
from probes.attribution.answers.schema import ANSWER_HEADS, ANSWER_PARTS, ANSWER_TOKENS

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
        figures[pair] = plots.plot_head_rows(pairs[pair], tokens, title)
    caption = "Every row of the prompt; the last one predicts the answer."
    yield Chart(combine_figures(figures, "prompt"), caption, half_width=True)


def _stream_charts(context: RenderContext) -> Iterator[Chart]:
    models = [*context.models]
    parts = [*sets_of(context.run.derived(parts_at_answer), models)]
    for prompts in dict.fromkeys(name for _, name, _ in parts):
        of_set = {model: rows for model, name, rows in parts if name == prompts}
        yield Chart(plots.plot_accumulated(of_set, prompts), STREAM_CAPTION)
        for model, rows in of_set.items():
            yield Chart(plots.plot_components(rows, model, prompts), COMPONENT_CAPTION, half_width=True)
            yield _row_chart(context.run, model, prompts)


def _row_chart(run: Run, model: str, prompts: str) -> Chart:
    """Layer x row of the prompts of a set, with a menu of prompts."""
    parts = add_stages(plain_types(run.rows(ANSWER_PARTS.name, model=model, prompts=prompts)))
    groups: Any = parts.groupby("pair", sort=False)
    pairs: dict[str, pd.DataFrame] = dict(iter(groups))
    shown = first_choices({pair: len(rows) for pair, rows in pairs.items()})
    grids = {pair: plots.row_grid(pairs[pair]) for pair in shown}
    cells = np.concatenate([grid.to_numpy().ravel() for grid in grids.values()])
    figures = {}
    for pair, grid in grids.items():
        tokens = _tokens(run, model, prompts, pair)
        title = f"{_answer_text(tokens)} by layer and row, {style.escape_label(pair)}: {style.escape_label(model)}"
        figures[pair] = plots.plot_rows(grid, tokens, title, cells)
    menu = describe_choices(len(shown), len(pairs), "prompts")
    return Chart(combine_figures(figures, "prompt"), ROW_CAPTION + menu, half_width=True)


def _tokens(run: Run, model: str, prompts: str, pair: str) -> pd.DataFrame:
    return plain_types(run.rows(ANSWER_TOKENS.name, model=model, prompts=prompts, pair=pair))


def _answer_text(tokens: pd.DataFrame) -> str:
    """The answer and, if there is one, the wrong answer, such as "' Mary' − ' John'"."""
    answer, wrong = (to_visible_line(tokens[name].iloc[0]) for name in ("answer", "wrong"))
    return style.escape_label(f"'{answer}' − '{wrong}'" if wrong else f"'{answer}'")
