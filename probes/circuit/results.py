"""Results about a circuit of heads: faithfulness, minimality of its members, completeness."""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import pandas as pd

from headscope.effects.prompts import MAX_SUBSETS, prompts_that_count
from headscope.effects.ranking import largest_unit
from headscope.effects.sweep import Effects, rows_of_sweep
from headscope.effects.units import unit_name, unit_result
from headscope.prompts.pairs import metric_label, metric_unit
from headscope.rendering.text import head_mask
from headscope.results.answers import answer_results
from headscope.results.result import Result
from headscope.runs.aggregation import MIN_DOCUMENTS, SIGNIFICANCE
from headscope.runs.run import Run
from probes.circuit.analysis import (
    ABLATED,
    KEYS,
    RISING_METRICS,
    circuit_rows,
    counted_rows,
    faithfulness,
    member_sweeps,
    prompt_metrics,
    subset_sweeps,
)
from probes.circuit.schema import CIRCUIT, CIRCUIT_MEMBERS, WHOLE


def results(run: Run) -> Iterator[Result]:
    """The answers of the unchanged model, and faithfulness, minimality and completeness of every circuit."""
    if CIRCUIT.name not in run.tables:
        return
    prompts = run.derived(prompt_metrics)
    yield from answer_results("circuit", prompts, prompts_that_count(prompts))
    members = {tuple(effects.key.values()): effects for effects in run.derived(member_sweeps)}
    for key, rows in run.derived(circuit_rows).items():
        yield from _whole_results(key, rows)
        yield from _member_results(members[key])
        yield from _subset_results(run, key)


def head_results(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """The minimality of one head in every circuit of a model."""
    if CIRCUIT_MEMBERS.name not in run.tables:
        return
    for effects in run.derived(member_sweeps):
        if effects.model == model:
            for _, unit in effects.units[head_mask(effects.units, layer, head)].iterrows():
                where = {**effects.where, "member": unit_name(unit)}
                yield unit_result(effects, unit, "circuit.member", details=details(effects.key), where=where)


def details(key: Any) -> dict[str, str]:
    """What names a circuit in sentences besides its keys."""
    metric = key["metric"]
    return {
        "ablated": ABLATED[key["complement"]],
        "label": metric_label(metric),
        "label_unit": metric_unit(metric),
    }


def _whole_results(key: tuple[str, ...], rows: pd.DataFrame) -> Iterator[Result]:
    """The metrics of every prompt, and the faithfulness of the circuit."""
    model, *where = key
    place: dict[str, Any] = {"model": model, "where": dict(zip(KEYS[1:], where, strict=True))}
    names = details(place["where"])
    if 1 < len(rows) <= MAX_SUBSETS:
        for pair, row in rows.iterrows():
            yield Result(
                question="circuit.prompt",
                value=float(row["metric_circuit"]),
                model=model,
                where={**place["where"], "pair": str(pair)},
                details={**names, "model_metric": row["metric_model"], "empty": row["metric_empty"]},
            )
    score = faithfulness(rows)
    if score is None:
        change = float((rows["metric_empty"] - rows["metric_model"]).mean())
        yield Result(question="circuit.undefined", value=change, n=len(rows), details=names, **place)
        return
    means = {name: float(rows[f"metric_{name}"].mean()) for name in ("circuit", "empty")}
    means |= {"model_mean": float(rows["metric_model"].mean())}
    fields = {"size": int(rows["size"].iloc[0]), **names, **means}
    by_prompt = dict(zip(map(str, rows.index), score.by_prompt.tolist(), strict=True))
    ratio: dict[str, Any] = {"value": score.value, "low": score.low, "high": score.high, "n": len(rows)}
    yield Result(question="circuit.faithfulness", by_sample=by_prompt, details=fields, **ratio, **place)


def _member_results(effects: Effects) -> Iterator[Result]:
    """How many members are needed, and the minimality of each."""
    units, names = effects.units, details(effects.key)
    rises = effects.key["metric"] in RISING_METRICS
    if units["n"].max() >= MIN_DOCUMENTS:
        is_clear = units["p_adjusted"] < SIGNIFICANCE
        is_needed = is_clear & ((units["effect"] < 0) if rises else (units["effect"] > 0))
        others, harmful = (
            ", ".join(unit_name(unit) for _, unit in units[chosen].iterrows())
            for chosen in (~is_clear, is_clear & ~is_needed)
        )
        fields = {**names, "size": len(units), "rate": SIGNIFICANCE, "others": others, "harmful": harmful}
        fields |= {"worsens": "rises" if rises else "falls", "improves": "falls" if rises else "rises"}
        place: dict[str, Any] = {"model": effects.model, "where": effects.where}
        yield Result(
            question="circuit.minimal", value=int(is_needed.sum()), n=int(units["n"].max()), details=fields, **place
        )
    for _, unit in units.sort_values("effect", ascending=rises, kind="stable").iterrows():
        where = {**effects.where, "member": unit_name(unit)}
        yield unit_result(effects, unit, "circuit.member", details=names, where=where)


def _subset_results(run: Run, key: tuple[str, ...]) -> Iterator[Result]:
    """The random subset, and the greedy subset, that separate model and circuit most."""
    sweeps = {family: _sweep(run.derived(subset_sweeps, family), key) for family in (WHOLE, "random", "greedy")}
    whole = cast(Effects, sweeps[WHOLE]).values.loc[WHOLE]
    for family, effects in sweeps.items():
        if family == WHOLE or effects is None:
            continue
        unit = largest_unit(effects, by_size=True) if family == "random" else _last_step(effects)
        rows = rows_of_sweep(run.derived(counted_rows), effects.key)
        removed = rows.loc[rows["subset"] == unit["subset"], "heads"].iloc[0]
        same_prompts = float(whole[effects.values.columns].to_numpy().mean())
        fields = {"subset": unit["subset"], "removed": removed, "whole": same_prompts, "subsets": len(effects.units)}
        yield unit_result(effects, unit, f"circuit.{family}", details={**fields, **details(effects.key)})


def _last_step(effects: Effects) -> pd.Series:
    """The largest greedy subset."""
    steps = effects.units["subset"].str.removeprefix("greedy ").astype(int)
    return effects.units.iloc[int(steps.argmax())]


def _sweep(effects: Sequence[Effects], key: tuple[str, ...]) -> Effects | None:
    """The sweep of a circuit, if it has one."""
    return next((one for one in effects if tuple(one.key.values()) == key), None)
