"""Validation of the rope settings in a config.json, before transformers reads them."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from headscope import user_input
from headscope.errors import BadInput

REQUIRED_KEYS: Mapping[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "longrope": ("short_factor", "long_factor"),
}
"""Keys that a rope type needs and for which transformers has no default."""
POSITIVE_KEYS = (
    *("rope_theta", "factor", "attention_factor", "original_max_position_embeddings"),
    *("low_freq_factor", "high_freq_factor"),
)
"""Keys whose value, if there is one, must be positive. YaRN's others may be 0, which means their default."""
LIST_KEYS = ("short_factor", "long_factor")


def refuse_rope_settings(folder: Path, name: str) -> None:
    """Raise BadInput for rope settings that give no frequencies: a missing key, or a value that is not
    a positive number.

    A file that cannot be read is left to transformers.
    """
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return
    for rope in _rope_settings(config):
        if problem := _problem(rope):
            raise BadInput(f"cannot open checkpoint '{name}': {problem}. Correct its config.json")


def _rope_settings(config: Any) -> Iterator[Mapping[str, Any]]:
    """The rope settings of a config and of its text part, one for each layer type. Each includes a base that the config
    states outside of them."""
    if not isinstance(config, dict):
        return
    yield from _rope_settings(config.get("text_config"))
    apart = {"rope_theta": config["rope_theta"]} if "rope_theta" in config else {}
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if isinstance(rope, dict):
        nested = [parameters for parameters in rope.values() if isinstance(parameters, dict)]
        yield from ({**apart, **parameters} for parameters in nested or [rope])


def _problem(rope: Mapping[str, Any]) -> str:
    """What is wrong with rope settings, or ""."""
    rope_type = rope.get("rope_type") or rope.get("type") or "default"
    required = REQUIRED_KEYS.get(rope_type, ()) if isinstance(rope_type, str) else ()
    if missing := [key for key in required if key not in rope]:
        return f"its rope settings of type '{rope_type}' lack {', '.join(missing)}"
    for key in POSITIVE_KEYS:
        value = rope.get(key)
        if value is not None and not _is_positive(value):
            return f"its {key} is {user_input.quote(value)}, not a positive number"
    for key in LIST_KEYS:
        values = rope.get(key)
        if values is not None and not (isinstance(values, list) and values and all(map(_is_positive, values))):
            return f"its {key} is not a list of positive numbers"
    if rope_type == "longrope" and len(rope["short_factor"]) != len(rope["long_factor"]):
        return "its short_factor and long_factor differ in length"
    if rope_type == "yarn" and rope.get("rope_theta") == 1:
        return "its rope_theta is 1, with which YaRN has no frequencies"
    return ""


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0
