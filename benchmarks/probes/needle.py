"""Cost of a grid of needle trials, with and without shared prefixes."""

from collections.abc import Callable
from typing import Any

from headscope.positions.model import Model
from headscope.study.config import build_study
from headscope.study.context import StudyContext
from probes.needle.declaration import NeedleOptions
from probes.needle.run import NeedleRunner

BENCHMARK_LENGTHS, BENCHMARK_DEPTHS = 20, 10
"""Context lengths and depths of the benchmark, as many as in the paper."""


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """A grid of one needle up to context length `length`, with and without shared prefixes."""
    grid = {"lengths": [length], "steps": BENCHMARK_LENGTHS, "depths": BENCHMARK_DEPTHS, "needles": 1}
    study = build_study({"models": {"bench": model.name}, "needle": grid})
    options = study.probe_options["needle"]
    assert isinstance(options, NeedleOptions)
    runner = NeedleRunner(options, StudyContext(study, {"bench": model}))
    cells = [cell for cell in runner.cells() if cell.work.mode == "strict"]

    def run_grid(shares_prefixes: bool) -> None:
        runner.drop_cached_prefix()
        for cell in cells:
            runner.compute_rows(cell, model)
            if not shares_prefixes:
                runner.drop_cached_prefix()

    name = f"needle grid {BENCHMARK_LENGTHS} x {BENCHMARK_DEPTHS}"
    return {
        f"{name}, one prompt at a time": lambda: run_grid(shares_prefixes=False),
        f"{name}, shared prefixes": lambda: run_grid(shares_prefixes=True),
    }
