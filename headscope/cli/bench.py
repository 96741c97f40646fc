"""The command `bench`: the cost of measuring on this machine."""

import json
from datetime import datetime
from typing import Annotated

import typer

from headscope.cli import quiet_libraries
from headscope.cli.flags import Json


def bench(
    model: Annotated[str, typer.Option("--model", help="CHECKPOINT to time.")] = "smollm2-135m",
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    length: Annotated[int, typer.Option("--length", min=64, help="Context length in tokens.")] = 4096,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="Interleaved repeats; the median is reported.")] = 3,
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
