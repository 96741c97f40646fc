"""The training step of a checkpoint folder."""

import json
import re
from pathlib import Path


def training_step(folder: Path) -> int | None:
    """The step in the trainer's state file, else the last number in the folder's name, else None."""
    state = folder / "trainer_state.json"
    if state.is_file():
        return int(json.loads(state.read_text(encoding="utf-8"))["global_step"])
    numbers = re.findall(r"\d+", folder.name)
    stepped = re.search(r"(step|checkpoint|ckpt|iter)[-_]?(\d+)", folder.name, re.IGNORECASE)
    return int(stepped[2]) if stepped else int(numbers[-1]) if numbers and folder.name.isdigit() else None
