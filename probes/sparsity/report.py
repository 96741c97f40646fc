"""Report of the sparsity probe: charts and glossary."""

from collections.abc import Iterator

import pandas as pd

from headscope.plots.head_matrices import plot_distribution
from headscope.plots.layers import plot_by_layer
from headscope.plots.top_heads import fit_to_card
from headscope.rendering.blocks import Block, Card, Chart, ChartGroup, RenderContext, Term
from headscope.rendering.explorer_blocks import query_link
from headscope.rendering.statistic_charts import comparison_chart, matrix_panels, model_panels
from headscope.results.words import answer
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from probes.sparsity import PROBE, plots
from probes.sparsity.analysis import (
    answer_changes,
    change_curves,
    changes_of_other_probes,
    longest_rows,
    loss_changes,
    recall_by_depth,
    recall_by_layer,
    recall_curves,
    shown_rule,
)
from probes.sparsity.results import keys_result

GLOSSARY = (
    Term(
        "Sparse selection, recall",
        "A rule chooses some of the keys that a query row sees. Its recall is the share of the row's attention weight "
        "on these keys; -ln recall is the KL divergence of the renormalised sparse row from the dense one.",
        "recallᵢ = Σ αᵢⱼ over j in Sᵢ",
        ("sparse_rows",),
    ),
    Term(
        "Keys for 95 % of the mass",
        "The fewest keys that together hold 95 % of a row's attention weight.",
        "",
        ("sparse_keys",),
    ),
)
_CURVES = (
    "Recall by the number of keys that a row keeps, a line per rule. top, group-top, layer-top and block need the "
    "dense weights: they bound what other rules can reach. At equal cost, a higher line is better."
)
_BANDS = (
    "Recall of the heads of each third of the layers under the first rule, by the number of keys that a row keeps: the "
    "median head, with the 10 % to 90 % quantile band."
)
_WHOLE = (
    "Every head attends by one rule, exactly masked, so that errors add up over the layers. Kept keys are the mean "
    "over heads and all rows."
)
_LOWER = " A lower line is better."
_OTHERS = " Where KV groups stream, the others keep all keys."


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """Keys that heads need, rules at equal cost, rules in whole models, shared sets and answer rows."""
    yield ChartGroup(PROBE.title, "Keys that heads need", _key_charts(context))
    yield ChartGroup(PROBE.title, "Rules at equal cost", _rule_charts(context))
    yield ChartGroup(PROBE.title, "Rules in the whole model", _whole_model_charts(context))
    yield ChartGroup(PROBE.title, "One set for several heads", _shared_charts(context))
    yield ChartGroup(PROBE.title, "Rows that produce an answer", _answer_charts(context))


def overview_cards(context: RenderContext) -> Iterator[Card]:
    """The keys that the heads need."""
    if labels := [*context.finite_values("sparse_keys")]:
        rows = longest_rows(context.run, "sparse_keys")
        yield Card(
            fit_to_card(plot_distribution(context.heads, "sparse_keys")),
            answer([keys_result(label, rows[rows["model"] == label]) for label in labels]),
            half_width=True,
            question="How many keys does a head need?",
            href=query_link(PROBE.path),
        )


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Block]:
    """Recall of one head under every rule."""
    if "sparse_rows" not in run.tables or (curves := recall_curves(run, model, layer, head)).empty:
        return
    yield Chart(plots.plot_recall_curves(curves, f"Recall by rule: layer {layer}, head {head}"), _CURVES)


def _key_charts(context: RenderContext) -> Iterator[Chart]:
    labels = [*context.finite_values("sparse_keys")]
    described = f"{statistic('sparse_keys').title}: {statistic('sparse_keys').meaning}."
    yield from matrix_panels(context, "sparse_keys", f"One cell per head; layer 0 is at the bottom. {described}")
    if labels:
        yield Chart(
            plot_by_layer(context.heads, "sparse_keys"),
            "Geometric mean over the heads of a layer, with the 10 % to 90 % quantile band.",
            half_width=True,
        )
    if len(labels) > 1:
        yield comparison_chart(context.heads, "sparse_keys", labels[0])


def _rule_charts(context: RenderContext) -> Iterator[Chart]:
    titles = {label: f"Recall by rule, mean over heads: {label}" for label in context.finite_values("sparse_recall")}
    curves = {label: context.run.derived(recall_curves, label) for label in titles}
    yield from model_panels(
        (label, Chart(plots.plot_recall_curves(curves[label], title), _CURVES, half_width=True))
        for label, title in titles.items()
    )
    bands = {label: context.run.derived(recall_by_depth, label) for label in titles}
    yield from model_panels(
        (label, Chart(plots.plot_recall_bands(bands[label], f"Recall by depth: {label}"), _BANDS, half_width=True))
        for label in titles
        if bands[label]
    )
    described = f"{statistic('sparse_recall').title}: {statistic('sparse_recall').meaning}."
    rule = shown_rule(context.run) if titles else ""
    yield from matrix_panels(context, "sparse_recall", f"One cell per head, under {rule}. {described}")


def _whole_model_charts(context: RenderContext) -> Iterator[Chart]:
    losses, others = context.run.derived(loss_changes), changes_of_other_probes(context.run)
    losses, answers = pd.concat([losses, others]) if len(others) else losses, answer_changes(context.run, "success")
    charts = (
        (losses, plots.plot_loss_changes, "Change of the loss", _WHOLE + _LOWER + _OTHERS * bool(len(others))),
        (answers, plots.plot_answers, "Answers about needles", f"{_WHOLE} A higher line is better."),
    )
    for changes, plot, name, caption in charts:
        measured = {*changes.index.get_level_values("model")}
        yield from model_panels(
            (label, Chart(plot(change_curves(changes, label), f"{name}: {label}"), caption, half_width=True))
            for label in context.models
            if label in measured
        )


def _shared_charts(context: RenderContext) -> Iterator[Chart]:
    caption = "Mean recall over the heads of a layer, if a head, a KV group or the whole layer has one set of keys."
    figures = {
        label: plots.plot_shared_sets(recall_by_layer(context.run, label), f"One set for several heads: {label}")
        for label in context.finite_values("sparse_shared_loss")
    }
    yield from model_panels((label, Chart(figure, caption, half_width=True)) for label, figure in figures.items())


def _answer_charts(context: RenderContext) -> Iterator[Chart]:
    figures = {
        label: plots.plot_answer_rows(
            context.heads[context.heads["model"] == label], f"Keys for 95 % of the mass: {label}"
        )
        for label in context.finite_values("sparse_keys_answer")
    }
    yield from model_panels(
        (label, Chart(figure, "One point per head.", half_width=True)) for label, figure in figures.items()
    )
