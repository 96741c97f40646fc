"""Results of the needle probe that no score has: success, agreement of scores, ablation, and those about one head.

The claim of Wu et al. 2024 is about ablated retrieval heads. Its thresholds are ours.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from headscope.base.ablation_names import describe_ablation
from headscope.rendering.blocks import Overview
from headscope.rendering.text import head_mask
from headscope.results.effects.statistics import MIN_COMPARED
from headscope.results.effects.sweep import Effects
from headscope.results.effects.units import unit_result
from headscope.results.questions import Question
from headscope.results.ranks import head_ranks
from headscope.results.result import Bound, Result
from headscope.results.samples import head_result, share_result
from headscope.results.verdicts import judge
from headscope.runs.aggregation import difference_interval
from headscope.runs.column_metadata import exceeds, statistic
from headscope.runs.run import Run
from probes.needle import analysis
from probes.needle.analysis import MODE_LABELS, PUBLISHED_SHARES
from probes.needle.scores import RETRIEVAL_THRESHOLD, VARIANTS, trial_names

MAX_SUPPORTED_SIZE = 16
"""Largest number of ablated heads at which the claim of Wu et al. is judged [ours]."""

QUESTIONS = (
    Question(
        name="retrieval.success",
        sentence="The success rate of {model}[ with {variant}] is {value}",
        headline="Needle retrieved[ with {variant}]: {value}",
        answer="Success rate[ with {variant}]: {values}",
        number="percent",
        samples="trials",
        level="headline",
        better="higher",
    ),
    Question(
        name="retrieval.no_success",
        sentence="{model} answers none of {n:n trials}[ with {variant}], so its heads have no retrieval score. See "
        "its answers in the table 'needles'",
        level="warning",
    ),
    Question(
        name="retrieval.control_success",
        sentence="{model} also answers {number:.0f} of {n:n prompts} without the needle: it knows or guesses these "
        "facts. Its success does not show retrieval. Use other needles",
        level="warning",
    ),
    Question(
        name="retrieval.control_score",
        sentence="Without the needle (control), the largest retrieval score of a head of {model} is {number:.3f}",
    ),
    *(
        Question(
            name=f"retrieval.{name}",
            sentence=f"In {{model}}, {{number:percent1}} of {{n:n heads}} have a retrieval score {meaning}[ with "
            "{variant}][, {position} the {published_low:percent} to {published_high:percent} that Wu et al. 2024 "
            "report]",
            number="percent1",
        )
        for name, meaning in (("share_above", f"above {RETRIEVAL_THRESHOLD}"), ("share_zero", "of 0"))
    ),
    Question(
        name="retrieval.kv_groups",
        sentence="In {model}, {number:.0f} of {n:n KV groups} contain a head with a retrieval score above "
        f"{RETRIEVAL_THRESHOLD}",
        number=".0f",
    ),
    Question(
        name="retrieval.haystack_agreement",
        sentence="The retrieval scores of {model} in haystacks {haystack} and {other_haystack} have a rank correlation "
        "of {value} and {overlap:percent} of their top {top} heads in common",
        number=".2f",
        samples="heads",
    ),
    Question(
        name="retrieval.model_agreement",
        sentence="The retrieval scores of {first} and {second} have a rank correlation of {value} and "
        "{overlap:percent} of their top {top} heads in common",
        number=".2f",
        samples="heads",
    ),
    Question(
        name="retrieval.detector_agreement",
        sentence="In {model}, {first} and {second} have a rank correlation of {value} and {overlap:percent} of their "
        "top {top} heads in common",
        number=".2f",
        samples="heads",
    ),
    Question(
        name="retrieval.ablated_success",
        sentence="Success rate of {model}[ with {variant}] with its top {size:n heads} ablated "
        "({change}): {value}; without ablation {unchanged:percent}[; {control}]",
        number="percent",
        samples="trials",
    ),
    Question(
        name="retrieval.random_ablated_success",
        sentence="Success rate of {model}[ with {variant}] with {size:n heads} of the same layers ablated at random "
        "({change}): {value}",
        number="percent",
        samples="trials",
    ),
    Question(
        name="retrieval.ablation_drop",
        sentence="Success rate of {model}[ with {variant}] with {size:n heads} ablated at random minus that with its "
        "top heads ablated ({change}): {value}",
        headline="Random minus top {size} ablated[, {variant}]: {value}",
        number="points",
        value_unit="percentage points",
        samples="trials",
        level="headline",
    ),
    Question(
        name="retrieval.ablation_claim",
        statement="{change:capital} of the top retrieval heads reduces the retrieval of {needles} more "
        "than ablation of random heads of the same layers (Wu et al. 2024)",
        sentence="{model}: {unchanged:percent} of trials succeed without ablation, {top:percent} with the top "
        "{size:n heads} ablated, and {random:percent} with as many ablated at random (mean of {draws:n draws}), a "
        "difference of {value}",
        criterion=f"at the largest tested number of heads up to {MAX_SUPPORTED_SIZE} with a control, the whole "
        "interval of the difference, over trials and draws of random heads, is above 0. Each half of the needles is "
        "tested with heads ranked on the other half",
        number="points",
        value_unit="percentage points",
        samples="trials",
    ),
    Question(
        name="retrieval.no_score",
        sentence="{model} answers no trial, so its heads have no retrieval score",
    ),
    Question(
        name="retrieval.head_score",
        sentence="In {model}, it copies {value} of the needle[; its score without the needle is {control:.3f}]",
        number="percent",
        samples="trials",
    ),
    Question(
        name="retrieval.head_attribution",
        sentence="In {model}, its direct logit attribution to an answer token is {value} through the needle[ and "
        "{rest:+.2f} through all other tokens]",
        number="+.2f",
        value_unit="logits",
        samples="trials",
    ),
)


def results(run: Run) -> Iterator[Result]:
    """Success and shares of heads of each model, agreement of haystacks, detectors and models, and ablation.

    A run without trials has no results.
    """
    if "needles" not in run.tables:
        return
    summary = run.derived(analysis.retrieval_summary)
    for row in summary.to_dict("records"):
        yield from _success_results(run, row)
    for row in summary.drop_duplicates("model").to_dict("records"):
        yield from _control_results(row)
    if "retrieval" in run.heads:
        yield from _score_results(run)
    if "needle_ablation" in run.tables:
        yield from ablation_results(run)


def _success_results(run: Run, row: dict[Any, Any]) -> Iterator[Result]:
    """The success of a model in the trials of a mode, and the shares of heads that copy."""
    model, mode = row["model"], row["mode"]
    fields: dict[str, Any] = {"model": model, "where": {"mode": mode}}
    variant = {"variant": VARIANTS[mode]}
    trials = run.table("needles")
    trials = trials[(trials["model"] == model) & (trials["mode"] == mode)]
    successes = trials["success"].set_axis(trial_names(trials))
    yield share_result("retrieval.success", successes, details=variant, **fields)
    if not row["successes"]:
        yield Result(question="retrieval.no_success", n=row["trials"], details=variant, **fields)
        return
    scored = int(run.heads.loc[run.heads["model"] == model, analysis.retrieval_column(mode)].count())
    for name in ("above", "zero"):
        published = _published(row[name], name) if mode != "indirect" else {}  # Wu et al. hide literal needles.
        yield Result(
            question=f"retrieval.share_{name}", value=row[name], n=scored, details=variant | published, **fields
        )


def _published(share: float, name: str) -> dict[str, Any]:
    """The range of a share of heads over the models of Wu et al. 2024, and the position of a share in it."""
    low, high = PUBLISHED_SHARES[name]
    shown = round(share, 3)  # as a sentence shows it, in per cent with one decimal
    position = "below" if shown < low else "above" if shown > high else "within"
    return {"position": position, "published_low": low, "published_high": high}


def _control_results(row: dict[Any, Any]) -> Iterator[Result]:
    """Success and largest score of a model without the needle."""
    if row["control_successes"]:
        count, trials = row["control_successes"], row["control_trials"]
        yield Result(question="retrieval.control_success", model=row["model"], value=count, n=trials)
    if not np.isnan(row["control"]):
        yield Result(question="retrieval.control_score", model=row["model"], value=row["control"])


def _score_results(run: Run) -> Iterator[Result]:
    """KV groups with a retrieval head, and the agreement of scores between haystacks, detectors and models."""
    for label, groups in analysis.scores_by_group(run.heads).groupby("model", observed=True):
        count = int(exceeds(groups["max"], RETRIEVAL_THRESHOLD).sum())
        yield Result(question="retrieval.kv_groups", model=str(label), value=count, n=len(groups))
    for row in _compared(analysis.seed_agreement(run.derived(analysis.scores_by_seed))):
        where = {"haystack": row["first"], "other_haystack": row["second"]}
        yield _agreement("haystack", row, model=row["model"], where=where)
    for row in _compared(analysis.detector_agreement(run.heads)):
        labels = {name: statistic(row[name]).label for name in ("first", "second")}
        where = {"score": row["first"], "other_score": row["second"]}
        yield _agreement("detector", row, labels, model=row["model"], where=where)
    for row in _compared(analysis.model_agreement(run.heads)):
        yield _agreement("model", row, where={"first": row["first"], "second": row["second"]})


def _compared(table: pd.DataFrame) -> list[dict[Any, Any]]:
    """The agreements over enough heads, of scores that are not all equal."""
    return table[(table["heads"] >= MIN_COMPARED) & table["spearman"].notna()].to_dict("records")


def _agreement(kind: str, row: dict[Any, Any], labels: Mapping[str, str] | None = None, **fields: Any) -> Result:
    """The rank correlation of two scores over heads, and the overlap of their top heads."""
    return Result(
        question=f"retrieval.{kind}_agreement",
        value=row["spearman"],
        low=row["low"],
        high=row["high"],
        n=row["heads"],
        details={"overlap": row["overlap"], "top": row["top"], **(labels or {})},
        **fields,
    )


def ablation_results(run: Run) -> Iterator[Result]:
    """For each model, kind of needle and ablation: success with the top heads and with random heads ablated, their
    difference, and the claim of Wu et al. 2024; the last three at sizes with a control."""
    for effects in run.derived(analysis.ablation_sweeps):
        sets = effects.units[effects.units["size"] > 0]
        controlled_sizes = sets.loc[sets["heads"] == "random", "size"]
        for heads, name in (("top", "ablated_success"), ("random", "random_ablated_success")):
            for size in sets.loc[sets["heads"] == heads, "size"].nlargest(1):
                unit, fields = _ablated(effects, heads, size), _ablation_fields(effects, size)
                yield unit_result(effects, unit, f"retrieval.{name}", **fields)
        if len(controlled_sizes):
            yield _ablation_drop(run, "retrieval.ablation_drop", effects, controlled_sizes.max())
            yield _ablation_claim(run, effects, controlled_sizes)


def _ablation_claim(run: Run, effects: Effects, sizes: pd.Series) -> Result:
    """The claim of Wu et al. 2024: retrieval depends on the top heads more than on random heads.

    It is judged at the largest tested number of heads with a control up to `MAX_SUPPORTED_SIZE`.
    """
    allowed = sizes[sizes <= MAX_SUPPORTED_SIZE]
    size = sizes.min() if allowed.empty else allowed.max()
    claim = judge(_ablation_drop(run, "retrieval.ablation_claim", effects, size), Bound("above"))
    if allowed.empty:
        return judge(claim, Bound("above"), "unmeasured")
    if claim.verdict != "inconclusive" or claim.reason:
        return claim
    draws, over_draws, over_trials = (claim.details[name] for name in ("draws", "over_draws", "over_trials"))
    distance = abs(claim.value)
    trials = analysis.trials_to_detect_retrieval_drop(claim.details["random"])
    reason, needed = "", None
    if trials is None or trials > (claim.n or 0):
        reason, needed = "power", trials
    elif draws < analysis.MIN_DRAWS:
        reason, needed = "few_draws", analysis.MIN_DRAWS
    elif over_draws and over_trials >= distance > 0:
        narrowed = claim.n * over_trials**2 / (distance**2 - over_draws**2) if over_draws < distance else math.inf
        reason, needed = "trials", math.ceil(narrowed) if math.isfinite(narrowed) else None
    elif over_draws and distance > 0:
        reason, needed = "draws", analysis.draws_to_detect(distance, over_trials, draws, over_draws)
    return judge(replace(claim, details={**claim.details, "needed": needed}), Bound("above"), reason)


def _ablation_drop(run: Run, question: str, effects: Effects, size: int) -> Result:
    """Success with random heads ablated minus that with as many top heads ablated.

    The interval is over trials and over random head sets: the squares of both half widths are added. The draws also
    differ by the trials, which are counted in both, so that the interval is rather too wide.
    """
    top, random = (_ablated(effects, heads, size) for heads in ("top", "random"))
    ends = difference_interval(*((unit["effect"], unit["low"], unit["high"]) for unit in (random, top)))
    draws, over_draws = analysis.half_width_over_draws(run, effects.key, size)
    value = random["effect"] - top["effect"]
    below, above = np.hypot(np.subtract(ends, value), over_draws)
    low, high = np.clip([value - below, value + above], -1, 1)
    fields = _ablation_fields(effects, size)
    over_trials = abs(ends[0 if value > 0 else 1] - value)  # towards 0
    fields["details"] |= {"draws": draws, "over_draws": over_draws, "over_trials": over_trials}
    by_top, by_random = effects.by_sample(top), effects.by_sample(random)
    return Result(
        question=question,
        model=effects.model,
        value=value,
        low=float(low),
        high=float(high),
        n=int(top["n"]),
        by_sample={trial: success - by_top[trial] for trial, success in by_random.items() if trial in by_top},
        **fields,
    )


def _ablation_fields(effects: Effects, size: int) -> dict[str, Any]:
    """Conditions and details of the results at one number of ablated heads."""
    mode = effects.where["mode"]
    details: dict[str, Any] = {
        "change": describe_ablation(effects.key["intervention"]),
        "variant": VARIANTS[mode],
        "needles": MODE_LABELS[mode],
        "unchanged": _ablated(effects, "top", 0)["effect"],
        "top": _ablated(effects, "top", size)["effect"],
        "unmeasured": f"set of at most {MAX_SUPPORTED_SIZE} heads",
    }
    if ((effects.units["heads"] == "random") & (effects.units["size"] == size)).any():
        details["random"] = _ablated(effects, "random", size)["effect"]
    else:
        details["control"] = "these heads have no random control: a layer has too few others"
    return {"where": {**effects.where, "size": int(size)}, "details": details}


def _ablated(effects: Effects, heads: str, size: int) -> pd.Series:
    """The success with "top" or "random" heads ablated, from their number; 0 for the unchanged model."""
    units = effects.units
    return units[(units["heads"] == heads) & (units["size"] == size)].iloc[0]


def head_results(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """Retrieval score of a head in `model`, its rank in each model, and its attribution through the needle."""
    if "needles" not in run.tables:
        return
    summary = run.derived(analysis.retrieval_summary)
    successes = summary[summary["mode"] == "strict"].set_index("model")["successes"]
    if successes.get(model) == 0:
        yield Result(question="retrieval.no_score", model=model)
    rows, n, where = run.heads[head_mask(run.heads, layer, head)], int(successes.get(model, 0)), {"mode": "strict"}
    for row in rows[rows["model"] == model].to_dict("records"):
        if not np.isnan(row.get("retrieval", np.nan)):
            control = {"control": row.get("retrieval_control", np.nan)}
            yield head_result("retrieval.head_score", row, "retrieval", n, where=where, details=control)
        yield from head_ranks(run, "retrieval", layer, head)
        if not np.isnan(row.get("needle_write", np.nan)):
            rest = {"rest": row["needle_rest"]}
            yield head_result("retrieval.head_attribution", row, "needle_write", n, where=where, details=rest)


def overview(run: Run) -> Overview | None:
    """Success and retrieval heads by model and mode; None for a run without trials."""
    if "needles" not in run.tables:
        return None
    return Overview("needles", run.derived(analysis.retrieval_summary))
