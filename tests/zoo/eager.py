"""What a family itself computes: its logits, and what its own eager attention is handed and returns.

Nothing of headscope has a part in it.
"""

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from support import eager_reference
from torch import Tensor, nn
from transformers import PreTrainedModel

from . import own_attention, sizes


@dataclass(frozen=True, eq=False)
class Call:
    """One call of a family's eager attention: q [H, L, d], k [G, L, d], alpha [H, L, L], visible [H|1, L, L]."""

    module: nn.Module
    q: Tensor
    k: Tensor
    alpha: Tensor
    visible: Tensor
    scaling: float


@dataclass(frozen=True, eq=False)
class Truth:
    """What the family itself computes for one text."""

    logits: Tensor
    calls: list[Call]


def tokens(module: PreTrainedModel) -> Tensor:
    """Ordinary token ids [1, L]."""
    return torch.randint(3, sizes.VOCAB - 8, (1, sizes.LENGTH), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def eager(module: PreTrainedModel, ids: Tensor, **inputs: Any) -> Truth:
    """Logits [1, L, V] and every call of the family's own eager attention, in order."""
    calls: list[Call] = []
    with _recorded(module, calls):
        logits = module(input_ids=ids, use_cache=False, **inputs).logits.float()
    return Truth(logits, calls)


@contextmanager
def _recorded(model: PreTrainedModel, calls: list[Call]) -> Iterator[None]:
    """Add every call of the `eager_attention_forward` of the model's families to `calls`."""
    homes = {type(m).__module__ for m in model.modules()}
    names = ("eager_attention_forward", "eager_attn_forward")

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def recording(*args: Any, **kwargs: Any) -> Any:
            out, alpha = original(*args, **kwargs)
            inputs = inspect.signature(original).bind(*args, **kwargs).arguments
            inputs |= inputs.get("kwargs", {})
            module, q, k = inputs["module"], inputs["query"], inputs["key"]
            scaling = inputs.get("scaling")
            scaling = q.shape[-1] ** -0.5 if scaling is None else float(scaling)
            visible = _visible(alpha[0], inputs.get("attention_mask"))
            visible_weights = alpha[0].float() * _share(alpha[0], inputs["value"][0], out[0])
            calls.append(Call(module, q[0], k[0], visible_weights, visible, scaling))
            return out, alpha

        return recording

    with ExitStack() as stack:
        stack.enter_context(own_attention.recording(model, lambda *call: calls.append(Call(*call))))
        for home in homes:
            for name in names:
                original = getattr(sys.modules[home], name, None)
                if original is not None:
                    setattr(sys.modules[home], name, wrap(original))
                    stack.callback(setattr, sys.modules[home], name, original)
        yield


def _share(alpha: Tensor, v: Tensor, out: Tensor) -> Tensor:
    """The part [H, L, 1] of alpha v [H, L, dv] that the output [L, H, dv] has: a sink may take its share afterwards."""
    expected = (alpha @ v.repeat_interleave(len(alpha) // len(v), 0)).float()
    actual = out.transpose(0, 1).float()
    square = expected.square().sum(-1, keepdim=True)
    return torch.where(square > 0, (actual * expected).sum(-1, keepdim=True) / square, 1.0)  # values may all be 0


def _visible(alpha: Tensor, mask: Tensor | None) -> Tensor:
    """Which keys a query may see, [1|H, L, L], as the family's mask has it."""
    if mask is None:
        return torch.ones_like(alpha[:1], dtype=torch.bool)
    mask = mask[0, ..., : alpha.shape[-1]]
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


def binned(call: Call) -> dict[int, dict[str, Any]]:
    """Means of each row statistic by visible keys, as `eager_reference.binned` with the keys that the mask shows."""
    rows = statistics(call)
    visible_counts = call.visible[0].sum(-1)
    edges = eager_reference.bin_edges(len(visible_counts))
    edge = torch.tensor([min(e for e in edges if e >= n) for n in visible_counts.tolist()])
    return {
        int(e): eager_reference.average(rows, (edge == e).nonzero().flatten().tolist(), call.visible[0])
        for e in edge.unique()
    }


def statistics(call: Call) -> dict[str, Tensor]:
    """`eager_reference.row_statistics` of the call's weights, [H, L] each."""
    return eager_reference.row_statistics(call.alpha)
