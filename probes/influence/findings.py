"""What the influence probe found, in sentences with numbers, and the words that a reader needs.

How influence is spread over units, who leads, how good the estimates are, what sets of units and bands of pairs carry,
and what the paper says of it.
"""

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
from probes.influence.objectives import TEXT_NOUNS, read_unit_rows
from probes.influence.tables import SWEEP_KEYS

GLOSSARY = (
    Term(
        "Head influence",
        "How much the loss on the next token changes, in nats per token, when what one head or key group learned about "
        "positions is reset and all others keep theirs. Above 0 the reset hurts, so the head makes use of what it "
        "learned.",
        tables=("influence", "influence_answers"),
    ),
    Term(
        "Influence on an answer",
        "The same, of the loss of one answer alone: the tokens of a fact that is hidden in a long text and asked for "
        "at its end. A head that the model needs to find the fact again stands out here, however little it does for "
        "the text at large.",
        tables=("influence_answers",),
    ),
)


def findings(run: Run) -> Iterator[Finding]:
    """The paper's claims, then what each sweep found."""
    yield from claims(run)
    yield from sweep_findings(run)


def sweep_findings(run: Run) -> Iterator[Finding]:
    """Each sweep, then its estimates against what was evaluated, then sets of units, then bands of pairs."""
    found = read_unit_rows(run)
    if found is None:
        return
    answered = run.derived(answered_trials)
    for sweep, units in run.derived(sweeps_without_bands):
        best = top_heads_by_statistic(run.heads[run.heads["model"] == sweep[0]]) if sweep[-1] == "answer" else {}
        yield _sweep_finding(sweep, units, answered, best)
    whole = found[~bands.band_mask(found["component"])]
    for key, rows in estimate_agreement(whole).groupby(SWEEP_KEYS, sort=False):
        yield _agreement_finding(key, rows)
    effects = run.derived(ranked_set_effects)
    groups: Any = effects.groupby([*SWEEP_KEYS, "unit"], observed=True, sort=False)
    for (label, length, *what, unit), block in groups:
        top = block[block["choice"] == "top"].set_index("size")["mean"].sort_index()
        if not bands.is_band(what[0]):
            yield Finding(
                PROBE.title,
                f"{label}, {describe_change(*what)}, {describe_context_length(length, what[-1])}: all "
                f"{top.index[-1]} {unit}s together add "
                f"{top.iloc[-1]:+.2g} nats/token, the most influential one alone {top.iloc[0]:+.2g}.",
                str(label),
            )
    for row in run.derived(named_set_effects).to_dict("records"):
        yield Finding(PROBE.title, _describe_named_set(row), str(row["model"]))
    for (label, length, objective), units in run.derived(band_sweeps):
        whole = joint_effects(run, label, length, objective)
        for kind in bands.KIND_DESCRIPTIONS:
            mine = units[units["component"].str.startswith(kind)]
            if len(mine):
                yield Finding(PROBE.title, _describe_bands(label, length, objective, kind, mine, whole), label)


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """The influence of a head, or of its KV group, in each sweep of a model, and its rank; of bands the leading one."""
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
            if len(mine := own[own["component"].str.startswith(kind)]):
                unit = most_harmful_unit(mine)
                done = describe_change(unit["component"], "none", objective)
                yield (
                    f"Influence in {model}, of {len(mine)} bands most with {done}: "
                    f"{unit['delta']:+.2g} nats/token{describe_uncertainty(unit)} for {unit_label(unit)}."
                )


def _sweep_finding(
    key: Any,
    units: pd.DataFrame,
    trials_by_model: Mapping[str, tuple[int, int, list[SweepUnits]]],
    top_heads: Mapping[str, pd.Series],
) -> Finding:
    """How influence is spread; of answers, also where the leading heads stand, and what the trials that are answered
    say alone."""
    label, length, *what = key
    order = units.sort_values("delta", ascending=False)
    first, last = order.iloc[0], order.iloc[-1]
    clear, noun = int((order["p_adjusted"] < 0.05).sum()), TEXT_NOUNS[what[-1]]
    sure = f"{clear} differ from zero (false discovery rate 5 %)"
    if first["documents"] < MIN_DOCUMENTS:
        sure = f"{first['documents']} {noun}{'s' if first['documents'] > 1 else ''} cannot tell any from zero"
    told = (
        f"{label}, {describe_change(*what)} one unit at a time, {describe_context_length(length, what[-1])}, "
        f"{describe_methods(order)}: most harmful at "
        f"{unit_label(first)} with {first['delta']:+.2g} nats/token{describe_uncertainty(first)}, least at "
        f"{unit_label(last)} with "
        f"{last['delta']:+.2g}{describe_uncertainty(last)}. The top {TAIL_FRACTION:.0%} of {len(order)} units hold "
        f"{top_share(order['delta']):.0%} of the summed |Δ| (Gini {gini(order['delta']):.2f}); {sure}."
    )
    for column, head in top_heads.items():
        if (own := unit_of_head(units, head)).empty:  # only heads of named sets were evaluated
            continue
        unit = own.iloc[0]
        told += (
            f" The {statistic(column).best_head_name}, layer {head['layer']}, head {head['head']}, has rank "
            f"{unit_rank(units, unit)} "
            f"with {unit['delta']:+.2g}{describe_uncertainty(unit)}."
        )
    if what[-1] == "answer":
        right, trials, apart = trials_by_model[label]
        told += f" With nothing changed {label} answers {right} of {trials} trials"
        alone = next((found for other, found in apart if other == key), None)
        if alone is not None:
            most = most_harmful_unit(alone)
            told += (
                f"; over these alone {unit_label(most)} "
                f"is most harmful with {most['delta']:+.2g}{describe_uncertainty(most)}"
            )
        told += "."
    return Finding(PROBE.title, told, label)


def _describe_named_set(row: dict[Any, Any]) -> str:
    """What a set that the user named carries."""
    what = row["component"], row["target"], row["objective"]
    sure = "" if np.isnan(row["low"]) else f" (95 % interval {row['low']:+.2g} to {row['high']:+.2g})"
    return (
        f"{row['model']}, {describe_change(*what)}, {describe_context_length(row['context_length'], what[-1])}: "
        f"the {row['size']} heads of "
        f"“{row['choice']}” together add {row['mean']:+.2g} nats/token{sure}."
    )


def _describe_bands(
    label: str, length: int, objective: str, kind: str, units: pd.DataFrame, effects: pd.DataFrame
) -> str:
    """Which band of pairs matters most to one unit, and what each costs where all units lose it."""
    first = most_harmful_unit(units)
    whole = effects[effects["component"].str.startswith(kind)].set_index("component")["mean"]
    costs = ", ".join(
        f"{bands.band_label(each)} {whole[each]:+.2g}" for each in sorted(whole.index, key=bands.band_sort_key)
    )
    at_once = f"; of all units at once: {costs}" if costs else ""
    loss = "" if objective == "text" else ", loss of the answer"
    return (
        f"{label}, rotary pairs by band, {bands.KIND_DESCRIPTIONS[kind]}{loss}, "
        f"{describe_context_length(length, objective)}: of one unit at a "
        f"time most harmful with pairs {bands.band_label(first['component'])} of {unit_label(first)}, "
        f"{first['delta']:+.2g} "
        f"nats/token{describe_uncertainty(first)}{at_once}."
    )


def _agreement_finding(key: Any, rows: Any) -> Finding:
    """How close the estimates of a sweep come to what was evaluated."""
    label, length, component, target, objective = key
    told = ", ".join(
        f"{row['spearman']:.3f} and {row['shared']} of the top {row['top']} ({ESTIMATE_LABELS[row['method']]})"
        for row in rows.to_dict("records")
    )
    loss = "" if objective == "text" else ", loss of the answer"
    return Finding(
        PROBE.title,
        f"{label}, {component} to {target}{loss}, {describe_context_length(length, objective)}: rank correlation "
        "of the estimates "
        f"with {rows['compared'].iloc[0]} evaluated units, and largest units shared: {told}.",
        str(label),
    )
