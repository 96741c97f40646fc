"""What the influence probe found, in sentences with numbers, and the word that a reader needs.

How influence is spread over units, who leads, how good the estimates are, what sets of units carry, and what the paper
says of it.
"""

from collections.abc import Iterator
from typing import Any

from headscope.report.content import Finding, Term
from headscope.report.words import here
from headscope.runs.means import TELLING
from headscope.runs.run import Run
from probes.influence import PROBE
from probes.influence.claims import claims
from probes.influence.found import (
    ESTIMATES,
    TOP,
    agreement,
    certainty,
    curve,
    gini,
    holding,
    how,
    name,
    rank,
    sweeps,
    top_share,
    words,
)
from probes.influence.tables import SWEEP

GLOSSARY = (
    Term(
        "Head influence",
        "How much the loss on the next token changes, in nats per token, when what one head or key group learned about "
        "positions is reset and all others keep theirs. Above 0 the reset hurts, so the head makes use of what it "
        "learned.",
        tables=("influence",),
    ),
)


def findings(run: Run) -> Iterator[Finding]:
    """The paper's claims, then what each sweep found."""
    yield from claims(run)
    yield from of_sweeps(run)


def of_sweeps(run: Run) -> Iterator[Finding]:
    """Each sweep, then its estimates against what was evaluated, then sets of units."""
    if "influence" not in run.tables:
        return
    for (label, length, *what), units in run.derived(sweeps):
        order = units.sort_values("delta", ascending=False)
        first, last = order.iloc[0], order.iloc[-1]
        clear = int((order["p_adjusted"] < 0.05).sum())
        sure = f"{clear} differ from zero (false discovery rate 5 %)"
        if first["documents"] < TELLING:
            sure = f"{first['documents']} document{'s' if first['documents'] > 1 else ''} cannot tell any from zero"
        yield Finding(
            PROBE.title,
            f"{label}, {words(*what)} one unit at a time, {length:,} tokens, {how(order)}: most harmful at "
            f"{name(first)} with {first['delta']:+.2g} nats/token{certainty(first)}, least at {name(last)} with "
            f"{last['delta']:+.2g}{certainty(last)}. The top {TOP:.0%} of {len(order)} units hold "
            f"{top_share(order['delta']):.0%} of the summed |Δ| (Gini {gini(order['delta']):.2f}); {sure}.",
            label,
        )
    for key, rows in agreement(run.influence).groupby(SWEEP, sort=False):
        yield _agreement(key, rows)
    if "influence_sets" in run.tables:
        effects: Any = curve(run.influence_sets).groupby([*SWEEP, "unit"], observed=True, sort=False)
        for (label, length, *what, unit), block in effects:
            top = block[block["choice"] == "top"].set_index("size")["mean"].sort_index()
            yield Finding(
                PROBE.title,
                f"{label}, {words(*what)}, {length:,} tokens: all {top.index[-1]} {unit}s together add "
                f"{top.iloc[-1]:+.2g} nats/token, the most influential one alone {top.iloc[0]:+.2g}.",
                str(label),
            )


def of_head(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """The influence of a head, or of its KV group, in each sweep of a model, and its rank."""
    rows = run.heads[here(run.heads, layer, head)]
    for (label, _, *what), units in run.derived(sweeps) if len(rows) else ():
        for _, unit in holding(units, rows.iloc[0]).iterrows() if label == model else ():
            yield (
                f"Influence in {model}, {words(*what)}: {unit['delta']:+.2g} nats/token{certainty(unit)} for "
                f"{name(unit)}, rank {rank(units, unit)} of {len(units)}."
            )


def _agreement(key: Any, rows: Any) -> Finding:
    """How close the estimates of a sweep come to what was evaluated."""
    label, length, component, target = key
    told = ", ".join(
        f"{row['spearman']:.3f} and {row['shared']} of the top {row['top']} ({ESTIMATES[row['method']]})"
        for row in rows.to_dict("records")
    )
    return Finding(
        PROBE.title,
        f"{label}, {component} to {target}, {length:,} tokens: rank correlation of the estimates with "
        f"{rows['compared'].iloc[0]} evaluated units, and largest units shared: {told}.",
        str(label),
    )
