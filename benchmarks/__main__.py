"""The modes of the developers' benchmark: `python -m benchmarks MODE`, or `make bench-MODE`."""

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import comparison
from headscope.bench.measuring import describe_machine, document_tokens, time_measuring
from headscope.cli import quiet_libraries
from headscope.cli.flags import Json, example_run
from headscope.errors import BadInput, HeadscopeError
from headscope.models.checkpoint import pick_device
from headscope.positions.model import load
from headscope.rendering.console import print_line, print_table

Row = dict[str, Any]
Checkpoint = Annotated[str, typer.Option("--model", help="CHECKPOINT to time.")]
DEFAULT_MODEL = "smollm2-135m"
Device = Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")]
Length = Annotated[int, typer.Option("--length", min=64, help="Context length in tokens.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, help="Interleaved repeats; the median is reported.")]

app = typer.Typer(help="Time and memory for developers; `headscope bench` times measuring alone.", add_completion=False)


def show(tables: Iterable[Sequence[Row]], as_json: bool) -> list[Row]:
    """Print tables as soon as they are measured, or all rows as JSON, also if a later table fails. Returns the rows."""
    rows: list[Row] = []
    date, machine = datetime.now().isoformat(" ", "minutes"), describe_machine()
    if not as_json:
        print_line(f"{date}, {machine}")
    try:
        for table in tables:
            rows += table
            if not as_json:
                print_table(table)
    finally:
        if as_json and rows:
            print(json.dumps({"date": date, "machine": machine, "rows": rows}), flush=True)
    return rows


@app.command()
def measuring(
    model: Checkpoint = DEFAULT_MODEL,
    shape: Annotated[
        str | None, typer.Option("--shape", help="Time random weights of this shape, llama-8b or smollm2-135m.")
    ] = None,
    device: Device = "auto",
    length: Length = 4096,
    repeats: Repeats = 3,
    compare: Annotated[
        Path | None, typer.Option("--compare", metavar="FILE", help="Show the ratios of an earlier output of --json.")
    ] = None,
    as_json: Json = False,
) -> None:
    """What `headscope bench` measures, with bounds: the largest ratios that headscope aims at on an idle CPU, and for
    8 billion parameters on an H100."""
    from benchmarks import shapes

    if shape is not None and model != DEFAULT_MODEL:
        raise BadInput("--shape times random weights: it has no --model. Remove one of them")
    description, earlier = comparison.read_earlier(compare) if compare else ("", {})
    if description and not as_json:
        print_line(f"Compared with {description}")
    loaded = load(model, device=device) if shape is None else shapes.random_model(shape, device)
    ids = document_tokens(loaded, length) if shape is None else shapes.random_tokens(shape, length)
    rows = comparison.add_bounds(time_measuring(loaded, ids, repeats), pick_device(device).type == "cuda", shape)
    show([comparison.add_earlier(rows, earlier) if earlier else rows], as_json)


@app.command()
def schemes(
    model: Checkpoint = DEFAULT_MODEL,
    device: Device = "auto",
    length: Length = 4096,
    repeats: Repeats = 3,
    as_json: Json = False,
) -> None:
    """A forward pass under YaRN and under an AdaRoPE adapter, and an optimiser step of the adapter."""
    from benchmarks.variants import compare_schemes

    show([compare_schemes(load(model, device=device), length, repeats)], as_json)


@app.command()
def lens(
    model: Checkpoint = DEFAULT_MODEL,
    device: Device = "auto",
    length: Length = 1024,
    repeats: Repeats = 3,
    as_json: Json = False,
) -> None:
    """Measuring and layer patching beside those of TransformerLens."""
    from benchmarks.variants import compare_lens

    show(compare_lens(model, length, repeats, device), as_json)


@app.command()
def probe(
    name: Annotated[str, typer.Argument(help="A module of benchmarks/probes.")],
    length: Annotated[int, typer.Argument(min=1, help="Time up to this context length in tokens.")],
    model: Checkpoint = DEFAULT_MODEL,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """What a probe computes, beside plain forward passes."""
    from benchmarks.variants import time_probe

    show([time_probe(name, load(model, device=device), length)], as_json)


@app.command()
def bfloat16(model: Checkpoint = DEFAULT_MODEL, length: Length = 1024, as_json: Json = False) -> None:
    """Measuring in bfloat16 on a CPU: its time, and its error relative to the sampling error."""
    from benchmarks.rounding import compare_bfloat16, has_bfloat16, rounding_verdict

    if not has_bfloat16():
        raise BadInput("this CPU emulates bfloat16. Use a CPU with bfloat16 instructions")
    rows = show([compare_bfloat16(model, length)], as_json)
    if not as_json:
        print_line(rounding_verdict(rows))


@app.command()
def engines(
    model: Checkpoint = DEFAULT_MODEL, device: Device = "auto", length: Length = 4096, as_json: Json = False
) -> None:
    """One study in this process and on Ray workers."""
    from benchmarks.variants import compare_engines

    show([compare_engines(model, length, device)], as_json)


@app.command("app")
def time_app(as_json: Json = False) -> None:
    """Response times of the app in Chromium, on the shipped example and on a synthetic run of 1,024 heads with 64
    rotary pairs under 4 models."""
    from benchmarks.browser_timing import measure_all

    show(([row] for row in measure_all(example_run())), as_json)


@app.command()
def scale(as_json: Json = False) -> None:
    """Processor time and memory of the steps around measuring on synthetic rows, at a size and at twice the size."""
    from benchmarks.scale import compare_growth

    show(compare_growth(), as_json)


def main() -> None:
    quiet_libraries()
    try:
        app()
    except HeadscopeError as error:
        sys.exit(f"benchmarks: {error}")


if __name__ == "__main__":
    main()
