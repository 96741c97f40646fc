"""Versions of the libraries that compute numbers: a run records them by work item, and resuming compares them."""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from headscope.errors import InputChanged

log = logging.getLogger("headscope")

LIBRARIES = ("headscope", "torch", "transformers", "pandas", "pyarrow")
COMPUTING = ("headscope", "torch", "transformers", "triton")
"""Libraries whose version may change a measured number."""


@cache
def library_versions() -> Mapping[str, str]:
    """The versions of this process, by library; on a GPU also that of Triton, "none" without it."""
    import torch

    versions = {name: version(name) for name in LIBRARIES}
    return versions | {"triton": _triton_version()} if torch.cuda.is_available() else versions


def _triton_version() -> str:
    try:
        return version("triton")
    except PackageNotFoundError:
        return "none"


def check_versions(stored: Sequence[Mapping[str, str]], partial: Path) -> None:
    """Compare the versions of finished work items with those of this process.

    Warns if the version of a library that computes numbers differs. Raises InputChanged for another major version: the
    first number of a version, or the first two if the first is 0.
    """
    if any("headscope" not in versions for versions in stored):
        raise InputChanged(
            "cannot resume this run: its finished work items were measured with an unknown earlier headscope. "
            f"Delete {partial} to start again"
        )
    for name in COMPUTING:
        current = library_versions().get(name, "none")
        for earlier in dict.fromkeys(versions[name] for versions in stored if name in versions):
            if earlier == current:
                continue
            if _major(earlier) != _major(current):
                raise InputChanged(
                    f"cannot resume this run: its finished work items were measured with {name} {earlier}, and {name} "
                    f"{current} may compute other numbers. Install {name} {earlier}, or delete {partial} to start again"
                )
            log.warning(
                "this run was started with %s %s and continues with %s; its work items may differ slightly. Delete %s "
                "to measure everything with one version",
                *(name, earlier, current, partial),
            )


def other_versions(versions: Mapping[str, str]) -> str:
    """The recorded versions that differ from those of this process, such as "torch 2.12.0"; "" if none does."""
    recorded = [name for name in COMPUTING if name in versions]
    return ", ".join(
        f"{name} {versions[name]}" for name in recorded if versions[name] != library_versions().get(name, "none")
    )


def _major(text: str) -> tuple[int, ...]:
    """The numbers of a version whose change may change results."""
    numbers = tuple(map(int, re.findall(r"\d+", text)[:2]))
    return numbers[:1] if numbers and numbers[0] else numbers
