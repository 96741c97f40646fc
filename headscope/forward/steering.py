"""Attention steering: chosen heads attend more to a span of the prompt (PASTA, Zhang et al. 2024).

    with steered(model, ["L18H6", "L20H1"], range(3, 17), alpha=0.01):
        model.module.generate(...)

The weights of all keys outside the span are multiplied by alpha and the row is renormalised. This adds ln(alpha) to
their logits, so the same fused kernel computes the heads' outputs. Listeners still get the q and k of the model.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from headscope.attention import backend
from headscope.attention.kernel import append_key_bias
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.ablation import Heads, describe_heads, heads_by_layer, refuse_other_head_set
from headscope.forward.capture import capturing
from headscope.forward.interventions import Unit, head_unit, layer_output_edit
from headscope.model_identity import AcceptedWeights
from headscope.positions.model import Model


@dataclass(frozen=True, eq=False)
class KeyScaling:
    """Multiply the weights of all keys outside `span` (positions, sorted) by `alpha`, and renormalise the rows."""

    span: Tensor
    alpha: float

    def __call__(self, z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
        if call.variant.softcap is not None or call.variant.sink is not None:
            reason = "learned sinks" if call.variant.softcap is None else "soft-capped logits"
            raise UnsupportedModel(f"cannot steer heads with {reason}. Use another model, or hs.ablated")
        keys = torch.arange(call.first_key, call.first_key + call.k.shape[2], device=call.k.device)
        outside = ~torch.isin(keys, self.span.to(keys.device))
        bias = (outside.float() * math.log(self.alpha)).expand(1, call.q.shape[1], -1)
        return call.attend(*append_key_bias(call.q, call.k, bias, call.variant.scaling), call.v)


@contextmanager
def steered(
    model: Model, heads: Heads, span: Iterable[int], alpha: float = 0.01, *, weights: AcceptedWeights = "same"
) -> Iterator[None]:
    """Steer heads to a span of the prompt in every pass inside the `with`; leaving restores the model.

    `heads` is a HeadSet, names such as "L18H6,L5H3" or a list of them, or a mapping from layers to heads; `weights`
    "any" accepts a HeadSet that was measured on other weights. `span` are token positions from 0, such as range(3, 17),
    the same in every sequence of a batch: sequences must not be padded on the left. 0 < `alpha` <= 1 multiplies the
    weights of all other keys, and 1 changes nothing; Zhang et al. (2024) use 0.01. Rows that see no key of the span,
    such as all rows of a shorter prompt, keep their weights.
    Raises BadInput for an empty span, a negative position or an alpha outside this range; UnsupportedModel, when the
    model runs, if its logits are soft-capped or its heads have learned sinks.
    """
    if isinstance(span, str):
        raise BadInput(f"span={span!r} is a text. Use token positions, such as range(3, 17)")
    positions = sorted({*span})
    if not positions or not all(type(position) is int and position >= 0 for position in positions):
        raise BadInput(f"span={positions} has no token position, or one below 0. Use positions such as range(3, 17)")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha <= 1:
        raise BadInput(f"alpha={alpha!r} is not a factor of weights. Use a number above 0 and at most 1")
    refuse_other_head_set(model, heads, weights)
    by_layer = heads_by_layer(model, heads)
    if alpha == 1:
        yield
        return
    intervention = KeyScaling(torch.tensor(positions), float(alpha))
    description = f"hs.steered({describe_heads(model, by_layer)}: tokens {_describe(positions)}, alpha {alpha:g})"
    with capturing(model, description) as layers:
        for layer, members in by_layer.items():
            units = [head_unit(model.geometry, layer, head) for head in members]
            layers.edit_output(layer, layer_output_edit(intervention, units, model.geometry))
        yield


def _describe(positions: list[int]) -> str:
    """Positions as ranges, such as 3-16,20: the description tells two spans apart."""
    starts = [position for position in positions if position - 1 not in positions]
    ends = [position for position in positions if position + 1 not in positions]
    return ",".join(f"{start}-{end}" if start < end else f"{start}" for start, end in zip(starts, ends, strict=True))
