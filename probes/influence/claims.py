"""The paper's claims about head influence and retrieval heads, judged from a run. The thresholds are ours."""

from collections.abc import Iterator

import pandas as pd

from headscope.report.blocks import PaperClaim
from headscope.runs.column_metadata import capitalise, statistic
from headscope.runs.run import Run
from probes.influence.analysis import (
    TAIL_FRACTION,
    covers_all_units,
    describe_change,
    describe_uncertainty,
    gini,
    most_harmful_unit,
    ranked_set_effects,
    sweeps_without_bands,
    top_heads_by_statistic,
    top_share,
    unit_of_head,
    unit_rank,
)
from probes.influence.heads import COMPONENT_DESCRIPTIONS
from probes.influence.tables import SWEEP_KEYS


def claims(run: Run) -> Iterator[PaperClaim]:
    """Claims for sweeps that reset parameters to the initialisation: heavy tail, top heads in it, sum of the effects.
    Claims for sweeps of answers: the top heads have the largest influence."""
    adapted = {model["label"] for model in run.manifest["models"] if model["scheme_name"] == "adarope"}
    for key, units in run.derived(sweeps_without_bands):
        label, length, component, target, objective = key
        if not covers_all_units(units, run.heads[run.heads["model"] == label]):
            continue
        if objective == "answer":
            yield from _answer_claims(run.heads[run.heads["model"] == label], units, describe_change(component, target))
            continue
        if label not in adapted or target != "init" or component not in ("joint", "freq", "scale"):
            continue
        change = f"Resetting the {COMPONENT_DESCRIPTIONS[component]} of one head at a time"
        order = units.sort_values("delta", ascending=False, ignore_index=True)
        share = top_share(order["delta"])
        yield PaperClaim(
            f"{change}: most heads have little influence, a few form a heavy tail",
            "supported" if share > 0.5 else "partly supported" if share > 0.25 else "not supported",
            f"{label}, {length:,} tokens: the top {TAIL_FRACTION:.0%} of {len(order)} units contribute {share:.0%} of "
            f"the summed |Δ|, Gini {gini(order['delta']):.2f}",
            model=label,
        )
        yield from _top_head_claims(run.heads[run.heads["model"] == label], order, change)
        effects = run.derived(ranked_set_effects).set_index(SWEEP_KEYS)
        if component == "joint" and key in effects.index:
            effects = effects.loc[[key]]
            total = float(effects[effects["choice"] == "top"].sort_values("size")["mean"].iloc[-1])
            largest = float(order["delta"].iloc[0])
            yield PaperClaim(
                f"{change}: even the largest effect is small compared with resetting all heads",
                "supported" if largest < total / 4 else "not supported",
                f"{label}: {largest:+.2g} nats/token for one unit, {total:+.2g} for all",
                model=label,
            )


def _top_head_claims(heads: pd.DataFrame, sorted_units: pd.DataFrame, change: str) -> Iterator[PaperClaim]:
    """Whether a model's top heads are in the tail. `sorted_units` start with the largest rise of the loss."""
    for column, head in top_heads_by_statistic(heads).items():
        unit, declared = unit_of_head(sorted_units, head).iloc[0], statistic(column)
        rank = unit_rank(sorted_units, unit)
        yield PaperClaim(
            f"{change}: the {declared.best_head_name} is in the tail",
            "supported" if rank <= TAIL_FRACTION * len(sorted_units) else "not supported",
            f"{unit['model']}: layer {head['layer']}, head {head['head']}, {declared.label} {head[column]:.2f}, has "
            f"rank {rank} of {len(sorted_units)} with {unit['delta']:+.2g} nats/token",
            model=unit["model"],
        )


def _answer_claims(heads: pd.DataFrame, units: pd.DataFrame, change: str) -> Iterator[PaperClaim]:
    """Whether changing a model's top heads raises the loss of the answer most.

    Inconclusive unless every unit was evaluated: on answers an estimate can be wrong by a nat and hide the top head.
    """
    estimated = int((units["method"] != "exact").sum())
    reason = f"; {estimated} of {len(units)} units are only estimated. Use --method exact" if estimated else ""
    for column, head in top_heads_by_statistic(heads).items():
        (_, unit), *_ = unit_of_head(units, head).iterrows()
        declared, rank = statistic(column), unit_rank(units, unit)
        in_tail = rank <= TAIL_FRACTION * len(units)
        verdict = "supported" if rank == 1 else "partly supported" if in_tail else "not supported"
        yield PaperClaim(
            f"{capitalise(change)}, one unit at a time: the {declared.best_head_name} has the largest "
            "influence on answers",
            "inconclusive" if estimated else verdict,
            f"{unit['model']}: layer {head['layer']}, head {head['head']}, {declared.label} {head[column]:.2f}, has "
            f"rank {rank} of {len(units)} with {unit['delta']:+.2g} nats/token{describe_uncertainty(unit)}; the "
            f"largest is {most_harmful_unit(units)['delta']:+.2g}{reason}",
            model=unit["model"],
        )
