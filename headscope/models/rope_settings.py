"""The rope settings of a config.json, checked before transformers reads them, and its context lengths."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from headscope.base import user_input
from headscope.errors import BadInput

LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
"""Config keys of a context length, in order of precedence."""
ORIGINAL_LENGTH_KEY = "original_max_position_embeddings"


def native_context(config: Any) -> int:
    """The length that the checkpoint was trained or declared for; 0 if the config has none.

    YaRN declares `factor` times the original length. Of several lengths the longest counts.
    """
    lengths = [_declared_length(config)]
    for rope in _rope_by_layer_type(config).values():
        factor = rope.get("factor") if _rope_type(rope) == "yarn" else None
        lengths.append((rope.get(ORIGINAL_LENGTH_KEY) or 0) * (factor or 1))
    return int(max(lengths))


def original_context(config: Any, layer_type: str | None = None) -> int:
    """The length before RoPE scaling of the layers of one type, by default the shortest of all; 0 if unknown.

    Linear scaling names no original length: it is the declared length divided by the factor.
    """
    ropes = _rope_by_layer_type(config)
    chosen = [ropes[layer_type]] if layer_type in ropes else [*ropes.values()]
    declared = _declared_length(config)
    lengths = []
    for rope in chosen:
        factor = rope.get("factor") if _rope_type(rope) == "linear" else None
        lengths.append(rope.get(ORIGINAL_LENGTH_KEY) or declared / (factor or 1))
    return int(min(lengths))


def frequency_change_length(rotary_module: nn.Module) -> int | None:
    """The longest text with the original frequencies of a rotary module; None if its frequencies are fixed.

    Dynamic RoPE changes at `max_position_embeddings`, whatever its original length says; longrope at the original
    length, which may be beyond the native context.
    """
    types: Any = getattr(rotary_module, "rope_type", None)
    types_by_layer_type = types if isinstance(types, dict) else {None: types}
    config: Any = getattr(rotary_module, "config", None)
    lengths = []
    for layer_type, rope_type in types_by_layer_type.items():
        if rope_type == "dynamic":
            lengths.append(config.max_position_embeddings)
        elif rope_type == "longrope":
            rope = config.rope_parameters if layer_type is None else config.rope_parameters[layer_type]
            lengths.append(rope[ORIGINAL_LENGTH_KEY])
    return min(map(int, lengths), default=None)


def _declared_length(config: Any) -> int:
    """The first declared length; with linear scaling the longest, as in Vicuna 16k, which declares both lengths."""
    text = config.get_text_config()
    lengths = [length for key in LENGTH_KEYS if isinstance(length := getattr(text, key, None), int) and length]
    is_linear = any(_rope_type(rope) == "linear" for rope in _rope_by_layer_type(config).values())
    return max(lengths, default=0) if is_linear else next(iter(lengths), 0)


def _rope_by_layer_type(config: Any) -> Mapping[str | None, Mapping[str, Any]]:
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    nested = {layer_type: parameters for layer_type, parameters in rope.items() if isinstance(parameters, dict)}
    return nested or {None: rope}


def _rope_type(rope: Mapping[str, Any]) -> str:
    return str(rope.get("rope_type") or rope.get("type") or "default")


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
