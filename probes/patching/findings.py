"""Findings of the patching probe: the heads with the largest effects, agreement of estimates, models; glossary."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from headscope.prompts.answers import count_pairs, describe_unanswered
from headscope.prompts.pairs import METRIC_LABELS, METRIC_UNITS
from headscope.report.blocks import Finding, FindingData, Term
from headscope.report.text import head_mask
from headscope.runs.run import Run
from probes.patching import PROBE
from probes.patching.analysis import (
    SWEEP_KEYS,
    UNIT_KEYS,
    SweepKey,
    agreement_of,
    effects_by_span,
    estimate_agreement,
    exact_or_all,
    largest_unit,
    pair_metrics,
    pairs_usable_in_all_models,
    questions_about_pairs,
    sweeps,
)
from probes.patching.claims import model_claims
from probes.patching.labels import (
    describe_methods,
    describe_significance,
    describe_sweep,
    describe_unmeasured,
    format_effect,
    unit_label,
    unit_noun_plural,
)
from probes.patching.schema import MIN_DIFFERENCE, PATCHING, WHOLE_GROUP

GLOSSARY = (
    Term(
        "Activation patching",
        "Run one prompt of a pair with one activation of one head taken from the run of the other prompt. Denoising "
        "puts a clean activation into the corrupted run: it asks whether the head is sufficient to restore the answer. "
        "Noising puts a corrupted activation into the clean run: it asks whether the head is necessary. An effect of 0 "
        "changes nothing; an effect of 1 moves the metric to its value in the other run.",
        "(m(patched) - m(unpatched)) / (m(source) - m(unpatched)); source: the run that the activation comes from",
        (PATCHING.name,),
    ),
    Term(
        "Attribution patching",
        "An estimate of all patches from one backward pass: the gradient of the metric with respect to the head's "
        "output, times the change of that output. Attention weights are recomputed with the patched queries or keys "
        "(AtP*). Estimates select the heads to patch exactly; they decide nothing.",
        "Σᵢ ⟨∂m/∂zᵢ, z′ᵢ − zᵢ⟩",
        (PATCHING.name,),
    ),
)


def findings(run: Run) -> Iterator[Finding]:
    """The pairs of each model and set, the largest effects of each sweep, agreement of estimates, changes of models."""
    if PATCHING.name not in run.tables:
        return
    for model, question in run.derived(questions_about_pairs):
        yield Finding(PROBE.title, question, model)
    shared = run.derived(pairs_usable_in_all_models).groupby(["prompts", "metric"]).size()
    groups: Any = run.derived(pair_metrics).groupby(["model", "prompts", "metric"], sort=False)
    for (model, prompts, metric), pairs in groups:
        text = _describe_pairs(model, prompts, metric, pairs, int(shared.get((prompts, metric), 0)))
        yield Finding(PROBE.title, text, model)
    for key, units in run.derived(sweeps):
        yield _sweep_finding(key, units, _count_pairs(run, key))
        if len(spans := effects_by_span(run, key)):
            yield _span_finding(key, spans)
    agreement: Any = run.derived(estimate_agreement).groupby(SWEEP_KEYS, sort=False)
    for key, units in agreement:
        yield _agreement_finding(key, units, dict(run.derived(sweeps))[key])
    yield from _model_findings(run)
    yield from model_claims(run)


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """The effect of a head or its KV group on every prompt set, with its rank."""
    if PATCHING.name not in run.tables:
        return
    for key, units in run.derived(sweeps):
        unit = unit_of_head(run, units, layer, head)
        if key[0] == model and len(unit):
            row = unit.iloc[0]
            rank = int((units["effect"].abs() > abs(row["effect"])).sum()) + 1
            yield (
                f"{describe_sweep(key)}, {key[1]}, in {model}: effect {format_effect(row)} for {unit_label(row)}, rank "
                f"{rank} of {len(units)} by size."
            )


def unit_of_head(run: Run, units: pd.DataFrame, layer: int, head: int) -> pd.DataFrame:
    """The unit that is or contains a query head, as one row; no row if the sweep lacks it."""
    rows = run.heads[head_mask(run.heads, layer, head)]
    group = rows["kv_group"].iloc[0] if len(rows) else -1
    in_group = (units["layer"] == layer) & (units["kv_group"] == group)
    unit: pd.DataFrame = units[in_group & units["head"].isin([WHOLE_GROUP, head])]
    return unit


def _describe_pairs(model: str, prompts: str, metric: str, pairs: pd.DataFrame, shared: int) -> str:
    clean, corrupted = pairs["metric_clean"].mean(), pairs["metric_corrupted"].mean()
    left_out = int((~pairs["is_normalised"]).sum())
    unit = METRIC_UNITS[metric]
    text = (
        f"{model}, {prompts}, {len(pairs)} pairs: the mean {METRIC_LABELS[metric]} is {clean:.2f} {unit} for clean and "
        f"{corrupted:.2f} for corrupted prompts."
    )
    if left_out:
        verb = "pair differs" if left_out == 1 else "pairs differ"
        text += f" {left_out} {verb} by less than {MIN_DIFFERENCE} {unit}; means leave them out."
    if unanswered := describe_unanswered(metric, pairs["metric_clean"].to_numpy()):
        text += f" {unanswered}"
    if shared < len(pairs) - left_out:
        text += f" Means are over the {shared} pairs that differ by at least {MIN_DIFFERENCE} {unit} in every model."
    return text


def _count_pairs(run: Run, key: SweepKey) -> str:
    """The number of pairs in the means of a sweep, and of those whose answer the model does not give."""
    rows = run.derived(pair_metrics).merge(run.derived(pairs_usable_in_all_models))
    rows = rows[(rows["model"] == key[0]) & (rows["prompts"] == key[1]) & (rows["metric"] == key[2])]
    return count_pairs(key[2], rows["metric_clean"].to_numpy())


def _sweep_finding(key: SweepKey, units: pd.DataFrame, pair_count: str) -> Finding:
    """The units of largest and lowest effect, exact ones if there are any, and how many effects differ from zero."""
    model, prompts = key[:2]
    largest, pairs = largest_unit(units), int(units["pairs"].max())
    smallest = exact_or_all(units).sort_values("effect", kind="stable").iloc[0]
    text = (
        f"{describe_sweep(key)}, {prompts}, in {model} ({pair_count}; {describe_methods(units)}): the most "
        f"positive effect is that of {unit_label(largest)}, {format_effect(largest)}. The lowest is that of "
        f"{unit_label(smallest)}, {format_effect(smallest)}. {describe_significance(units, unit_noun_plural(units))}."
    )
    head = None if largest["head"] == WHOLE_GROUP else int(largest["head"])
    data = FindingData(largest["effect"], largest["low"], largest["high"], pairs, int(largest["layer"]), head)
    return Finding(PROBE.title, text, model, data=data)


def _span_finding(key: SweepKey, effects: pd.DataFrame) -> Finding:
    """The unit of largest absolute effect in each named span."""
    parts = []
    for span, units in effects.groupby("span", observed=True):
        candidates = exact_or_all(units)
        largest = candidates.iloc[int(candidates["effect"].abs().argmax())]
        parts.append(f"{span}: {unit_label(largest)}, {format_effect(largest)}")
    return Finding(
        PROBE.title,
        f"{describe_sweep(key)}, {key[1]}, in {key[0]}, only at the positions of a span ({int(effects['pairs'].max())} "
        f"pairs), the effects of largest size: {'; '.join(parts)}.",
        key[0],
    )


def _agreement_finding(key: SweepKey, units: pd.DataFrame, effects: pd.DataFrame) -> Finding:
    """How well the estimates of a sweep agree with exact effects, and whether an estimated unit may have a larger one.

    `units` are those with both, `effects` are all of the sweep.
    """
    spearman, shared, size = agreement_of(units)
    correlation = "not defined" if np.isnan(spearman) else f"{spearman:.2f}"
    noun, error = unit_noun_plural(units), float((units["estimate"] - units["exact"]).abs().max())
    return Finding(
        PROBE.title,
        f"{describe_sweep(key)}, {key[1]}, in {key[0]}: for {len(units)} {noun} patched exactly, "
        f"the rank correlation of estimates with exact effects is {correlation}; the top {size} by estimated and by "
        f"exact absolute effect share {shared} {noun}.{describe_unmeasured(effects, error, noun)}",
        key[0],
        data=FindingData(spearman, n=len(units)),
    )


def _model_findings(run: Run) -> Iterator[Finding]:
    """How the effects of each sweep change from the first model to each other one."""
    all_sweeps = dict(run.derived(sweeps))
    for key, units in all_sweeps.items():
        base = all_sweeps.get((run.models[0], *key[1:]))
        if key[0] == run.models[0] or base is None:
            continue
        both = base.merge(units, on=UNIT_KEYS, suffixes=("_base", ""))
        both = both.assign(change=both["effect"] - both["effect_base"])
        top = both.iloc[int(both["change"].abs().argmax())]
        estimated = int(((both["method"] != "exact") | (both["method_base"] != "exact")).sum())
        correlation = float(both["effect"].corr(both["effect_base"], "spearman"))
        noun = unit_noun_plural(both)
        note = f" {estimated} of {len(both)} {noun} are estimated in at least one model." if estimated else ""
        yield Finding(
            PROBE.title,
            f"{describe_sweep(key)}, {key[1]}, {key[0]} against {run.models[0]}, over the same {int(top['pairs'])} "
            f"pairs: the rank correlation of the effects of {len(both)} {noun} is {correlation:.2f}. The largest "
            f"change is that of {unit_label(top)}, from {top['effect_base']:+.2f} to {top['effect']:+.2f}.{note}",
            key[0],
            data=FindingData(correlation, n=len(both)),
        )
