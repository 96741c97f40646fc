"""What the paper says of head influence, against a run, and what it says of retrieval heads, asked of answers.

Thresholds are ours and stand in each claim's text.
"""

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
    """Of each sweep back to the initialisation: how influence is spread, where the leading heads lie, the sum. Of each
    sweep of answers: whether the leading heads stand at its extreme."""
    adapted = {model["label"] for model in run.manifest["models"] if str(model["scheme"]).startswith("adarope:")}
    for key, units in run.derived(sweeps_without_bands):
        label, length, component, target, objective = key
        if not covers_all_units(units, run.heads[run.heads["model"] == label]):
            continue
        if objective == "answer":
            yield from _answer_claims(run.heads[run.heads["model"] == label], units, describe_change(component, target))
            continue
        if label not in adapted or target != "init" or component not in ("joint", "freq", "scale"):
            continue
        what = f"Resetting the {COMPONENT_DESCRIPTIONS[component]} of one head at a time"
        order = units.sort_values("delta", ascending=False, ignore_index=True)
        share = top_share(order["delta"])
        yield PaperClaim(
            f"{what}: most matter little, a small set forms a heavy tail",
            "holds" if share > 0.5 else "holds in part" if share > 0.25 else "differs",
            f"{label}, {length:,} tokens: the top {TAIL_FRACTION:.0%} of {len(order)} units hold {share:.0%} of "
            "the summed "
            f"|delta|, Gini {gini(order['delta']):.2f}",
            model=label,
        )
        yield from _top_head_claims(run.heads[run.heads["model"] == label], order, what)
        effects = run.derived(ranked_set_effects).set_index(SWEEP_KEYS)
        if component == "joint" and key in effects.index:
            effects = effects.loc[[key]]
            whole = float(effects[effects["choice"] == "top"].sort_values("size")["mean"].iloc[-1])
            most = float(order["delta"].iloc[0])
            yield PaperClaim(
                f"{what}: even the largest loss is modest against that of resetting all",
                "holds" if most < whole / 4 else "differs",
                f"{label}: {most:+.2g} nats/token against {whole:+.2g}",
                model=label,
            )


def _top_head_claims(heads: pd.DataFrame, sorted_units: pd.DataFrame, change: str) -> Iterator[PaperClaim]:
    """Where the units of a model's leading heads stand; `order` has the most harmful reset first."""
    for column, head in top_heads_by_statistic(heads).items():
        unit, shown = unit_of_head(sorted_units, head).iloc[0], statistic(column)
        place = unit_rank(sorted_units, unit)
        yield PaperClaim(
            f"{change}: the {shown.best_head_name} lies in the tail",
            "holds" if place <= TAIL_FRACTION * len(sorted_units) else "differs",
            f"{unit['model']}: layer {head['layer']}, head {head['head']}, {shown.label} {head[column]:.2f}, has rank "
            f"{place} of {len(sorted_units)} with {unit['delta']:+.2g} nats/token",
            model=unit["model"],
        )


def _answer_claims(heads: pd.DataFrame, units: pd.DataFrame, change: str) -> Iterator[PaperClaim]:
    """Whether the change that harms the answer most is that of a model's leading heads.

    Only where every unit was evaluated: on answers an estimate can be off by a nat, and hide the head that leads.
    """
    estimated = int((units["method"] != "exact").sum())
    guessed = f"; {estimated} of {len(units)} units only estimated (--method exact evaluates them)" if estimated else ""
    for column, head in top_heads_by_statistic(heads).items():
        (_, unit), *_ = unit_of_head(units, head).iterrows()
        shown, place = statistic(column), unit_rank(units, unit)
        verdict = "holds" if place == 1 else "holds in part" if place <= TAIL_FRACTION * len(units) else "differs"
        yield PaperClaim(
            f"{capitalise(change)}, one unit at a time: the {shown.best_head_name} stands at the extreme of the "
            "histogram of answers",
            "cannot be told" if estimated else verdict,
            f"{unit['model']}: layer {head['layer']}, head {head['head']}, {shown.label} {head[column]:.2f}, has rank "
            f"{place} of {len(units)} with {unit['delta']:+.2g} nats/token{describe_uncertainty(unit)}; the extreme is "
            f"{most_harmful_unit(units)['delta']:+.2g}{guessed}",
            model=unit["model"],
        )
