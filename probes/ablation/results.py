"""Results of the ablation probe: effects of every head over prompts, and of named heads together."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pandas as pd

from headscope.base.ablation_names import column_part, describe_ablation
from headscope.prompts.pairs import metric_label, metric_unit
from headscope.prompts.token_positions import describe_positions
from headscope.rendering.text import head_mask
from headscope.results.answers import answer_results
from headscope.results.effects.prompts import prompts_that_count, rows_that_count, subset_result, subset_sweeps
from headscope.results.effects.ranking import largest_unit
from headscope.results.effects.results import leads, sweep_results
from headscope.results.effects.sweep import Effects, Sweep, rows_of_sweep, sweep_effects
from headscope.results.effects.units import head_columns, unit_result
from headscope.results.result import Bound, Result
from headscope.results.samples import mean_result
from headscope.results.verdicts import judge
from headscope.runs.aggregation import plain_types
from headscope.runs.column_metadata import Statistic
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from probes.ablation.declaration import ABLATION, ABLATION_SETS, KINDS, POSITIONS_MARK

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        f"ablation_{column_part(kind)}": Statistic(
            f"{describe_ablation(kind)} on prompts",
            "logits or nats",
            f"change of the answer's metric under {describe_ablation(kind)} of the head at all positions, "
            "mean over the prompts of all sets that count in every model (is_counted)",
            number_format="+.3g",
        )
        for kind in KINDS
    }
)
SWEEP = Sweep(keys=("model", "prompts", "metric", "intervention"), sample="pair", value="change")
"""Ablations of single heads. The intervention is the kind of ablation."""
SET_SWEEP = replace(SWEEP, units=("size",))
"""Ablations of all named heads together."""


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """Columns `ablation_<kind>` by (model, layer, head, kv_group), each with its confidence interval over prompts.

    Ablations at some positions have none.
    """
    if ABLATION.name not in run.tables:
        return None
    rows = counted_rows(run.table(ABLATION.name))
    rows = rows[~rows["intervention"].str.contains(POSITIONS_MARK, regex=False)]
    if rows.empty:
        return None
    kinds = rows["intervention"].unique()
    windows = [kind for kind in kinds if kind.startswith("streaming:")]
    names = {kind: column_part(kind) for kind in kinds} | ({windows[0]: "streaming"} if len(windows) == 1 else {})
    rows = rows.assign(doc=rows["prompts"] + "/" + rows["pair"], column="ablation_" + rows["intervention"].map(names))
    return head_columns(run, rows, SWEEP)


def sweeps(run: RunTables) -> list[Effects]:
    """Every sweep of single heads."""
    return sweep_effects(counted_rows(run.table(ABLATION.name)), SWEEP, run.models)


def prompt_sweeps(run: RunTables) -> list[Effects]:
    """The sweeps of single heads in every prompt that has results of its own."""
    return subset_sweeps(counted_rows(run.table(ABLATION.name)), SWEEP, run.models)


def set_sweeps(run: RunTables, is_control: bool = False) -> list[Effects]:
    """Every sweep of the named heads together, or of random heads (mean over the sets of a prompt), as one unit."""
    rows = counted_rows(run.table(ABLATION_SETS.name))
    return sweep_effects(rows[(rows["draw"] > 0) == is_control], SET_SWEEP, run.models)


def counted_rows(table: pd.DataFrame) -> pd.DataFrame:
    """The rows that count with `change`, metric after minus before, and the kind of ablation as `intervention`."""
    rows = rows_that_count(table).rename(columns={"kind": "intervention"})
    return rows.assign(change=rows["metric_after"] - rows["metric_before"])


def prompt_metrics(run: RunTables) -> pd.DataFrame:
    """One row per prompt of every model and set: model, prompts, metric, pair, is_counted, and `metric_clean` of the
    unchanged run."""
    keys = ["model", "prompts", "metric", "pair"]
    rows = run.table(ABLATION.name)[[*keys, "metric_before", "is_counted"]].drop_duplicates(keys)
    return plain_types(rows).rename(columns={"metric_before": "metric_clean"})


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
    name, mark, positions = kind.partition(POSITIONS_MARK)
    return {
        "change": describe_ablation(name) + mark + describe_positions(positions),
        "label": metric_label(metric),
        "label_unit": metric_unit(metric),
    }
