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
from headscope.runs.aggregation import TELLING
from headscope.runs.column_metadata import statistic
from headscope.runs.run import Run
from probes.influence import PROBE, bands
from probes.influence.analysis import (
    ESTIMATES,
    TOP,
    Swept,
    agreement,
    banded,
    certainty,
    contexts,
    curves,
    gini,
    holding,
    how,
    leaders,
    leading,
    name,
    named,
    rank,
    solved,
    sweeps,
    together,
    top_share,
    words,
)
from probes.influence.claims import claims
from probes.influence.objectives import NOUNS, of_units
from probes.influence.tables import SWEEP

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
    yield from of_sweeps(run)


def of_sweeps(run: Run) -> Iterator[Finding]:
    """Each sweep, then its estimates against what was evaluated, then sets of units, then bands of pairs."""
    found = of_units(run)
    if found is None:
        return
    answered = run.derived(solved)
    for sweep, units in run.derived(sweeps):
        best = leaders(run.heads[run.heads["model"] == sweep[0]]) if sweep[-1] == "answer" else {}
        yield _sweep(sweep, units, answered, best)
    whole = found[~bands.are_bands(found["component"])]
    for key, rows in agreement(whole).groupby(SWEEP, sort=False):
        yield _agreement(key, rows)
    effects = run.derived(curves)
    groups: Any = effects.groupby([*SWEEP, "unit"], observed=True, sort=False)
    for (label, length, *what, unit), block in groups:
        top = block[block["choice"] == "top"].set_index("size")["mean"].sort_index()
        if not bands.is_band(what[0]):
            yield Finding(
                PROBE.title,
                f"{label}, {words(*what)}, {contexts(length, what[-1])}: all {top.index[-1]} {unit}s together add "
                f"{top.iloc[-1]:+.2g} nats/token, the most influential one alone {top.iloc[0]:+.2g}.",
                str(label),
            )
    for row in run.derived(named).to_dict("records"):
        yield Finding(PROBE.title, _set(row), str(row["model"]))
    for (label, length, objective), units in run.derived(banded):
        whole = together(run, label, length, objective)
        for kind in bands.KINDS:
            mine = units[units["component"].str.startswith(kind)]
            if len(mine):
                yield Finding(PROBE.title, _bands(label, length, objective, kind, mine, whole), label)


def of_head(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """The influence of a head, or of its KV group, in each sweep of a model, and its rank; of bands the leading one."""
    rows = run.heads[head_mask(run.heads, layer, head)]
    for (label, _, *what), units in run.derived(sweeps) if len(rows) else ():
        for _, unit in holding(units, rows.iloc[0]).iterrows() if label == model else ():
            yield (
                f"Influence in {model}, {words(*what)}: {unit['delta']:+.2g} nats/token{certainty(unit)} for "
                f"{name(unit)}, rank {rank(units, unit)} of {len(units)}."
            )
    for (label, _, objective), units in run.derived(banded) if len(rows) else ():
        own = holding(units, rows.iloc[0]) if label == model else units.head(0)
        for kind in bands.KINDS:
            if len(mine := own[own["component"].str.startswith(kind)]):
                unit = leading(mine)
                done = words(unit["component"], "none", objective)
                yield (
                    f"Influence in {model}, of {len(mine)} bands most with {done}: "
                    f"{unit['delta']:+.2g} nats/token{certainty(unit)} for {name(unit)}."
                )


def _sweep(
    key: Any,
    units: pd.DataFrame,
    answered: Mapping[str, tuple[int, int, list[Swept]]],
    best: Mapping[str, pd.Series],
) -> Finding:
    """How influence is spread; of answers, also where the leading heads stand, and what the trials that are answered
    say alone."""
    label, length, *what = key
    order = units.sort_values("delta", ascending=False)
    first, last = order.iloc[0], order.iloc[-1]
    clear, noun = int((order["p_adjusted"] < 0.05).sum()), NOUNS[what[-1]]
    sure = f"{clear} differ from zero (false discovery rate 5 %)"
    if first["documents"] < TELLING:
        sure = f"{first['documents']} {noun}{'s' if first['documents'] > 1 else ''} cannot tell any from zero"
    told = (
        f"{label}, {words(*what)} one unit at a time, {contexts(length, what[-1])}, {how(order)}: most harmful at "
        f"{name(first)} with {first['delta']:+.2g} nats/token{certainty(first)}, least at {name(last)} with "
        f"{last['delta']:+.2g}{certainty(last)}. The top {TOP:.0%} of {len(order)} units hold "
        f"{top_share(order['delta']):.0%} of the summed |Δ| (Gini {gini(order['delta']):.2f}); {sure}."
    )
    for column, head in best.items():
        if (own := holding(units, head)).empty:  # only heads of named sets were evaluated
            continue
        unit = own.iloc[0]
        told += (
            f" The {statistic(column).best}, layer {head['layer']}, head {head['head']}, has rank {rank(units, unit)} "
            f"with {unit['delta']:+.2g}{certainty(unit)}."
        )
    if what[-1] == "answer":
        right, trials, apart = answered[label]
        told += f" With nothing changed {label} answers {right} of {trials} trials"
        alone = next((found for other, found in apart if other == key), None)
        if alone is not None:
            most = leading(alone)
            told += f"; over these alone {name(most)} is most harmful with {most['delta']:+.2g}{certainty(most)}"
        told += "."
    return Finding(PROBE.title, told, label)


def _set(row: dict[Any, Any]) -> str:
    """What a set that the user named carries."""
    what = row["component"], row["target"], row["objective"]
    sure = "" if np.isnan(row["low"]) else f" (95 % interval {row['low']:+.2g} to {row['high']:+.2g})"
    return (
        f"{row['model']}, {words(*what)}, {contexts(row['context_length'], what[-1])}: the {row['size']} heads of "
        f"“{row['choice']}” together add {row['mean']:+.2g} nats/token{sure}."
    )


def _bands(label: str, length: int, objective: str, kind: str, units: pd.DataFrame, effects: pd.DataFrame) -> str:
    """Which band of pairs matters most to one unit, and what each costs where all units lose it."""
    first = leading(units)
    whole = effects[effects["component"].str.startswith(kind)].set_index("component")["mean"]
    costs = ", ".join(f"{bands.label(each)} {whole[each]:+.2g}" for each in sorted(whole.index, key=bands.order))
    at_once = f"; of all units at once: {costs}" if costs else ""
    loss = "" if objective == "text" else ", loss of the answer"
    return (
        f"{label}, rotary pairs by band, {bands.KINDS[kind]}{loss}, {contexts(length, objective)}: of one unit at a "
        f"time most harmful with pairs {bands.label(first['component'])} of {name(first)}, {first['delta']:+.2g} "
        f"nats/token{certainty(first)}{at_once}."
    )


def _agreement(key: Any, rows: Any) -> Finding:
    """How close the estimates of a sweep come to what was evaluated."""
    label, length, component, target, objective = key
    told = ", ".join(
        f"{row['spearman']:.3f} and {row['shared']} of the top {row['top']} ({ESTIMATES[row['method']]})"
        for row in rows.to_dict("records")
    )
    loss = "" if objective == "text" else ", loss of the answer"
    return Finding(
        PROBE.title,
        f"{label}, {component} to {target}{loss}, {contexts(length, objective)}: rank correlation of the estimates "
        f"with {rows['compared'].iloc[0]} evaluated units, and largest units shared: {told}.",
        str(label),
    )
