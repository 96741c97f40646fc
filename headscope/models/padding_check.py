"""Padding check: before the first padded pass of a model, compare a left-padded text with the same text alone.

A batch pads shorter texts on the left, and the attention mask hides the padding from attention. But learned positions
may count it, and recurrent layers may read it. Some families need `position_ids` that count from the first token of
each text. Others do not accept them, or count differently: RoBERTa's own positions begin after the padding index. So
headscope refuses passes in which the output of a text would depend on its padding, or on positions that differ from
the family's own.
"""

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from headscope.attention import backend, families
from headscope.attention.contexts import replacing
from headscope.compat.torch import FORWARD_HOOKS, FORWARD_PRE_HOOKS
from headscope.errors import BadInput, UnsupportedModel
from headscope.models.inspection import evaluation_mode
from headscope.models.quantization import quantization_method
from headscope.models.rotation import preserving_frequencies

TOKENS, PADDING = 3, 2
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-3, 0.1
"""Largest difference of logits, as a share of the largest logit. The second is also that of quantized weights."""


@dataclass(frozen=True)
class PaddingEffects:
    """Largest differences of the logits, as shares of the largest logit, beyond those of rounding; 0 if there are none.

    `padding`: of a left-padded text without `position_ids`. `padding_with_positions`: the same with `position_ids` that
    count from the first token. `positions`: of a text without padding whose `position_ids` count from 0.
    """

    padding: float
    padding_with_positions: float
    positions: float


@dataclass(frozen=True, eq=False)
class PaddingCheck:
    """The check of one model. It costs up to two passes, so it runs when a pass first depends on its result."""

    model: PreTrainedModel
    rotates: bool

    @cached_property
    def uncounted_token(self) -> int | None:
        """The token that is no position except in a cached prefix, as in RoBERTa; None for most families."""
        modules = self.model.modules()
        return next((m.padding_idx for m in modules if hasattr(m, "create_position_ids_from_input_ids")), None)

    @cached_property
    def effects(self) -> PaddingEffects:
        """The effects of padding on the model itself: open contexts and hooks neither change nor see its passes."""
        with without_contexts(self.model):
            return _measure_effects(self.model, self.rotates)


@contextmanager
def without_contexts(model: PreTrainedModel) -> Iterator[None]:
    """Run the model with its own attention: open contexts and hooks neither change nor see the passes inside."""
    with (
        _without_hooks(model),
        preserving_frequencies(model.modules()),
        torch.autocast(model.device.type, enabled=False),
        evaluation_mode(model),
        backend.using_attention_implementation(model, families.reference_implementation(model)),
    ):
        yield


@contextmanager
def _without_hooks(model: nn.Module) -> Iterator[None]:
    """Run the model without the hooks of its modules inside the `with`."""
    with ExitStack() as stack:
        for module in model.modules():
            for hooks in (FORWARD_PRE_HOOKS, FORWARD_HOOKS):
                if hooks.of(module):
                    stack.enter_context(replacing(module, hooks.attribute, OrderedDict()))
        yield


def _measure_effects(model: PreTrainedModel, rotates: bool) -> PaddingEffects:
    """Run a padded text and a longer one, which begins like it, as one batch; call it in `without_contexts`.

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

    is_exact = model.dtype.itemsize >= 4 and not quantization_method(model.config)
    tolerance = TOLERANCE if is_exact else HALF_PRECISION_TOLERANCE
    try:
        alone, after_padding = logits()
    except torch.OutOfMemoryError:
        raise
    except Exception:  # a model may refuse padding in any way, as it does when it is used
        return PaddingEffects(0.0, 0.0, 0.0)
    padding = _difference(after_padding, alone, tolerance)
    if rotates and not padding:
        return PaddingEffects(0.0, 0.0, 0.0)
    try:
        alone_with_positions, padded_with_positions = logits(position_ids=standard_positions(mask))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # it takes no position_ids
        return PaddingEffects(padding, padding, 0.0)
    return PaddingEffects(
        padding,
        _difference(padded_with_positions, alone, tolerance),
        _difference(alone_with_positions, alone, tolerance),
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
        if len(args) > 1:
            kwargs = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
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
        if positions is None and not is_padded:
            return
        effects = check.effects
        if positions is not None and effects.positions:
            raise UnsupportedModel(
                f"cannot run '{name}' with position_ids that count from 0, as generate passes them: the model's own "
                f"positions differ, so the logits change by {effects.positions:.0%}, also in transformers. Call the "
                "model without position_ids"
            )
        share = effects.padding if positions is None else effects.padding_with_positions
        if is_padded and share:
            if positions is None and not effects.padding_with_positions:
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
