"""The context lengths of a checkpoint's config, in tokens. There are three different ones.

The **native context** is the length that the checkpoint was trained or declared for. The **original context** is the
length before RoPE scaling: schemes that replace the scaling start from it. The **frequency change length** is the
longest text with the original frequencies: the code of dynamic and longrope RoPE computes others for longer texts.
Llama 3.1 has a native context of 131,072 tokens and an original one of 8,192, and never changes its frequencies.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

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
