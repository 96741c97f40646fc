"""Frequencies that transformers computes for other rope parameters than a checkpoint's, by layer.

Its own config is read by the same way first: where that does not give the frequencies that the checkpoint was seen to
turn by, what a scheme would make of them is not known, and the scheme is refused.
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
from headscope.positions.schedule import Fixed, refusal, refuse_without_rotation

PLAIN = ("default", "proportional")
"""Rope types that scale nothing."""
log = logging.getLogger("headscope")


def rescheduled(
    checkpoint: LoadedModel,
    rope_type: str,
    *,
    rope_theta: float | None = None,
    base_factor: float = 1.0,
    **parameters: float | None,
) -> Fixed:
    """Frequencies and factor that transformers computes for these rope parameters, layer by layer.

    Layers with a sliding window keep theirs. What a checkpoint was scaled by already is replaced, not scaled further,
    and that is told. Raises UnsupportedModel for a checkpoint without rotation, one where only
    such layers rotate, or whose config does not tell its frequencies.
    """
    refuse_without_rotation(checkpoint, rope_type)
    rotation = checkpoint.rotation
    thetas, factors = list(Fixed.own(checkpoint).thetas), list(rotation.factors)
    turning = {
        kind for kind, rotates in zip(rotation.layer_types, checkpoint.geometry.layer_rotates, strict=True) if rotates
    }
    if turning == {"sliding_attention"}:
        why = "only its layers with a sliding window rotate, and those keep their frequencies"
        raise refusal(checkpoint, rope_type, why)
    for layer_type in dict.fromkeys(rotation.layer_types):
        if layer_type == "sliding_attention":
            continue
        layers = [n for n, kind in enumerate(rotation.layer_types) if kind == layer_type]
        layers = [n for n in layers if checkpoint.geometry.layer_rotates[n]]
        if not layers:
            continue
        own = _own_parameters(checkpoint, layer_type)
        told, _ = _computed(checkpoint, layer_type, own)
        for layer in layers:
            if told.shape != rotation.theta[layer].shape or not torch.allclose(told, rotation.theta[layer], rtol=1e-2):
                raise refusal(checkpoint, rope_type, "its config does not tell the frequencies that it turns by")
        if own["rope_type"] not in PLAIN:
            scaled = f"'{checkpoint.name}' is scaled already ({own['rope_type']})"
            _tell_once(f"{scaled}: what a scheme makes of its base takes the place of that, and is not put on top")
        rope = {
            "rope_type": rope_type,
            "rope_theta": (rope_theta or own["rope_theta"]) * base_factor,
            "original_max_position_embeddings": checkpoint.geometry.native_context,
            **{name: value for name, value in parameters.items() if value is not None},
        }
        # Proportional rope spaces its frequencies over the whole head, and sets those beyond a share of it to 0.
        whole = own["rope_type"] == "proportional"
        if own.get("partial_rotary_factor") is not None and not whole:
            rope["partial_rotary_factor"] = own["partial_rotary_factor"]
        theta, factor = _computed(checkpoint, layer_type, rope)
        shared = (theta * (told != 0) if whole else theta)[None]
        for layer in layers:
            thetas[layer], factors[layer] = shared, factor if rotation.factor_scales_logits else 1.0
    return Fixed(checkpoint, tuple(thetas), tuple(factors))


def own_at(checkpoint: LoadedModel, length: int) -> Fixed:
    """The checkpoint's own rotation of a text of that length: some turn a longer text by other frequencies.

    Raises UnsupportedModel where its own cos and sin are not those of the frequencies that its config tells.
    """
    own = Fixed.own(checkpoint)
    rotation = checkpoint.rotation
    if rotation.frequency_change_length is None or length <= rotation.frequency_change_length:
        return own
    turning = checkpoint.geometry.layer_rotates
    kinds = dict.fromkeys(kind for kind, turns in zip(rotation.layer_types, turning, strict=True) if turns)
    by_kind = {kind: _computed(checkpoint, kind, _own_parameters(checkpoint, kind), length) for kind in kinds}
    last = torch.tensor([[length - 1]], device=checkpoint.device)
    nothing = torch.zeros(1, 1, 1, device=checkpoint.device)
    for module in rotation.rotary_modules:
        for kind, (theta, factor) in by_kind.items():
            with preserving_frequencies([module]):
                made = module(nothing, last, **({"layer_type": kind} if kind else {}))
            made = made if isinstance(made, tuple) else (made,)
            expected = cos_sin_tables(last, theta[None], factor, rotation.table_layout, made[0].dtype)
            if not all(torch.allclose(*both, atol=2e-2) for both in zip(made, expected, strict=True)):
                raise refusal(checkpoint, "base", f"of {length} tokens, it does not turn by the frequencies it tells")
    thetas, factors = list(own.thetas), list(own.factors)
    for layer, kind in enumerate(rotation.layer_types):
        if turning[layer]:
            theta, factor = by_kind[kind]
            thetas[layer], factors[layer] = theta[None], factor if rotation.factor_scales_logits else 1.0
    return Fixed(checkpoint, tuple(thetas), tuple(factors), rotates=False)


@cache
def _tell_once(line: str) -> None:
    log.warning(line)


def _own_parameters(checkpoint: LoadedModel, layer_type: str | None) -> dict[str, Any]:
    config = copy.deepcopy(checkpoint.module.config.get_text_config())
    config.standardize_rope_params()
    ropes = config.rope_parameters
    return dict(ropes[layer_type] if layer_type else ropes)


def _computed(
    checkpoint: LoadedModel, layer_type: str | None, rope: dict[str, Any], length: int | None = None
) -> tuple[Tensor, float]:
    """Frequencies [pairs], float32, and the factor on cos and sin, for the rope parameters of one kind of layer."""
    config = copy.deepcopy(checkpoint.module.config.get_text_config())
    config.standardize_rope_params()
    plain = rope["rope_type"] == "default"
    rope = {**rope, "rope_type": "linear", "factor": 1.0} if plain else rope
    config.rope_parameters = {**config.rope_parameters, layer_type: rope} if layer_type else rope
    if not hasattr(config, "max_position_embeddings"):
        config.max_position_embeddings = checkpoint.geometry.native_context
    if "original_max_position_embeddings" in rope and hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = rope["original_max_position_embeddings"]  # a copy, which would win
    compute = ROPE_INIT_FUNCTIONS[rope["rope_type"]]
    theta, factor = compute(config, torch.device("cpu"), seq_len=length, layer_type=layer_type)
    return theta.float(), float(factor)
