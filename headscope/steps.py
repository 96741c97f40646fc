"""The training step of a checkpoint folder."""

import json
import re
from pathlib import Path


def training_step(folder: Path) -> int | None:
    """The step in the trainer's state file, else in the folder's name ("step-10", "checkpoint-10", "10"), else None."""
    state = folder / "trainer_state.json"
    if state.is_file():
        return int(json.loads(state.read_text(encoding="utf-8"))["global_step"])
    named = re.search(r"(?:step|checkpoint|ckpt|iter)[-_]?(\d+)", folder.name, re.IGNORECASE)
    named = named or re.fullmatch(r"(\d+)", folder.name)
    return int(named[1]) if named else None
