"""Many checkpoints of one training run: found by a glob, in the order of their steps."""

import json
import os
import re
from pathlib import Path

from headscope import given
from headscope.errors import BadInput

LARGEST_STEP = 2**63 - 1


def training_step(folder: Path) -> int | None:
    """The step in the trainer's state file, else in the folder's name ("step-10", "checkpoint-10", "10"), else None."""
    state = folder / "trainer_state.json"
    if os.path.isfile(state):
        return _stored_step(state)
    named = re.search(r"(?:step|checkpoint|ckpt|iter)[-_]?(\d+)", folder.name, re.IGNORECASE)
    named = named or re.fullmatch(r"(\d+)", folder.name)
    return int(named[1]) if named and int(named[1]) <= LARGEST_STEP else None


def _stored_step(state: Path) -> int:
    """The step that a trainer's state file tells. Raises BadInput where it tells none."""
    mend = "mend that file, or remove it to take the step from the folder's name"
    try:
        step = json.loads(state.read_text(encoding="utf-8"))["global_step"]
    except (OSError, ValueError, RecursionError, LookupError, TypeError) as error:
        raise BadInput(f"cannot read a training step in '{state}' ({type(error).__name__}): {mend}") from error
    if type(step) is not int or not 0 <= step <= LARGEST_STEP:
        raise BadInput(f"cannot read a training step in '{state}' (global_step is {given.shown(step)}): {mend}")
    return step


def expand_checkpoints(pattern: str) -> dict[str, str]:
    """One model per match of a glob, labelled by its name (its path, where two have one name), by training step.

    The glob names folders, GLOB[@SCHEME], or adapters, CHECKPOINT@adarope:adapter=GLOB.
    """
    checkpoint, adapter, glob = pattern.partition("@adarope:adapter=")
    if adapter and "*" in glob:
        before, after, what = f"{checkpoint}{adapter}", "", "adapter"
        found = [file for file in _glob(glob) if file.is_file()]
    else:
        glob, at, scheme = pattern.partition("@")
        before, after, what = "", f"{at}{scheme}", "checkpoint folder (with a config.json)"
        found = [folder for folder in _glob(glob) if (folder / "config.json").is_file()]
    if not found:
        raise BadInput(f"no {what} matches '{glob}'")
    steps = {path: training_step(path) for path in found}
    ordered = sorted(found, key=lambda path: (steps[path] is None, steps[path] or 0, path.name))
    names = [_stem(path) for path in found]
    labels = {path: _stem(path) if names.count(_stem(path)) == 1 else str(path) for path in ordered}
    return {label: f"{before}{path}{after}" for path, label in labels.items()}


def _glob(pattern: str) -> list[Path]:
    root = given.path(pattern, "checkpoint pattern")
    anchor = Path(root.anchor) if root.is_absolute() else Path()
    try:
        return list(anchor.glob(str(root.relative_to(anchor) if root.is_absolute() else root)))
    except (ValueError, NotImplementedError, OSError) as error:
        raise BadInput(f"checkpoint pattern {given.shown(pattern)} cannot be used ({error}): check it") from error


def _stem(path: Path) -> str:
    return path.name.removesuffix(".safetensors")
