"""Cards of the probe `measure`: effective lengths, what changes most, the loss, and the roles during training."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import numpy as np
import pandas as pd

from headscope.base.heads import format_head
from headscope.plots import curves, role_emergence
from headscope.plots import head_matrices as head_figures
from headscope.plots.top_heads import fit_to_card, hide_long_legend, plot_unit_bars
from headscope.rendering.blocks import Card, RenderContext
from headscope.rendering.explorer_blocks import query_link
from headscope.results.words import answer, sentence
from headscope.runs.column_metadata import parse_column
from headscope.runs.summary import longest_ess_column, models_with_same_tokens, same_text_mask
from headscope.runs.trainings import training_checkpoints
from probes.measure.results import (
    CHANGED_HEADS,
    changed_heads,
    loss_difference_results,
    median_length,
    onset_results,
)


def overview_cards(context: RenderContext) -> Iterator[Card]:
    """The cards, as far as the run has their tables."""
    yield from _length_card(context)
    yield from _change_card(context)
    yield from _loss_card(context)


def page_cards(context: RenderContext, page: str) -> Iterator[Card]:
    """The cards on top of Compare and of Checkpoints, as far as the run has their tables."""
    if page == "/compare":
        yield from _change_card(context)
        yield from _loss_card(context)
    elif page == "/checkpoints":
        yield from _role_cards(context)


def _length_card(context: RenderContext) -> Iterator[Card]:
    name = longest_ess_column(context.heads)
    measured = context.finite_values(name) if name else {}
    if not name or not measured:
        return
    figure = fit_to_card(head_figures.plot_distribution(context.heads, name))
    yield Card(
        figure.update_yaxes(title_text="effective length (tokens)"),
        answer([median_length(values, name, label) for label, values in measured.items()]),
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
    ratio: pd.Series = (wide[model] / wide[models[0]]).map(np.log)
    order = ratio[np.isfinite(ratio)].sort_values(ascending=False, kind="stable")
    if len(order) < 2 * CHANGED_HEADS:
        return
    chosen = pd.concat([order[:CHANGED_HEADS], order[: -CHANGED_HEADS - 1 : -1]]) / np.log(2)
    figure = plot_unit_bars(
        f"Effective length under {model}, ratio to {models[0]}",
        [format_head(layer, head) for layer, head, _ in chosen.index],
        chosen.tolist(),
        [*chosen.index],
        "2<sup>%{x:.2f}</sup> times",
        model,
    )
    ticks = np.arange(np.floor(chosen.min()), np.ceil(chosen.max()) + 1)
    ticks = ticks[:: max(1, len(ticks) // 6)]
    figure.update_xaxes(tickvals=ticks, ticktext=[f"×{2.0**tick:.3g}" for tick in ticks])
    where = {"context_length": parse_column(name).length or 0}
    yield Card(
        figure,
        sentence(changed_heads(order.droplevel("kv_group"), model, models[0], where)),
        half_width=True,
        question="Which heads change most?",
        href=query_link("/heads", stat=name, model=model, baseline=models[0]),
    )


def _loss_card(context: RenderContext) -> Iterator[Card]:
    nll, models = context.table("nll"), context.models
    if nll is None or len(models) < 2:
        return
    differences = [*loss_difference_results(context.run, models[1:], models[0])]
    if not differences:
        return
    length = max(result.where["context_length"] for result in differences)
    is_comparable = nll["model"].isin(models_with_same_tokens(context.run, models[0]))
    figure = curves.plot_loss_difference(nll[is_comparable & same_text_mask(context.run, nll, models[0])], models[0])
    yield Card(
        hide_long_legend(fit_to_card(figure)),
        answer([result for result in differences if result.where["context_length"] == length]),
        half_width=True,
        question=f"Do the models predict better than {models[0]}?",
        href=query_link("/compare", tab="loss-along-the-context"),
    )


def _role_cards(context: RenderContext) -> Iterator[Card]:
    """A card for each role that heads take on after the first checkpoint, those of most such heads first."""
    run, filtered_heads = context.run, context.heads[["layer", "head"]].drop_duplicates()
    heads = run.heads.merge(filtered_heads, on=["layer", "head"])  # of all checkpoints, as `context.heads` is not
    onsets = sorted(onset_results(run, heads, context.models), key=lambda result: result.where["role"])
    by_role = {role: [*results] for role, results in groupby(onsets, key=lambda result: str(result.where["role"]))}
    counts = {role: sum(result.details["later"] or 0 for result in results) for role, results in by_role.items()}
    checkpoints = training_checkpoints(run.manifest["models"])
    for role in sorted((role for role in by_role if counts[role]), key=lambda role: -counts[role]):
        trainings = [replace(result, model=str(result.where["training"])) for result in by_role[role]]
        yield Card(
            role_emergence.plot_role_count(heads, checkpoints, role),
            answer(trainings),
            half_width=True,
            question=f"When do heads take on the role {role}?",
            href=query_link("/heads", role=role, model=by_role[role][0].model),
        )
