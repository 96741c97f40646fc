"""Findings, glossary and terminal overview of the needle probe.

Findings report the success and the retrieval heads of each model, the agreement of haystacks, models and detectors, the
ablation of heads, and the claim of Wu et al. 2024 about ablated retrieval heads. The thresholds of the claim are ours.
"""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from headscope.report.blocks import Finding, FindingData, Overview, PaperClaim, Term
from headscope.report.text import describe_ranks, format_percent, head_mask, heads_by_model
from headscope.runs.aggregation import verdict_above
from headscope.runs.column_metadata import exceeds, statistic
from headscope.runs.run import Run
from probes.needle import PROBE, analysis
from probes.needle.analysis import PUBLISHED_SHARES
from probes.needle.heads import RETRIEVAL_THRESHOLD

MAX_SUPPORTED_SIZE = 16
"""Largest number of ablated heads at which the claim of Wu et al. is judged [ours]."""

MODE_SUFFIXES = {"strict": "", "indirect": " (paraphrased questions)", "wu": " (scored as by Wu et al.)"}
"""Text that follows the trials of each mode in a sentence."""

GLOSSARY = (
    Term(
        "Retrieval score",
        "A fact, the needle, is hidden in a long text, the haystack. A question at the end of the prompt asks for it. "
        "A head copies a token of the needle if its largest attention weight is on that token at the step at which the "
        "model outputs it. The score is the share of the needle that a head copies, 0 to 1, averaged over successful "
        "trials, with a 95 % confidence interval over trials. Control prompts omit the needle: their scores arise by "
        "chance.",
        tables=("retrieval",),
    ),
    Term(
        "Attribution through the needle",
        "Direct logit attribution of a head to the answer through its attention to the needle's tokens, minus the same "
        "through the tokens at that position in the control prompt. It does not require copying, so it also detects "
        "heads that retrieve the answer to a question that shares no word with the needle.",
        "Σ_needle α v W_h · g ∘ (U_y − mean U) / scale of the final norm",
        ("needle_attribution",),
    ),
    Term(
        "Ablation of retrieval heads",
        "Zero ablation sets the outputs of a set of heads to zero; mean ablation sets them to their mean over the "
        "haystack. The top heads have the highest scores over the other half of the needles. They are compared with "
        "random sets that have as many heads in each layer.",
        tables=("needle_ablation",),
    ),
)


def findings(run: Run) -> Iterator[Finding]:
    """Findings of each model, of pairs of haystacks and of pairs of models, then the claim of Wu et al.

    A run without trials has no findings.
    """
    if "needles" not in run.tables:
        return
    for row in run.derived(analysis.retrieval_summary).to_dict("records"):
        for text, data in _model_sentences(run, row):
            yield Finding(PROBE.title, text, row["model"], data=data)
    for label, groups in (
        analysis.scores_by_group(run.heads).groupby("model", observed=True) if _has_retrieval(run) else ()
    ):
        count = int(exceeds(groups["max"], RETRIEVAL_THRESHOLD).sum())
        verb = "contains" if count == 1 else "contain"
        yield Finding(
            PROBE.title,
            f"In {label}, {count} of {len(groups)} KV groups {verb} a head with a retrieval score above "
            f"{RETRIEVAL_THRESHOLD:g}.",
            str(label),
            data=FindingData(count, n=len(groups)),
        )
    for row in analysis.seed_agreement(run.derived(analysis.scores_by_seed)).to_dict("records"):
        yield Finding(
            PROBE.title,
            f"The retrieval scores of {row['model']} in haystacks {row['first']} and {row['second']} have a rank "
            f"correlation of {row['spearman']:.2f} and {format_percent(row['overlap'])} of their top "
            f"{analysis.TOP_COUNT} heads in common.",
            row["model"],
            data=FindingData(row["spearman"]),
        )
    for name in ("needle_write", "needle_write_indirect"):
        for label, block in heads_by_model(run.heads, name):
            top_rows = block.sort_values(name, ascending=False, kind="stable").head(5)
            examples = ", ".join(
                f"layer {row['layer']}, head {row['head']} ({row[name]:+.2f})" for _, row in top_rows.iterrows()
            )
            text = f"In {label}, {statistic(name).label} is largest for {examples}, in logits."
            top = top_rows.iloc[0]
            low, high = (float(top.get(f"{name}_{end}", math.nan)) for end in ("low", "high"))
            data = FindingData(float(top[name]), low, high, layer=int(top["layer"]), head=int(top["head"]))
            yield Finding(PROBE.title, text, label, data=data)
    for row in analysis.detector_agreement(run.heads).to_dict("records"):
        data = FindingData(row["spearman"], row["low"], row["high"])
        yield Finding(PROBE.title, _describe_detector_agreement(row), row["model"], data=data)
    yield from _ablation_findings(run)
    for row in analysis.model_agreement(run.heads).to_dict("records") if _has_retrieval(run) else ():
        yield Finding(
            PROBE.title,
            f"The retrieval scores of {row['first']} and {row['second']} have a rank correlation of "
            f"{row['spearman']:.2f} and {format_percent(row['overlap'])} of their top {analysis.TOP_COUNT} heads in "
            "common.",
            data=FindingData(row["spearman"]),
        )
    yield from paper_claims(run)


def paper_claims(run: Run) -> Iterator[PaperClaim]:
    """The claim of Wu et al. 2024 for each model, kind of needle and ablation: retrieval depends on the top heads more
    than on random heads.

    The evidence is the success with random heads ablated minus that with the top heads ablated, at the largest tested
    number of heads up to `MAX_SUPPORTED_SIZE`.
    """
    if "needle_ablation" not in run.tables:
        return
    for (label, mode, ablation), curve in run.derived(analysis.ablation_curve).groupby(
        ["model", "mode", "ablation"], observed=True
    ):
        unchanged = curve[curve["size"] == 0].iloc[0]
        trials = int(unchanged["trials"])
        sizes = curve.loc[curve["size"] > 0, "size"]
        allowed = sizes[sizes <= MAX_SUPPORTED_SIZE]
        size = int(sizes.min() if allowed.empty else allowed.max())
        top, random = (curve[(curve["top"] == is_top) & (curve["size"] == size)].iloc[0] for is_top in (True, False))
        low, high = analysis.share_difference(random, top)
        verdict, reason = verdict_above(low, high), ""
        if allowed.empty:
            verdict = "inconclusive"
            reason = f". The run ablated no set of at most {MAX_SUPPORTED_SIZE} heads, so the claim is not decided"
        elif verdict == "inconclusive" and not analysis.can_detect_retrieval_drop(random, trials):
            reason = (
                ". With this number of trials, even a success rate of 0 % would not differ significantly from that "
                "with random heads ablated"
            )
        yield PaperClaim(
            f"{str(ablation).capitalize()} ablation of the top retrieval heads reduces the retrieval of "
            f"{analysis.MODE_LABELS[str(mode)]} more than ablation of random heads of the same layers (Wu et al. "
            "2024)",
            verdict,
            f"{label}, {trials} trials: {format_percent(unchanged['share'])} succeed without ablation, "
            f"{analysis.format_share(top)} with the top {_count_heads(size)} ablated, and "
            f"{analysis.format_share(random)} with {_count_heads(size)} ablated at random. With the top heads ablated, "
            f"the success rate is {_describe_difference(random, top)}{reason}. Each half of the needles is tested with "
            "heads ranked on the other half",
            model=str(label),
            criterion=f"at the largest tested number of heads up to {MAX_SUPPORTED_SIZE}, the 95 % confidence interval "
            "of the difference is above 0",
            data=FindingData(random["share"] - top["share"], low, high, trials),
        )


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """Retrieval score of a head in `model` with and without the needle, its rank in each model, and its direct logit
    attribution through the needle."""
    if "needles" not in run.tables:
        return
    summary = run.derived(analysis.retrieval_summary)
    strict = summary[(summary["model"] == model) & (summary["mode"] == "strict")]
    if (strict["successes"] == 0).any():
        yield f"{model} answers no trial, so its heads have no retrieval score."
    if not _has_retrieval(run):
        return
    rows = run.heads[head_mask(run.heads, layer, head)]
    if rows["retrieval"].any():
        yield from _score_sentences(run, rows, model, layer, head)
    elif rows["retrieval"].notna().any():
        yield "It copies no needle token in any successful trial."
    if "needle_write" not in run.heads:
        return
    for row in rows[rows["model"] == model].dropna(subset=["needle_write"]).to_dict("records"):
        interval = _format_interval(row, "needle_write", "+.2f")
        yield (
            f"Its direct logit attribution to an answer token is {row['needle_write']:+.2f} logits{interval} through "
            f"the needle and {row['needle_rest']:+.2f} through all other tokens."
        )


def _score_sentences(run: Run, rows: pd.DataFrame, model: str, layer: int, head: int) -> Iterator[str]:
    """Retrieval score of a head in `model`, with its control, and its rank in each model."""
    for row in rows[(rows["model"] == model) & rows["retrieval"].notna()].to_dict("records"):
        control = row.get("retrieval_control", math.nan)
        comparison = "" if math.isnan(control) else f"; its score on control prompts is {control:.3f}"
        low, high = row["retrieval_low"], row["retrieval_high"]
        interval = "" if math.isnan(low) else f" ({analysis.format_share_interval({'low': low, 'high': high})})"
        yield f"It copies {format_percent(row['retrieval'])} of the hidden fact{interval}{comparison}."
    if ranks := describe_ranks(run, "retrieval", layer, head):
        yield f"Rank by {statistic('retrieval').label}: {ranks}."


def overview(run: Run) -> Overview | None:
    """One row per model and mode, with a warning for each model that answered no trial and so has no scores.

    None for a run without trials.
    """
    if "needles" not in run.tables:
        return None
    data = run.derived(analysis.retrieval_summary)
    records = data.to_dict("records")
    warnings = [
        f"{row['model']} answered none of {row['trials']} trials, so its heads have no retrieval score. "
        "See its answers in the table 'needles'"
        for row in records
        if not row["successes"]
    ]
    return Overview("needles", PROBE.title, data, [_overview_record(row) for row in records], warnings)


def _model_sentences(run: Run, row: dict[Any, Any]) -> Iterator[tuple[str, FindingData]]:
    """Sentences on the success of a model, its top retrieval heads, and the share of heads that copy, with their
    numbers."""
    model, mode_suffix = row["model"], MODE_SUFFIXES[row["mode"]]
    success = FindingData(row["share"], row["low"], row["high"], int(row["trials"]))
    if not row["successes"]:
        text = f"{model} answers none of {row['trials']} trials{mode_suffix}, so its heads have no retrieval score."
        yield text, success
        return
    if row["control_successes"]:
        yield (
            f"{model} also answers {row['control_successes']} of {row['control_trials']} prompts without the needle: "
            "it knows or guesses these facts. Its success does not show retrieval. Use other needles.",
            FindingData(row["control_successes"], n=int(row["control_trials"])),
        )
    top_heads = ", ".join(
        f"layer {layer}, head {head} ({score:.2f})"
        for layer, head, score in analysis.top_heads(run, model, row["mode"])
    )
    yield (
        f"{model} answers {row['successes']} of {row['trials']} trials{mode_suffix} correctly: "
        f"{analysis.format_share(row)}. Its top retrieval heads are {top_heads}. {_control_sentence(row)}",
        success,
    )
    is_comparable = row["mode"] != "indirect"  # Wu et al. hide literal needles.
    above, zero = (
        f" ({_compare_with_published(row[measure], measure)})" if is_comparable else "" for measure in ("above", "zero")
    )
    yield (
        f"In {model}, {format_percent(row['above'], 1)} of heads have a retrieval score above {RETRIEVAL_THRESHOLD}"
        f"{mode_suffix}{above}, and {format_percent(row['zero'], 1)} have a score of 0{zero}.",
        FindingData(row["above"]),
    )


def _control_sentence(row: dict[Any, Any]) -> str:
    if row["control"] == 0:
        return "Without the needle (control), all scores are 0."
    return f"Without the needle (control), the largest score is {row['control']:.3f}."


def _describe_detector_agreement(row: dict[Any, Any]) -> str:
    """A sentence with the agreement of two detectors of retrieval heads."""
    first, second = (statistic(row[name]).label for name in ("first", "second"))
    interval = "" if math.isnan(row["low"]) else f" (95 % confidence interval {row['low']:.2f} to {row['high']:.2f})"
    return (
        f"In {row['model']}, {first} and {second} have a rank correlation of {row['spearman']:.2f}{interval} over "
        f"heads and {format_percent(row['overlap'])} of their top {analysis.TOP_COUNT} heads in common."
    )


def _ablation_findings(run: Run) -> Iterator[Finding]:
    """Success with the top heads ablated, compared with random heads."""
    if "needle_ablation" not in run.tables:
        return
    for (label, mode, ablation), curve in run.derived(analysis.ablation_curve).groupby(
        ["model", "mode", "ablation"], observed=True
    ):
        top, random = (curve[curve["top"] == is_top].iloc[-1] for is_top in (True, False))
        size, trials = int(top["size"]), int(top["trials"])
        yield Finding(
            PROBE.title,
            f"With its top {_count_heads(size)} ablated ({ablation} ablation), {label} retrieves "
            f"{round(trials * top['share'])} of {trials} {analysis.MODE_LABELS[str(mode)]} "
            f"({format_percent(top['share'])}, {analysis.format_share_interval(top)}). With {_count_heads(size)} of "
            f"the same layers ablated at random, it retrieves {analysis.format_share(random)}; without ablation, "
            f"{format_percent(curve['share'].iloc[0])}. The success rate is {_describe_difference(random, top)}. Each "
            "half of the needles is tested with heads ranked on the other half.",
            str(label),
            data=FindingData(top["share"], top["low"], top["high"], trials),
        )


def _describe_difference(random: "pd.Series[float]", top: "pd.Series[float]") -> str:
    """The success with the top heads ablated, relative to random heads, with its 95 % confidence interval."""
    difference = random["share"] - top["share"]
    low, high = analysis.share_difference(random, top)
    direction = "lower"
    if difference < 0:
        difference, low, high, direction = -difference, -high, -low, "higher"
    return (
        f"{100 * difference:.0f} percentage points {direction} than with random heads (95 % confidence interval "
        f"{100 * low:.0f} to {100 * high:.0f})"
    )


def _count_heads(count: int) -> str:
    return f"{count} head{'s' if count != 1 else ''}"


def _overview_record(row: dict[Any, Any]) -> dict[str, object]:
    """A row of the overview in the terminal: success with its 95 % confidence interval, shares of heads, top head."""
    heads = {
        "heads > 0.1": format_percent(row["above"], 1),
        "heads at 0": format_percent(row["zero"], 1),
        "top head": f"L{row['layer']:.0f} H{row['head']:.0f}: {row['top']:.2f}",
    }
    return {
        "model": row["model"],
        "mode": row["mode"],
        "answered": f"{row['successes']}/{row['trials']} ({format_percent(row['low'])} to "
        f"{format_percent(row['high'])})",
        **(heads if row["successes"] else dict.fromkeys(heads, "no score")),
        "without needle": row["control"],
    }


def _compare_with_published(share: float, measure: str) -> str:
    low, high = PUBLISHED_SHARES[measure]
    # The sentence shows the share in per cent with one decimal.
    share = round(share, 3)
    position = "below" if share < low else "above" if share > high else "within"
    return f"{position} the {format_percent(low)} to {format_percent(high)} that Wu et al. 2024 report"


def _format_interval(row: dict[Any, Any], column: str, number_format: str) -> str:
    low, high = row[f"{column}_low"], row[f"{column}_high"]
    return "" if math.isnan(low) else f" (95 % confidence interval {low:{number_format}} to {high:{number_format}})"


def _has_retrieval(run: Run) -> bool:
    """Whether the run has strict retrieval scores."""
    return "retrieval" in run.heads
