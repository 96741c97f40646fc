"""Padding check: when a checkpoint is opened, compare a left-padded text with the same text alone.

A batch pads shorter texts on the left, and the attention mask hides the padding from attention. But learned positions
may count it, and recurrent layers may read it. Some families need `position_ids` that count from the first token of
each text. Others do not accept them, or count differently: RoBERTa's own positions begin after the padding index. So
headscope refuses passes in which the output of a text would depend on its padding, or on positions that differ from
the family's own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.attention import backend, families
from headscope.errors import BadInput, UnsupportedModel
from headscope.models.inspection import evaluation_mode
from headscope.models.quantization import quantization_method

TOKENS, PADDING = 3, 2
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 0.1
"""Largest difference of logits, as a share of the largest logit. The second is also that of quantized weights."""


@dataclass(frozen=True)
class PaddingCheck:
    """Largest differences of the logits, as shares of the largest logit, beyond those of rounding; 0 if there are none.

    `padding`: of a left-padded text without `position_ids`. `padding_with_positions`: the same with `position_ids` that
    count from the first token. `positions`: of a text without padding whose `position_ids` count from 0. RoBERTa does
    not count the token `uncounted_token` as a position, except in a cached prefix.
    """

    padding: float
    padding_with_positions: float
    positions: float
    uncounted_token: int | None = None


def check_padding(model: PreTrainedModel, rotates: bool) -> PaddingCheck:
    """Run a padded text and a longer one, which begins like it, as one batch, with the model's own attention.

    Of a model that rotates, which counts positions from 0, `position_ids` are tested only if padding changes it.
    """
    pad = getattr(model.config.get_text_config(), "pad_token_id", None)
    pad = pad if isinstance(pad, int) and 0 <= pad < model.get_input_embeddings().weight.shape[0] else 0
    text = torch.tensor([token for token in range(TOKENS + PADDING + 1) if token != pad][: TOKENS + PADDING])
    padded = torch.cat((torch.full((PADDING,), pad), text[:TOKENS]))
    ids = torch.stack((text, padded)).to(model.device)
    mask = torch.ones_like(ids)
    mask[1, :PADDING] = 0

    def logits(**positions: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [TOKENS, V] of the beginning of the longer text, and of the padded text."""
        output: Tensor = model(ids, attention_mask=mask, use_cache=False, **positions).logits.float()
        return output[0, :TOKENS], output[1, PADDING:]

    uncounted = next(
        (module.padding_idx for module in model.modules() if hasattr(module, "create_position_ids_from_input_ids")),
        None,
    )
    is_exact = model.dtype.itemsize >= 4 and not quantization_method(model.config)
    tolerance = TOLERANCE if is_exact else HALF_PRECISION_TOLERANCE
    unaffected = PaddingCheck(0.0, 0.0, 0.0, uncounted)
    reference = families.reference_implementation(model)
    with evaluation_mode(model), backend.using_attention_implementation(model, reference):
        try:
            alone, after_padding = logits()
        except Exception:  # a model may refuse padding in any way, as it does when it is used
            return unaffected
        padding = _difference(after_padding, alone, tolerance)
        if rotates and not padding:
            return unaffected
        try:
            alone_with_positions, padded_with_positions = logits(position_ids=standard_positions(mask))
        except Exception:  # it takes no position_ids
            return PaddingCheck(padding, padding, 0.0, uncounted)
    return PaddingCheck(
        padding,
        _difference(padded_with_positions, alone, tolerance),
        _difference(alone_with_positions, alone, tolerance),
        uncounted,
    )


def standard_positions(mask: Tensor) -> Tensor:
    """Positions [B, L] that count from the first token of each text, for a padding mask [B, L]."""
    return (mask.long().cumsum(-1) - 1).clamp(min=0)


def _difference(logits: Tensor, expected: Tensor, tolerance: float) -> float:
    """Largest difference as a share of the largest logit, 0 within the tolerance."""
    share = float((logits - expected).abs().max() / expected.abs().max())
    return 0.0 if share <= tolerance else share if math.isfinite(share) else math.inf


def refusing_wrong_positions(check: PaddingCheck, name: str) -> Callable[[nn.Module, Any, dict[str, Any]], None]:
    """A forward pre-hook that refuses passes in which padding or position_ids would change the logits."""

    def refuse(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
        mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        is_padded = mask is not None and not bool(mask[:, 0].all())
        cache, ids = kwargs.get("past_key_values"), kwargs.get("input_ids", args[0] if args else None)
        if positions is None and cache is not None and check.uncounted_token is not None and ids is not None:
            real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask[:, -ids.shape[1] :].bool()
            if bool((ids[real] == check.uncounted_token).any()):
                raise UnsupportedModel(
                    f"cannot run '{name}' on token {check.uncounted_token} with a cache: the positions after this "
                    "token differ from those without a cache, also in transformers. Pass use_cache=False"
                )
        if positions is not None and not _are_standard(positions, mask, kwargs):
            return  # the caller chose other positions deliberately
        if positions is not None and check.positions:
            raise UnsupportedModel(
                f"cannot run '{name}' with position_ids that count from 0, as generate passes them: the model's own "
                f"positions differ, so the logits change by {check.positions:.0%}, also in transformers. Call the "
                "model without position_ids"
            )
        share = check.padding if positions is None else check.padding_with_positions
        if is_padded and share:
            if positions is None and not check.padding_with_positions:
                raise BadInput(
                    f"left padding without position_ids: '{name}' counts the padding as positions, which changes its "
                    f"logits by {share:.0%}. Pass position_ids that count from the first token of each text"
                )
            raise UnsupportedModel(
                f"cannot run '{name}' with left padding: it changes the logits by {share:.0%}, also in transformers. "
                "Pass one text at a time, or pad on the right"
            )

    return refuse


def _are_standard(positions: Any, mask: Tensor | None, kwargs: dict[str, Any]) -> bool:
    """Whether position_ids [B, L] are those that count from the first token of each text."""
    if not isinstance(positions, Tensor) or positions.dim() != 2:
        return False
    length = positions.shape[1]
    if mask is not None:
        real = mask[:, -length:].bool()
        return bool((positions.expand_as(real) == standard_positions(mask)[:, -length:])[real].all())
    cache = kwargs.get("past_key_values")
    first = 0 if cache is None else cache.get_seq_length()
    return torch.equal(positions[0], torch.arange(first, first + length, device=positions.device))
