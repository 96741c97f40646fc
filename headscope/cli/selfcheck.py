"""The command `selfcheck`: whether this machine measures correctly, and the cost of measuring on it."""

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headscope.cli import quiet_libraries
from headscope.cli.flags import MAX_BUNDLED_TOKENS, Json

if TYPE_CHECKING:
    from headscope.positions.model import Model

SHORTEST = 256
"""Tokens of the first timed pass."""
MAX_TIMING_SECONDS = 90.0
"""Time after which no longer context is timed."""


def selfcheck(
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda, cuda:1, ...")] = "auto",
    model: Annotated[str, typer.Option("--model", help="CHECKPOINT to measure.")] = "smollm2-135m",
    length: Annotated[
        int, typer.Option("--length", min=16, max=MAX_BUNDLED_TOKENS, help="Tokens to compare with eager attention.")
    ] = 192,
    longest: Annotated[
        int | None,
        typer.Option(
            "--longest",
            min=0,
            max=MAX_BUNDLED_TOKENS,
            help="Longest context to time. [default: as far as time and memory allow]",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare every measure with eager attention on this machine, in fp32 and bf16, and time it at increasing lengths.

    Also shows how far the statistics of heads differ between bf16 and fp32. Takes about two minutes. The exit code is 1
    if a measure disagrees with eager attention.
    """
    quiet_libraries(as_json)
    rows = [*_check_rows(device, model, length, longest)]
    if as_json:
        print(json.dumps(rows))
    else:
        from headscope.rendering.console import print_line, print_table

        print_table(rows)
    if disagreeing := [row for row in rows if row["result"] == "DISAGREES"]:
        if not as_json:
            print_line(
                f"{len(disagreeing)} checks disagree on {_machine(device)}. Use another --device, and report this "
                "table."
            )
        raise typer.Exit(1)
    if not as_json:
        print_line(f"All checks agree. {_machine(device)}.")


def _check_rows(device: str, name: str, length: int, longest: int | None) -> Iterator[dict[str, Any]]:
    from headscope.bench.measuring import document_tokens
    from headscope.bench.precision import precision_differences
    from headscope.forward.selfcheck import run_checks
    from headscope.positions.model import load
    from headscope.study.progress import console_progress

    progress = console_progress(quiet=False, can_resume=False)
    progress.start(3, 0)  # two models and their comparison
    try:
        models = {dtype: load(name, device=device, dtype=dtype) for dtype in ("bf16", "fp32")}
        for dtype, model in models.items():
            progress.set_activity(f"comparing measures in {dtype} with eager attention")
            for check in run_checks(model, document_tokens(model, length)):
                result = "agrees" if check.is_within_tolerance else "DISAGREES"
                yield _row(
                    check.quantity, check.dtype, length, f"{check.difference:.1e}", f"{check.tolerance:.0e}", result
                )
            progress.advance(1)
        progress.set_activity("comparing bf16 with fp32")
        for row in precision_differences(models["bf16"], models["fp32"], length).itertuples():
            ranks = f"95 % of heads below {row.largest:.1e}, rank correlation {row.rank_correlation:.4f}"
            yield _row(f"{row.statistic}: bf16 against fp32", "bfloat16", length, f"{row.median:.1e}", "", ranks)
    finally:
        progress.stop()
    model = models["fp32"]
    if model.device.type == "cuda":  # what is measured there
        model = load(name, device=device)
    yield from _timing_rows(model, longest)


def _timing_rows(model: "Model", longest: int | None) -> Iterator[dict[str, Any]]:
    """Time of measuring as a ratio to the plain forward pass, at lengths that double until time or memory runs out."""
    from headscope.bench.measuring import measuring_cost_ratios

    length, start = SHORTEST, time.monotonic()
    dtype = str(model.module.dtype).removeprefix("torch.")
    while time.monotonic() - start < MAX_TIMING_SECONDS and (longest is None or length <= longest):
        ratio_by_check = measuring_cost_ratios(model, length)
        if ratio_by_check is None:
            yield _row("memory", dtype, length, "does not fit", "", "")
            return
        for check, ratio in ratio_by_check.items():
            yield _row(check, dtype, length, f"{ratio:.2f}", "", "")
        length *= 2


def _row(check: str, dtype: str, length: int, difference: str, tolerance: str, result: str) -> dict[str, Any]:
    return {
        "check": check,
        "dtype": dtype,
        "length": length,
        "difference": difference,
        "tolerance": tolerance,
        "result": result,
    }


def _machine(device: str) -> str:
    from importlib.metadata import version

    from headscope.study.executor import hardware

    machine = hardware()
    processor = machine["cuda"] or f"{machine['machine']}, {machine['cpus']} threads"
    return f"headscope {version('headscope')}, torch {version('torch')}, --device {device} on {processor}"
