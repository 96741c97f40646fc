"""Replay check: when a model is first replayed, compare runs that start at a layer with full passes.

A decoder layer may pass more than the residual stream to later layers, and may compute a batch differently from its
single sequences. So the check ablates all heads of a layer over a few tokens, those of the next layer in a second run,
and none in a third. The three runs as one growing batch must equal full passes; else the same runs, as batches of equal
first layers, must. Edits of open contexts, which could conflict with these, do not act in the check.
"""

from collections.abc import Callable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from headscope.attention import backend
from headscope.errors import HeadscopeError, UnsupportedModel, first_line
from headscope.forward.backbone import backbone
from headscope.forward.capture import trial_pass
from headscope.interventions.edits import Edit, Run, registered
from headscope.interventions.kinds import Zero
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
_grows: "WeakKeyDictionary[nn.Module, bool]" = WeakKeyDictionary()
"""Whether runs of a model that start at different layers can be one batch."""


class ResumablePass(Protocol):
    """The part of `Replay` that is checked."""

    def record_streams(self) -> Tensor: ...

    def hidden_states(self, runs: Sequence[Run]) -> Tensor: ...


def grows_batches(model: LoadedModel) -> bool:
    """Whether runs of a model that start at different layers can be one batch."""
    return _grows.get(model.module, True)


def check_once(model: LoadedModel, make_replay: Callable[[Tensor], ResumablePass]) -> None:
    """Raise UnsupportedModel if runs of a model differ from full passes. Each model is checked once.

    `make_replay` builds the replay of ids [1, L]. The model must be captured.
    """
    if model.module not in _reasons:
        _reasons[model.module] = None  # the replay inside the check calls this function again
        try:
            with trial_pass(), backend.suspending_edits(model.attention_modules):
                _grows[model.module] = True
                if _difference(model, make_replay) is not None:
                    _grows[model.module] = False
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
    """How runs differ from full passes, None if they do not.

    Three runs: all heads of an early layer ablated, those of a layer in the middle, and none.
    """
    ids = torch.arange(TOKENS, device=model.device)[None] % model.module.get_input_embeddings().weight.shape[0]
    middle = model.geometry.layers // 2
    runs: list[list[Edit]] = []
    for layer in (max(0, middle - 1), middle):
        heads = tuple((layer, head) for head in range(model.geometry.layer_heads[layer]))
        runs.append([Edit(Zero(), heads, ("z",))])
    full = []
    for run in runs:
        with registered(model, [run]):
            full.append(backbone(model)(ids, use_cache=False).last_hidden_state)
    replay = make_replay(ids)
    try:
        unedited = replay.record_streams()
        resumed = replay.hidden_states([*runs, ()])
    except HeadscopeError:
        raise
    except Exception as error:  # the model's own code may fail in any way
        return f"a resumed pass over two copies of a text failed ({type(error).__name__}: {first_line(error)})"
    expected = torch.cat((*full, unedited)).float()
    is_exact = unedited.dtype.itemsize >= 4 and not quantization_method(model.module.config)
    tolerance, rounding = (TOLERANCE, ROUNDING) if is_exact else (HALF_PRECISION_TOLERANCE, HALF_PRECISION_ROUNDING)
    effect, scale = float((expected[1] - expected[2]).norm()), float(expected.norm())
    difference = float((resumed.float() - expected).norm())
    if difference <= tolerance * effect + rounding * scale:
        return None
    return f"a resumed pass over two copies of a text differs from full passes by {difference / scale:.1%}"
