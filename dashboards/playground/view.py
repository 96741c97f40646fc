"""What a link to the playground keeps: its inputs and choices, as JSON in the URL's parameter `playground`."""

import json
from collections.abc import Collection, Mapping
from typing import Any

PlaygroundView = Mapping[str, Any]
"""Values of the inputs by name; an input without an entry has its default."""
TEXTS = ("prompt", "heads", "kind", "corrupted", "answer", "wrong", "next_token")
MAX_TEXT = 30_000
"""Characters of a text that a link keeps."""


def parse_view(text: str, models: Collection[str], quantities: Collection[str]) -> PlaygroundView:
    """The valid entries of the parameter; the others are left out."""
    try:
        values = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    if not isinstance(values, dict):
        return {}
    return {name: value for name, value in values.items() if _is_valid(name, value, models, quantities)}


def _is_valid(name: str, value: Any, models: Collection[str], quantities: Collection[str]) -> bool:
    match name, value:
        case ("pair", {"query": int(), "key": int(), **others}):
            return all(isinstance(position, int) for position in others.values())
        case ("count", int()):
            return True
        case ("layer" | "head", str()):
            return value.isascii() and value.isdecimal() and len(value) < 6
        case ("scale", str()):
            return value in ("log", "linear")
        case ("model", str()):
            return value in models
        case ("quantity", str()):
            return value in quantities
        case (_, str()):
            return name in TEXTS and len(value) <= MAX_TEXT
        case _:
            return False
