"""Results of path patching: the pairs, every sweep, and the strongest paths of single heads."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from headscope.effects.ranking import chosen_unit
from headscope.effects.results import sweep_results
from headscope.effects.sweep import Effects
from headscope.effects.units import unit_result
from headscope.rendering.blocks import Overview
from headscope.results.answers import answer_results
from headscope.results.result import Result
from headscope.runs.run import Run
from probes.patching.effects import describe_min_difference
from probes.patching.labels import path_name
from probes.patching.pairs import pair_metrics
from probes.patching.paths import PROBE
from probes.patching.paths.analysis import pair_sweeps, strongest_paths, sweeps, sweeps_of_model
from probes.patching.paths.schema import LOGITS, PATH_ESTIMATES, PATHS


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
