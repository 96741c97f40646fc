"""run.json of a finished run: what it must hold for all else to rely on it, checked once, when the run is opened."""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headscope.errors import BadRun
from headscope.runs.columns import FORMAT_VERSION
from headscope.runs.io import MEND, read_json
from headscope.runs.old_names import translate_manifest


@dataclass(frozen=True)
class Kind:
    """A kind of value: what it is called, and which values are of it."""

    name: str
    holds: Callable[[Any], bool]


def whole(low: int, high: int) -> Kind:
    """Whole numbers from `low` to `high`; true and false are none."""
    return Kind(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


TEXT = Kind("a text", lambda value: isinstance(value, str))
SECONDS = Kind("a number of seconds", lambda value: type(value) in (int, float) and 0 <= value < 1e15)
PLACES = whole(1, 2**15)
"""Layers and heads, which are stored in 16 bits."""
STEP = Kind("a training step or null", lambda value: value is None or whole(0, 2**63).holds(value))

EVERY = "*"
"""Stands for every key of an object."""
SHAPE: Mapping[str, Any] = {
    "format_version": whole(1, FORMAT_VERSION),
    "models": [
        {
            **dict.fromkeys(("label", "spec", "checkpoint", "scheme", "weights_sha256"), TEXT),
            "step": STEP,
            "geometry": dict.fromkeys(("layers", "heads", "kv_groups"), PLACES),
        }
    ],
    "tables": {EVERY: {"rows": whole(0, 2**63), "sha256": TEXT}},
    "config?": {},
    "files?": {EVERY: TEXT},
    "timings?": {"seconds": SECONDS},
}
"""An object has these keys, and any others; those with a question mark may be missing. A list is of one shape."""


def read_manifest(run: Path) -> dict[str, Any]:
    """The run.json of the directory `run`. Raises BadRun if it is none, unfinished, damaged or of a newer format."""
    if not os.path.isfile(run / "run.json"):
        raise BadRun(f"{run} is not a run directory: it has no run.json")
    manifest = read_json(run / "run.json")
    version = manifest.get("format_version")
    if type(version) is int and version > FORMAT_VERSION:
        raise BadRun(f"{run} has format {version}, this headscope reads up to {FORMAT_VERSION}: upgrade headscope")
    if not {"tables", "models"} <= manifest.keys():
        raise BadRun(f"{run} is not a finished run: its run.json names no tables or no models")
    for fault in _faults(manifest, SHAPE, ""):
        raise BadRun(f"{run / 'run.json'} is damaged: {fault}; {MEND}")
    labels = [model["label"] for model in manifest["models"]]
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise BadRun(f"{run / 'run.json'} is damaged: two of its models are called '{repeated[0]}'; {MEND}")
    return translate_manifest(manifest) if version == 1 else manifest


def _faults(value: Any, shape: Any, where: str) -> Iterator[str]:
    """Where `value` is not of the shape, and what should be there."""
    if isinstance(shape, Kind):
        if not shape.holds(value):
            yield f"{where} is not {shape.name}"
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{where} is not a list"
            return
        for at, each in enumerate(value):
            yield from _faults(each, shape[0], f"{where}[{at}]")
    elif not isinstance(value, dict):
        yield f"{where} is not an object"
    else:
        for key, inner in shape.items():
            name = key.removesuffix("?")
            if key == EVERY:
                for each in value:
                    yield from _faults(value[each], inner, f"{where}.{each}")
            elif name in value:
                yield from _faults(value[name], inner, f"{where}.{name}".lstrip("."))
            elif name == key:
                yield f"{where}.{name} is missing".lstrip(".")
