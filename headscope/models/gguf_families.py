"""Settings of a GGUF file that one architecture of transformers expresses in its own way."""

from typing import Any

from headscope.models.gguf_file import GgufFile


def family_values(file: GgufFile) -> dict[str, Any]:
    """Values of the configuration for the families below; empty for others.

    Raises UnsupportedModel for settings that transformers cannot express.
    """
    match file.architecture:
        case "falcon":
            return _falcon(file)
        case "gemma4":
            return _gemma4(file)
    return {}


def _falcon(file: GgufFile) -> dict[str, Any]:
    if file.settings["attention.head_count_kv"] != 1:
        raise file.unsupported_error(
            "attention.head_count_kv", "is not 1: transformers cannot read the order of its weights"
        )
    return {"multi_query": True}


def _gemma4(file: GgufFile) -> dict[str, Any]:
    """Head dimensions, KV heads and feed-forward widths by layer, keys shared between layers, embeddings by layer."""
    settings, layers = file.settings, file.settings["block_count"]
    sliding = settings.get("attention.sliding_window_pattern")
    if not isinstance(sliding, list) or len(sliding) != layers or all(sliding) or not any(sliding):
        raise file.unsupported_error(
            "attention.sliding_window_pattern", "does not name layers with and without a window"
        )
    groups, widths = settings["attention.head_count_kv"], settings["feed_forward_length"]
    groups = groups if isinstance(groups, list) else [groups] * layers
    widths = widths if isinstance(widths, list) else [widths] * layers
    if {*widths} - {widths[0], 2 * widths[0]}:
        raise file.unsupported_error("feed_forward_length", "is neither equal in all layers nor double in some")
    full = sliding.index(False)
    return {
        "head_dim": settings["attention.key_length_swa"],
        "global_head_dim": settings["attention.key_length"],
        "num_key_value_heads": groups[sliding.index(True)],
        "num_global_key_value_heads": groups[full],
        "attention_k_eq_v": f"blk.{full}.attn_v.weight" not in file.tensor_names,
        "num_kv_shared_layers": settings.get("attention.shared_kv_layers", 0),
        "intermediate_size": widths[0],
        "use_double_wide_mlp": 2 * widths[0] in widths,
        "hidden_size_per_layer_input": settings.get("embedding_length_per_layer_input", 0),
    }
