"""What the needle probe found, in sentences with numbers, the words that a reader needs, and what the terminal shows.

Sentences set success and retrieval heads of each model against published shares, and tell how far haystacks and models
agree.
"""

import math
from collections.abc import Iterator
from typing import Any

from headscope.report.content import Finding, Overview, Term
from headscope.report.words import here, ranks
from headscope.runs.run import Run
from headscope.runs.statistics import statistic
from probes.needle import PROBE, found
from probes.needle.found import PUBLISHED
from probes.needle.heads import RETRIEVAL_HEAD

GLOSSARY = (
    Term(
        "Retrieval score",
        "A fact, the needle, is hidden in a long text and asked for. A head copies a token of it if, at the step at "
        "which the model writes that token, the head's largest weight lies on that very token of the needle. The score "
        "is the share of the needle that a head copies, 0 to 1, averaged over the trials that the model answers; its "
        "interval is over trials. The control asks without the needle: what a head scores there, it scores by chance.",
        tables=("retrieval",),
    ),
)


def findings(run: Run) -> Iterator[Finding]:
    """Sentences on each model, then on pairs of haystacks and of models; nothing without trials."""
    if "needles" not in run.tables:
        return
    for row in run.derived(found.overview).to_dict("records"):
        for text in _of_model(run, row):
            yield Finding(PROBE.title, text, row["model"])
    for label, groups in found.by_group(run.heads).groupby("model", observed=True) if _scored(run) else ():
        holding = (groups["max"] > RETRIEVAL_HEAD).sum()
        text = f"{holding} of {len(groups)} key groups of {label} hold such a head."
        yield Finding(PROBE.title, text, str(label))
    for row in found.retest(run.derived(found.by_seed)).to_dict("records"):
        yield Finding(
            PROBE.title,
            f"Haystacks {row['first']} and {row['second']} rank the heads of {row['model']} with a correlation of "
            f"{row['spearman']:.2f} and share {row['overlap']:.0%} of their top 10.",
            row["model"],
        )
    for row in found.between_models(run.heads).to_dict("records") if _scored(run) else ():
        yield Finding(
            PROBE.title,
            f"{row['second']} ranks its heads as {row['first']} does with a correlation of {row['spearman']:.2f}, and "
            f"{row['overlap']:.0%} of the top 10 are the same.",
        )


def of_head(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """What the head copies in `model` with a needle and without, and its rank by that under each model."""
    if not _scored(run):
        return
    rows = run.heads[here(run.heads, layer, head)]
    if not rows["retrieval"].any():
        yield "It copies no token of a needle in any successful trial."
        return
    for row in rows[(rows["model"] == model) & rows["retrieval"].notna()].to_dict("records"):
        control = row.get("retrieval_control", math.nan)
        without = "" if math.isnan(control) else f", and scores {control:.3f} where there is none"
        sure = ""
        if not math.isnan(row["retrieval_low"]):
            sure = f" (95 % interval {row['retrieval_low']:.2f} to {row['retrieval_high']:.2f})"
        yield f"When there is a needle it copies {row['retrieval']:.2f} of it{sure}{without}."
    if told := ranks(run.heads, "retrieval", layer, head):
        yield f"Rank by {statistic('retrieval').label}: {told}."


def overview(run: Run) -> Overview | None:
    """One row a model and mode; a warning for each that found no needle: no score is not a score of 0."""
    if "needles" not in run.tables:
        return None
    data = run.derived(found.overview)
    records = data.to_dict("records")
    warnings = [
        f"{row['model']} found the needle in none of {row['trials']} trials, so its heads have no retrieval score; its "
        "answers are in the table needles"
        for row in records
        if not row["successes"]
    ]
    return Overview("needles", PROBE.title, data, [_in_words(row) for row in records], warnings)


def _of_model(run: Run, row: dict[Any, Any]) -> Iterator[str]:
    """How often the model answers, who copies most, and how many copy at all."""
    model, how = row["model"], "" if row["mode"] == "strict" else f" (mode {row['mode']})"
    if not row["successes"]:
        yield f"{model} answered none of {row['trials']} trials{how}, so none of its heads has a retrieval score."
        return
    best = ", ".join(
        f"layer {layer} head {head} ({score:.2f})" for layer, head, score in found.leading(run, model, row["mode"])
    )
    yield (
        f"{model} answers {row['successes']} of {row['trials']} trials{how}, {row['share']:.0%} (95 % interval "
        f"{row['low']:.0%} to {row['high']:.0%}). Its top retrieval heads are {best}; "
        f"without the needle no head scores above {row['control']:.3f}."
    )
    yield (
        f"In {model}, {row['above']:.1%} of heads score above {RETRIEVAL_HEAD} "
        f"({_published(row['above'], 'above')}) and {row['zero']:.1%} never copy "
        f"({_published(row['zero'], 'zero')})."
    )


def _in_words(row: dict[Any, Any]) -> dict[str, object]:
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


def _published(share: float, what: str) -> str:
    low, high = PUBLISHED[what]
    return f"{'within' if low <= share <= high else 'outside'} the {low:.0%} to {high:.0%} of published models"


def _scored(run: Run) -> bool:
    """Whether the strict score of any head is known."""
    return "retrieval" in run.heads
