"""Replay check: when a model is first replayed, compare a resumed pass with full passes.

A decoder layer may pass more than the residual stream to later layers, and may compute a batch differently from its
single sequences. So the check resumes a pass over two copies of a few tokens in the middle of the model and ablates the
heads of that layer in one copy. The copies must equal a full pass with the ablation and a full pass without it.
"""

from collections.abc import Callable
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from headscope.attention import backend
from headscope.errors import HeadscopeError, UnsupportedModel, first_line
from headscope.forward.backbone import backbone
from headscope.forward.capture import trial_pass
from headscope.models.checkpoint import LoadedModel
from headscope.models.quantization import quantization_method

TOKENS = 4
TOLERANCE, HALF_PRECISION_TOLERANCE = 1e-2, 0.5
"""Largest difference as a share of the effect of the ablation. In half precision and with
quantized weights rounding differs between a batch and its rows, which may select another expert."""
ROUNDING, HALF_PRECISION_ROUNDING = 1e-4, 2e-2
"""Share of the hidden states that rounding may change."""

_reasons: "WeakKeyDictionary[nn.Module, str | None]" = WeakKeyDictionary()
"""Why passes of a model cannot be resumed, None if they can."""


class ResumablePass(Protocol):
    """The part of `Replay` that is checked."""

    def record_streams(self) -> Tensor: ...

    def hidden_states(self, output_edits: dict[int, backend.OutputEdit], copies: int) -> Tensor: ...


def check_once(model: LoadedModel, make_replay: Callable[[Tensor], ResumablePass]) -> None:
    """Raise UnsupportedModel if resumed passes of a model differ from full ones. Each model is checked once.

    `make_replay` builds the replay of ids [1, L]. The model must be captured.
    """
    if model.module not in _reasons:
        _reasons[model.module] = None  # the replay inside the check calls this function again
        try:
            with trial_pass():
                _reasons[model.module] = _difference(model, make_replay)
        except HeadscopeError:
            del _reasons[model.module]
            raise
    if reason := _reasons[model.module]:
        raise UnsupportedModel(
            f"cannot resume the forward pass of {model.name} ({model.module.config.model_type}) at a layer: {reason}. "
            "Use another model"
        )


@torch.no_grad()
def _difference(model: LoadedModel, make_replay: Callable[[Tensor], ResumablePass]) -> str | None:
    """How a resumed pass differs from full ones, None if it does not."""
    ids = torch.arange(TOKENS, device=model.device)[None] % model.module.get_input_embeddings().weight.shape[0]
    layer = model.geometry.layers // 2

    def ablate_last_copy(z: Tensor, call: backend.AttentionCall) -> Tensor:
        return torch.cat((z[:-1], torch.zeros_like(z[-1:])))

    with backend.editing_output(model.attention_modules[layer], ablate_last_copy):
        ablated = backbone(model)(ids, use_cache=False).last_hidden_state
    replay = make_replay(ids)
    try:
        unedited = replay.record_streams()
        resumed = replay.hidden_states({layer: ablate_last_copy}, copies=2)
    except HeadscopeError:
        raise
    except Exception as error:  # the model's own code may fail in any way
        return f"a resumed pass over two copies of a text failed ({type(error).__name__}: {first_line(error)})"
    expected = torch.cat((unedited, ablated)).float()
    is_exact = unedited.dtype.itemsize >= 4 and not quantization_method(model.module.config)
    tolerance, rounding = (TOLERANCE, ROUNDING) if is_exact else (HALF_PRECISION_TOLERANCE, HALF_PRECISION_ROUNDING)
    effect, scale = float((expected[1] - expected[0]).norm()), float(expected.norm())
    difference = float((resumed.float() - expected).norm())
    if difference <= tolerance * effect + rounding * scale:
        return None
    return f"a resumed pass over two copies of a text differs from full passes by {difference / scale:.1%}"
