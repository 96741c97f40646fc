"""Results of the ablation probe: answers of the unchanged model, single heads, named heads together."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from headscope.ablation_names import describe_ablation
from headscope.effects.prompts import prompts_that_count, subset_result
from headscope.effects.ranking import largest_unit
from headscope.effects.results import leads, sweep_results
from headscope.effects.sweep import Effects, rows_of_sweep
from headscope.effects.units import unit_result
from headscope.prompts.pairs import metric_label, metric_unit
from headscope.rendering.text import head_mask
from headscope.results.answers import answer_results
from headscope.results.result import Bound, Result
from headscope.results.samples import mean_result
from headscope.results.verdicts import judge
from headscope.runs.run import Run
from probes.ablation.analysis import counted_rows, prompt_metrics, prompt_sweeps, set_sweeps, sweeps
from probes.ablation.schema import ABLATION, ABLATION_SETS


def results(run: Run) -> Iterator[Result]:
    """The answers of the unchanged model, the heads of largest and lowest effect, and the named heads together."""
    if ABLATION.name not in run.tables:
        return
    prompts = run.derived(prompt_metrics)
    yield from answer_results("ablation", prompts, prompts_that_count(prompts))
    for effects in run.derived(prompt_sweeps):
        yield subset_result(effects, "ablation.prompt", prompts, _details(effects), by_size=True)
    if ABLATION_SETS.name in run.tables:
        controls = {tuple(control.key.values()): control for control in run.derived(set_sweeps, True)}
        for effects in run.derived(set_sweeps):
            control = controls.get(tuple(effects.key.values()))
            yield _set_result(run, effects, has_control=control is not None)
            if control is not None:
                yield _control_result(effects, control)
    for effects in run.derived(sweeps):
        yield from sweep_results(effects, "ablation", "heads", _details(effects))
        if len(effects.units) > 1:
            unit = largest_unit(effects, by_size=True)
            yield unit_result(effects, unit, "ablation.largest", details=_details(effects) | {"leads": leads(unit)})


def _set_result(run: Run, effects: Effects, has_control: bool) -> Result:
    """The effect of ablating all named heads together."""
    rows, unit = rows_of_sweep(counted_rows(run.table(ABLATION_SETS.name)), effects.key), effects.units.iloc[0]
    rows = rows[rows["draw"] == 0]
    details: dict[str, Any] = {"size": int(unit["size"])}
    details |= {"before": rows["metric_before"].mean(), "after": rows["metric_after"].mean()}
    if not has_control:
        details["control"] = "these heads have no random control"
    return unit_result(effects, unit, "ablation.set", details=_details(effects) | details)


def _control_result(named: Effects, control: Effects) -> Result:
    """Whether the named heads matter more than as many random heads, by the differences on the same prompts."""
    by_set = [effects.units.iloc[0] for effects in (named, control)]
    named_values, random_values = (
        pd.Series(effects.by_sample(unit)) for effects, unit in zip((named, control), by_set, strict=True)
    )
    rises = named.key["metric"] in ("nll", "rank")
    details: dict[str, Any] = {"size": int(by_set[0]["size"]), "comparative": "higher" if rises else "lower"}
    for name, unit in zip(("named", "random"), by_set, strict=True):
        details |= {name: float(unit["effect"]), f"{name}_low": float(unit["low"]), f"{name}_high": float(unit["high"])}
    difference = mean_result(
        "ablation.control",
        named_values - random_values,
        model=named.model,
        where=named.where,
        details=_details(named) | details,
    )
    return judge(difference, Bound("above" if rises else "below", 0.0))


def head_results(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """The change for one head in every sweep of a model."""
    if ABLATION.name not in run.tables:
        return
    for effects in run.derived(sweeps):
        if effects.model != model:
            continue
        for _, unit in effects.units[head_mask(effects.units, layer, head)].iterrows():
            yield unit_result(effects, unit, "ablation.head", details=_details(effects))


def _details(effects: Effects) -> dict[str, Any]:
    """What names a sweep in sentences besides its keys."""
    kind, metric = effects.key["intervention"], effects.key["metric"]
    name, *place = kind.split(maxsplit=1)
    return {
        "change": " ".join([describe_ablation(name), *place]),
        "label": metric_label(metric),
        "label_unit": metric_unit(metric),
    }
