"""Frequencies that transformers computes for other RoPE parameters than the checkpoint's own, by layer.

The same code first computes the checkpoint's own frequencies from its config. If they differ from the frequencies found
by model inspection, the config is no basis for a scheme, and the scheme is refused.
"""

import copy
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headscope.errors import warn_once
from headscope.models.checkpoint import LoadedModel
from headscope.models.rope_settings import ORIGINAL_LENGTH_KEY, original_context
from headscope.models.rotation import cos_sin_tables, preserving_frequencies
from headscope.positions.schedule import FixedSchedule, Schedule, require_rotation, unsupported_scheme_error

UNSCALED_ROPE_TYPES = ("default", "proportional")
FAMILY_YARN_KEYS = frozenset({"beta_fast", "beta_slow", "truncate", "mscale", "mscale_all_dim"})
"""Keys of `rope_parameters` that say how a family applies YaRN."""
SCALING_KEYS = FAMILY_YARN_KEYS | {
    *("type", "factor", "attention_factor", "short_factor", "long_factor", "short_mscale", "long_mscale", "alpha"),
    *("low_freq_factor", "high_freq_factor"),
}
"""Keys of `rope_parameters` that belong to a RoPE scaling, which a scheme replaces."""
SINUSOIDAL_BASE = 10_000.0
"""Base of the frequencies in GPT-J's and CodeGen's tables of sin and cos."""


def scaled_schedule(
    checkpoint: LoadedModel,
    rope_type: str,
    *,
    rope_theta: float | None = None,
    ntk_factor: float | None = None,
    **options: float | None,
) -> FixedSchedule:
    """Frequencies, attention factors and softmax factors that transformers computes for a scheme, layer by layer.

    The result equals the same model with the schedule's `rope_parameters` in its config. `ntk_factor` multiplies the
    base as the scheme ntk does. Sliding-window layers keep their own frequencies. A checkpoint's existing scaling is
    replaced, not scaled further, with a warning. Raises UnsupportedModel for a checkpoint without rotation, one in
    which only sliding-window layers rotate, or one whose config does not determine its frequencies.
    """
    require_rotation(checkpoint, rope_type)
    rotation = checkpoint.rotation
    thetas, factors = list(FixedSchedule.of_checkpoint(checkpoint).thetas), list(rotation.factors)
    softmax_ratios = [1.0] * len(thetas)
    rope_parameters: dict[str | None, dict[str, Any]] = {}
    has_masked_pairs = False
    for layer_type, layers in _layers_to_change(checkpoint, rope_type).items():
        own = _own_rope_parameters(checkpoint, layer_type)
        own_theta = _check_own_frequencies(checkpoint, rope_type, layer_type, layers)
        base = (rope_theta or own["rope_theta"]) * _ntk_base_factor(checkpoint, ntk_factor, 2 * len(own_theta))
        rope = _scheme_parameters(own, rope_type, base, original_length(checkpoint, layer_type), options)
        theta, factor = _compute_scheme(checkpoint, rope_type, layer_type, rope)
        if own["rope_type"] == "proportional":
            theta, has_masked_pairs = theta * (own_theta != 0), True
        shared_theta, factor = theta[None], factor if rotation.factor_scales_logits else 1.0
        for layer in layers:
            thetas[layer], factors[layer] = shared_theta, factor
            module = checkpoint.attention_modules[layer]
            softmax_ratios[layer] = softmax_factor(module, rope) / softmax_factor(module, own)
        rope_parameters[layer_type] = rope
        if own["rope_type"] not in UNSCALED_ROPE_TYPES:
            first = layers[0]
            _warn_of_replacement(checkpoint, own["rope_type"], factor / rotation.factors[first], softmax_ratios[first])
    return FixedSchedule(
        checkpoint,
        tuple(thetas),
        tuple(factors),
        softmax_ratios=tuple(softmax_ratios),
        rope_parameters=None if has_masked_pairs else rope_parameters,
    )


def _layers_to_change(checkpoint: LoadedModel, scheme: str) -> dict[str | None, list[int]]:
    """The layers that a scheme changes, by layer type: those that rotate, except layers of the type sliding_attention.

    Raises UnsupportedModel if only sliding-window layers rotate.
    """
    layers_by_type: dict[str | None, list[int]] = {}
    for layer, layer_type in enumerate(checkpoint.rotation.layer_types):
        if checkpoint.geometry.layer_rotates[layer]:
            layers_by_type.setdefault(layer_type, []).append(layer)
    sliding = layers_by_type.pop("sliding_attention", None)
    if sliding is not None and not layers_by_type:
        reason = "only its sliding-window layers rotate, and they keep their frequencies"
        raise unsupported_scheme_error(checkpoint, scheme, reason)
    return layers_by_type


def _check_own_frequencies(checkpoint: LoadedModel, scheme: str, layer_type: str | None, layers: list[int]) -> Tensor:
    """The checkpoint's own frequencies from its config. Raises UnsupportedModel if model inspection found others."""
    theta, _ = _compute_frequencies(checkpoint, layer_type, _own_rope_parameters(checkpoint, layer_type))
    for layer in layers:
        inspected = checkpoint.rotation.layer_theta(layer)
        if theta.shape != inspected.shape or not torch.allclose(theta, inspected, rtol=1e-2):
            reason = "its config does not determine its rotary frequencies"
            raise unsupported_scheme_error(checkpoint, scheme, reason)
    return theta


def _scheme_parameters(
    own: dict[str, Any], rope_type: str, base: float, original: int, options: Mapping[str, float | None]
) -> dict[str, Any]:
    """The `rope_parameters` of a scheme, from the checkpoint's own.

    Settings that are not part of RoPE scaling stay, such as the share of rotary dimensions. YaRN on a checkpoint with
    YaRN also keeps the settings of its family: the ends of YaRN's ramp, and `mscale_all_dim`, by which some families
    multiply all logits instead of the rotated part. So YaRN with the checkpoint's own factor is the checkpoint, unless
    its config states an attention factor, which belongs to its own factor.
    """
    stated = {name: value for name, value in options.items() if value is not None}
    kept = FAMILY_YARN_KEYS if rope_type == own["rope_type"] == "yarn" else frozenset()
    if "attention_factor" in stated:
        kept = kept - {"mscale", "mscale_all_dim"}
    # Proportional RoPE spaces its frequencies over the whole head and sets those beyond a share of it to 0.
    replaced = {"partial_rotary_factor"} if own["rope_type"] == "proportional" else set()
    replaced |= SCALING_KEYS - kept
    rope = {name: value for name, value in own.items() if name not in replaced and value is not None}
    return {**rope, "rope_type": rope_type, "rope_theta": base, ORIGINAL_LENGTH_KEY: original, **stated}


def original_length(checkpoint: LoadedModel, layer_type: str | None) -> int:
    """The context length before RoPE scaling of the layers of one type."""
    return original_context(checkpoint.module.config, layer_type) or checkpoint.geometry.native_context


def softmax_factor(attention_module: nn.Module, rope: Mapping[str, Any]) -> float:
    """The factor on the softmax scale that the family of an attention module computes from RoPE parameters.

    DeepSeek, Mistral 4 and others multiply all logits by YaRN's temperature (`mscale_all_dim`), outside cos and sin.
    """
    apply = getattr(sys.modules[type(attention_module).__module__], "yarn_apply_mscale", None)
    return 1.0 if apply is None else float(apply(dict(rope), 1.0))


def own_softmax_factors(checkpoint: LoadedModel) -> tuple[float, ...]:
    """The factor on the softmax scale that each layer's attention module applies for the checkpoint's own RoPE."""
    rotates, types = checkpoint.geometry.layer_rotates, checkpoint.rotation.layer_types
    return tuple(
        softmax_factor(module, _own_rope_parameters(checkpoint, types[layer])) if rotates[layer] else 1.0
        for layer, module in enumerate(checkpoint.attention_modules)
    )


def _compute_scheme(
    checkpoint: LoadedModel, scheme: str, layer_type: str | None, rope: dict[str, Any]
) -> tuple[Tensor, float]:
    """Frequencies and factor of a scheme. Raises UnsupportedModel for a base or a length that gives none."""
    if scheme == "yarn" and rope["rope_theta"] <= 1:
        reason = f"its rope_theta is {rope['rope_theta']:g}, so its wavelengths do not grow from pair to pair"
        raise unsupported_scheme_error(checkpoint, scheme, reason, "Check rope_theta in its config.json")
    if scheme in ("yarn", "llama3") and not rope[ORIGINAL_LENGTH_KEY]:
        reason = "its config has no context length"
        raise unsupported_scheme_error(checkpoint, scheme, reason, "Add max_position_embeddings to its config.json")
    dims = int(checkpoint.geometry.head_dim * rope.get("partial_rotary_factor", 1.0))
    if scheme == "yarn" and dims % 2:
        reason = f"transformers computes YaRN for an even number of rotary dimensions only, and its config gives {dims}"
        raise unsupported_scheme_error(checkpoint, scheme, reason)
    return _compute_frequencies(checkpoint, layer_type, rope)


def _warn_of_replacement(checkpoint: LoadedModel, own_type: str, attention_ratio: float, softmax_ratio: float) -> None:
    changes = [
        f"{name} is multiplied by {ratio:.4g}"
        for name, ratio in (("the factor on cos and sin", attention_ratio), ("the softmax scale", softmax_ratio))
        if abs(ratio - 1) > 1e-6
    ]
    warn_once(
        f"'{checkpoint.name}' already uses RoPE scaling ({own_type}). The scheme replaces it: "
        + ", ".join(["frequencies are computed from the unscaled base", *changes])
    )


def _ntk_base_factor(checkpoint: LoadedModel, ntk_factor: float | None, dims: int) -> float:
    """The factor on the base for NTK-aware interpolation of `dims` rotary dimensions."""
    if ntk_factor is None:
        return 1.0
    if dims == 2:
        reason = "it has one rotary pair, whose frequency does not depend on the base"
        raise unsupported_scheme_error(checkpoint, "ntk", reason)
    return float(ntk_factor ** (dims / (dims - 2)))


def schedule_at_length(checkpoint: LoadedModel, schedule: Schedule, length: int) -> Schedule:
    """The schedule of a text of `length` tokens; some checkpoints change their own frequencies with the length.

    Raises UnsupportedModel if the checkpoint's cos and sin differ from those of the frequencies in its config.
    """
    rotation = checkpoint.rotation
    limit = rotation.frequency_change_length
    if schedule.replaces_rotation or limit is None or length <= limit:
        return schedule
    assert isinstance(schedule, FixedSchedule)
    layer_rotates = checkpoint.geometry.layer_rotates
    types = dict.fromkeys(kind for kind, rotates in zip(rotation.layer_types, layer_rotates, strict=True) if rotates)
    frequencies_by_type = {
        layer_type: _compute_frequencies(checkpoint, layer_type, _own_rope_parameters(checkpoint, layer_type), length)
        for layer_type in types
    }
    last_position = torch.tensor([[length - 1]], device=checkpoint.device)
    no_input = torch.zeros(1, 1, 1, device=checkpoint.device)
    for module in rotation.rotary_modules:
        for layer_type, (theta, factor) in frequencies_by_type.items():
            with preserving_frequencies([module]):
                tables = module(no_input, last_position, **({"layer_type": layer_type} if layer_type else {}))
                tables = tables if isinstance(tables, tuple) else (tables,)
            expected = cos_sin_tables(last_position, theta[None], factor, rotation.table_layout, tables[0].dtype)
            if not all(torch.allclose(*pair, atol=2e-2) for pair in zip(tables, expected, strict=True)):
                reason = f"beyond {limit} tokens its code does not rotate by the frequencies of its config"
                raise unsupported_scheme_error(checkpoint, "base", reason, f"Use texts of at most {limit} tokens")
    thetas, factors = list(schedule.thetas), list(schedule.attention_factors)
    for layer, layer_type in enumerate(rotation.layer_types):
        if layer_rotates[layer]:
            theta, factor = frequencies_by_type[layer_type]
            thetas[layer], factors[layer] = theta[None], factor if rotation.factor_scales_logits else 1.0
    return replace(schedule, thetas=tuple(thetas), attention_factors=tuple(factors))


def _own_rope_parameters(checkpoint: LoadedModel, layer_type: str | None) -> dict[str, Any]:
    parameters = _text_config(checkpoint).rope_parameters
    return dict(parameters[layer_type] if layer_type else parameters)


def _text_config(checkpoint: LoadedModel) -> Any:
    """A copy of the text config, with RoPE parameters in the standard form."""
    config, geometry = copy.deepcopy(checkpoint.module.config.get_text_config()), checkpoint.geometry
    if getattr(config, "rope_parameters", None) is None:  # GPT-J and CodeGen, whose code fixes the base
        share = 2 * geometry.pairs / geometry.head_dim
        config.rope_parameters = {"rope_type": "default", "rope_theta": SINUSOIDAL_BASE, "partial_rotary_factor": share}
    if vars(config).get("head_dim", 0) is None:  # Mixtral; transformers multiplies it
        config.head_dim = geometry.head_dim
    config.standardize_rope_params()
    return config


def _compute_frequencies(
    checkpoint: LoadedModel, layer_type: str | None, rope: dict[str, Any], length: int | None = None
) -> tuple[Tensor, float]:
    """Frequencies [pairs], float32, and the factor on cos and sin for the RoPE parameters of one layer type."""
    config = _text_config(checkpoint)
    if rope["rope_type"] == "default":  # ROPE_INIT_FUNCTIONS has no such entry; linear by 1 is the same
        rope = {**rope, "rope_type": "linear", "factor": 1.0}
    config.rope_parameters = {**config.rope_parameters, layer_type: rope} if layer_type else rope
    if not hasattr(config, "max_position_embeddings"):
        config.max_position_embeddings = checkpoint.geometry.native_context
    if ORIGINAL_LENGTH_KEY in rope and hasattr(config, ORIGINAL_LENGTH_KEY):
        # transformers prefers this copy over the value in rope_parameters.
        setattr(config, ORIGINAL_LENGTH_KEY, rope[ORIGINAL_LENGTH_KEY])
    compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    theta, factor = compute(config, torch.device("cpu"), seq_len=length, layer_type=layer_type)
    return theta.float(), float(factor)
