"""Charts and glossary of the sparsity probe."""

from collections.abc import Iterator, Mapping

import pandas as pd
import plotly.graph_objects as go

from headscope.base.heads import format_head
from headscope.plots import axes, shapes, style
from headscope.plots.head_matrices import plot_distribution
from headscope.plots.layers import plot_by_layer
from headscope.plots.top_heads import fit_to_card
from headscope.rendering.blocks import Block, Card, Chart, ChartGroup, RenderContext, Term
from headscope.rendering.explorer_blocks import query_link
from headscope.rendering.statistic_charts import comparison_chart, matrix_panels, model_panels
from headscope.results.words import answer
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from probes.sparsity import PROBE
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


def plot_recall_curves(curves: pd.DataFrame, title: str) -> go.Figure:
    """Recall by mean number of kept keys, a line per family of rules; `curves` has rule, family, recall and kept."""
    return _plot_curves(curves, "recall", title, "recall", "recall %{y:.3f}")


def plot_loss_changes(curves: pd.DataFrame, title: str) -> go.Figure:
    """Change of the loss by mean number of kept keys, a line per family; `curves` has rule, family, change and kept."""
    return _plot_curves(curves, "change", title, "change of the loss (nats/token)", "%{y:+.4f} nats/token")


def plot_answers(curves: pd.DataFrame, title: str) -> go.Figure:
    """Share of right answers by kept keys; `curves` has rule, family, value, kept, and dense, which is dotted."""
    figure = _plot_curves(curves, "value", title, "right answers", "%{y:.0%} right")
    figure.add_hline(y=curves["dense"].max(), line=style.REFERENCE_LINE, annotation_text="dense attention")
    return figure.update_yaxes(tickformat=".0%", range=[-0.03, 1.03])


def _plot_curves(curves: pd.DataFrame, column: str, title: str, label: str, hover: str) -> go.Figure:
    """A column by mean number of kept keys, a line per family of rules."""
    rows = curves[curves["kept"] > 0].set_index("kept").rename(columns={column: "y", "rule": "customdata"})
    if rows.empty:
        return style.empty_figure(title, "no data to plot")
    styles = style.category_styles([*rows["family"].unique()])
    families = {styles[name]: rows.loc[rows["family"] == name, ["y", "customdata"]] for name in styles}
    hover = f"%{{customdata}}: %{{x:.0f}} keys, {hover}<extra></extra>"
    return shapes.lines(title, families, hover, _kept_axis(rows.index), label, height=420)


def plot_recall_bands(curves: Mapping[str, pd.DataFrame], title: str) -> go.Figure:
    """Recall by mean number of kept keys (index): a line of medians and a band (mean, low, high) by group of layers."""
    styled = dict(zip(style.line_styles([*curves]).values(), curves.values(), strict=True))
    kept = _kept_axis(pd.concat([*curves.values()]).index)
    return shapes.bands(title, styled, "%{x:.0f} keys: median recall %{y:.3f}", kept, "recall", height=420)


def plot_shared_sets(recall: pd.DataFrame, title: str) -> go.Figure:
    """Mean recall by layer, a line per rule (columns)."""
    if recall.empty:
        return style.empty_figure(title, "no sizes of top and layer-top to compare")
    rules = {
        line_style: recall[[rule]].set_axis(["y"], axis=1)
        for rule, line_style in style.category_styles([*recall]).items()
    }
    return shapes.lines(title, rules, "layer %{x}: recall %{y:.3f}", "layer", "recall")


def plot_answer_rows(heads: pd.DataFrame, title: str) -> go.Figure:
    """Keys for 95 % of the mass in answer rows (y) and rows of text (x), a point per head of one model."""
    rows = heads.dropna(subset=["sparse_keys", "sparse_keys_answer"])
    if rows.empty:
        return style.empty_figure(title, "no rows that produce an answer")
    figure = style.new_figure(title)
    figure.add_scatter(
        x=rows["sparse_keys"],
        y=rows["sparse_keys_answer"],
        mode="markers",
        customdata=rows[["layer", "head", "kv_group"]],
        text=[format_head(int(layer), int(head)) for layer, head in zip(rows["layer"], rows["head"], strict=True)],
        marker={"color": style.CATEGORY_PALETTE[0], "size": 6},
        showlegend=False,
        hovertemplate="%{text}: %{x:.0f} keys in text, %{y:.0f} in answers<extra></extra>",
    )
    x = {"title_text": "keys, rows of text", **axes.log_axis(rows["sparse_keys"])}
    y = {"title_text": "keys, rows of answers", **axes.log_axis(rows["sparse_keys_answer"])}
    return style.declare_head_points(shapes.label_axes(figure, x, y))


def _kept_axis(kept: pd.Index) -> dict[str, object]:
    return {"title_text": "kept keys per row", **axes.log_axis(kept)}


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
    yield Chart(plot_recall_curves(curves, f"Recall by rule: layer {layer}, head {head}"), _CURVES)


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
        (label, Chart(plot_recall_curves(curves[label], title), _CURVES, half_width=True))
        for label, title in titles.items()
    )
    bands = {label: context.run.derived(recall_by_depth, label) for label in titles}
    yield from model_panels(
        (label, Chart(plot_recall_bands(bands[label], f"Recall by depth: {label}"), _BANDS, half_width=True))
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
        (losses, plot_loss_changes, "Change of the loss", _WHOLE + _LOWER + _OTHERS * bool(len(others))),
        (answers, plot_answers, "Answers about needles", f"{_WHOLE} A higher line is better."),
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
        label: plot_shared_sets(recall_by_layer(context.run, label), f"One set for several heads: {label}")
        for label in context.finite_values("sparse_shared_loss")
    }
    yield from model_panels((label, Chart(figure, caption, half_width=True)) for label, figure in figures.items())


def _answer_charts(context: RenderContext) -> Iterator[Chart]:
    figures = {
        label: plot_answer_rows(context.heads[context.heads["model"] == label], f"Keys for 95 % of the mass: {label}")
        for label in context.finite_values("sparse_keys_answer")
    }
    yield from model_panels(
        (label, Chart(figure, "One point per head.", half_width=True)) for label, figure in figures.items()
    )
