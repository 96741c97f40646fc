"""What reading found, in sentences with numbers, the word that a reader needs, and what the terminal shows."""

from collections.abc import Iterator

import pandas as pd

from headscope.report.blocks import Finding, Overview, Term
from headscope.report.text import default_models, head_mask, head_name, heads_by_model
from headscope.runs.column_metadata import number
from headscope.runs.run import Run
from probes.patterns import PROBE
from probes.patterns.analysis import document_text, top_far_rows
from probes.patterns.words import mark_token

MAX_HEADS = 5
"""Heads of a model that the terminal shows."""

GLOSSARY = (
    Term(
        "Telling row",
        "A row is one token with the weights that a head gives to the tokens before it. Most weight goes to the first "
        "token and to near ones, which tells little; a row is telling where one token further back than 32 has much.",
        tables=("far_reads",),
    ),
)


def findings(run: Run) -> Iterator[Finding]:
    """The heads of each model that pick out far tokens most, with an example."""
    for label in default_models(run) if "far_weight" in run.heads else ():
        for _, block in heads_by_model(run.heads[run.heads["model"] == label], "far_weight"):
            order = block.sort_values("far_weight", ascending=False)
            best, middle = order.iloc[0], number(block["far_weight"].median())
            yield Finding(
                PROBE.title,
                f"In {label}, {head_name(best)} picks out tokens far back most: on average one of them gets "
                f"{number(best['far_weight'])} of its weight; the median head gives {middle}. "
                f"{_describe_example(run, label, int(best['layer']), int(best['head']))}",
                label,
            )


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """The head's most telling row in words."""
    if "far_weight" in run.heads and run.heads[head_mask(run.heads, layer, head)]["far_weight"].notna().any():
        told = _describe_example(run, model, layer, head)
        if told:
            yield told


def overview(run: Run) -> Overview | None:
    """The most telling rows of the heads of each model that pick out far tokens most."""
    if "reads" not in run.tables:
        return None
    records = [record for label in run.models for record in _overview_records(run, label)]
    warnings = [] if records else ["no token lies further back than 32: what heads read is in the table reads"]
    return Overview(PROBE.name, PROBE.title, pd.DataFrame(records), records, warnings)


def _overview_records(run: Run, label: str) -> Iterator[dict[str, object]]:
    heads = run.heads[run.heads["model"] == label]
    order = heads.dropna(subset=["far_weight"]) if "far_weight" in heads else heads[:0]
    for _, best in order.sort_values("far_weight", ascending=False)[:MAX_HEADS].iterrows() if len(order) else ():
        for doc, query, key, weight, distance in _top_far_row(run, label, int(best["layer"]), int(best["head"])):
            words = document_text(run, label, doc)
            yield {
                "model": label,
                "head": f"L{best['layer']} H{best['head']}",
                "weight": number(weight),
                "it looks at": mark_token(words, key, 4, 2),
                "from": mark_token(words, query, 4, 0),
                "tokens back": f"{distance:,}",
            }


def _describe_example(run: Run, model: str, layer: int, head: int) -> str:
    for doc, query, key, weight, distance in _top_far_row(run, model, layer, head):
        words = document_text(run, model, doc)
        return (
            f"In {doc} it looks from “{mark_token(words, query, 6, 0)}” at “{mark_token(words, key)}”, {distance:,} tokens "
            f"back, with {number(weight)} of its weight."
        )
    return ""


def _top_far_row(run: Run, model: str, layer: int, head: int) -> Iterator[tuple[str, int, int, float, int]]:
    """The head's most telling row, if it has one."""
    for row in top_far_rows(run, model, layer, head)[:1].itertuples(index=False, name=None):
        doc, query, key, weight, distance = row
        yield str(doc), int(query), int(key), float(weight), int(distance)
