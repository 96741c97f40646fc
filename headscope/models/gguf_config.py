"""The transformers configuration of a GGUF file.

transformers reads the sizes of a GGUF file, but of its positions only the base of the frequencies. This module adds
rotation, windows, temperature, soft caps and the sizes that transformers leaves at the defaults of its class.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from transformers import PreTrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from headscope.errors import UnsupportedModel
from headscope.models.gguf_file import GgufFile, family_values
from headscope.models.gguf_rope import LOCAL_BASES, proportional_parameters, rope_parameters, rope_theta

Windows = Literal["none", "all", "pattern"]


@dataclass(frozen=True)
class Architecture:
    """An architecture that headscope opens from GGUF: what differs from Llama.

    `windows` says which layers may have a sliding window; of `period` layers the last attends to the whole text, or the
    layers are those of the file's pattern. `large_layers` is the number of layers of the size whose softmax scale is
    (hidden size / heads)^-1/2 instead of head_dim^-1/2, or `scale` is the softmax scale. `rotates` is false without
    rotary positions; `rotates_by_window` is true if layers with a window rotate by a base of their own. `keys` are
    further settings, each with the value that the model of transformers has for it.
    """

    windows: Windows = "none"
    period: int = 1
    large_layers: int | None = None
    scale: float | None = None
    rotates: bool = True
    rotates_by_window: bool = False
    keys: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))


ANY = object()
"""Marks a setting whose every value is accepted: transformers reads it, or it changes no number."""
_EXPERTS = {
    "expert_feed_forward_length": ANY,
    "expert_shared_feed_forward_length": ANY,
    "expert_weights_norm": ANY,
    "expert_gating_func": 1,  # softmax
}
_SSM = {f"ssm.{name}": ANY for name in ("conv_kernel", "state_size", "group_count", "time_step_rank", "inner_size")}
_QWEN35 = {**_SSM, "full_attention_interval": ANY, "nextn_predict_layers": ANY, "rope.dimension_sections": ANY}
_GEMMA4 = {
    **dict.fromkeys(("attention.key_length_swa", "attention.value_length_swa", "rope.dimension_count_swa"), ANY),
    **dict.fromkeys(("attention.shared_kv_layers", "embedding_length_per_layer_input"), ANY),
}
ARCHITECTURES = {
    "llama": Architecture(keys={"tensor_data_layout": "Meta AI original pth"}),
    "qwen2": Architecture(),
    "qwen2moe": Architecture(keys=_EXPERTS),
    "qwen3": Architecture(),
    "qwen3moe": Architecture(keys=_EXPERTS),
    "qwen35": Architecture(keys=_QWEN35),
    "qwen35moe": Architecture(keys=_QWEN35 | _EXPERTS),
    "phi3": Architecture(windows="all"),
    "gemma2": Architecture(windows="pattern", period=2, large_layers=46),
    "gemma3": Architecture(windows="pattern", period=6, large_layers=62, rotates_by_window=True),
    "gemma4": Architecture(windows="pattern", period=6, scale=1.0, rotates_by_window=True, keys=_GEMMA4),
    "starcoder2": Architecture(windows="all"),
    "stablelm": Architecture(keys={"use_parallel_residual": ANY}),
    "nemotron": Architecture(),
    "falcon": Architecture(keys={"tensor_data_layout": "jploski"}),
    "bloom": Architecture(rotates=False, keys={"attention.max_alibi_bias": 8.0}),
    "gpt2": Architecture(rotates=False),
    "lfm2": Architecture(keys={"shortconv.l_cache": ANY}),
    "minimax-m2": Architecture(keys={"expert_feed_forward_length": ANY, "expert_gating_func": 2}),
}
"""Architectures of GGUF files that headscope opens, by their name in the file."""

SIZES = {
    "context_length": ("max_position_embeddings",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "block_count": ("num_hidden_layers",),
    "attention.head_count": ("num_attention_heads",),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
}
"""Settings, and the attributes of a configuration that may hold them: the first that its class has."""
OPTIONAL_SIZES = ("context_length", "feed_forward_length", "attention.head_count_kv", "attention.key_length")
"""Sizes that a class may lack: no forward pass uses the first, and the shapes of the weights determine the others."""
POSITION_KEYS = (
    *("rope.freq_base", "rope.global.freq_base", "rope.freq_base_swa", "rope.local.freq_base", "rope.dimension_count"),
    *("rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length"),
    *("rope.scaling.attn_factor", "rope.scaling.finetuned", "rope.scaling.yarn_log_multiplier"),
    *("rope.scaling.yarn_ext_factor", "rope.scaling.yarn_attn_factor", "rope.scaling.yarn_beta_fast"),
    *("rope.scaling.yarn_beta_slow", "attention.sliding_window", "attention.sliding_window_pattern"),
    "attention.scale",
)
"""Settings of positions, windows and temperature that headscope reads for every architecture."""
OTHER_KEYS = ("vocab_size", "attention.value_length", "attention.causal", "pooling_type")
"""Settings that need no attribute: checked with the weights, or without effect on a forward pass."""


def architecture(file: GgufFile) -> Architecture:
    """The declaration of the file's architecture. Raises UnsupportedModel for other architectures."""
    if file.architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"cannot open GGUF file '{file.path}': its architecture is '{file.architecture}'. Use the folder or the "
            f"hub id that it was made from, or a GGUF file of one of: {', '.join(sorted(ARCHITECTURES))}"
        )
    return ARCHITECTURES[file.architecture]


def gguf_config(file: GgufFile) -> PreTrainedConfig:
    """The configuration of the model in a GGUF file.

    Raises UnsupportedModel for an architecture or a setting that headscope does not read, and for settings that
    transformers cannot express.
    """
    declaration = architecture(file)
    _refuse_unknown_settings(file, declaration)
    values, _ = PreTrainedConfig.get_config_dict(file.path.parent, gguf_file=file.path.name)
    if file.architecture == "llama":  # "mistral" if the file's name is that, whose class adds a window
        values["model_type"] = "llama"
    config_class = CONFIG_MAPPING[values["model_type"]]
    values = {key: value for key, value in values.items() if key not in ("rope_theta", "rope_scaling")}
    values |= _sizes(file, config_class)
    values |= _biases(file, config_class)
    values |= family_values(file)
    if declaration.rotates:
        values["rope_parameters"] = _rope(file, config_class, values.get("rope_parameters") or {})
    values |= _windows(file, declaration, config_class)
    if has_attribute(config_class, "query_pre_attn_scalar"):
        values["query_pre_attn_scalar"] = _rounded(softmax_scale(file) ** -2)
    elif not math.isclose(softmax_scale(file), default_scale(file), rel_tol=1e-6):
        raise file.unsupported_error(
            "attention.scale", f"is not {default_scale(file):.6g}, as in this model of transformers"
        )
    if has_attribute(config_class, "original_max_position_embeddings"):  # Phi-3, which prefers it to rope_parameters
        default = file.settings["context_length"]
        length = file.settings.get("rope.scaling.original_context_length", default)
        values["original_max_position_embeddings"] = length
    if has_attribute(config_class, "vocab_size_per_layer_input"):
        values["vocab_size_per_layer_input"] = values["vocab_size"]
    vocabulary = values.get("vocab_size")
    if vocabulary is not None and (values.get("pad_token_id") or config_class().pad_token_id or 0) >= vocabulary:
        values["pad_token_id"] = None  # the default of the class is a token of its published checkpoint
    return config_class.from_dict(values)


def head_dim(file: GgufFile, *, local: bool = False) -> int:
    """Dimensions of a head; with `local`, in layers with a window, which may differ in Gemma 4."""
    settings = file.settings
    if local and "attention.key_length_swa" in settings:
        return int(settings["attention.key_length_swa"])
    return int(settings.get("attention.key_length") or settings["embedding_length"] // settings["attention.head_count"])


def default_scale(file: GgufFile) -> float:
    """The factor on the products of queries and keys that llama.cpp has for the architecture."""
    declaration, settings = architecture(file), file.settings
    if declaration.scale is not None:
        return declaration.scale
    is_large = settings["block_count"] == declaration.large_layers
    dims = settings["embedding_length"] // settings["attention.head_count"] if is_large else head_dim(file)
    return float(dims**-0.5)


def softmax_scale(file: GgufFile) -> float:
    """The factor on the products of queries and keys: that of the file, else of the architecture."""
    return float(file.settings.get("attention.scale") or default_scale(file))


def layer_windows(file: GgufFile) -> tuple[int | None, ...]:
    """The sliding window of each layer, None where it attends to the whole text."""
    declaration = architecture(file)
    layers = int(file.settings["block_count"]) - int(file.settings.get("nextn_predict_layers", 0))
    window = file.settings.get("attention.sliding_window") or None  # Phi-3 writes 0 for none
    if window is None or (declaration.windows == "none" and window >= file.settings["context_length"]):
        return (None,) * layers
    if declaration.windows == "none":
        raise file.unsupported_error(
            "attention.sliding_window", "is not supported by this architecture in transformers"
        )
    pattern = file.settings.get("attention.sliding_window_pattern", declaration.period)
    if isinstance(pattern, int):
        pattern = [pattern == 0 or layer % pattern < pattern - 1 for layer in range(layers)]
        if declaration.windows == "all":
            pattern = [True] * layers
    if len(pattern) != layers or (declaration.windows == "all" and not all(pattern)):
        raise file.unsupported_error("attention.sliding_window_pattern", "does not fit the layers of this architecture")
    return tuple(window if sliding else None for sliding in pattern)


def has_attribute(config_class: Any, name: str) -> bool:
    """Whether configurations of this class have the attribute."""
    return name in config_class.attribute_map or name in config_class.__dataclass_fields__


def _refuse_unknown_settings(file: GgufFile, declaration: Architecture) -> None:
    known = {*SIZES, *POSITION_KEYS, *OTHER_KEYS} - {*_EXPERTS}
    for key in file.settings:
        if key not in known and key not in declaration.keys:
            raise file.unsupported_error(key, "is unknown to headscope for this architecture")
        if (value := declaration.keys.get(key, ANY)) is not ANY and file.settings[key] != value:
            raise file.unsupported_error(key, f"must be {value}")
        is_local = key in LOCAL_BASES and not declaration.rotates_by_window
        if is_local or (key.startswith("rope.") and not declaration.rotates):
            raise file.unsupported_error(key, "is not supported by this architecture in transformers")
    if file.settings.get("attention.causal") is False:
        raise file.unsupported_error("attention.causal", "makes the model attend in both directions")
    for key, length in (
        ("attention.value_length", head_dim(file)),
        ("attention.value_length_swa", head_dim(file, local=True)),
    ):
        if file.settings.get(key, length) != length:
            raise file.unsupported_error(key, "differs from the length of the keys")


def _sizes(file: GgufFile, config_class: Any) -> dict[str, Any]:
    """Sizes, epsilons and soft caps. Lists by layer are left to transformers and compared after opening."""
    sizes: dict[str, Any] = {}
    for key, attributes in SIZES.items():
        value = file.settings.get(key)
        name = next((name for name in attributes if has_attribute(config_class, name)), None)
        if value is None or isinstance(value, list):
            continue
        if name is not None:
            sizes[config_class.attribute_map.get(name, name)] = value
        elif value and key not in OPTIONAL_SIZES:
            raise file.unsupported_error(key, "is not supported by this architecture in transformers")
    return sizes


def _rope(file: GgufFile, config_class: Any, axes: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters`, by layer type for Gemma 3 and 4; entries of axes that transformers read itself are kept."""
    local = {"rope_type": "default", "rope_theta": rope_theta(file, local=True)}
    if file.architecture == "gemma4":
        for key, dims in (
            ("rope.dimension_count", head_dim(file)),
            ("rope.dimension_count_swa", head_dim(file, local=True)),
        ):
            if file.settings.get(key, dims) != dims:
                raise file.unsupported_error(key, "is not the dimension of the whole head")
        return {"full_attention": proportional_parameters(file, head_dim(file)), "sliding_attention": local}
    rope = {**axes, **rope_parameters(file, head_dim(file))}
    class_share = config_class().rope_parameters.get("partial_rotary_factor", 1.0)
    if rope["partial_rotary_factor"] == class_share == 1:
        del rope["partial_rotary_factor"]  # as folders leave it out
    return {"full_attention": rope, "sliding_attention": local} if architecture(file).rotates_by_window else rope


def _windows(file: GgufFile, declaration: Architecture, config_class: Any) -> dict[str, Any]:
    windows = layer_windows(file)
    window = next(filter(None, windows), None)
    values: dict[str, Any] = {"sliding_window": window} if has_attribute(config_class, "sliding_window") else {}
    if declaration.windows == "pattern":
        values["layer_types"] = ["sliding_attention" if window else "full_attention" for window in windows]
    return values


def _biases(file: GgufFile, config_class: Any) -> dict[str, Any]:
    """Biases that the weights have and that the class leaves out by default."""
    tensors = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return {name: tensor in file.tensor_names for name, tensor in tensors.items() if has_attribute(config_class, name)}


def _rounded(value: float) -> float | int:
    """The nearest integer if float32 cannot distinguish the value from it, else the value."""
    return round(value) if math.isclose(value, round(value), rel_tol=1e-6) else value
