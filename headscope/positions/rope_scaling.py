"""Frequencies that transformers computes for other RoPE parameters than the checkpoint's own, by layer.

The same code first computes the checkpoint's own frequencies from its config. If they differ from the frequencies found
by model inspection, the config is no basis for a scheme, and the scheme is refused.
"""

import copy
import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headscope.models.checkpoint import LoadedModel
from headscope.models.rotation import cos_sin_tables, preserving_frequencies
from headscope.positions.schedule import FixedSchedule, require_rotation, unsupported_scheme_error

UNSCALED_ROPE_TYPES = ("default", "proportional")
SINUSOIDAL_BASE = 10_000.0
"""Base of the frequencies in GPT-J's and CodeGen's tables of sin and cos."""
log = logging.getLogger("headscope")


def scaled_schedule(
    checkpoint: LoadedModel,
    rope_type: str,
    *,
    rope_theta: float | None = None,
    ntk_factor: float | None = None,
    **parameters: float | None,
) -> FixedSchedule:
    """Frequencies and attention factors that transformers computes for these RoPE parameters, layer by layer.

    `ntk_factor` multiplies the base as the scheme ntk does. Sliding-window layers keep their own frequencies. A
    checkpoint's existing scaling is replaced, not scaled further, with a warning. Raises UnsupportedModel for a
    checkpoint without rotation, one in which only sliding-window layers rotate, or one whose config does not determine
    its frequencies.
    """
    require_rotation(checkpoint, rope_type)
    rotation = checkpoint.rotation
    thetas, factors = list(FixedSchedule.of_checkpoint(checkpoint).thetas), list(rotation.factors)
    rotating_types = {
        layer_type
        for layer_type, rotates in zip(rotation.layer_types, checkpoint.geometry.layer_rotates, strict=True)
        if rotates
    }
    if rotating_types == {"sliding_attention"}:
        reason = "only its sliding-window layers rotate, and they keep their frequencies"
        raise unsupported_scheme_error(checkpoint, rope_type, reason)
    for layer_type in dict.fromkeys(rotation.layer_types):
        if layer_type == "sliding_attention":
            continue
        layers = [n for n, other_type in enumerate(rotation.layer_types) if other_type == layer_type]
        layers = [n for n in layers if checkpoint.geometry.layer_rotates[n]]
        if not layers:
            continue
        own_parameters = _own_rope_parameters(checkpoint, layer_type)
        own_theta, _ = _compute_frequencies(checkpoint, layer_type, own_parameters)
        for layer in layers:
            inspected = rotation.layer_theta(layer)
            if own_theta.shape != inspected.shape or not torch.allclose(own_theta, inspected, rtol=1e-2):
                reason = "its config does not determine its rotary frequencies"
                raise unsupported_scheme_error(checkpoint, rope_type, reason)
        if own_parameters["rope_type"] not in UNSCALED_ROPE_TYPES:
            _warn_once(
                f"'{checkpoint.name}' already uses RoPE scaling ({own_parameters['rope_type']}). The scheme replaces "
                "it: frequencies are computed from the unscaled base"
            )
        rope = {
            "rope_type": rope_type,
            "rope_theta": (rope_theta or own_parameters["rope_theta"])
            * _ntk_base_factor(checkpoint, ntk_factor, 2 * len(own_theta)),
            "original_max_position_embeddings": checkpoint.geometry.native_context,
            **{name: value for name, value in parameters.items() if value is not None},
        }
        # Proportional RoPE spaces its frequencies over the whole head and sets those beyond a share of it to 0.
        is_proportional = own_parameters["rope_type"] == "proportional"
        if own_parameters.get("partial_rotary_factor") is not None and not is_proportional:
            rope["partial_rotary_factor"] = own_parameters["partial_rotary_factor"]
        theta, factor = _compute_frequencies(checkpoint, layer_type, rope)
        shared_theta = (theta * (own_theta != 0) if is_proportional else theta)[None]
        for layer in layers:
            thetas[layer], factors[layer] = shared_theta, factor if rotation.factor_scales_logits else 1.0
    return FixedSchedule(checkpoint, tuple(thetas), tuple(factors))


def _ntk_base_factor(checkpoint: LoadedModel, ntk_factor: float | None, dims: int) -> float:
    """The factor on the base for NTK-aware interpolation of `dims` rotary dimensions."""
    if ntk_factor is None:
        return 1.0
    if dims == 2:
        reason = "it has one rotary pair, whose frequency does not depend on the base"
        raise unsupported_scheme_error(checkpoint, "ntk", reason)
    return float(ntk_factor ** (dims / (dims - 2)))


def own_schedule_at_length(checkpoint: LoadedModel, length: int) -> FixedSchedule:
    """The checkpoint's own rotation of a text of `length` tokens; some checkpoints change frequencies with the length.

    Raises UnsupportedModel if the checkpoint's cos and sin differ from those of the frequencies in its config.
    """
    checkpoint_schedule = FixedSchedule.of_checkpoint(checkpoint)
    rotation = checkpoint.rotation
    if rotation.frequency_change_length is None or length <= rotation.frequency_change_length:
        return checkpoint_schedule
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
                limit = rotation.frequency_change_length
                reason = f"beyond {limit} tokens its code does not rotate by the frequencies of its config"
                raise unsupported_scheme_error(checkpoint, "base", reason, f"Use texts of at most {limit} tokens")
    thetas, factors = list(checkpoint_schedule.thetas), list(checkpoint_schedule.attention_factors)
    for layer, layer_type in enumerate(rotation.layer_types):
        if layer_rotates[layer]:
            theta, factor = frequencies_by_type[layer_type]
            thetas[layer], factors[layer] = theta[None], factor if rotation.factor_scales_logits else 1.0
    return FixedSchedule(checkpoint, tuple(thetas), tuple(factors), replaces_rotation=False)


@cache
def _warn_once(message: str) -> None:
    log.warning(message)


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
    if "original_max_position_embeddings" in rope and hasattr(config, "original_max_position_embeddings"):
        # transformers prefers this copy over the value in rope_parameters.
        config.original_max_position_embeddings = rope["original_max_position_embeddings"]
    compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    theta, factor = compute(config, torch.device("cpu"), seq_len=length, layer_type=layer_type)
    return theta.float(), float(factor)
