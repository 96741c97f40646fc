"""The figures of a bench beside their bounds and beside those of an earlier bench."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headscope.base.input_files import read_text_file
from headscope.base.user_input import expand_path, quote
from headscope.bench.measuring import ALL_MEASURES, EXACT_STATISTICS, SAMPLED_STATISTICS
from headscope.errors import BadInput, ResourceMissing

Row = Mapping[str, Any]
Key = tuple[Any, ...]
BOUNDS = {
    (SAMPLED_STATISTICS, 4096): 1.10,
    (ALL_MEASURES, 4096): 1.15,
    (EXACT_STATISTICS, 4096): 1.25,
    (EXACT_STATISTICS, 512): 1.05,
}
"""Largest ratio to the plain forward pass that headscope aims at on a quiet CPU, by call and context length."""
GPU_BOUNDS = {
    (what, length): bound
    for what, bounds in {
        SAMPLED_STATISTICS: (1.6, 1.15, 1.10, 1.10),
        EXACT_STATISTICS: (1.6, 1.40, 1.40, 1.65),
        ALL_MEASURES: (2.0, 1.30, 1.20, 1.20),
    }.items()
    for length, bound in zip((2048, 8192, 32_768, 131_072), bounds, strict=True)
}
"""The same for a model of 8 billion parameters in bfloat16 on a GPU of the class of an H100."""
GPU_BOUNDS_SHAPE = "llama-8b"


def add_bounds(rows: Sequence[Row], on_gpu: bool = False, shape: str | None = None) -> list[dict[str, Any]]:
    """The rows, with a column `bound` if one of them has a bound; on a GPU only a model of `GPU_BOUNDS_SHAPE` has."""
    bounds_by_call = BOUNDS if not on_gpu else GPU_BOUNDS if shape == GPU_BOUNDS_SHAPE else {}
    bounds = [bounds_by_call.get((str(row.get("what")), int(row.get("length", 0)))) for row in rows]
    if not any(bounds):
        return [dict(row) for row in rows]
    return [{**row, "bound": bound} for row, bound in zip(rows, bounds, strict=True)]


def read_earlier(path: Path) -> tuple[str, dict[Key, Row]]:
    """Date and machine of an earlier bench, and its rows by what they time, from the output of `--json`.

    Raises ResourceMissing without the file, BadInput for another file.
    """
    try:
        earlier = json.loads(read_text_file(expand_path(path, "earlier bench"), f"earlier bench {quote(str(path))}"))
        return f"{earlier['date']}, {earlier['machine']}", {_key(row): row for row in earlier["rows"]}
    except FileNotFoundError as error:
        message = f"no earlier bench at {quote(str(path))}. Write it with --json"
        raise ResourceMissing(message) from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        message = f"{quote(str(path))} is not the output of a bench with --json. Use a file that it wrote"
        raise BadInput(message) from error


def add_earlier(rows: Sequence[Row], earlier: Mapping[Key, Row]) -> list[dict[str, Any]]:
    """The rows, with the ratio of the same row of an earlier bench as `earlier_ratio`; None without one."""
    return [{**row, "earlier_ratio": earlier.get(_key(row), {}).get("ratio")} for row in rows]


def _key(row: Row) -> Key:
    """What a row times: its texts, and the context length."""
    return *(value for value in row.values() if isinstance(value, str)), row.get("length")
