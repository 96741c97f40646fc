"""Compare a model that transformers opened from a GGUF file with what the file says, by the rules of llama.cpp.

The expectation is computed from the file alone; the model is inspected in a forward pass. If transformers drops a
setting or interprets it differently, the file is refused and the message names the setting.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from headscope.models.gguf_config import (
    OPTIONAL_SIZES,
    SIZES,
    architecture,
    has_attribute,
    head_dim,
    layer_windows,
    softmax_scale,
)
from headscope.models.gguf_file import GgufFile, refuse_unused_tensors
from headscope.models.gguf_rope import attention_factor, original_length, rope_theta, scaling_factor, scaling_type
from headscope.models.inspection import evaluation_mode, inspect_model

RELATIVE_TOLERANCE = 1e-5
"""Files hold settings as float32."""


def check_model(module: PreTrainedModel, file: GgufFile, unused: Iterable[str]) -> None:
    """Raise UnsupportedModel, naming the setting, if the model differs from the file.

    `unused` are the tensors that transformers reports as unused.
    """
    refuse_unused_tensors(module, file, unused)
    _check_sizes(module.config, file)
    with evaluation_mode(module):
        inspection = inspect_model(module)
    windows = layer_windows(file)
    rotation = inspection.rotation
    attending = [windows[number] for number in inspection.layer_numbers]
    _require(file, "attention.sliding_window", attending, list(inspection.windows))
    is_local = [window is not None and architecture(file).rotates_by_window for window in attending]
    heads = file.settings["attention.head_count"]
    _require(file, "attention.head_count", [heads] * len(attending), list(inspection.layer_heads))
    head_dims = [head_dim(file, local=local) for local in is_local]
    _require(file, "attention.key_length", head_dims, list(inspection.layer_head_dims))
    groups = file.settings.get("attention.head_count_kv", heads)
    if not isinstance(groups, list):
        groups = [groups] * len(windows)
    groups = [groups[number] for number in inspection.layer_numbers]
    _require(file, "attention.head_count_kv", groups, list(inspection.layer_kv_groups))
    for attention in inspection.attention_modules:
        if (scale := getattr(attention, "scaling", None)) is not None and not _close(scale, softmax_scale(file)):
            raise file.unsupported_error(
                "attention.scale", f"is {softmax_scale(file):.6g}, but the model has {scale:.6g}"
            )
    if not architecture(file).rotates:
        return
    for layer, local in enumerate(is_local):
        theta, factor = expected_rotation(file, local=local)
        if not _close(rotation.factors[layer], factor) and rotation.factor_scales_logits:
            raise file.unsupported_error(
                "rope.scaling.attn_factor", f"is {factor:.6g}, but the model has {rotation.factors[layer]}"
            )
        own = rotation.layer_theta(layer)
        if own.shape != theta.shape or not torch.allclose(own.double(), theta, rtol=RELATIVE_TOLERANCE, atol=1e-12):
            raise file.unsupported_error(
                "rope.scaling.type", f"gives other frequencies than the model has in layer {layer}"
            )


def expected_rotation(file: GgufFile, *, local: bool = False) -> tuple[Tensor, float]:
    """Frequencies [pairs], float64, and the factor on cos and sin that llama.cpp computes for short texts.

    `local`: for layers with a sliding window in architectures that rotate these by a base of their own.
    """
    key = "rope.dimension_count_swa" if local else "rope.dimension_count"
    dims = file.settings.get(key, head_dim(file, local=local))
    exponents = torch.arange(0, dims, 2).double() / dims
    theta = rope_theta(file, local=local) ** -exponents
    if local:
        return theta, 1.0
    match scaling_type(file):
        case "linear":
            theta = theta / scaling_factor(file)
        case "yarn":
            ramp = _yarn_ramp(file, dims)
            theta = theta / scaling_factor(file) * ramp + theta * (1 - ramp)
        case "longrope":
            theta = theta / file.divisors["rope_factors_short.weight"].double()
        case "divisors":
            theta = theta / file.divisors["rope_freqs.weight"].double()
    return theta, attention_factor(file)


def _yarn_ramp(file: GgufFile, dims: int) -> Tensor:
    """The share of interpolation of each pair [pairs]."""
    beta_fast = file.settings.get("rope.scaling.yarn_beta_fast", 32.0)
    beta_slow = file.settings.get("rope.scaling.yarn_beta_slow", 1.0)

    def pair(rotations: float) -> float:
        inverse_theta = original_length(file) / (rotations * 2 * math.pi)
        return dims * math.log(inverse_theta) / (2 * math.log(rope_theta(file)))

    low, high = max(math.floor(pair(beta_fast)), 0), min(math.ceil(pair(beta_slow)), dims - 1)
    return ((torch.arange(dims // 2).double() - low) / max(high - low, 0.001)).clamp(0, 1)


def _check_sizes(config: Any, file: GgufFile) -> None:
    """Compare the sizes, epsilons and soft caps of the file with the configuration."""
    for key, attributes in SIZES.items():
        name = next((name for name in attributes if has_attribute(type(config), name)), None)
        value = file.settings.get(key)
        is_inspected = key in OPTIONAL_SIZES and key != "context_length"
        if name is None or value is None or isinstance(value, list) or is_inspected:
            continue
        value -= file.settings.get("nextn_predict_layers", 0) if key == "block_count" else 0
        if not _close(getattr(config, name) or 0, value):
            raise file.unsupported_error(key, f"differs from that of the model, {getattr(config, name)}")


def _require(file: GgufFile, key: str, expected: Any, actual: Any) -> None:
    if expected != actual:
        raise file.unsupported_error(
            key, f"differs from that of the model: {expected} in the file, {actual} in the model"
        )


def _close(value: float, expected: float) -> bool:
    return math.isclose(value, expected, rel_tol=RELATIVE_TOLERANCE)
