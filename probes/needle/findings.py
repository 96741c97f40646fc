"""Findings, glossary and terminal overview of the needle probe.

Findings compare success and retrieval heads of each model with published shares, and report how well haystacks, models
and detectors agree.
"""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from headscope.report.blocks import Finding, Overview, Term
from headscope.report.text import describe_ranks, head_mask, heads_by_model
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from probes.needle import PROBE, analysis
from probes.needle.analysis import PUBLISHED_SHARES
from probes.needle.claims import claims
from probes.needle.heads import RETRIEVAL_THRESHOLD

GLOSSARY = (
    Term(
        "Retrieval score",
        "A fact, the needle, is hidden in a long text and queried at its end. A head copies a token of the "
        "needle if its "
        "largest attention weight is on that token at the step at which the model outputs it. The score is the share "
        "of the needle that a head copies, 0 to 1, averaged over the trials that the model answers, with a confidence "
        "interval over trials. The control omits the needle: its scores arise by chance.",
        tables=("retrieval",),
    ),
    Term(
        "Attribution through the needle",
        "Direct logit attribution of a head to the answer through its attention to the needle's tokens, minus the same "
        "for the tokens at that place without a needle. It does not require copying, so it also detects heads that "
        "retrieve the answer to a question that shares no word with the needle.",
        "Σ_needle α v W_h · g ∘ (U_y − mean U) / scale of the final norm",
        ("needle_attribution",),
    ),
    Term(
        "Ablation of retrieval heads",
        "A set of heads is ablated: their outputs are set to zero (zero) or to their mean over the haystack (mean). "
        "The top heads have the highest scores over the other half of the needles. They are compared with random "
        "sets that have as many heads in each layer.",
        tables=("needle_ablation",),
    ),
)


def findings(run: Run) -> Iterator[Finding]:
    """Findings of each model, of pairs of haystacks and of models, then claims; nothing without trials."""
    if "needles" not in run.tables:
        return
    for row in run.derived(analysis.retrieval_summary).to_dict("records"):
        for text in _model_sentences(run, row):
            yield Finding(PROBE.title, text, row["model"])
    for label, groups in (
        analysis.scores_by_group(run.heads).groupby("model", observed=True) if _has_retrieval(run) else ()
    ):
        count = (groups["max"] > RETRIEVAL_THRESHOLD).sum()
        text = (
            f"{count} of {len(groups)} KV groups of {label} contain a head with a retrieval score above "
            f"{RETRIEVAL_THRESHOLD:g}."
        )
        yield Finding(PROBE.title, text, str(label))
    for row in analysis.seed_agreement(run.derived(analysis.scores_by_seed)).to_dict("records"):
        yield Finding(
            PROBE.title,
            f"The retrieval scores of {row['model']} in haystacks {row['first']} and {row['second']} have a rank "
            f"correlation of {row['spearman']:.2f} and share {row['overlap']:.0%} of the top 10 heads.",
            row["model"],
        )
    for name in ("needle_write", "needle_write_indirect"):
        for label, block in heads_by_model(run.heads, name):
            order = block.sort_values(name, ascending=False, kind="stable").head(5)
            best = ", ".join(
                f"layer {row['layer']} head {row['head']} ({row[name]:+.2f})" for _, row in order.iterrows()
            )
            yield Finding(
                PROBE.title, f"In {label}, {statistic(name).label} is largest in {best}; values in logits.", label
            )
    for row in analysis.detector_agreement(run.heads).to_dict("records"):
        yield Finding(PROBE.title, _describe_detector_agreement(row), row["model"])
    yield from _ablation_findings(run)
    for row in analysis.model_agreement(run.heads).to_dict("records") if _has_retrieval(run) else ():
        yield Finding(
            PROBE.title,
            f"The retrieval scores of {row['first']} and {row['second']} have a rank correlation of "
            f"{row['spearman']:.2f} and share {row['overlap']:.0%} of the top 10 heads.",
        )
    yield from claims(run)


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """Retrieval score of a head in `model` with and without the needle, its rank under each model, and its direct logit
    attribution through the needle."""
    if not _has_retrieval(run):
        return
    rows = run.heads[head_mask(run.heads, layer, head)]
    if rows["retrieval"].any():
        yield from _copy_sentences(run, rows, model, layer, head)
    else:
        yield "It copies no needle token in any successful trial."
    for row in (
        rows[rows["model"] == model].dropna(subset=["needle_write"]).to_dict("records") if _has_attribution(run) else ()
    ):
        interval = _format_interval(row, "needle_write", "+.2f")
        yield (
            f"Its attribution to an answer token is {row['needle_write']:+.2f} logits{interval} through the needle and "
            f"{row['needle_rest']:+.2f} through all other tokens."
        )


def _copy_sentences(run: Run, rows: pd.DataFrame, model: str, layer: int, head: int) -> Iterator[str]:
    for row in rows[(rows["model"] == model) & rows["retrieval"].notna()].to_dict("records"):
        control = row.get("retrieval_control", math.nan)
        without = "" if math.isnan(control) else f"; in control trials without the needle its score is {control:.3f}"
        interval = _format_interval(row, "retrieval", ".0%")
        yield f"It copies {row['retrieval']:.0%} of the hidden fact{interval}{without}."
    if ranks := describe_ranks(run.heads, "retrieval", layer, head):
        yield f"Rank by {statistic('retrieval').label}: {ranks}."


def overview(run: Run) -> Overview | None:
    """One row per model and mode, with a warning for each model that answered no trial and so has no scores."""
    if "needles" not in run.tables:
        return None
    data = run.derived(analysis.retrieval_summary)
    records = data.to_dict("records")
    warnings = [
        f"{row['model']} answered none of {row['trials']} trials, so its heads have no retrieval score. Its "
        "answers are "
        "in the table 'needles'"
        for row in records
        if not row["successes"]
    ]
    return Overview("needles", PROBE.title, data, [_overview_record(row) for row in records], warnings)


def _model_sentences(run: Run, row: dict[Any, Any]) -> Iterator[str]:
    """Sentences on the success of a model, its top retrieval heads, and the share of heads that copy."""
    model, mode_suffix = row["model"], "" if row["mode"] == "strict" else f" (mode {row['mode']})"
    if not row["successes"]:
        yield f"{model} answers none of {row['trials']} trials{mode_suffix}, so its heads have no retrieval score."
        return
    best = ", ".join(
        f"layer {layer} head {head} ({score:.2f})" for layer, head, score in analysis.top_heads(run, model, row["mode"])
    )
    yield (
        f"{model} answers {row['successes']} of {row['trials']} trials{mode_suffix}, {row['share']:.0%} (95 % "
        "confidence "
        f"interval {row['low']:.0%} to {row['high']:.0%}). Its top retrieval heads are {best}. {_control_sentence(row)}"
    )
    is_literal = row["mode"] != "indirect"  # like the needles of the published models
    above, zero = (
        f" ({_compare_with_published(row[measure], measure)})" if is_literal else "" for measure in ("above", "zero")
    )
    yield (
        f"In {model}, {row['above']:.1%} of heads score above {RETRIEVAL_THRESHOLD}{mode_suffix}{above} and "
        f"{row['zero']:.1%} copy nothing{zero}."
    )


def _control_sentence(row: dict[Any, Any]) -> str:
    if row["control"] == 0:
        return "All control scores, without the needle, are 0."
    return f"The largest control score, without the needle, is {row['control']:.3f}."


def _describe_detector_agreement(row: dict[Any, Any]) -> str:
    """Text with the agreement of two detectors of retrieval heads."""
    first, second = (statistic(row[name]).label for name in ("first", "second"))
    interval = "" if math.isnan(row["low"]) else f" (95 % confidence interval {row['low']:.2f} to {row['high']:.2f})"
    return (
        f"In {row['model']}, {first} and {second} have a rank correlation of {row['spearman']:.2f}{interval} over "
        "heads "
        f"and share {row['overlap']:.0%} of the top {analysis.TOP_COUNT} heads."
    )


def _ablation_findings(run: Run) -> Iterator[Finding]:
    """Success with the top heads ablated, compared with random heads."""
    if "needle_ablation" not in run.tables:
        return
    for (label, mode, ablation), lines in run.derived(analysis.ablation_curve).groupby(
        ["model", "mode", "ablation"], observed=True
    ):
        top, random = (lines[lines["top"] == is_top].iloc[-1] for is_top in (True, False))
        size, separated_at = int(top["size"]), analysis.first_separated_size(lines)
        noun = "indirect needles" if mode == "indirect" else "needles"
        verdict = (
            f"The confidence intervals separate from {separated_at} head{'s' if separated_at > 1 else ''} on"
            if separated_at is not None
            else "The confidence intervals overlap at every size"
        )
        yield Finding(
            PROBE.title,
            f"With its top {size} heads ablated ({ablation}), {label} retrieves {analysis.format_share(top)} of "
            f"the {noun} "
            f"that did not rank them; with as many random heads of the same layers, {analysis.format_share(random)}; "
            f"unchanged, {lines['share'].iloc[0]:.0%}. {verdict}.",
            str(label),
        )


def _overview_record(row: dict[Any, Any]) -> dict[str, object]:
    """A row of the terminal's table: success with its confidence interval, shares of heads and the top head."""
    heads = {
        "heads > 0.1": f"{row['above']:.1%}",
        "heads at 0": f"{row['zero']:.1%}",
        "top head": f"L{row['layer']:.0f} H{row['head']:.0f}: {row['top']:.2f}",
    }
    return {
        "model": row["model"],
        "mode": row["mode"],
        "answered": f"{row['successes']}/{row['trials']} [{row['low']:.0%}, {row['high']:.0%}]",
        **(heads if row["successes"] else dict.fromkeys(heads, "no score")),
        "without needle": row["control"],
    }


def _compare_with_published(share: float, measure: str) -> str:
    low, high = PUBLISHED_SHARES[measure]
    position = "within" if low <= round(share, 3) <= high else "outside"  # of the rounded share in the text
    return f"{position} the range of {low:.0%} to {high:.0%} in published models"


def _format_interval(row: dict[Any, Any], column: str, number_format: str) -> str:
    low, high = row[f"{column}_low"], row[f"{column}_high"]
    return "" if math.isnan(low) else f" (95 % confidence interval {low:{number_format}} to {high:{number_format}})"


def _has_attribution(run: Run) -> bool:
    """Whether the run has attribution through literal needles."""
    return "needle_write" in run.heads


def _has_retrieval(run: Run) -> bool:
    """Whether the run has strict retrieval scores."""
    return "retrieval" in run.heads
