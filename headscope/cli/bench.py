"""The command `bench`: the cost of measuring. Every probe that can be timed adds a flag with its name."""

import inspect
import json
from collections.abc import Iterator
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from headscope import plugins
from headscope.cli import quiet_libraries
from headscope.cli.flags import Json, example_run
from headscope.errors import BadInput
from headscope.study.runner_parts import RunnerParts

DEFAULT_MODEL = "smollm2-135m"
BF16_LENGTH = 1024
"""Tokens of the documents that are also measured in bfloat16."""
LENS_LENGTH = 1024
"""Tokens for the comparison with transformer-lens, if it is installed."""


def bench(
    model: Annotated[str, typer.Option("--model", help="CHECKPOINT to time.")] = DEFAULT_MODEL,
    shape: Annotated[
        str | None,
        typer.Option(
            "--shape", help="Time random weights of this shape, llama-8b or smollm2-135m, instead of a checkpoint."
        ),
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    length: Annotated[int, typer.Option("--length", min=64, help="Context length in tokens.")] = 4096,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Interleaved repeats; the median is reported.")] = 3,
    lens_length: Annotated[
        int | None,
        typer.Option(
            "--lens-length",
            min=0,
            help="Tokens for the comparison with transformer-lens; 0 skips it. "
            "[default: 1024 if transformer-lens is installed]",
        ),
    ] = None,
    dashboard: Annotated[bool, typer.Option("--dash", help="Time the app instead.")] = False,
    compare_workers: Annotated[
        bool, typer.Option("--engine", help="Compare Ray workers with one process on the same study instead.")
    ] = False,
    growth: Annotated[
        bool,
        typer.Option("--scale", help="Measure how commit, reading and listing grow at twice the size instead."),
    ] = False,
    compare: Annotated[
        Path | None,
        typer.Option("--compare", metavar="FILE", help="Show the ratios of an earlier bench, a file made with --json."),
    ] = None,
    as_json: Json = False,
    **longest: int,
) -> None:
    """Benchmark measurements: time and peak memory, as ratios to the plain forward pass of the same model.

    On a CPU with bfloat16 instructions, also compares bfloat16 with float32: its time, and its error relative to the
    sampling error. The column "bound" is the target upper limit of the ratio on an otherwise idle CPU, or, on CUDA, of
    a model of 8 billion parameters on an H100.

    With --dash, measures response times of the app in Chromium (needs the dev extra) on the shipped example and
    on a synthetic run of 1,024 heads with 64 rotary pairs under 4 models.

    With --scale, measures processor time and memory of the steps around measuring on synthetic rows, at a size and at
    twice the size.
    """
    from headscope.bench import comparison

    if sum([dashboard, compare_workers, growth, shape is not None]) > 1:
        raise BadInput("--dash, --engine, --scale and --shape exclude one another. Give one of them")
    rows: list[dict[str, Any]] = []
    description, earlier = comparison.read_earlier(compare) if compare else ("", {})
    date, machine = datetime.now().isoformat(" ", "minutes"), comparison.describe_machine()
    if not as_json:
        print(f"{date}, {machine}")
        if description:
            print(f"Compared with {description}")
    try:
        if dashboard:
            from dashboards import browser_timing

            rows += (_print_wait(row, as_json) for row in browser_timing.measure_all(example_run()))
            return
        if growth:
            from headscope.bench import scale
            from headscope.rendering.console import print_table as print_growth

            for table in scale.compare_growth():
                rows += table
                if not as_json:
                    print_growth(table)
            return
        quiet_libraries()
        from headscope.models.checkpoint import pick_device
        from headscope.rendering.console import print_line, print_table

        on_gpu = pick_device(device).type == "cuda"
        probes = {name: n for name, n in longest.items() if n}
        if shape is not None and (lens_length or probes or model != DEFAULT_MODEL):
            raise BadInput("--shape times random weights: it has no --model, --lens-length and probes. Remove them")
        if lens_length is None:
            lens_length = LENS_LENGTH if find_spec("transformer_lens") else 0
            if not lens_length and shape is None and not compare_workers and not as_json:
                print_line(
                    "transformer-lens is not installed: the comparison with it is left out. Run pip install "
                    "'headscope[lens]' to add it."
                )
        tables = (
            _tables(model, length, repeats, lens_length, probes, compare_workers, device)
            if shape is None
            else _shape_tables(shape, length, repeats, device)
        )
        for table in tables:
            bounded = comparison.add_bounds(table, on_gpu, shape)
            rows += bounded
            if not as_json:
                print_table(comparison.add_earlier(bounded, earlier) if earlier else bounded)
                print_line(_verdict(table))
    finally:
        if as_json and rows:  # also if a later table failed
            print(json.dumps({"date": date, "machine": machine, "rows": rows}), flush=True)


def _tables(
    model: str, length: int, repeats: int, lens_length: int, probes: dict[str, int], engine: bool, device: str
) -> Iterator[list[dict[str, Any]]]:
    """The comparison tables, each as soon as it is measured."""
    from headscope.bench.rounding import compare_bfloat16, has_bfloat16
    from headscope.bench.variants import compare_engines, compare_variants
    from headscope.models.checkpoint import pick_device

    if engine:
        yield compare_engines(model, length, device)
        return
    yield from compare_variants(model, length, repeats, lens_length, probes, device)
    if has_bfloat16() and pick_device(device).type == "cpu":
        yield compare_bfloat16(model, BF16_LENGTH)


def _shape_tables(shape: str, length: int, repeats: int, device: str) -> Iterator[list[dict[str, Any]]]:
    from headscope.bench.shapes import compare_shape

    return compare_shape(shape, length, repeats, device)


def _verdict(table: list[dict[str, Any]]) -> str:
    """A sentence on the error of bfloat16; "" for any other table."""
    if "error_over_sampling" not in table[0]:
        return ""
    worst = max(row["error_over_sampling"] for row in table)
    relation = "smaller than" if worst < 1 else "larger than"
    return (
        f"The error of bfloat16 is up to {worst:g} times the sampling error, {relation} the variation between "
        "documents. "
        "--dtype auto uses float32 on CPU."
    )


def _print_wait(row: dict[str, Any], as_json: bool) -> dict[str, Any]:
    """Print a timing of the app at once, unless all are printed as JSON at the end. Returns the row."""
    if not as_json:
        numbers = ", ".join(f"{value} {name}" for name, value in row.items() if isinstance(value, float))
        print(f"{row['run']}, {row['wait']}: {numbers}", flush=True)
    return row


def command() -> Any:
    """The command with one flag per probe that can be timed."""
    flags = {
        name: Annotated[
            int,
            typer.Option(
                f"--{name}", min=0, help=f"{probe.title}: also time up to this context length in tokens; 0 skips it."
            ),
        ]
        for name, probe in plugins.probes().items()
        if probe.has(RunnerParts.bench)
    }
    *own, _ = inspect.signature(bench).parameters.values()
    probe_parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=flag, default=0)
        for name, flag in flags.items()
    ]
    bench.__signature__ = inspect.Signature([*own, *probe_parameters])  # type: ignore[attr-defined]
    bench.__annotations__ |= flags
    return bench
