"""What the needle probe found, in sentences with numbers, the words that a reader needs, and what the terminal shows.

Sentences set success and retrieval heads of each model against published shares, and tell how far haystacks and models
agree.
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
        "A fact, the needle, is hidden in a long text and asked for. A head copies a token of it if, at the step at "
        "which the model writes that token, the head's largest weight lies on that very token of the needle. The score "
        "is the share of the needle that a head copies, 0 to 1, averaged over the trials that the model answers; its "
        "interval is over trials. The control asks without the needle: what a head scores there, it scores by chance.",
        tables=("retrieval",),
    ),
    Term(
        "Write through the needle",
        "What a head adds directly to the logits of the answer through its weight on the needle's tokens, less what it "
        "adds through the tokens that stand there without a needle. It needs no token to be copied, so that it also "
        "finds heads that fetch an answer to a question which shares no word with the needle.",
        "Σ_needle α v W_h · g ∘ (U_y − mean U) / scale of the final norm",
        ("needle_attribution",),
    ),
    Term(
        "Knock-out",
        "Heads are silenced together: they say nothing (zero), or what they say of the haystack on average (mean). "
        "The top ones are those with the highest score over the other half of the needles; beside them stand random "
        "sets with as many heads in each layer.",
        tables=("needle_ablation",),
    ),
)


def findings(run: Run) -> Iterator[Finding]:
    """Sentences on each model, on pairs of haystacks and of models, then claims; nothing without trials."""
    if "needles" not in run.tables:
        return
    for row in run.derived(analysis.retrieval_summary).to_dict("records"):
        for text in _model_sentences(run, row):
            yield Finding(PROBE.title, text, row["model"])
    for label, groups in (
        analysis.scores_by_group(run.heads).groupby("model", observed=True) if _has_retrieval(run) else ()
    ):
        holding = (groups["max"] > RETRIEVAL_THRESHOLD).sum()
        text = (
            f"{holding} of {len(groups)} KV groups of {label} "
            f"hold a head that copies more than {RETRIEVAL_THRESHOLD:g}."
        )
        yield Finding(PROBE.title, text, str(label))
    for row in analysis.seed_agreement(run.derived(analysis.scores_by_seed)).to_dict("records"):
        yield Finding(
            PROBE.title,
            f"Haystacks {row['first']} and {row['second']} rank the heads of {row['model']} with a correlation of "
            f"{row['spearman']:.2f} and share {row['overlap']:.0%} of their top 10.",
            row["model"],
        )
    for name in ("needle_write", "needle_write_indirect"):
        for label, block in heads_by_model(run.heads, name):
            order = block.sort_values(name, ascending=False, kind="stable").head(5)
            best = ", ".join(
                f"layer {row['layer']} head {row['head']} ({row[name]:+.2f})" for _, row in order.iterrows()
            )
            yield Finding(PROBE.title, f"In {label}, {statistic(name).label} is largest in {best} logits.", label)
    for row in analysis.detector_agreement(run.heads).to_dict("records"):
        yield Finding(PROBE.title, _describe_detector_agreement(row), row["model"])
    yield from _ablation_findings(run)
    for row in analysis.model_agreement(run.heads).to_dict("records") if _has_retrieval(run) else ():
        yield Finding(
            PROBE.title,
            f"{row['second']} ranks its heads as {row['first']} does with a correlation of {row['spearman']:.2f}, and "
            f"{row['overlap']:.0%} of the top 10 are the same.",
        )
    yield from claims(run)


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """What the head copies in `model` with a needle and without, its rank by that under each model, and what it writes
    through the needle."""
    if not _has_retrieval(run):
        return
    rows = run.heads[head_mask(run.heads, layer, head)]
    if rows["retrieval"].any():
        yield from _copy_sentences(run, rows, model, layer, head)
    else:
        yield "It copies no token of a needle in any successful trial."
    for row in (
        rows[rows["model"] == model].dropna(subset=["needle_write"]).to_dict("records") if _has_attribution(run) else ()
    ):
        sure = _format_interval(row, "needle_write", "+.2f")
        yield (
            f"Through the needle it adds {row['needle_write']:+.2f} logits{sure} to an answered token, through all "
            f"else {row['needle_rest']:+.2f}."
        )


def _copy_sentences(run: Run, rows: pd.DataFrame, model: str, layer: int, head: int) -> Iterator[str]:
    for row in rows[(rows["model"] == model) & rows["retrieval"].notna()].to_dict("records"):
        control = row.get("retrieval_control", math.nan)
        without = "" if math.isnan(control) else f", and scores {control:.3f} where there is none"
        sure = _format_interval(row, "retrieval", ".2f")
        yield f"When there is a needle it copies {row['retrieval']:.2f} of it{sure}{without}."
    if told := describe_ranks(run.heads, "retrieval", layer, head):
        yield f"Rank by {statistic('retrieval').label}: {told}."


def overview(run: Run) -> Overview | None:
    """One row a model and mode; a warning for each that found no needle: no score is not a score of 0."""
    if "needles" not in run.tables:
        return None
    data = run.derived(analysis.retrieval_summary)
    records = data.to_dict("records")
    warnings = [
        f"{row['model']} found the needle in none of {row['trials']} trials, so its heads have no retrieval score; its "
        "answers are in the table needles"
        for row in records
        if not row["successes"]
    ]
    return Overview("needles", PROBE.title, data, [_overview_record(row) for row in records], warnings)


def _model_sentences(run: Run, row: dict[Any, Any]) -> Iterator[str]:
    """How often the model answers, who copies most, and how many copy at all."""
    model, how = row["model"], "" if row["mode"] == "strict" else f" (mode {row['mode']})"
    if not row["successes"]:
        yield f"{model} answered none of {row['trials']} trials{how}, so none of its heads has a retrieval score."
        return
    best = ", ".join(
        f"layer {layer} head {head} ({score:.2f})" for layer, head, score in analysis.top_heads(run, model, row["mode"])
    )
    yield (
        f"{model} answers {row['successes']} of {row['trials']} trials{how}, {row['share']:.0%} (95 % interval "
        f"{row['low']:.0%} to {row['high']:.0%}). Its top retrieval heads are {best}; "
        f"without the needle no head scores above {row['control']:.3f}."
    )
    literal = row["mode"] != "indirect"  # as those of the published models are
    above, zero = (f" ({_compare_with_published(row[what], what)})" if literal else "" for what in ("above", "zero"))
    yield (
        f"In {model}, {row['above']:.1%} of heads score above {RETRIEVAL_THRESHOLD}{how}{above} and "
        f"{row['zero']:.1%} never "
        f"copy{zero}."
    )


def _describe_detector_agreement(row: dict[Any, Any]) -> str:
    """How far two detectors agree on the heads of a model."""
    first, second = (statistic(row[name]).label for name in ("first", "second"))
    sure = "" if math.isnan(row["low"]) else f" (95 % interval {row['low']:.2f} to {row['high']:.2f})"
    return (
        f"In {row['model']}, {first} and {second} rank heads with a correlation of {row['spearman']:.2f}{sure}, and "
        f"{row['overlap']:.0%} of the top {analysis.TOP_COUNT} are the same."
    )


def _ablation_findings(run: Run) -> Iterator[Finding]:
    """What is left of success without the top heads, and whether that is less than without random ones."""
    if "needle_ablation" not in run.tables:
        return
    for (label, mode, how), lines in run.derived(analysis.ablation_curve).groupby(
        ["model", "mode", "ablation"], observed=True
    ):
        top, random = (lines[lines["top"] == which].iloc[-1] for which in (True, False))
        size, part = int(top["size"]), analysis.first_separated_size(lines)
        which = "indirect needles" if mode == "indirect" else "needles"
        verdict = (
            f"the intervals part from {part} head{'s' if part > 1 else ''} on"
            if part is not None
            else "the intervals do not part"
        )
        yield Finding(
            PROBE.title,
            f"With its top {size} heads silenced ({how}) {label} finds {analysis.format_share(top)} of the "
            f"{which} that did "
            f"not rank them, with as many random heads of the same layers {analysis.format_share(random)}, and "
            "unchanged "
            f"{lines['share'].iloc[0]:.0%}; {verdict}.",
            str(label),
        )


def _overview_record(row: dict[Any, Any]) -> dict[str, object]:
    """A row of the terminal's table: success with its interval, shares of heads and the top head."""
    heads = {
        "heads > 0.1": f"{row['above']:.1%}",
        "heads at 0": f"{row['zero']:.1%}",
        "top head": f"L{row['layer']:.0f} H{row['head']:.0f}: {row['top']:.2f}",
    }
    return {
        "model": row["model"],
        "mode": row["mode"],
        "found": f"{row['successes']}/{row['trials']} [{row['low']:.0%}, {row['high']:.0%}]",
        **(heads if row["successes"] else dict.fromkeys(heads, "no score")),
        "without needle": row["control"],
    }


def _compare_with_published(share: float, measure: str) -> str:
    low, high = PUBLISHED_SHARES[measure]
    where = "within" if low <= round(share, 3) <= high else "outside"  # as it is shown
    return f"{where} the {low:.0%} to {high:.0%} of published models"


def _format_interval(row: dict[Any, Any], column: str, number_format: str) -> str:
    low, high = row[f"{column}_low"], row[f"{column}_high"]
    return "" if math.isnan(low) else f" (95 % interval {low:{number_format}} to {high:{number_format}})"


def _has_attribution(run: Run) -> bool:
    """Whether it is known what any head writes through a literal needle."""
    return "needle_write" in run.heads


def _has_retrieval(run: Run) -> bool:
    """Whether the strict score of any head is known."""
    return "retrieval" in run.heads
