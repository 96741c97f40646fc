"""Results of patched layers: every sweep over all positions or a named span, and the largest single positions."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from headscope.effects.results import sweep_results
from headscope.effects.sweep import Effects
from headscope.results.result import Result
from headscope.runs.run import Run
from probes.patching.analysis import layer_position_effects, layer_sweeps
from probes.patching.schema import LAYER_ACTIVATION_LABELS


def layer_results(run: Run) -> Iterator[Result]:
    """The results of every sweep of layers, and the largest effect of one position in the pair that is drawn."""
    for effects in run.derived(layer_sweeps):
        yield from layer_sweep_results(effects)
    for rows in layer_position_effects(run):
        yield _position_result(rows)


def layer_sweep_results(effects: Effects) -> Iterator[Result]:
    """Results about the layers of one sweep."""
    details = {"activation": LAYER_ACTIVATION_LABELS[effects.key["intervention"]]}
    yield from sweep_results(effects, "patching_layers", "layers", details, _layer_fields)


def _layer_fields(unit: pd.Series) -> dict[str, Any]:
    return {"details": {"patched_layer": int(unit["layer"])}}


def _position_result(rows: pd.DataFrame) -> Result:
    """The largest absolute effect of one layer and position. One pair is no sample of pairs."""
    largest = rows.iloc[int(rows["effect"].abs().to_numpy().argmax())]
    where = {name: str(largest[name]) for name in ("prompts", "metric", "intervention", "direction", "pair")}
    return Result(
        question="patching_layers.position",
        model=str(largest["model"]),
        value=float(largest["effect"]),
        is_exact=largest["method"] == "exact",
        where=where,
        details={
            "activation": LAYER_ACTIVATION_LABELS[where["intervention"]],
            "patched_layer": int(largest["layer"]),
            "position": int(largest["position"]),
        },
    )
