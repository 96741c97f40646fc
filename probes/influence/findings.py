"""Findings of the influence probe: the paper's claims, concentration, largest units, estimates, sets, bands; glossary.

The paper has no thresholds for its claims; those here are ours.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from headscope.report.blocks import Finding, FindingData, PaperClaim, Term
from headscope.report.text import format_percent, head_mask, head_name
from headscope.runs.aggregation import MIN_DOCUMENTS, verdict_above
from headscope.runs.column_metadata import capitalise, statistic
from headscope.runs.run import Run
from probes.influence import PROBE, bands
from probes.influence.analysis import (
    TOP_FRACTION,
    SweepUnits,
    answered_trials,
    band_sweeps,
    changes_by_document,
    covers_all_units,
    estimate_agreement,
    gini,
    joint_effects,
    margin_over_rank,
    named_set_effects,
    ranked_set_effects,
    sweeps_without_bands,
    top_heads_by_statistic,
    top_share,
    top_share_interval,
    top_unit_count,
    unit_of_head,
    unit_of_largest_rise,
    unit_rank,
)
from probes.influence.effect_rows import TEXT_NOUNS, read_unit_rows
from probes.influence.labels import (
    ESTIMATE_LABELS,
    describe_change,
    describe_context_length,
    describe_highest,
    describe_lowest,
    describe_methods,
    describe_sweep,
    describe_uncertainty,
    format_change,
    unit_label,
    unit_noun,
    unit_nouns,
)
from probes.influence.schema import SWEEP_KEYS

GLOSSARY = (
    Term(
        "Head influence",
        "Change of the next-token loss, in nats per token, when the learned position parameters of one head or KV "
        "group are reset, or when the head is ablated, and all others are unchanged. Above 0 the loss rises, so the "
        "model uses what was reset or ablated.",
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

MIN_TOP_SHARE = 0.5
"""Share of the total rise of the loss above which the top units account for most of the influence [ours]."""
_UNIT_NOUNS = {"group": "KV group", "head": "head"}


def findings(run: Run) -> Iterator[Finding]:
    """The paper's claims, then findings of every sweep."""
    yield from paper_claims(run)
    yield from sweep_findings(run)


def paper_claims(run: Run) -> Iterator[PaperClaim]:
    """The paper's claims about head influence and retrieval heads.

    Resets of AdaRoPE parameters to the start of training: the effects have a heavy tail, the top heads are in it, and
    the effects add up. Changes scored on answers: the top heads have the largest influence.
    """
    adapted = {model["label"] for model in run.manifest["models"] if model["scheme_name"] == "adarope"}
    for key, units in run.derived(sweeps_without_bands):
        label, length, component, target, objective = key
        heads = run.heads[run.heads["model"] == label]
        if not covers_all_units(units, heads):
            continue
        if objective == "answer":
            changes = changes_by_document(run, key)
            yield from _answer_claims(heads, units, changes, component, target)
            continue
        if label not in adapted or target != "init" or component not in ("joint", "freq", "scale"):
            continue
        noun, nouns = unit_noun(units), unit_nouns(units)
        change = describe_sweep(component, target, noun)
        order = units.sort_values("delta", ascending=False, ignore_index=True)
        changes, reason = changes_by_document(run, key), _missing_evidence(units)
        share, (low, high) = top_share(order["delta"]), top_share_interval(changes)
        yield PaperClaim(
            f"{change}: a few {nouns} account for most of the influence",
            "inconclusive" if reason else verdict_above(low, high, MIN_TOP_SHARE),
            f"{label}, {length:,} tokens: the top {format_percent(TOP_FRACTION)}, {top_unit_count(len(order))} of "
            f"{len(order)} {nouns}, contribute {format_percent(share)} of the total rise"
            f"{_format_bounds(low, high, format_percent)}{reason}",
            model=label,
            criterion=f"the top {format_percent(TOP_FRACTION)} contribute more than {format_percent(MIN_TOP_SHARE)}",
            data=FindingData(share, low, high, len(order)),
        )
        yield from _top_head_claims(heads, units, changes, change)
        effects = run.derived(ranked_set_effects).set_index(SWEEP_KEYS)
        if component == "joint" and key in effects.index:
            everything = effects.loc[[key]].query("choice == 'top'").sort_values("size").iloc[-1]
            largest = order.iloc[0]
            margin_low = everything["low"] / 4 - largest["high"]
            margin_high = everything["high"] / 4 - largest["low"]
            yield PaperClaim(
                f"{change}: the largest effect of one {noun} is small compared with resetting all of them",
                "inconclusive" if reason else verdict_above(margin_low, margin_high),
                f"{label}, {length:,} tokens: {format_change(largest['delta'])} nats/token for one {noun}"
                f"{_format_bounds(largest['low'], largest['high'])}, {format_change(everything['mean'])} for all "
                f"{len(order)}{_format_bounds(everything['low'], everything['high'])}{reason}",
                model=label,
                criterion="less than a quarter",
                data=FindingData(everything["mean"] / 4 - largest["delta"], margin_low, margin_high),
            )


def sweep_findings(run: Run) -> Iterator[Finding]:
    """Findings of each sweep, of its estimates, of sets of units and of bands of rotary pairs."""
    unit_rows = read_unit_rows(run)
    if unit_rows is None:
        return
    answered = run.derived(answered_trials)
    for sweep, units in run.derived(sweeps_without_bands):
        top_heads = top_heads_by_statistic(run.heads[run.heads["model"] == sweep[0]]) if sweep[-1] == "answer" else {}
        yield _sweep_finding(sweep, units, answered, top_heads)
    without_bands = unit_rows[~bands.band_mask(unit_rows["component"])]
    for key, rows in estimate_agreement(without_bands).groupby(SWEEP_KEYS, sort=False):
        yield _agreement_finding(key, rows)
    effects = run.derived(ranked_set_effects)
    groups: Any = effects.groupby([*SWEEP_KEYS, "unit"], observed=True, sort=False)
    for (label, length, component, target, objective, unit), block in groups:
        ranked = block[block["choice"] == "top"].sort_values("size")
        top, whole = ranked.set_index("size")["mean"], ranked.iloc[-1]
        if not bands.is_band(component):
            yield Finding(
                PROBE.title,
                f"{label}, {describe_change(component, target, objective)}, "
                f"{describe_context_length(length, objective)}: the loss changes by "
                f"{format_change(top.iloc[-1])} nats/token with all {top.index[-1]} {_UNIT_NOUNS[unit]}s changed, and "
                f"by {format_change(top.iloc[0])} with only the top {_UNIT_NOUNS[unit]} changed.",
                str(label),
                data=FindingData(whole["mean"], whole["low"], whole["high"]),
            )
    for row in run.derived(named_set_effects).to_dict("records"):
        data = FindingData(row["mean"], row["low"], row["high"])
        yield Finding(PROBE.title, _describe_named_set(row), str(row["model"]), data=data)
    for (label, length, objective), units in run.derived(band_sweeps):
        effects = joint_effects(run, label, length, objective)
        for kind in bands.KIND_DESCRIPTIONS:
            rows = units[units["component"].str.startswith(kind)]
            if len(rows):
                text = _describe_bands(label, length, objective, kind, rows, effects)
                yield Finding(PROBE.title, text, label, data=_unit_data(unit_of_largest_rise(rows)))


def head_findings(run: Run, model: str, layer: int, head: int) -> Iterator[str]:
    """Influence and rank of a head or its KV group in each sweep of a model, and its band of largest influence."""
    rows = run.heads[head_mask(run.heads, layer, head)]
    for (label, _, *change), units in run.derived(sweeps_without_bands) if len(rows) else ():
        for _, unit in unit_of_head(units, rows.iloc[0]).iterrows() if label == model else ():
            yield (
                f"Influence in {model}, {describe_change(*change)}: {format_change(unit['delta'])} nats/token"
                f"{describe_uncertainty(unit)} for {unit_label(unit)}, rank {unit_rank(units, unit)} of {len(units)}."
            )
    for (label, _, objective), units in run.derived(band_sweeps) if len(rows) else ():
        head_units = unit_of_head(units, rows.iloc[0]) if label == model else units.head(0)
        for kind in bands.KIND_DESCRIPTIONS:
            if len(band_rows := head_units[head_units["component"].str.startswith(kind)]):
                unit, count = unit_of_largest_rise(band_rows), len(band_rows)
                yield (
                    f"Influence in {model}, largest of {count} band{'s' if count > 1 else ''}, "
                    f"{describe_change(unit['component'], 'none', objective)}: {format_change(unit['delta'])} "
                    f"nats/token{describe_uncertainty(unit)} for {unit_label(unit)}."
                )


def _missing_evidence(units: pd.DataFrame) -> str:
    """Why the units of a sweep cannot decide a claim, to end its evidence; "" if they can."""
    estimated = int((units["method"] != "exact").sum())
    if estimated:
        verb = "was" if estimated == 1 else "were"
        return f"; {estimated} of {len(units)} {unit_nouns(units)} {verb} only estimated, so the claim is not decided"
    count = int(units["documents"].min())
    if count >= MIN_DOCUMENTS:
        return ""
    noun = TEXT_NOUNS[units["objective"].iloc[0]]
    return f"; one {noun} gives no interval" if count == 1 else f"; {count} {noun}s give no interval"


def _format_bounds(low: float, high: float, to_text: Callable[[float], str] = format_change) -> str:
    return "" if np.isnan(low) else f" (95 % confidence interval {to_text(low)} to {to_text(high)})"


def _top_head_claims(
    heads: pd.DataFrame, units: pd.DataFrame, changes: pd.DataFrame, change: str
) -> Iterator[PaperClaim]:
    """Claims that a model's top heads are among the units of largest influence."""
    size = top_unit_count(len(units))
    statement = (
        f"is among the {format_percent(TOP_FRACTION)} of {unit_nouns(units)} with the largest influence ({size} of "
        f"{len(units)})"
    )
    yield from _rank_claims(heads, units, changes, f"{change}: {{}} {statement}", size)


def _answer_claims(
    heads: pd.DataFrame, units: pd.DataFrame, changes: pd.DataFrame, component: str, target: str
) -> Iterator[PaperClaim]:
    """Claims that changing a model's top heads raises the loss of the answer most."""
    change = describe_change(component, target)
    change = f"Under {change}" if target == "none" else f"With {change}"
    statement = f"{change}, one {unit_noun(units)} at a time, {{}} has the largest influence on answers"
    yield from _rank_claims(heads, units, changes, statement, 1)


def _unit_of(head: str, unit: pd.Series) -> str:
    """A head, or the KV group that changes with it."""
    return f"the KV group of {head}" if unit["head"] < 0 else head


def _rank_claims(
    heads: pd.DataFrame, units: pd.DataFrame, changes: pd.DataFrame, statement: str, rank: int
) -> Iterator[PaperClaim]:
    """Claims that the top head of each statistic, or its KV group, is among the `rank` units of largest influence.

    The evidence is the difference to the unit that is `rank`-th among the others, paired by document.
    """
    reason, noun = _missing_evidence(units), unit_noun(units)
    for column, head in top_heads_by_statistic(heads).items():
        unit, declared = unit_of_head(units, head).iloc[0], statistic(column)
        difference, low, high = margin_over_rank(changes, unit, rank)
        rival = "the largest other influence" if rank == 1 else f"that of the {noun} at rank {rank} among the others"
        yield PaperClaim(
            statement.format(_unit_of(f"the {declared.best_head_name}", unit)),
            "inconclusive" if reason else verdict_above(low, high),
            f"{unit['model']}: {_unit_of(head_name(head), unit)} ({declared.label} {head[column]:.2f}) has rank "
            f"{unit_rank(units, unit)} of {len(units)} {unit_nouns(units)} by influence, with "
            f"{format_change(unit['delta'])} nats/token{describe_uncertainty(unit)}. Its influence minus {rival} is "
            f"{format_change(difference)} nats/token{_format_bounds(low, high)}{reason}",
            model=unit["model"],
            data=FindingData(difference, low, high, int(unit["documents"]), int(head["layer"]), int(head["head"])),
        )


def _sweep_finding(
    key: Any,
    units: pd.DataFrame,
    trials_by_model: Mapping[str, tuple[int, int, list[SweepUnits]]],
    top_heads: Mapping[str, pd.Series],
) -> Finding:
    """Concentration and largest units of a sweep; for answers, also the ranks of the top heads and answered trials."""
    label, length, component, target, objective = key
    order = units.sort_values("delta", ascending=False)
    largest, smallest = order.iloc[0], order.iloc[-1]
    significant = int((order["p_adjusted"] < 0.05).sum())
    changes = f"{significant} changes are" if significant > 1 else "1 change is" if significant else "No change is"
    significance = (
        f"{changes} significant after correction for {len(order)} tests (false discovery rate 5 %); intervals of "
        f"single {unit_nouns(units)} are uncorrected"
    )
    if "exact" not in set(order["method"]):
        significance = "Estimates do not decide whether a change is real"
    elif largest["documents"] < MIN_DOCUMENTS:
        significance = f"Too few {TEXT_NOUNS[objective]}s for a significance test"
    mixed = "; of exact and estimated changes together" if order["method"].nunique() > 1 else ""
    text = (
        f"{describe_sweep(component, target, unit_noun(units))} in {label} "
        f"({describe_context_length(length, objective)}): the loss{'' if objective == 'text' else ' of the answer'} "
        f"{describe_highest(largest, unit_label(largest))}. It {describe_lowest(smallest, unit_label(smallest))}. "
        f"{capitalise(describe_methods(order))}. The top {format_percent(TOP_FRACTION)} of {len(order)} "
        f"{unit_nouns(units)} contribute {format_percent(top_share(order['delta']))} of the total rise (Gini "
        f"coefficient of the absolute changes {gini(order['delta']):.2f}{mixed}). {significance}."
    )
    for column, head in top_heads.items():
        if (matches := unit_of_head(units, head)).empty:  # the sweep covers only heads of named sets
            continue
        unit = matches.iloc[0]
        subject = capitalise(_unit_of(f"the {statistic(column).best_head_name}", unit))
        text += (
            f" {subject}, {head_name(head)}, has rank {unit_rank(units, unit)} of {len(units)}, with "
            f"{format_change(unit['delta'])}{describe_uncertainty(unit)}."
        )
    if objective == "answer":
        answered, trials, answered_sweeps = trials_by_model[label]
        change = "ablation" if target == "none" else "resets"
        text += f" Without {change}, {label} answers {answered} of {trials} trials correctly"
        answered_units = next((rows for sweep, rows in answered_sweeps if sweep == key), None)
        if answered_units is not None:
            unit = unit_of_largest_rise(answered_units)
            text += f"; over these trials the loss {describe_highest(unit, unit_label(unit))}"
        text += "."
    return Finding(PROBE.title, text, label, data=_unit_data(largest))


def _unit_data(unit: pd.Series) -> FindingData:
    """The influence of one unit; a KV group has no head."""
    head = int(unit["head"]) if unit["head"] >= 0 else None
    return FindingData(unit["delta"], unit["low"], unit["high"], int(unit["documents"]), int(unit["layer"]), head)


def _describe_named_set(row: dict[Any, Any]) -> str:
    """Text with the effect of changing a named set of heads."""
    component, target, objective = row["component"], row["target"], row["objective"]
    interval = _format_bounds(row["low"], row["high"])
    return (
        f"{row['model']}, {describe_change(component, target, objective)}, "
        f"{describe_context_length(row['context_length'], objective)}: changing the {row['size']} heads of "
        f"“{row['choice']}” together changes the loss by {format_change(row['mean'])} nats/token{interval}."
    )


def _describe_bands(
    label: str, length: int, objective: str, kind: str, units: pd.DataFrame, effects: pd.DataFrame
) -> str:
    """Text with the unit and band of largest influence, and the effect of each band ablated in all heads."""
    largest = unit_of_largest_rise(units)
    means = effects[effects["component"].str.startswith(kind)].set_index("component")["mean"]
    listing = ", ".join(
        f"{bands.pairs_label(component)}: {format_change(means[component])}"
        for component in sorted(means.index, key=bands.band_sort_key)
    )
    joint = f". Changes with a band ablated in all heads at once, nats/token: {listing}" if listing else ""
    loss = "" if objective == "text" else " of the answer"
    name = f"{bands.pairs_label(largest['component'])} of {unit_label(largest)}"
    return (
        f"Rotary pairs of {label} by band, {bands.KIND_DESCRIPTIONS[kind]} in one {unit_noun(units)} at a time "
        f"({describe_context_length(length, objective)}): the loss{loss} {describe_highest(largest, name)}{joint}."
    )


def _agreement_finding(key: Any, rows: Any) -> Finding:
    """Agreement of the estimates of a sweep with exact evaluation."""
    label, length, component, target, objective = key
    first = rows.iloc[0]
    agreement = ", ".join(
        f"{row['spearman']:.2f} ({ESTIMATE_LABELS[row['method']]}"
        + (f"; {row['shared']} of the top {row['top']} in common)" if row["top"] < row["compared"] else ")")
        for row in rows.to_dict("records")
    )
    return Finding(
        PROBE.title,
        f"{label}, {describe_change(component, target, objective)}, {describe_context_length(length, objective)}: the "
        f"rank correlation of the estimates with exact evaluation over {first['compared']} {first['nouns']} is "
        f"{agreement}.",
        str(label),
        data=FindingData(first["spearman"], n=int(first["compared"])),
    )
