"""What sharing prefixes saves: a needle grid with every prompt read from its start, and only from where it differs."""

from collections.abc import Callable
from typing import Any

from headscope.positions.model import Model
from headscope.study.config import build_study
from headscope.study.context import StudyContext
from probes.needle.options import NeedleOptions
from probes.needle.run import NeedleRunner

BENCHMARK_LENGTHS, BENCHMARK_DEPTHS = 20, 10
"""Context lengths and depths of the grid that is timed, as many as in the paper."""


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """One needle on a grid of contexts up to `length`."""
    grid = {"lengths": BENCHMARK_LENGTHS, "max_length": length, "depths": BENCHMARK_DEPTHS, "needles": 1}
    study = build_study({"models": {"bench": model.name}, "needle": grid})
    config = study.probe_options["needle"]
    assert isinstance(config, NeedleOptions)
    section = NeedleRunner(config, StudyContext(study, {"bench": model}))
    cells = [cell for cell in section.cells() if cell.task.mode == "strict"]

    def run(shared: bool) -> Callable[[], Any]:
        def way() -> None:
            section.drop_cached_prefix()
            for cell in cells:
                section.rows(cell, model)
                if not shared:
                    section.drop_cached_prefix()

        return way

    name = f"needle grid {BENCHMARK_LENGTHS} x {BENCHMARK_DEPTHS}"
    return {f"{name}, one prompt at a time": run(shared=False), f"{name}, shared prefixes": run(shared=True)}
