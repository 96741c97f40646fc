"""Writes run.json of a finished run, and checks its digest and structure once, when the run is opened."""

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headscope.errors import BadRun
from headscope.runs.columns import FORMAT_VERSION
from headscope.runs.io import REPAIR_ADVICE, read_json, write_json


@dataclass(frozen=True)
class ValueKind:
    """A kind of value: its name and a test for it."""

    name: str
    is_valid: Callable[[Any], bool]


def integer_between(low: int, high: int) -> ValueKind:
    """Whole numbers from `low` to `high`, without true and false."""
    return ValueKind(f"a whole number from {low} to {high}", lambda value: type(value) is int and low <= value <= high)


TEXT = ValueKind("a text", lambda value: isinstance(value, str))
SECONDS = ValueKind("a number of seconds", lambda value: type(value) in (int, float) and 0 <= value < 1e15)
INDEX_COUNT = integer_between(1, 2**15)
"""Numbers of layers and heads, which are stored in 16 bits."""
STEP = ValueKind("a training step or null", lambda value: value is None or integer_between(0, 2**63).is_valid(value))

ANY_KEY = "*"
"""Stands for any key of an object."""
MANIFEST_SHAPE: Mapping[str, Any] = {
    "format_version": integer_between(FORMAT_VERSION, FORMAT_VERSION),
    "models": [
        {
            **dict.fromkeys(("label", "spec", "checkpoint", "scheme", "weights_sha256"), TEXT),
            "step": STEP,
            "prompt_tokens?": [integer_between(1, 2**31)],
            "geometry": dict.fromkeys(("layers", "heads", "kv_groups"), INDEX_COUNT),
        }
    ],
    "tables": {ANY_KEY: {"rows": integer_between(0, 2**63), "sha256": TEXT}},
    "config?": {},
    "inputs?": {ANY_KEY: TEXT},
    "versions?": {ANY_KEY: TEXT},
    "hardware?": {},
    **dict.fromkeys(("started?", "finished?"), TEXT),
    "files?": {ANY_KEY: TEXT},
    "timings?": {"seconds": SECONDS},
}
"""Keys that an object must have; it may have others. Keys with a question mark are optional. List items have one
shape."""


def write_manifest(run: Path, manifest: Mapping[str, Any]) -> None:
    """Write run.json with the digest of its content."""
    write_json(run / "run.json", {**manifest, "digest": _manifest_digest(manifest)})


def _manifest_digest(manifest: Mapping[str, Any]) -> str:
    """SHA-256 of the entries, except `digest` itself."""
    content = {key: value for key, value in manifest.items() if key != "digest"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def read_manifest(run: Path) -> dict[str, Any]:
    """The run.json of the directory `run`. Raises BadRun if it is not a run, unfinished, damaged or of another
    format."""
    if not os.path.exists(run):
        raise BadRun(f"no run directory at '{run}'. Check the path")
    if not os.path.isfile(run / "run.json"):
        if any(run.glob("*.parquet")):
            raise BadRun(f"{run} is damaged: it has no run.json. {REPAIR_ADVICE}")
        raise BadRun(f"{run} is not a run directory: it has no run.json. Name the folder of one run, such as {run}/RUN")
    manifest = read_json(run / "run.json")
    version: Any = manifest.get("format_version")
    if type(version) is int and version >= 1 and version != FORMAT_VERSION:
        remedy = "Upgrade headscope" if version > FORMAT_VERSION else "Measure it again"
        raise BadRun(f"{run} has format {version}, but this headscope reads format {FORMAT_VERSION}. {remedy}")
    if not {"tables", "models"} <= manifest.keys():
        raise BadRun(f"{run} is not a finished run: its run.json has no tables or no models. Name a finished run")
    for fault in _shape_errors(manifest, MANIFEST_SHAPE, ""):
        raise BadRun(f"{run / 'run.json'} is damaged: {fault}. {REPAIR_ADVICE}")
    if manifest.get("digest") != _manifest_digest(manifest):
        raise BadRun(f"{run / 'run.json'} is damaged: its digest differs from the recorded one. {REPAIR_ADVICE}")
    labels = [model["label"] for model in manifest["models"]]
    if repeated := [label for label in labels if labels.count(label) > 1]:
        raise BadRun(
            f"{run / 'run.json'} is damaged: two of its models have the label '{repeated[0]}'. {REPAIR_ADVICE}"
        )
    return manifest


def _shape_errors(value: Any, shape: Any, json_path: str) -> Iterator[str]:
    """Places where `value` differs from the shape, with what should be there."""
    if isinstance(shape, ValueKind):
        if not shape.is_valid(value):
            yield f"{json_path} is not {shape.name}"
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{json_path} is not a list"
            return
        for index, item in enumerate(value):
            yield from _shape_errors(item, shape[0], f"{json_path}[{index}]")
    elif not isinstance(value, dict):
        yield f"{json_path} is not an object"
    else:
        for key, inner in shape.items():
            name = key.removesuffix("?")
            if key == ANY_KEY:
                for item in value:
                    yield from _shape_errors(value[item], inner, f"{json_path}.{item}")
            elif name in value:
                yield from _shape_errors(value[name], inner, f"{json_path}.{name}".lstrip("."))
            elif name == key:
                yield f"{json_path}.{name} is missing".lstrip(".")
