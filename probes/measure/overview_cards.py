"""Cards of the probe `measure` for the overview: effective lengths, what changes most, and the loss."""

from collections.abc import Iterator

import numpy as np
import pandas as pd

from headscope.heads import format_head
from headscope.plots import heads as head_figures
from headscope.plots import loss
from headscope.plots.top_heads import fit_to_card, hide_long_legend, plot_unit_bars
from headscope.report.blocks import Card, RenderContext
from headscope.report.explorer_blocks import query_link
from headscope.report.text import describe_values
from headscope.runs.aggregation import mean_losses, plain_types
from headscope.runs.column_metadata import format_number, parse_column
from headscope.runs.summary import longest_ess_column, models_with_same_tokens, same_text_mask

CHANGED_HEADS = 3
"""Heads of largest rise, and of largest fall, on the card of changes."""


def overview_cards(context: RenderContext) -> Iterator[Card]:
    """The cards, as far as the run has their tables."""
    yield from _length_card(context)
    yield from _change_card(context)
    yield from _loss_card(context)


def _length_card(context: RenderContext) -> Iterator[Card]:
    name = longest_ess_column(context.heads)
    medians = context.finite_values(name) if name else {}
    if not name or not medians:
        return
    values = {label: float(of_model.median()) for label, of_model in medians.items()}
    figure = fit_to_card(head_figures.plot_distribution(context.heads, name))
    yield Card(
        figure.update_yaxes(title_text="effective length (tokens)"),
        f"The median effective length at a context length of {parse_column(name).length:,} tokens is "
        f"{describe_values(values, format_number)}, in tokens.",
        half_width=True,
        question="How many tokens does a head attend to?",
        href=query_link("/heads", stat=name),
    )


def _change_card(context: RenderContext) -> Iterator[Card]:
    name, models = longest_ess_column(context.heads), context.models
    if name is None or len(models) < 2:
        return
    model = context.selected_model if context.selected_model != models[0] else models[-1]
    heads = context.heads[context.heads["model"].isin([models[0], model])]
    wide = heads.pivot_table(index=["layer", "head", "kv_group"], columns="model", values=name, observed=True)
    if not {models[0], model} <= {*wide}:
        return
    wide = wide.dropna()
    ratio: pd.Series = (wide[model] / wide[models[0]]).map(np.log2)
    order = ratio[np.isfinite(ratio)].sort_values()
    if len(order) < 2 * CHANGED_HEADS:
        return
    chosen = [*order.index[-CHANGED_HEADS:][::-1], *order.index[:CHANGED_HEADS]]
    names = [format_head(layer, head) for layer, head, _ in chosen]
    first_change, last_change = (
        " to ".join(format_number(wide.loc[chosen[index], label]) for label in (models[0], model))
        for index in (0, CHANGED_HEADS)
    )
    figure = plot_unit_bars(
        f"Effective length under {model}, ratio to {models[0]}",
        names,
        [float(order[head]) for head in chosen],
        chosen,
        "2<sup>%{x:.2f}</sup> times",
        model,
    )
    ticks = np.arange(np.floor(order.min()), np.ceil(order.max()) + 1)
    ticks = ticks[:: max(1, len(ticks) // 6)]
    figure.update_xaxes(tickvals=ticks, ticktext=[f"×{2.0**tick:.3g}" for tick in ticks])
    yield Card(
        figure,
        f"From {models[0]} to {model}, the effective length {'rises most' if order.max() > 0 else 'falls least'} in "
        f"{names[0]} ({first_change} tokens) and {'falls most' if order.min() < 0 else 'rises least'} in "
        f"{names[CHANGED_HEADS]} ({last_change}).",
        half_width=True,
        question="Which heads change most?",
        href=query_link("/heads", stat=name, model=model, baseline=models[0]),
    )


def _loss_card(context: RenderContext) -> Iterator[Card]:
    nll, models = context.table("nll"), context.models
    if nll is None or len(models) < 2:
        return
    comparable = nll["model"].isin(models_with_same_tokens(context.run, models[0]))
    nll = nll[comparable & same_text_mask(context.run, nll, models[0])]
    longest = nll[nll["context_length"] == nll["context_length"].max()]
    losses = mean_losses(plain_types(longest), ["model"])
    others = [label for label in models[1:] if label in losses]
    if models[0] not in losses or not others:
        return
    changes = {label: float(losses[label] - losses[models[0]]) for label in others}
    figure = fit_to_card(loss.plot_loss_difference(nll, models[0]))
    yield Card(
        hide_long_legend(figure),
        f"Over {int(longest['context_length'].iloc[0]):,} tokens, the mean loss minus that of {models[0]} is "
        f"{describe_values(changes, '{:+.3f}'.format, 'for')}, in nats per token.",
        half_width=True,
        question=f"Do the models predict better than {models[0]}?",
        href=query_link("/compare"),
    )
