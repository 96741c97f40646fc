"""The command that tells whether this machine measures rightly, and what that costs on it."""

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.cli.execution import quiet_libraries
from headscope.cli.flags import Json

if TYPE_CHECKING:
    from headscope.positions.model import Model

SHORTEST = 256
"""Tokens of the first timing."""
PATIENCE = 90.0
"""Seconds after which no longer context is timed."""


def selfcheck(
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    model: Annotated[str, typer.Option("--model", help="CHECKPOINT to measure.")] = "smollm2-135m",
    length: Annotated[
        int, typer.Option("--length", min=16, help="Tokens that are held against eager attention.")
    ] = 192,
    longest: Annotated[
        int | None,
        typer.Option("--longest", min=0, help="Longest context to time. \\[default: as time and memory allow]"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every measure against eager attention on this machine, in fp32 and bf16, and time it at growing lengths.

    Takes about two minutes, and ends with exit code 1 where something disagrees.
    """
    quiet_libraries(as_json)
    rows = [*_found(device, model, length, longest)]
    if as_json:
        print(json.dumps(rows))
    else:
        from headscope.report.terminal import print_line, print_table

        print_table(rows)
    if wrong := [row for row in rows if row["result"] == "DISAGREES"]:
        if not as_json:
            print_line(
                f"{len(wrong)} checks disagree. {_machine(device)}: report it with this table; use another --device."
            )
        raise typer.Exit(1)
    if not as_json:
        print_line(f"All checks agree. {_machine(device)}.")


def _found(device: str, name: str, length: int, longest: int | None) -> Iterator[dict[str, Any]]:
    from headscope.bench.variants import tokens
    from headscope.forward.selfcheck import checks
    from headscope.positions.model import load

    for dtype in ("bf16", "fp32"):
        model = load(name, device=device, dtype=dtype)
        for check in checks(model, tokens(model, length)):
            result = "agrees" if check.agrees else "DISAGREES"
            yield _row(check.what, check.dtype, length, f"{check.found:.1e}", f"{check.allowed:.0e}", result)
    if model.device.type == "cuda":  # what is measured there
        model = load(name, device=device)
    yield from _timed(model, longest)


def _timed(model: "Model", longest: int | None) -> Iterator[dict[str, Any]]:
    """Measuring as a ratio to the plain forward pass, at lengths that double until time or memory ends."""
    from headscope.bench.variants import ratios

    length, began = SHORTEST, time.monotonic()
    dtype = str(model.module.dtype).removeprefix("torch.")
    while time.monotonic() - began < PATIENCE and (longest is None or length <= longest):
        found = ratios(model, length)
        if found is None:
            yield _row("memory", dtype, length, "does not fit", "", "")
            return
        for what, ratio in found.items():
            yield _row(what, dtype, length, f"{ratio:.2f}", "", "")
        length *= 2


def _row(what: str, dtype: str, length: int, found: str, allowed: str, result: str) -> dict[str, Any]:
    return {"check": what, "dtype": dtype, "length": length, "found": found, "allowed": allowed, "result": result}


def _machine(device: str) -> str:
    from importlib.metadata import version

    from headscope.study.executor import hardware

    told = hardware()
    on = told["cuda"] or f"{told['machine']}, {told['cpus']} threads"
    return f"headscope {version('headscope')}, torch {version('torch')}, --device {device} on {on}"
