"""Findings of the influence probe: concentration, largest units, accuracy of estimates, sets, bands; glossary."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from headscope.report.blocks import Finding, Term
from headscope.report.text import head_mask
from headscope.runs.aggregation import MIN_DOCUMENTS
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from probes.influence import PROBE, bands
from probes.influence.analysis import (
    ESTIMATE_LABELS,
    TAIL_FRACTION,
    SweepUnits,
    answered_trials,
    band_sweeps,
    describe_change,
    describe_context_length,
    describe_methods,
    describe_uncertainty,
    estimate_agreement,
    gini,
    joint_effects,
    most_harmful_unit,
    named_set_effects,
    ranked_set_effects,
    sweeps_without_bands,
    top_heads_by_statistic,
    top_share,
    unit_label,
    unit_of_head,
    unit_rank,
)
from probes.influence.claims import claims
from probes.influence.effect_rows import TEXT_NOUNS, read_unit_rows
from probes.influence.tables import SWEEP_KEYS

GLOSSARY = (
    Term(
        "Head influence",
        "Change of the next-token loss, in nats per token, when the learned position parameters of one head or KV "
        "group are reset and all others are unchanged. Above 0 the loss rises, so the head uses what it learned.",
        tables=("influence", "influence_answers"),
    ),
    Term(
        "Influence on an answer",
        "The same change for the loss of an answer: the tokens of a fact that is hidden in a long text and queried at "
        "its end. Heads that retrieve the fact have a large influence on it, even if their influence on the whole "
        "text is small.",
        tables=("influence_answers",),
    ),
)

_UNIT_NOUNS = {"group": "KV group", "head": "head"}


def findings(run: Run) -> Iterator[Finding]:
    """The paper's claims, then findings of every sweep."""
    yield from claims(run)
    yield from sweep_findings(run)


def sweep_findings(run: Run) -> Iterator[Finding]:
    """Findings of each sweep, of its estimates, of sets of units and of bands of rotary pairs."""
    unit_rows = read_unit_rows(run)
    if unit_rows is None:
        return
    answered = run.derived(answered_trials)
    for sweep, units in run.derived(sweeps_without_bands):
        best = top_heads_by_statistic(run.heads[run.heads["model"] == sweep[0]]) if sweep[-1] == "answer" else {}
        yield _sweep_finding(sweep, units, answered, best)
    without_bands = unit_rows[~bands.band_mask(unit_rows["component"])]
    for key, rows in estimate_agreement(without_bands).groupby(SWEEP_KEYS, sort=False):
        yield _agreement_finding(key, rows)
    effects = run.derived(ranked_set_effects)
    groups: Any = effects.groupby([*SWEEP_KEYS, "unit"], observed=True, sort=False)
    for (label, length, *what, unit), block in groups:
        top = block[block["choice"] == "top"].set_index("size")["mean"].sort_index()
        if not bands.is_band(what[0]):
            yield Finding(
                PROBE.title,
                f"{label}, {describe_change(*what)}, {describe_context_length(length, what[-1])}: the loss changes by "
                f"{top.iloc[-1]:+.2g} nats/token with all {top.index[-1]} {_UNIT_NOUNS[unit]}s changed, and by "
                f"{top.iloc[0]:+.2g} with only the most influential one.",
                str(label),
            )
    for row in run.derived(named_set_effects).to_dict("records"):
        yield Finding(PROBE.title, _describe_named_set(row), str(row["model"]))
    for (label, length, objective), units in run.derived(band_sweeps):
        effects = joint_effects(run, label, length, objective)
        for kind in bands.KIND_DESCRIPTIONS:
            rows = units[units["component"].str.startswith(kind)]
            if len(rows):
                yield Finding(PROBE.title, _describe_bands(label, length, objective, kind, rows, effects), label)


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """Influence and rank of a head or its KV group in each sweep of a model, and its band of largest influence."""
    rows = run.heads[head_mask(run.heads, layer, head)]
    for (label, _, *what), units in run.derived(sweeps_without_bands) if len(rows) else ():
        for _, unit in unit_of_head(units, rows.iloc[0]).iterrows() if label == model else ():
            yield (
                f"Influence in {model}, {describe_change(*what)}: {unit['delta']:+.2g} "
                f"nats/token{describe_uncertainty(unit)} for "
                f"{unit_label(unit)}, rank {unit_rank(units, unit)} of {len(units)}."
            )
    for (label, _, objective), units in run.derived(band_sweeps) if len(rows) else ():
        own = unit_of_head(units, rows.iloc[0]) if label == model else units.head(0)
        for kind in bands.KIND_DESCRIPTIONS:
            if len(band_rows := own[own["component"].str.startswith(kind)]):
                unit = most_harmful_unit(band_rows)
                change = describe_change(unit["component"], "none", objective)
                yield (
                    f"Influence in {model}, largest of {len(band_rows)} bands, {change}: "
                    f"{unit['delta']:+.2g} nats/token{describe_uncertainty(unit)} for {unit_label(unit)}."
                )


def _sweep_finding(
    key: Any,
    units: pd.DataFrame,
    trials_by_model: Mapping[str, tuple[int, int, list[SweepUnits]]],
    top_heads: Mapping[str, pd.Series],
) -> Finding:
    """Concentration and largest units of a sweep; of answers, also the ranks of the top heads and answered trials."""
    label, length, *what = key
    order = units.sort_values("delta", ascending=False)
    first, last = order.iloc[0], order.iloc[-1]
    clear, noun = int((order["p_adjusted"] < 0.05).sum()), TEXT_NOUNS[what[-1]]
    significance = f"{clear} differ from zero (false discovery rate 5 %)"
    if first["documents"] < MIN_DOCUMENTS:
        count = f"{first['documents']} {noun}{'s' if first['documents'] > 1 else ''}"
        significance = (
            f"{count} are too few to call any effect real"
            if first["documents"] > 1
            else (f"{count} is too little to call any effect real")
        )
    text = (
        f"{label}, {describe_change(*what)} one unit at a time, {describe_context_length(length, what[-1])}, "
        f"{describe_methods(order)}: the loss rises most for {unit_label(first)}, by {first['delta']:+.2g} nats/token"
        f"{describe_uncertainty(first)}, and least for {unit_label(last)}, by {last['delta']:+.2g}"
        f"{describe_uncertainty(last)}. The top {TAIL_FRACTION:.0%} of {len(order)} units contribute "
        f"{top_share(order['delta']):.0%} of the summed |Δ| (Gini {gini(order['delta']):.2f}); {significance}."
    )
    for column, head in top_heads.items():
        if (own := unit_of_head(units, head)).empty:  # only heads of named sets were swept
            continue
        unit = own.iloc[0]
        text += (
            f" The {statistic(column).best_head_name}, layer {head['layer']}, head {head['head']}, has rank "
            f"{unit_rank(units, unit)} "
            f"with {unit['delta']:+.2g}{describe_uncertainty(unit)}."
        )
    if what[-1] == "answer":
        right, trials, answered_sweeps = trials_by_model[label]
        text += f" Unchanged, {label} answers {right} of {trials} trials"
        answered_units = next((rows for other, rows in answered_sweeps if other == key), None)
        if answered_units is not None:
            largest = most_harmful_unit(answered_units)
            text += (
                f"; over these trials the loss rises most for {unit_label(largest)}, by {largest['delta']:+.2g}"
                f"{describe_uncertainty(largest)}"
            )
        text += "."
    return Finding(PROBE.title, text, label)


def _describe_named_set(row: dict[Any, Any]) -> str:
    """Text with the effect of changing a named set of heads."""
    what = row["component"], row["target"], row["objective"]
    interval = "" if np.isnan(row["low"]) else f" (95 % confidence interval {row['low']:+.2g} to {row['high']:+.2g})"
    return (
        f"{row['model']}, {describe_change(*what)}, {describe_context_length(row['context_length'], what[-1])}: "
        f"changing the {row['size']} heads of “{row['choice']}” together changes the loss by {row['mean']:+.2g} "
        f"nats/token{interval}."
    )


def _describe_bands(
    label: str, length: int, objective: str, kind: str, units: pd.DataFrame, effects: pd.DataFrame
) -> str:
    """Text with the unit and band of largest influence, and the effect of each band ablated in all units."""
    first = most_harmful_unit(units)
    means = effects[effects["component"].str.startswith(kind)].set_index("component")["mean"]
    listing = ", ".join(
        f"{bands.band_label(component)} {means[component]:+.2g}"
        for component in sorted(means.index, key=bands.band_sort_key)
    )
    joint = f". In all units at once: {listing}" if listing else ""
    loss = "" if objective == "text" else ", loss of the answer"
    return (
        f"{label}, rotary pairs by band, {bands.KIND_DESCRIPTIONS[kind]}{loss}, "
        f"{describe_context_length(length, objective)}: in one unit at a time, the loss rises most for pairs "
        f"{bands.band_label(first['component'])} of {unit_label(first)}, by {first['delta']:+.2g} nats/token"
        f"{describe_uncertainty(first)}{joint}."
    )


def _agreement_finding(key: Any, rows: Any) -> Finding:
    """How well the estimates of a sweep agree with exact evaluation."""
    label, length, component, target, objective = key
    agreement = ", ".join(
        f"{ESTIMATE_LABELS[row['method']]} {row['spearman']:.3f}, {row['shared']} of the top {row['top']} shared"
        for row in rows.to_dict("records")
    )
    loss = "" if objective == "text" else ", loss of the answer"
    return Finding(
        PROBE.title,
        f"{label}, {component} to {target}{loss}, {describe_context_length(length, objective)}: rank correlation of "
        f"the estimates with {rows['compared'].iloc[0]} exactly evaluated units: {agreement}.",
        str(label),
    )
