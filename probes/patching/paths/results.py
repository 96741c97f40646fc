"""Results of path patching: the pairs, every sweep, and the strongest paths of single heads."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.prompts.token_positions import ALL_TOKENS
from headscope.rendering.blocks import Overview
from headscope.results.answers import answer_results
from headscope.results.effects.prompts import MAX_SUBSETS
from headscope.results.effects.ranking import chosen_unit
from headscope.results.effects.results import sweep_results
from headscope.results.effects.sweep import Effects, Sweep, sweep_effects, with_mean_estimates
from headscope.results.effects.units import unit_result
from headscope.results.result import Result
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from probes.patching.analysis import pair_metrics, path_name, with_difference
from probes.patching.declaration import describe_min_difference
from probes.patching.paths import PROBE
from probes.patching.paths.declaration import LOGITS, PATH_ENDS, PATH_ESTIMATES, PATH_KEYS, PATHS, PLACE_KEYS, TOGETHER

PATH_COLUMNS = [column.name for column in (*PATH_KEYS, *PLACE_KEYS)]
LAYER_AND_HEAD_COLUMNS = PATH_COLUMNS[:4]
PLACE_COLUMNS = PATH_COLUMNS[5:]
MAX_LAYER_OR_HEAD = 1 << 11
"""Upper bound of layer and head numbers, so that a path with its positions fits in 64 bits."""
SORTED_PATH_ENDS = sorted(PATH_ENDS)
ANYWHERE = (ALL_TOKENS, ALL_TOKENS)
"""The positions of paths that are patched at all positions."""

SWEEP = Sweep(
    keys=("model", "prompts", "metric", "direction", "norms", "mlps"),
    sample="pair",
    value="effect",
    weight="difference",
    units=("path",),
    methods=("exact", "estimate"),
)
"""Patches of one path at its positions; there may be millions of estimates, so a path is one number."""
PAIR_SWEEP = replace(SWEEP, keys=(*SWEEP.keys, "pair_name"))
"""Patches of one path in one pair of a set."""


def sweeps(run: RunTables) -> list[Effects]:
    """The sweeps of a run in the order of its models; see `sweeps_of_model`."""
    return [effects for model in run.models for effects in run.derived(sweeps_of_model, model)]


def sweeps_of_model(run: RunTables, model: str) -> list[Effects]:
    """The sweeps of a model; `units` has one row per path, in the order of the path's columns, which it also has."""
    places = run.derived(_places)
    exact = {tuple(effects.key.values()): effects for effects in _exact_effects(run, model)}
    estimates = _estimates(run, model)
    return [_path_effects(key, exact.get(key), estimates.get(key), places) for key in sorted({*exact, *estimates})]


def pair_sweeps(run: RunTables) -> list[Effects]:
    """The patched paths of every pair of a set with few pairs, in the order of the models, then of the set."""
    effects = [one for model in run.models for one in _exact_effects(run, model, PAIR_SWEEP)]
    return [_path_effects(tuple(one.key.values()), one, None, run.derived(_places)) for one in effects]


def strongest_paths(effects: Effects, paths: pd.DataFrame, count: int) -> pd.DataFrame:
    """The paths of largest |effect| among `paths`, rows of `effects.units`, strongest first, of the exact ones if there
    are any."""
    exact = paths[paths["method"] == effects.sweep.methods[0]]
    candidates = exact if len(exact) else paths
    return candidates.loc[candidates["effect"].abs().sort_values(ascending=False, kind="stable").index[:count]]


def _exact_effects(run: RunTables, model: str, sweep: Sweep = SWEEP) -> list[Effects]:
    if PATHS.name not in run.tables:
        return []
    rows = run.table(PATHS.name)
    rows = rows[(rows["model"] == model) & rows["is_counted"]]
    numbers = _path_numbers(rows, run.derived(_places))
    rows = rows.assign(mlps=np.where(rows["mlps_recomputed"], "recomputed", "frozen"), path=numbers)
    if sweep is PAIR_SWEEP:
        pairs = rows.groupby("prompts", observed=True)["pair"].transform("nunique")
        rows = rows[pairs.between(2, MAX_SUBSETS)]
        rows = rows.assign(pair_name=rows["pair"])
    columns = [*sweep.keys, sweep.sample, sweep.value, sweep.weight, "path"]
    return sweep_effects(with_difference(rows)[columns], sweep, [model])


def _estimates(run: RunTables, model: str) -> dict[tuple[Any, ...], pd.DataFrame]:
    """The estimate of every path of each sweep, and the number of its pairs, by path number."""
    if PATH_ESTIMATES.name not in run.tables:
        return {}
    places, everywhere = run.derived(_places), dict(zip(PLACE_COLUMNS, ANYWHERE, strict=True))
    rows = run.table(PATH_ESTIMATES.name).assign(mlps="frozen", **everywhere)
    groups: Any = rows[rows["model"] == model].groupby([*SWEEP.keys], sort=False, observed=True)
    return {
        key: pd.DataFrame(
            {
                "estimate": block["change"].to_numpy(np.float64) / block["difference"].to_numpy(np.float64),
                "n": block["pairs"].to_numpy(),
            },
            _path_numbers(block, places),
        )
        for key, block in groups
    }


def _places(run: RunTables) -> list[tuple[str, ...]]:
    """The pairs of positions of sender and receiver in a run."""
    places = {ANYWHERE}
    if PATHS.name in run.tables:
        places |= {*run.table(PATHS.name)[PLACE_COLUMNS].drop_duplicates().itertuples(index=False, name=None)}
    return sorted(places)


def _path_effects(
    key: tuple[Any, ...], exact: Effects | None, estimates: pd.DataFrame | None, places: Sequence[tuple[str, ...]]
) -> Effects:
    """The effects of one sweep, with the columns of the paths."""
    effects = exact
    if estimates is not None:
        effects = with_mean_estimates(exact, SWEEP, dict(zip(SWEEP.keys, key, strict=True)), estimates)
    assert effects is not None, "a sweep has exact effects or estimates"
    return replace(effects, units=effects.units.join(_path_columns(effects.units["path"].to_numpy(np.int64), places)))


def _path_numbers(rows: pd.DataFrame, places: Sequence[tuple[str, ...]]) -> npt.NDArray[np.int64]:
    """Encode each path as one integer. The integers sort like the columns of the paths."""
    numbers = np.zeros(len(rows), np.int64)
    for name in LAYER_AND_HEAD_COLUMNS:
        numbers = numbers * MAX_LAYER_OR_HEAD + rows[name].to_numpy(np.int64) - TOGETHER
    ends = rows["through"].cat
    ranks = np.array([SORTED_PATH_ENDS.index(name) for name in ends.categories], np.int64)
    numbers = numbers * len(SORTED_PATH_ENDS) + ranks[ends.codes.to_numpy()]
    place_numbers: Any = 0
    if len(places) > 1:
        index = pd.MultiIndex.from_tuples(places)
        place_numbers = index.get_indexer(pd.MultiIndex.from_frame(rows[PLACE_COLUMNS].astype(str)))
    return np.asarray(numbers * len(places) + place_numbers)


def _path_columns(numbers: npt.NDArray[np.int64], places: Sequence[tuple[str, ...]]) -> pd.DataFrame:
    """The columns of the paths of these numbers."""
    numbers, place_numbers = np.divmod(numbers, len(places))
    numbers, end_codes = np.divmod(numbers, len(SORTED_PATH_ENDS))
    columns: dict[str, Any] = {"through": pd.Categorical.from_codes(end_codes, pd.Index(SORTED_PATH_ENDS))}
    for name in reversed(LAYER_AND_HEAD_COLUMNS):
        numbers, number = np.divmod(numbers, MAX_LAYER_OR_HEAD)
        columns[name] = number + TOGETHER
    for position, name in enumerate(PLACE_COLUMNS):
        labels = [place[position] for place in places]
        columns[name] = pd.Categorical(np.array(labels, object)[place_numbers], [*dict.fromkeys(labels)])
    return pd.DataFrame({name: columns[name] for name in PATH_COLUMNS})


def results(run: Run) -> Iterator[Result]:
    """Results about the pairs and every sweep."""
    if not has_paths(run):
        return
    if PATHS.name in run.tables:  # estimates do not store the metrics of pairs
        metrics = run.derived(pair_metrics, PATHS.name)
        limits = {name: describe_min_difference(name) for name in metrics["metric"].unique()}
        yield from answer_results("paths", metrics, limits=limits)
    all_sweeps = sweeps(run)
    if not all_sweeps:
        yield Result(question="paths.no_effects")
    for effects in pair_sweeps(run):
        yield _pair_result(effects)
    for effects in all_sweeps:
        yield from path_results(effects)


def _pair_result(effects: Effects) -> Result:
    """The path of largest absolute effect in one pair."""
    path = chosen_unit(effects, strongest_paths(effects, effects.units, 1).iloc[0])
    where = effects.where
    where["pair"] = where.pop("pair_name")
    fields = _path_fields(path)
    fields["details"] |= _details(effects)
    return unit_result(effects, path, "paths.pair", **fields, where=where, n=None)  # one pair is no sample of pairs


def path_results(effects: Effects) -> Iterator[Result]:
    """Results about the paths of one sweep."""
    yield from sweep_results(effects, "paths", "paths", _details(effects), _path_fields)
    between_heads = effects.units[effects.units["receiver_layer"] != LOGITS]
    for _, path in strongest_paths(effects, between_heads, 1).iterrows():
        yield _path_result(effects, path, "paths.between_heads")


def head_results(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """The strongest path from a head and the strongest to it, in every sweep of a model."""
    if not has_paths(run):
        return
    for effects in run.derived(sweeps_of_model, model):
        paths = effects.units
        for end, direction in (("sender", "from"), ("receiver", "to")):
            own = paths[(paths[f"{end}_layer"] == layer) & (paths[f"{end}_head"] == head)]
            for _, path in strongest_paths(effects, own, 1).iterrows():
                yield _path_result(effects, path, "paths.head", end=direction)


def has_paths(run: Run) -> bool:
    """Whether the run has patches or estimates of paths."""
    return PATHS.name in run.tables or PATH_ESTIMATES.name in run.tables


def _path_result(effects: Effects, path: pd.Series, question: str, **details: str) -> Result:
    """The effect of a path that was chosen for it."""
    fields = _path_fields(path)
    fields["details"] = {**fields["details"], **_details(effects), **details}
    return unit_result(effects, chosen_unit(effects, path), question, **fields)


def _path_fields(path: pd.Series) -> dict[str, Any]:
    """Fields of a result about a path. It belongs to the sender."""
    return {
        "layer": int(path["sender_layer"]),
        "head": int(path["sender_head"]),
        "details": {"path": path_name(path)},
    }


def _details(effects: Effects) -> dict[str, str]:
    """What names a sweep in sentences besides its keys."""
    return {f"other_{name}": effects.key[name] for name in ("norms", "mlps") if effects.key[name] != "frozen"}


def overview(run: Run) -> Overview | None:
    """One row per sweep: pairs, paths, and the path of largest absolute effect."""
    if not has_paths(run):
        return None
    records = []
    for effects in sweeps(run):
        path = chosen_unit(effects, strongest_paths(effects, effects.units, 1).iloc[0])
        records.append(
            {
                "model": effects.model,
                **effects.where,
                "pairs": int(effects.units["n"].max()),
                "paths": len(effects.units),
                "exact paths": int(effects.is_exact.sum()),
                "strongest path": path_name(path),
                **{name: path[name] for name in ("effect", "low", "high", "method")},
            }
        )
    return Overview(PROBE.name, pd.DataFrame(records))
