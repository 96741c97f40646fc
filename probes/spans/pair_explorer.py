"""The page of any pair of spans: its two spans are chosen in lists, and every head shows its mass between them."""

from collections.abc import Mapping, Sequence

import pandas as pd

from headscope.plots.head_matrices import plot_matrix
from headscope.rendering.blocks import Block, Chart, Link, PageContent, RenderContext, TextBlock
from headscope.rendering.explorer_blocks import LinkChoice, choice_or_default, query_link
from headscope.rendering.text import format_cell
from headscope.runs.aggregation import HEAD_KEYS
from probes.spans import PROBE, plots
from probes.spans.analysis import heads_of_pair, shown_pairs, span_means
from probes.spans.report import heads_charts


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
        plots.plot_span_matrix(means, f"Mass between spans, mean over heads: {model}"),
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
