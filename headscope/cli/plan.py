"""The command that tells what a study will cost."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from headscope.cli.execution import quiet_libraries
from headscope.cli.flags import Json

SHOWN = 20
"""Checkpoints that are listed; the costliest."""


def plan(
    study_file: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="Study file.")],
    workers: Annotated[
        int | None,
        typer.Option("--workers", min=1, help="Workers of --engine ray. \\[default: those of the study, or two]"),
    ] = None,
    gpus: Annotated[int, typer.Option("--gpus", min=0, help="GPUs that they share; 0 for this machine's cores.")] = 0,
    timings: Annotated[
        Path | None,
        typer.Option("--timings", help="A stored run of the same sections, whose times are taken instead of new ones."),
    ] = None,
    as_json: Json = False,
) -> None:
    """What a study will cost before it is run: cells, time, memory of a worker, bytes stored, and time with N workers.

    A few of its cells are made here and thrown away, which takes a minute or two; for other machines give --timings.
    """
    quiet_libraries(as_json)
    from headscope.runs.run import Run
    from headscope.study import planning
    from headscope.study.config import read_study

    study = read_study(study_file, {})
    many = workers or study.engine.workers or gpus or 2
    told = planning.plan_study(study, many, gpus, None if timings is None else Run.open(timings))
    print(json.dumps(told)) if as_json else _show(told)


def _show(told: Mapping[str, Any]) -> None:
    from headscope.report.terminal import print_line, print_table

    rows = sorted(told["checkpoints"], key=lambda row: -row["seconds"])
    print_table([{**row, "seconds": _time(row["seconds"])} for row in rows[:SHOWN]])
    if len(rows) > SHOWN:
        print_line(f"and {len(rows) - SHOWN} more")
    where = f"{told['gpus']} GPUs" if told["gpus"] else "the cores of this machine"
    print_line(f"{told['cells']:,} cells: about {_time(told['seconds_alone'])} in one process")
    print_line(
        f"{told['workers']} workers on {where}: about {_time(told['seconds_shared'])} "
        f"({told['speedup']:g} times as fast), {_bytes(told['bytes_of_a_worker'])} of memory each"
    )
    print_line(f"Stored: about {_bytes(told['bytes_stored'])}. Times are from {told['from']}.")


def _time(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"
