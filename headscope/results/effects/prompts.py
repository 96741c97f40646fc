"""Effects over a set of prompts: which prompts count, and the effects in single prompts or groups of them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from headscope.prompts.pairs import metric_label
from headscope.results.effects.ranking import largest_unit, next_units
from headscope.results.effects.sweep import Effects, Sweep, shared_samples, sweep_effects
from headscope.results.effects.units import unit_name, unit_result
from headscope.results.result import Result
from headscope.runs.aggregation import plain_types

SET_KEYS = ["prompts", "metric"]
MAX_SUBSETS = 12
"""Most prompts of a set that have results of their own; in a larger set its groups have, if they are so few [ours]."""
RUNS = ("clean", "corrupted")
"""The unchanged runs of a prompt."""
NEXT_UNITS = 2
"""Units that follow the largest one of a prompt."""


def prompts_that_count(prompts: pd.DataFrame) -> pd.DataFrame:
    """The prompts that means are over, one row each: prompts, metric, pair. They count in every model.

    `prompts` has these columns, `model` and `is_counted`. Models in which no prompt of the set counts are disregarded.
    """
    return shared_samples(prompts[prompts["is_counted"]], SET_KEYS, "pair")


def rows_that_count(rows: pd.DataFrame, prompts: pd.DataFrame | None = None) -> pd.DataFrame:
    """The rows of the prompts that count in every model: those of the rows themselves, or of another table's
    `prompts_that_count`."""
    rows = plain_types(rows[rows["is_counted"]])
    return rows.merge(prompts_that_count(rows) if prompts is None else prompts)


def subset_names(rows: pd.DataFrame) -> pd.Series:
    """The prompt or group whose own results each row of one set belongs to; "" if there are none.

    Columns: pair and, where pairs have one, group. A set of one prompt has no others to separate it from.
    """
    pairs, groups = rows["pair"].nunique(), rows["group"].nunique() if "group" in rows else 0
    if 1 < pairs <= MAX_SUBSETS:
        return rows["pair"]
    return rows["group"] if 1 < groups <= MAX_SUBSETS else pd.Series("", rows.index)


def with_subsets(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of prompts or groups that have results of their own, with their `subset`."""
    sets = [members.assign(subset=subset_names(members)) for _, members in rows.groupby("prompts", sort=False)]
    rows = pd.concat(sets) if sets else rows.assign(subset="")
    return rows[rows["subset"] != ""]


def by_subset(sweep: Sweep) -> Sweep:
    """A sweep over a set as one of each subset, whose last key is `subset`."""
    return replace(sweep, keys=(*sweep.keys, "subset"))


def subset_sweeps(rows: pd.DataFrame, sweep: Sweep, models: Sequence[str]) -> list[Effects]:
    """The sweeps of every prompt or group that has results of its own, in the order of the set."""
    return sweep_effects(with_subsets(rows), by_subset(sweep), models)


def subset_result(
    effects: Effects, question: str, prompts: pd.DataFrame, details: Mapping[str, Any], by_size: bool = False
) -> Result:
    """The unit of largest effect in one prompt or group (`subset_sweeps`), those that follow, and the most negative.

    `prompts` has the unchanged metrics: model, prompts, metric, pair, `metric_clean` and perhaps `metric_corrupted`.
    `by_size` orders by absolute effect, so that no negative effect hides.
    Effects of which none is positive are ordered so as well.
    """
    by_size = by_size or not (effects.candidates["effect"] > 0).any()
    names = [str(name) for name in effects.values.columns]
    where = effects.where
    subset = where.pop("subset")
    where["pair" if names == [subset] else "group"] = subset
    own = prompts[(prompts["model"] == effects.model) & prompts["pair"].isin(names)]
    for name in SET_KEYS:
        own = own[own[name] == where[name]]
    largest, negative = largest_unit(effects, by_size=by_size), largest_unit(effects, ascending=True)
    following = next_units(effects, NEXT_UNITS, by_size)
    is_hidden = not by_size and negative["effect"] < 0
    own_details = {
        **details,
        "next": {unit_name(unit): float(unit["effect"]) for _, unit in following.iterrows()},
        "negative": {unit_name(negative): float(negative["effect"])} if is_hidden else {},
        "label": metric_label(where["metric"]),
        **{name: float(own[f"metric_{name}"].mean()) for name in RUNS if f"metric_{name}" in own},
    }
    fields: dict[str, Any] = {"where": where, "details": own_details}
    if "pair" in where:
        fields["n"] = None  # one prompt is no sample of prompts
    return unit_result(effects, largest, question, **fields)
