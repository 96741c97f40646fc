"""Report of the spans probe: charts, the prompt with the weights of a head, glossary."""

from collections.abc import Iterator
from itertools import groupby

import numpy as np
import pandas as pd

from headscope.rendering.blocks import Block, Card, Chart, ChartGroup, RenderContext, Term
from headscope.rendering.explorer_blocks import Passage, TextCell, passage_table
from headscope.rendering.statistic_charts import comparison_chart, matrix_chart, top_heads_card
from headscope.rendering.token_spans import TokenizedText, shaded_tokens
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from probes.spans import PROBE, plots
from probes.spans.analysis import group_names, head_scores, held_out, second_group, shown_pairs, span_means
from probes.spans.results import top_heads

GLOSSARY = (
    Term(
        "Attention mass between spans",
        "A span is a named part of a prompt, or a class of tokens. The mass from span A to span B is the summed weight "
        "on the keys in B, averaged over the rows in A that see such a key. Chance is the mass of uniform weights. The "
        "first token is a span of its own, because many heads rest there.",
        "mean over i in A of Σ αᵢⱼ over j in B",
        ("spans",),
    ),
    Term(
        "Lookback ratio",
        "In the rows of generated tokens: the mean weight per token of the prompt, over its sum with the mean weight "
        "per generated token. Near 1: the head looks at the prompt; near 0: at what the model wrote.",
        "c / (c + g)",
        ("span_lookback",),
    ),
)


def charts(context: RenderContext) -> Iterator[ChartGroup]:
    """The mass of all heads between the shown spans, all pairs of spans, two groups, and the generated text."""
    yield ChartGroup(PROBE.title, "Mass between the shown spans", _mass_charts(context))
    yield ChartGroup(PROBE.title, "All pairs of spans", _pair_charts(context))
    yield ChartGroup(PROBE.title, "Two groups of prompts", _group_charts(context))
    yield ChartGroup(PROBE.title, "Generated text", _generated_charts(context))
    yield ChartGroup(PROBE.title, "Steering", _steering_charts(context))


def overview_cards(context: RenderContext) -> Iterator[Card]:
    """The heads with the largest mass between the shown spans."""
    models = context.finite_values("spans_mass")
    for query, key in [shown_pairs(context.run)[label] for label in models][:1]:
        question = f"Which heads attend from {query} to {key}?"
        yield from top_heads_card(context, "spans_mass", question, top_heads(context.run, models))


def head_card(run: Run, model: str, layer: int, head: int) -> Iterator[Passage]:
    """The first prompt by span, shaded by the head's weights."""
    if "span_weights" not in run.tables or model not in shown_pairs(run):
        return
    weights = run.rows("span_weights", model=model, layer=layer, head=head)
    tokens = run.rows("span_tokens", model=model).sort_values("position")
    if weights.empty or tokens.empty:
        return
    text = TokenizedText(tokens["text"].to_numpy(dtype=object), tokens["special"].to_numpy(dtype=bool))
    by_position = dict(zip(weights["position"].astype(int), weights["weight"].astype(float), strict=True))
    cells: list[list[TextCell]] = []
    position = 0
    for span, run_of_tokens in groupby(tokens["span"].astype(str)):
        end = position + len([*run_of_tokens])
        cells.append([span, shaded_tokens(text, range(position, end), by_position)])
        position = end
    query, _ = shown_pairs(run)[model]
    yield passage_table(
        f"The first prompt, shaded by the mean weight of the rows of “{query}” in {model}.", ("span", "text"), cells
    )


def head_charts(run: Run, model: str, layer: int, head: int) -> Iterator[Block]:
    """The mass of one head between all spans, and by step of the generated text."""
    if "spans" not in run.tables or model not in shown_pairs(run):
        return
    name = f"layer {layer}, head {head}"
    if len(means := span_means(run, model, layer, head)):
        yield Chart(
            plots.plot_span_matrix(means, f"Mass between spans: {name}"),
            "One cell per pair of spans; rows are query spans. Mean over texts. An empty cell: no row sees such a key.",
            half_width=True,
        )
    if "span_steps" in run.tables and len(steps := run.rows("span_steps", model=model, layer=layer, head=head)):
        yield Chart(
            plots.plot_steps(steps, f"Mass by step of the generated text: {name}"),
            "One line per key span. Mean over texts.",
            half_width=True,
        )


def _mass_charts(context: RenderContext) -> Iterator[Chart]:
    pairs, labels = shown_pairs(context.run), [*context.finite_values("spans_mass")]
    for label in labels[:1]:
        yield from heads_charts(context.heads, label, pairs[label], context.scale_heads)
    if len(labels) > 1:
        yield comparison_chart(context.heads, "spans_mass", labels[0])


def heads_charts(
    heads: pd.DataFrame, model: str, pair: tuple[str, str], scale_heads: pd.DataFrame | None = None
) -> Iterator[Chart]:
    """Mass and excess of all heads of a model for one pair of spans, and the heads with the largest mass."""
    for name in ("spans_mass", "spans_excess"):
        caption = f"{statistic(name).title} from {pair[0]} to {pair[1]}: {statistic(name).meaning}."
        yield matrix_chart(heads, name, model, scale_heads, caption)
    yield Chart(
        plots.plot_ranking(heads, model, pair),
        "The heads with the largest mass. Error bars: 95 % confidence interval over texts, each head by itself.",
    )


def _pair_charts(context: RenderContext) -> Iterator[Chart]:
    for label in (label for label in context.models if label in shown_pairs(context.run)):
        yield Chart(
            plots.plot_span_matrix(span_means(context.run, label), f"Mass between spans, mean over heads: {label}"),
            "One cell per pair of spans; rows are query spans. Mean over heads and texts. An empty cell: no row sees "
            "such a key.",
            half_width=True,
        )


def _group_charts(context: RenderContext) -> Iterator[Chart]:
    for label in context.finite_values("spans_auroc"):
        caption = f"{statistic('spans_auroc').title}: {statistic('spans_auroc').meaning}. 0.5: none."
        yield matrix_chart(context.heads, "spans_auroc", label, context.scale_heads, caption)
        if (judged := context.run.derived(held_out, label)) is not None:
            is_second = second_group(context.run, label, head_scores(context.run, label))
            yield Chart(
                plots.plot_groups(judged, np.asarray(is_second), group_names(context.run, label), label),
                "One point per prompt: the mean standardised mass of the heads that other prompts chose. The AUROC is "
                "the mean over splits.",
                half_width=True,
            )


def _steering_charts(context: RenderContext) -> Iterator[Chart]:
    rows = context.table("span_steering")
    if rows is not None and len(rows):
        yield Chart(
            plots.plot_steering(rows),
            "One point per prompt: the mean log-probability of its continuation without and with heads steered to a "
            "span. Above the line, steering makes the continuation more probable. Prompts that means leave out "
            "have a point, too.",
            half_width=True,
        )


def _generated_charts(context: RenderContext) -> Iterator[Chart]:
    for label in [*context.finite_values("lookback_ratio")][:1]:
        yield matrix_chart(context.heads, "lookback_ratio", label, context.scale_heads)
    steps = context.table("span_steps")
    if steps is None:
        return
    for label in context.models:
        if len(rows := steps[steps["model"] == label]):
            title = f"Mass by step of the generated text, mean over heads: {label}"
            yield Chart(
                plots.plot_steps(rows, title), "One line per key span. Mean over heads and texts.", half_width=True
            )
