"""The runs that headscope ships, by name."""

from pathlib import Path

from headscope.cli.flags import EXAMPLES
from headscope.run import Run


def shipped_path(name: str) -> Path:
    """The folder of the shipped run of this name."""
    (path,) = EXAMPLES.glob(f"*Z-{name}-????????")
    return path


def open_shipped(name: str) -> Run:
    """The shipped run of this name."""
    return Run.open(shipped_path(name))
