"""Plausible rows of the probes, a function for each: called with (sizes, model, number of the model)."""

from collections.abc import Callable, Iterator, Mapping

from benchmarks.synthetic_run import Sizes
from headscope.runs.arrow import Rows

from . import (
    ablation,
    attribution,
    budget,
    circuit,
    detectors,
    evaluate,
    imported,
    influence,
    needle,
    patching,
    paths,
    patterns,
    spans,
    sparsity,
    weights,
)

Cells = Iterator[tuple[str, Mapping[str, Rows]]]

ROWS: Mapping[str, Callable[[Sizes, str, int], Cells]] = {
    module.__name__.rpartition(".")[2]: module.synthetic_cells
    for module in (
        ablation,
        attribution,
        budget,
        circuit,
        detectors,
        evaluate,
        imported,
        influence,
        needle,
        patching,
        paths,
        patterns,
        sparsity,
        spans,
        weights,
    )
}
