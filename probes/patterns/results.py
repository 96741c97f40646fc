"""Results of attention patterns: examples of rows, and the number of stored maps."""

from collections.abc import Iterator

import pandas as pd

from headscope.heads import format_head
from headscope.rendering.blocks import Overview
from headscope.rendering.text import head_mask, heads_by_model
from headscope.rendering.token_spans import mark_token
from headscope.results.result import Result
from headscope.runs.run import Run
from headscope.runs.summary import default_models
from probes.patterns import PROBE, prompt_rows
from probes.patterns.analysis import count_maps, document_text, layers_and_heads, top_far_rows

MAX_HEADS = 5
"""Heads per model in the overview."""


def results(run: Run) -> Iterator[Result]:
    """The strongest attention in a prompt; an example of the head of each model with the largest top far weight; the
    number of stored maps."""
    for label in default_models(run):
        yield from prompt_rows.results(run, label)
    for label in default_models(run):
        for _, heads in heads_by_model(run.heads[run.heads["model"] == label], "far_weight"):
            for at in layers_and_heads(heads.nlargest(1, "far_weight")):
                yield from _example(run, label, *at)
    for label, count in count_maps(run).items():
        yield Result(question="patterns.maps", value=count, model=label)


def head_results(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """The head's top far row in words."""
    if "far_weight" in run.heads and run.heads[head_mask(run.heads, layer, head)]["far_weight"].notna().any():
        yield from _example(run, model, layer, head)


def _example(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """The head's top far row, if it has one."""
    for row in top_far_rows(run, model, layer, head)[:1].to_dict("records"):
        text = document_text(run, model, row["doc"])
        yield Result(
            question="patterns.example",
            value=float(row["weight"]),
            model=model,
            layer=layer,
            head=head,
            details={
                "doc": row["doc"],
                "query": mark_token(text, row["query"], 6, 0),
                "key": mark_token(text, row["key"]),
                "distance": row["distance"],
            },
        )


def overview(run: Run) -> Overview | None:
    """The top far row of each of the leading heads of every model; without rows, the number of stored maps."""
    if "top_keys" in run.tables:
        records = [record for label in run.models for record in _overview_records(run, label)]
    else:
        records = [{"model": label, "attention maps": count} for label, count in count_maps(run).items()]
    if not records:
        return None
    return Overview(PROBE.name, pd.DataFrame(records))


def _overview_records(run: Run, label: str) -> Iterator[dict[str, object]]:
    heads = run.heads[run.heads["model"] == label]
    ordered = heads.dropna(subset=["far_weight"]) if "far_weight" in heads else heads[:0]
    leading = ordered.sort_values("far_weight", ascending=False)[:MAX_HEADS] if len(ordered) else ordered
    for layer, head in layers_and_heads(leading):
        for row in top_far_rows(run, label, layer, head)[:1].to_dict("records"):
            text = document_text(run, label, row["doc"])
            yield {
                "model": label,
                "head": format_head(layer, head),
                "weight": row["weight"],
                "attended token": mark_token(text, row["key"], 4, 2),
                "query token": mark_token(text, row["query"], 4, 0),
                "distance": row["distance"],
            }
