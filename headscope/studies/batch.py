"""Many checkpoints of one training run: found by a glob, in the order of their steps."""

import json
import re
from pathlib import Path

from headscope.errors import BadInput


def training_step(folder: Path) -> int | None:
    """The step in the trainer's state file, else in the folder's name ("step-10", "checkpoint-10", "10"), else None."""
    state = folder / "trainer_state.json"
    if state.is_file():
        return int(json.loads(state.read_text(encoding="utf-8"))["global_step"])
    named = re.search(r"(?:step|checkpoint|ckpt|iter)[-_]?(\d+)", folder.name, re.IGNORECASE)
    named = named or re.fullmatch(r"(\d+)", folder.name)
    return int(named[1]) if named else None


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
    root = Path(pattern).expanduser()
    anchor = Path(root.anchor) if root.is_absolute() else Path()
    return list(anchor.glob(str(root.relative_to(anchor) if root.is_absolute() else root)))


def _stem(path: Path) -> str:
    return path.name.removesuffix(".safetensors")
