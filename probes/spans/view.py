"""Charts and glossary of the spans probe, the prompt with the weights of a head, and the page of any pair of spans."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from headscope.base.heads import format_head
from headscope.plots import shapes, style
from headscope.plots.head_matrices import plot_matrix
from headscope.rendering.blocks import Block, Card, Chart, ChartGroup, Link, PageContent, RenderContext, Term, TextBlock
from headscope.rendering.explorer_blocks import (
    LinkChoice,
    Passage,
    TextCell,
    choice_or_default,
    passage_table,
    query_link,
)
from headscope.rendering.statistic_charts import comparison_chart, matrix_chart, top_heads_card
from headscope.rendering.text import format_cell
from headscope.rendering.token_spans import TokenizedText, shaded_tokens
from headscope.results.effects.groups import HeldOut
from headscope.runs.aggregation import HEAD_KEYS
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from probes.spans import PROBE
from probes.spans.analysis import (
    group_names,
    head_scores,
    heads_of_pair,
    held_out,
    second_group,
    shown_pairs,
    span_means,
)
from probes.spans.results import top_heads

RANKED_HEADS = 20
MAX_LEVEL_NAMES = 3
"""Key spans whose names fit beside each other in a chart of half the width."""


def plot_span_matrix(means: pd.DataFrame, title: str) -> go.Figure:
    """Mean mass as a query span x key span matrix; `means` has `query`, `key`, `mass` and `chance`."""
    if means.empty:
        return style.empty_figure(title, "no data to plot")
    queries, keys = (list(dict.fromkeys(means[name])) for name in ("query", "key"))
    mass, chance = (
        means.pivot(index="query", columns="key", values=name).reindex(index=queries, columns=keys)
        for name in ("mass", "chance")
    )
    figure = shapes.matrix(
        title,
        mass.rename(index=style.escape_label, columns=style.escape_label),
        "from %{y} to %{x}: mass %{z:.3f}, chance %{customdata[0]:.3f}",
        {"title_text": "key span", "type": "category"},
        {"title_text": "query span", "type": "category", "autorange": "reversed"},
        unit="mass",
        height=120 + 34 * max(len(queries), 6),
        top_margin=70,
        gaps=False,
        customdata=chance.to_numpy()[..., None],
        zmin=0,
        zmax=1,
        texttemplate="%{z:.2f}" if len(keys) <= 10 else None,
    )
    if len(keys) > MAX_LEVEL_NAMES:
        figure.update_xaxes(tickangle=-40)
        figure.update_layout(margin_b=110, height=figure.layout.height + 54)
    return figure


def plot_ranking(heads: pd.DataFrame, model: str, pair: tuple[str, str]) -> go.Figure:
    """The heads of one model with the largest mass, with intervals over texts."""
    query, key = map(style.escape_label, pair)
    title = f"Largest mass from {query} to {key}: {style.escape_label(model)}"
    rows = heads[heads["model"] == model].dropna(subset=["spans_mass"])
    rows = rows.sort_values("spans_mass", ascending=False, kind="stable")[:RANKED_HEADS]
    if rows.empty:
        return style.empty_figure(title, "no head sees both spans")
    low, high = (rows[f"spans_mass_{end}"].fillna(rows["spans_mass"]) for end in ("low", "high"))
    figure = style.new_figure(title, 120 + 18 * len(rows))
    figure.add_scatter(
        x=rows["spans_mass"],
        y=[format_head(int(layer), int(head)) for layer, head in zip(rows["layer"], rows["head"], strict=True)],
        error_x=style.error_bars(rows["spans_mass"], low, high),
        customdata=np.stack([rows["layer"], rows["head"], rows["kv_group"]], -1),
        mode="markers",
        marker_color=style.PALETTE[0],
        name=style.escape_label(model),
        showlegend=False,
        hovertemplate="%{y}: mass %{x:.3f}<extra></extra>",
    )
    x = {"title_text": "attention mass", "rangemode": "tozero"}
    return shapes.label_axes(figure, x, {"autorange": "reversed", "type": "category"})


def plot_groups(judged: HeldOut, is_second: np.ndarray, names: list[str], model: str) -> go.Figure:
    """Distributions of the held-out scores of the prompts of two groups."""
    title = f"Held-out scores, AUROC {judged.auroc:.2f}: {style.escape_label(model)}"
    figure = style.new_figure(title)
    for number, name in enumerate(names):
        figure.add_box(
            y=judged.scores[is_second == bool(number)],
            name=style.escape_label(name),
            boxpoints="all",
            jitter=0.4,
            pointpos=0,
            marker={"color": style.PALETTE[number], "size": 5},
            showlegend=False,
            hovertemplate="%{y:.2f} standard deviations<extra></extra>",
        )
    figure.update_yaxes(title_text="score (standard deviations)")
    return figure


def plot_steps(rows: pd.DataFrame, title: str) -> go.Figure:
    """Mean mass of the generated text on each key span, by step; `rows` are those of `span_steps`."""
    if rows.empty:
        return style.empty_figure(title, "no data to plot")
    means = rows.groupby(["key", "step"], observed=True)["mass"].mean()
    styles = style.category_styles([*means.index.unique("key")], style.PALETTE)
    curves = {line_style: means[key].to_frame("y") for key, line_style in styles.items()}
    steps = sorted({*means.index.get_level_values("step")})
    ticks = {"type": "log", "tickvals": steps, "ticktext": [*map(str, steps)]}
    x, y = {"title_text": "step of the generated text", **ticks}, {"title_text": "mass", "rangemode": "tozero"}
    return shapes.lines(title, curves, "step %{x}: %{y:.3f}", x, y)


def plot_steering(rows: pd.DataFrame) -> go.Figure:
    """Log-probability of the continuations with steering against without, by model; `rows` are of `span_steering`."""
    rows = rows[rows["metric"] == "logprob"]
    spans = ", ".join(style.escape_label(key) for key in dict.fromkeys(rows["key"].astype(str)))
    figure = style.new_figure(f"Continuation without and with steering to {spans}")
    ends = [
        float(min(rows["plain"].min(), rows["steered"].min())),
        float(max(rows["plain"].max(), rows["steered"].max())),
    ]
    figure.add_scatter(
        x=ends, y=ends, mode="lines", line={"color": style.GRID_COLOUR}, showlegend=False, hoverinfo="skip"
    )
    for number, label in enumerate(dict.fromkeys(rows["model"].astype(str))):
        of_model = rows[rows["model"] == label]
        figure.add_scatter(
            x=of_model["plain"],
            y=of_model["steered"],
            mode="markers",
            marker={"color": style.PALETTE[number % len(style.PALETTE)]},
            name=style.escape_label(label),
            text=[style.escape_label(doc) for doc in of_model["doc"].astype(str)],
            hovertemplate="%{text}: %{x:.2f} without, %{y:.2f} with<extra>%{fullData.name}</extra>",
        )
    return shapes.finish(figure, "without steering (nats/token)", "with steering (nats/token)")


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
            plot_span_matrix(means, f"Mass between spans: {name}"),
            "One cell per pair of spans; rows are query spans. Mean over texts. An empty cell: no row sees such a key.",
            half_width=True,
        )
    if "span_steps" in run.tables and len(steps := run.rows("span_steps", model=model, layer=layer, head=head)):
        yield Chart(
            plot_steps(steps, f"Mass by step of the generated text: {name}"),
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
        plot_ranking(heads, model, pair),
        "The heads with the largest mass. Error bars: 95 % confidence interval over texts, each head by itself.",
    )


def _pair_charts(context: RenderContext) -> Iterator[Chart]:
    for label in (label for label in context.models if label in shown_pairs(context.run)):
        yield Chart(
            plot_span_matrix(span_means(context.run, label), f"Mass between spans, mean over heads: {label}"),
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
                plot_groups(judged, np.asarray(is_second), group_names(context.run, label), label),
                "One point per prompt: the mean standardised mass of the heads that other prompts chose. The AUROC is "
                "the mean over splits.",
                half_width=True,
            )


def _steering_charts(context: RenderContext) -> Iterator[Chart]:
    rows = context.table("span_steering")
    if rows is not None and len(rows):
        yield Chart(
            plot_steering(rows),
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
            yield Chart(plot_steps(rows, title), "One line per key span. Mean over heads and texts.", half_width=True)


def pair_page(context: RenderContext, url_query: Mapping[str, str]) -> PageContent:
    """All heads of the selected model for the pair of spans in the URL, by default that of the per-head table."""
    run, model, title = context.run, context.selected_model, PROBE.explorer_tab
    if "spans" not in run.tables or model not in shown_pairs(run):
        reason = f"No mass between spans of {model} is stored. Measure it with:"
        return PageContent(title, "", {"": [TextBlock([reason], command=PROBE.command_line)]})
    means, notes = span_means(run, model), list[str]()
    default_query, default_key = shown_pairs(run)[model]
    queries = [*dict.fromkeys(means["query"])]
    query = choice_or_default("from", queries, url_query, notes, default_query if default_query in queries else None)
    keys = [*means[means["query"] == query]["key"]]
    key = choice_or_default("to", keys, url_query, notes, default_key if default_key in keys else None)
    choices: list[Block] = [_choice("From", "from", queries, query), _choice("To", "to", keys, key)]
    others = [label for label in context.models if label in shown_pairs(run) and label != model]
    values = pd.concat([heads_of_pair(run, label, query, key) for label in (model, *others)])
    heads = run.heads.loc[run.heads["model"].isin([model, *others]), HEAD_KEYS].merge(values, on=HEAD_KEYS, how="left")
    top = heads[heads["model"] == model].sort_values("spans_mass", ascending=False, kind="stable").iloc[0]
    introduction = (
        f"From {query} to {key}, layer {top['layer']}, head {top['head']} of {model} has the largest attention mass: "
        f"{format_cell(top.to_dict(), 'spans_mass')}. Click a cell to open the page of a head."
    )
    pairs = Chart(
        plot_span_matrix(means, f"Mass between spans, mean over heads: {model}"),
        "One cell per pair of spans; rows are query spans. Mean over heads and texts.",
    )
    caption = f"From {query} to {key}. One cell per head, on the colour scale of {model}."
    of_others = [Chart(plot_matrix(heads, "spans_mass", label), caption, half_width=True) for label in others]
    sections: dict[str, Sequence[Block]] = {
        "": [*choices, *([TextBlock(notes)] if notes else [])],
        "All heads": [*heads_charts(heads, model, (query, key))],
        **({"Other models": of_others} if others else {}),
        "All pairs of spans": [pairs],
    }
    return PageContent(title, introduction, sections)


def _choice(label: str, parameter: str, values: Sequence[str], chosen: str) -> LinkChoice:
    links = [Link(value, query_link(**{parameter: value})) for value in values]
    return LinkChoice(links, label, values.index(chosen))
