"""The command `dash`: opens the dashboard."""

import os
from pathlib import Path
from typing import Annotated

import typer

from headscope import user_input
from headscope.errors import BadInput, CannotWrite

EXAMPLES = Path(__file__).parents[1] / "examples"
"""Runs that headscope ships."""
EXAMPLE = next(EXAMPLES.glob("*-example-*"))
"""The shipped run that opens first."""


def dash(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="RUNS_DIR|RUN",
            show_default="the shipped example",
            help="Folder that holds runs, or the run to open first.",
        ),
    ] = EXAMPLE,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on this machine; 0 picks a free one.")
    ] = 8050,
) -> None:
    """Explore runs in the browser: heads, model comparison, retrieval, influence, checkpoints.

    Read-only and local only: it listens on this machine and makes no network requests. New runs appear by themselves.
    """
    path = user_input.expand_path(directory, "directory")
    if not path.is_dir():
        raise BadInput(f"no directory '{directory}'. Measure something first, for example: headscope demo")
    from dashboards.app import serve

    try:
        serve(path.resolve(), port)
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        raise CannotWrite(f"cannot listen on port {port}: {reason}. Choose another --port") from error
