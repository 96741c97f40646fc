"""The command that opens the dashboard."""

import os
from pathlib import Path
from typing import Annotated

import typer

from headscope import user_input
from headscope.errors import BadInput, CannotWrite

EXAMPLES = Path(__file__).parents[1] / "examples"
"""Runs that headscope ships."""
EXAMPLE = next(EXAMPLES.glob("*-example-*"))
"""The one that is opened first."""


def dash(
    directory: Annotated[
        Path,
        typer.Argument(
            metavar="RUNS_DIR|RUN",
            show_default="the shipped example",
            help="Directory that holds runs, or the one of them to begin with.",
        ),
    ] = EXAMPLE,
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port on this machine; 0 takes a free one.")
    ] = 8050,
) -> None:
    """Explore runs in the browser: heads, models side by side, retrieval, influence, checkpoints.

    Reads runs and changes nothing; answers to this machine alone, and asks no other. New runs appear by themselves.
    """
    place = user_input.path(directory, "directory")
    if not place.is_dir():
        raise BadInput(f"no directory '{directory}': make a run first, e.g. headscope demo")
    from dashboards.app import serve

    try:
        serve(place.resolve(), port)
    except OSError as error:
        raise CannotWrite(
            f"cannot listen on port {port}: {os.strerror(error.errno or 0)}; choose another --port"
        ) from error
