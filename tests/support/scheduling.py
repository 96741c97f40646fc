"""Jobs for tests of the scheduler."""

from dataclasses import dataclass

from headscope.study.cells import Cell, Job

CHECKPOINTS = {f"m{n}": f"checkpoint {n}" for n in range(20)}


@dataclass(frozen=True)
class Prerequisites:
    prerequisites: tuple[str, ...]


def measure_job(cell: Cell, probe: str = "measure") -> Job:
    return Job(((probe, cell),))


def measure_jobs(checkpoints: int, cells: int) -> list[Job]:
    """For each of several models, each with its own checkpoint, cells that cost 1 to `cells`."""
    return [
        measure_job(Cell(f"m{model}: {cell}", f"m{model}", cell + 1.0))
        for model in range(checkpoints)
        for cell in range(cells)
    ]
