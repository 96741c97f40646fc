"""Results of the ablation probe: answers of the unchanged model, single heads, named heads together."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from headscope.effects.results import sweep_results
from headscope.effects.sweep import Effects, rows_of_sweep
from headscope.effects.units import unit_result
from headscope.prompts.answers import ANSWER_CRITERIA, gives_answer
from headscope.prompts.pairs import METRIC_LABELS, METRIC_UNITS
from headscope.report.text import head_mask
from headscope.results.answers import answered_result
from headscope.results.result import Result
from headscope.runs.run import Run
from probes.ablation.analysis import prompt_metrics, set_sweeps, sweeps, with_change
from probes.ablation.schema import ABLATION, ABLATION_SETS

DOUBT = "Answer and wrong answer may be exchanged"


def results(run: Run) -> Iterator[Result]:
    """The answers of the unchanged model, the heads of largest and lowest effect, and the named heads together."""
    if ABLATION.name not in run.tables:
        return
    yield from _answered_results(run)
    for effects in run.derived(sweeps):
        yield from sweep_results(effects, "ablation", "heads", _details(effects))
    if ABLATION_SETS.name in run.tables:
        for effects in run.derived(set_sweeps):
            yield _set_result(run, effects)


def _answered_results(run: Run) -> Iterator[Result]:
    """How many prompts of each set the unchanged model answers."""
    for (model, prompts, metric), values in run.derived(prompt_metrics).items():
        if metric in ANSWER_CRITERIA:
            where = {"prompts": prompts, "metric": metric}
            is_answered = pd.Series(gives_answer(metric, values.to_numpy()), values.index)
            unanswered = int((~is_answered).sum())
            yield answered_result("ablation.answered", metric, is_answered, unanswered, DOUBT, model=model, where=where)


def _set_result(run: Run, effects: Effects) -> Result:
    """The effect of ablating all named heads together."""
    rows, unit = rows_of_sweep(with_change(run.table(ABLATION_SETS.name)), effects.key), effects.units.iloc[0]
    details = {"size": int(unit["size"]), "before": rows["metric_before"].mean(), "after": rows["metric_after"].mean()}
    return unit_result(effects, unit, "ablation.set", details=_details(effects) | details)


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
    change = "streaming attention" if kind == "streaming" else f"{kind} ablation"
    return {"change": change, "label": METRIC_LABELS[metric], "label_unit": METRIC_UNITS[metric]}
