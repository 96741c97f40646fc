"""The commands `plan` and `bench`: what a study and what measuring cost."""

import json
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from headscope.base.user_input import MAX_WORKERS
from headscope.cli import quiet_libraries
from headscope.cli.flags import MAX_BUNDLED_TOKENS, Json


def bench(
    model: Annotated[str, typer.Option("--model", help="CHECKPOINT to time.")] = "smollm2-135m",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    length: Annotated[
        int, typer.Option("--length", min=64, max=MAX_BUNDLED_TOKENS, help="Context length in tokens.")
    ] = 4096,
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, max=1000, help="Interleaved repeats; the median is reported.")
    ] = 3,
    as_json: Json = False,
) -> None:
    """Benchmark measurements: time and peak memory, as ratios to the plain forward pass of the same model."""
    quiet_libraries()
    from headscope.bench.measuring import describe_machine, document_tokens, time_measuring
    from headscope.positions.model import load
    from headscope.rendering.console import print_line, print_table

    date, machine = datetime.now().isoformat(" ", "minutes"), describe_machine()
    if not as_json:
        print_line(f"{date}, {machine}")
    loaded = load(model, device=device)
    rows = time_measuring(loaded, document_tokens(loaded, length), repeats)
    if as_json:
        print(json.dumps({"date": date, "machine": machine, "rows": rows}))
    else:
        print_table(rows)


MAX_CHECKPOINTS = 20
"""Checkpoints that are listed, the most expensive first."""


def plan(
    study_file: Annotated[Path, typer.Argument(metavar="STUDY.yaml", help="Study file.")],
    workers: Annotated[
        int | None,
        typer.Option(
            "--workers", min=1, max=MAX_WORKERS, help="Number of Ray workers. [default: as in the study, or 2]"
        ),
    ] = None,
    gpus: Annotated[
        int,
        typer.Option(
            "--gpus",
            min=0,
            max=MAX_WORKERS,
            help="Number of GPUs that the workers share; 0: plan for the CPU cores of this machine.",
        ),
    ] = 0,
    timings: Annotated[
        Path | None,
        typer.Option("--timings", help="Take times from this stored run of the same probes instead of measuring."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the cost of a study: work items, time, memory per worker, disk space, and time on N workers.

    Times a few work items of the study on this machine: a minute or two, longer with long contexts. For another
    machine, give --timings.
    """
    quiet_libraries(as_json)
    from headscope.runs.run import Run
    from headscope.study import planning
    from headscope.study.config import read_study
    from headscope.study.progress import console_progress

    study = read_study(study_file, {})
    worker_count = workers or study.engine.workers or gpus or 2
    timed_run = None if timings is None else Run.open(timings)
    progress = console_progress(quiet=False, can_resume=False)
    costs = planning.plan_study(study, worker_count, gpus, timed_run, progress)
    print(json.dumps(costs)) if as_json else _print_costs(costs)


def _print_costs(costs: Mapping[str, Any]) -> None:
    from headscope.rendering.console import print_line, print_table

    rows = sorted(costs["checkpoints"], key=lambda row: -row["seconds"])
    print_table([{**row, "seconds": _format_time(row["seconds"])} for row in rows[:MAX_CHECKPOINTS]])
    if len(rows) > MAX_CHECKPOINTS:
        print_line(f"and {len(rows) - MAX_CHECKPOINTS} more")
    processors = f"{costs['gpus']} GPUs" if costs["gpus"] else "the cores of this machine"
    print_line(
        f"{costs['cells']:,} work items: about {_format_time(costs['seconds_alone'])} in one process, "
        f"{_format_time(costs['seconds_commit'])} of them to merge the tables at the end"
    )
    print_line(
        f"{costs['workers']} workers on {processors}: about {_format_time(costs['seconds_shared'])} "
        f"({costs['speedup']:g} times as fast), {_format_bytes(costs['bytes_of_a_worker'])} of memory each"
    )
    print_line(f"Disk space: about {_format_bytes(costs['bytes_stored'])}. Times from {costs['from']}.")


def _format_time(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def _format_bytes(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1e3:.0f} kB"
