"""What the detectors found, in sentences with numbers, the words that a reader needs, and what the terminal shows."""

from collections.abc import Iterator

import pandas as pd

from headscope.report.blocks import Finding, Overview, Term
from headscope.report.text import default_models, format_head_count, head_mask, head_name, heads_by_model
from headscope.runs.column_metadata import format_number
from headscope.runs.run import Run
from probes.detectors import PROBE
from probes.detectors.analysis import KIND_COLUMNS, ROLE_THRESHOLD, TARGET_DESCRIPTIONS
from probes.detectors.plots import mean_over_sequences

GLOSSARY = (
    Term(
        "Previous-token and induction head",
        "On random tokens that come twice, nothing but positions and the earlier copy can guide a head. A "
        "previous-token head looks at the token before; a duplicate-token head at the earlier copy of the token; an "
        "induction head at what followed that copy, which is what comes next. A score is the mean weight on that "
        "token, 0 to 1; chance is what weights that are spread evenly would give. A head is named after what has more "
        "than half of its weight.",
        "induction: mean αᵢ,ᵢ₋ₘ₊₁ over the second m tokens",
        ("detectors",),
    ),
)


def findings(run: Run) -> Iterator[Finding]:
    """Of each model, how many heads are of each kind, and which is the strongest."""
    for label in default_models(run) if "detectors" in run.tables else ():
        for kind, name in KIND_COLUMNS.items():
            for _, block in heads_by_model(run.heads[run.heads["model"] == label], name):
                best = block.sort_values(name).iloc[-1]
                yield Finding(
                    PROBE.title,
                    f"In {label}, {format_head_count(block[name] > ROLE_THRESHOLD)} put more than half of their weight on {TARGET_DESCRIPTIONS[kind]}; "
                    f"{head_name(best)} puts most there, {_format_score(best, name)}.",
                    label,
                )


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """What has most of the head's weight on random tokens that come twice, against chance."""
    if "detectors" not in run.tables:
        return
    rows = run.table("detectors")
    rows = rows[head_mask(rows, layer, head) & (rows["model"] == model)]
    rows = rows[rows["context_length"] == rows["context_length"].max()]
    if rows.empty:
        return
    means = mean_over_sequences(rows)
    best, length = means.sort_values("score").iloc[-1], int(rows["context_length"].iloc[0])
    sure = "" if pd.isna(best["low"]) else f", 95 % interval {format_number(best['low'])} to {format_number(best['high'])}"
    yield (
        f"On random tokens that come twice, {length:,} in all, {best['score']:.0%} of its weight in {model} lies on "
        f"{TARGET_DESCRIPTIONS[best['kind']]} ({format_number(best['chance'])} by chance{sure})."
    )


def overview(run: Run) -> Overview | None:
    """A row for each model: how many heads are of each kind, and the top induction head."""
    if "detectors" not in run.tables:
        return None
    records = [_overview_record(run, label) for label in run.models if (run.table("detectors")["model"] == label).any()]
    return Overview("detectors", PROBE.title, pd.DataFrame(records), records)


def _overview_record(run: Run, model: str) -> dict[str, object]:
    mine = run.heads[run.heads["model"] == model]
    counts = {f"{kind} > {ROLE_THRESHOLD:g}": int((mine[name] > ROLE_THRESHOLD).sum()) for kind, name in KIND_COLUMNS.items() if name in mine}
    name, top = KIND_COLUMNS["induction"], "–"
    order = mine.dropna(subset=[name]).sort_values(name) if name in mine else mine[:0]
    if len(order):
        best = order.iloc[-1]
        top = f"L{best['layer']} H{best['head']}: {best[name]:.2f}"
    return {"model": model, **counts, "top induction head": top}


def _format_score(row: pd.Series, column: str) -> str:
    low, high = row[f"{column}_low"], row[f"{column}_high"]
    sure = "" if pd.isna(low) else f" (95 % interval over sequences {format_number(low)} to {format_number(high)})"
    return f"{format_number(row[column])}{sure}"
