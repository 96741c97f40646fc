"""The command that tells what measuring costs. A probe that can be timed adds a flag of its own name."""

import inspect
import json
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from headscope import plugins
from headscope.cli.dash import EXAMPLE
from headscope.cli.execution import quiet_libraries
from headscope.cli.flags import Json

ROUNDED = 1024
"""Tokens of the documents that are measured in bfloat16 as well."""


def bench(
    model: Annotated[str, typer.Option("--model", help="CHECKPOINT to time.")] = "smollm2-135m",
    length: Annotated[int, typer.Option("--length", min=64, help="Context length in tokens.")] = 4096,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Interleaved repeats; the median counts.")] = 3,
    lens_length: Annotated[
        int,
        typer.Option("--lens-length", min=0, help="Length for the comparison with transformer-lens; 0 leaves it out."),
    ] = 1024,
    dashboard: Annotated[bool, typer.Option("--dash", help="Time the dashboard instead.")] = False,
    engine: Annotated[
        bool, typer.Option("--engine", help="Time workers of Ray beside one process instead, on the same study.")
    ] = False,
    as_json: Json = False,
    **longest: int,
) -> None:
    """Time and peak memory of measuring, as ratios to the plain forward pass of the same model in this process.

    On a CPU that computes in bfloat16, also what that takes beside float32, and its error beside that of sampling.

    With --dash, how long the dashboard lets a user wait, as a real Chromium sees it (needs the dev extra): on the
    shipped example, and on a made-up run of 1,024 heads with 64 rotary pairs under 4 models.
    """
    rows: list[dict[str, Any]] = []
    if dashboard:
        from dashboards import browser_timing

        rows += (_told(row, as_json) for row in browser_timing.measure_all(EXAMPLE))
    else:
        quiet_libraries()
        from headscope.report.terminal import print_line, print_table

        probes = {name: n for name, n in longest.items() if n}
        for table in _tables(model, length, repeats, lens_length, probes, engine):
            rows += table
            if not as_json:
                print_table(table)
                print_line(_verdict(table))
    if as_json:
        print(json.dumps(rows))


def _tables(
    model: str, length: int, repeats: int, lens_length: int, probes: dict[str, int], engine: bool
) -> Iterator[list[dict[str, Any]]]:
    """What is compared, a table as soon as it is known."""
    from headscope.bench.engines import engines
    from headscope.bench.rounding import has_bfloat16, rounding
    from headscope.bench.variants import compare

    if engine:
        yield engines(model, length)
        return
    yield from compare(model, length, repeats, lens_length, probes)
    if has_bfloat16():
        yield rounding(model, ROUNDED)


def _verdict(table: list[dict[str, Any]]) -> str:
    """What the error of bfloat16 means for who chooses a dtype; nothing of another table."""
    if "error_over_sampling" not in table[0]:
        return ""
    worst = max(row["error_over_sampling"] for row in table)
    told = "less than documents differ by chance" if worst < 1 else "more than documents differ by chance"
    return f"bfloat16 is off by up to {worst:g} of the sampling error, {told}; --dtype auto stays float32 on CPU."


def _told(row: dict[str, Any], quietly: bool) -> dict[str, Any]:
    """The row; in words, as soon as it is known, unless all are printed as JSON in the end."""
    if not quietly:
        numbers = ", ".join(f"{value} {name}" for name, value in row.items() if isinstance(value, float))
        print(f"{row['run']}, {row['wait']}: {numbers}", flush=True)
    return row


def command() -> Any:
    """`bench` with the flags of the probes."""
    flags = {
        name: Annotated[
            int, typer.Option(f"--{name}", min=0, help=f"{probe.title}: longest context to time, in tokens.")
        ]
        for name, probe in plugins.probes().items()
        if probe.bench
    }
    *own, _ = inspect.signature(bench).parameters.values()
    added = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=flag, default=0)
        for name, flag in flags.items()
    ]
    bench.__signature__ = inspect.Signature([*own, *added])  # type: ignore[attr-defined]
    bench.__annotations__ |= flags
    return bench
