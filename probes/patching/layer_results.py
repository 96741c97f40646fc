"""Results of patched layers: every sweep over all positions or a named span."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from headscope.effects.results import sweep_results
from headscope.effects.sweep import Effects
from headscope.results.result import Result
from headscope.runs.run import Run
from probes.patching.analysis import layer_sweeps
from probes.patching.schema import LAYER_ACTIVATION_LABELS


def layer_results(run: Run) -> Iterator[Result]:
    """The results of every sweep of layers."""
    for effects in run.derived(layer_sweeps):
        yield from layer_sweep_results(effects)


def layer_sweep_results(effects: Effects) -> Iterator[Result]:
    """Results about the layers of one sweep."""
    details = {"activation": LAYER_ACTIVATION_LABELS[effects.key["intervention"]]}
    yield from sweep_results(effects, "patching_layers", "layers", details, _layer_fields)


def _layer_fields(unit: pd.Series) -> dict[str, Any]:
    return {"details": {"patched_layer": int(unit["layer"])}}
