"""Results about a circuit of heads: faithfulness, minimality of its members, completeness."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import pandas as pd

from headscope.base.ablation_names import MEAN_OF_PROMPTS, column_part
from headscope.prompts.pairs import metric_label, metric_unit
from headscope.rendering.text import head_mask
from headscope.results.answers import answer_results
from headscope.results.effects.prompts import MAX_SUBSETS, prompts_that_count, rows_that_count
from headscope.results.effects.ranking import largest_unit
from headscope.results.effects.sweep import UNIT_KEYS, Effects, Sweep, rows_of_sweep, sweep_effects
from headscope.results.effects.units import head_columns, unit_name, unit_result
from headscope.results.result import Result
from headscope.runs.aggregation import (
    MIN_DOCUMENTS,
    SIGNIFICANCE,
    confidence_interval,
    linearise_ratios,
    plain_types,
    ratio_of_means_interval,
)
from headscope.runs.column_metadata import Statistic
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from probes.circuit.declaration import CIRCUIT, CIRCUIT_MEMBERS, WHOLE

KEYS = ("model", "prompts", "complement", "metric")
ABLATED = {MEAN_OF_PROMPTS: "mean-ablated over prompts", "resample": "resample-ablated", "zero": "zero-ablated"}
"""What is done to the other heads, by ablation."""
RISING_METRICS = ("nll", "rank", "kl")
"""Metrics that rise when the answer gets worse. The others fall, also one of the user."""
MEMBERS = Sweep(keys=KEYS, sample="pair", value="minimality", units=(*UNIT_KEYS, "positions"))
"""Minimality of every member: m(C) - m(C without v)."""
SUBSETS = Sweep(keys=KEYS, sample="pair", value="difference", units=("subset",))
"""Completeness of every removed subset K: m(M without K) - m(C without K), over the prompts that did not choose it."""


STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        f"circuit_{column_part(complement)}": Statistic(
            f"minimality in the circuit, others {name}",
            "logits or nats",
            "answer's metric of the circuit minus that of the circuit without the head, mean over the prompts of all "
            f"sets that count in every model (is_counted); all other heads are {name}. The sum over its positions if "
            "they are separate members; empty for heads outside of the circuit",
            number_format="+.3g",
        )
        for complement, name in ABLATED.items()
    }
)


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """Columns `circuit_<complement>` by (model, layer, head, kv_group), each with its interval over prompts.

    A head that is a member at several places has the sum of their minimalities.
    """
    if CIRCUIT_MEMBERS.name not in run.tables:
        return None
    members = _counted_members(run)
    if members.empty:
        return None
    by_member: Any = members.groupby([*KEYS, *UNIT_KEYS, "pair"], sort=False)
    rows = by_member["minimality"].sum().reset_index()
    rows = rows.assign(
        doc=rows["prompts"] + "/" + rows["pair"], column="circuit_" + rows["complement"].map(column_part)
    )
    return head_columns(run, rows, MEMBERS)


def member_sweeps(run: RunTables) -> list[Effects]:
    """The minimality of the members of every circuit."""
    return sweep_effects(_counted_members(run), MEMBERS, run.models)


def _counted_members(run: RunTables) -> pd.DataFrame:
    """The rows of members that count with `minimality`: the metric of the circuit minus that without the member."""
    rows = rows_that_count(run.table(CIRCUIT_MEMBERS.name))
    return rows.assign(minimality=rows["metric_circuit"] - rows["metric_without"])


def counted_rows(run: RunTables) -> pd.DataFrame:
    """The rows of the table `circuit` that count."""
    return rows_that_count(run.table(CIRCUIT.name))


def prompt_metrics(run: RunTables) -> pd.DataFrame:
    """One row per prompt of every model and set: model, prompts, metric, pair, is_counted, and `metric_clean` of the
    unchanged run."""
    keys, rows = ["model", "prompts", "metric", "pair"], run.table(CIRCUIT.name)
    rows = rows.loc[rows["subset"] == WHOLE, [*keys, "metric_model", "is_counted"]].drop_duplicates(keys)
    return plain_types(rows).rename(columns={"metric_model": "metric_clean"})


def subset_sweeps(run: RunTables, family: str) -> list[Effects]:
    """The difference between model and circuit for the removed subsets of a family: none, random or greedy."""
    rows = counted_rows(run)
    rows = rows[~rows["is_selecting"] & rows["subset"].str.startswith(family)]
    return sweep_effects(rows.assign(difference=rows["metric_model"] - rows["metric_circuit"]), SUBSETS, run.models)


def circuit_rows(run: RunTables) -> dict[tuple[str, ...], pd.DataFrame]:
    """The rows of whole circuits that count by model, prompts, complement and metric; the pair is the index."""
    rows = counted_rows(run)
    groups: Any = rows[rows["subset"] == WHOLE].groupby([*KEYS], sort=False)
    return {key: group.set_index("pair") for key, group in groups}


@dataclass(frozen=True)
class Faithfulness:
    """(m_C - m_0) / (m_M - m_0) of the mean metrics over prompts, with Fieller's 95 % confidence interval.

    Fieller's interval has the ratios R at which Student's t test over prompts does not reject a mean of 0 for
    (m_C - m_0) - R (m_M - m_0). In simulations of skewed changes over 4 to 30 prompts it covers 0.95 to 0.97, and the
    linearised ratio 0.91 to 0.96. NaN without an interval.
    """

    value: float
    low: float
    high: float
    by_prompt: pd.Series
    """The linearised ratio of every prompt, whose mean is `value`."""


def faithfulness(rows: pd.DataFrame) -> Faithfulness | None:
    """The faithfulness of a circuit from the rows of the whole circuit.

    None if m_M - m_0 is not clearly different from 0: then the interval is unbounded.
    """
    circuit, model = (
        (rows[f"metric_{name}"] - rows["metric_empty"]).to_numpy(np.float64)[None] for name in ("circuit", "model")
    )
    (low,), (high,) = confidence_interval(model)
    if model.mean() == 0 or low <= 0 <= high:
        return None
    by_prompt = linearise_ratios(circuit, model)
    (low,), (high,) = ratio_of_means_interval(by_prompt, model)
    return Faithfulness(float(by_prompt.mean()), float(low), float(high), pd.Series(by_prompt[0], rows.index))


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
