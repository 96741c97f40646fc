"""Estimate the effect of an intervention on the loss for all units at once, from gradients of the unchanged model.

The head's own softmax is recomputed exactly: one attention pass gives its output z' under the intervention. The layers
after it are expanded around the unchanged model. First order: <dNLL/dz, z' - z>, summed over positions. Second
order [ours]: plus half of E <dNLL*/dz, z' - z>^2, where NLL* is the loss of tokens drawn from the model's own
predictions; that is the curvature of KL(adapted || changed), the Fisher form of the loss's Hessian. Each position of z
is squared separately, which omits joint effects of two positions and lowers the variance for few draws.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from headscope.attention import backend
from headscope.forward.interventions import Intervention, Unit, kv_group_units, layer_output_edit
from headscope.forward.replay import Objective, Replay

CURVATURE_DRAWS = 2
"""Draws of tokens for a second-order term; each costs a backward pass."""

InterventionKey = TypeVar("InterventionKey")


@dataclass(frozen=True, eq=False)
class EffectEstimate:
    """Terms of one intervention's effect on the mean loss, nats per token, float64.

    head_slopes [T, H] by layer and head; head_curvatures [T, H] and group_curvatures [T, G], zero without draws.
    """

    head_slopes: Tensor
    head_curvatures: Tensor
    group_curvatures: Tensor

    def first_order(self, unit: Unit, heads: slice) -> float:
        """The first-order estimate for a unit, whose heads are `heads` of its layer."""
        return float(self.head_slopes[unit.layer, heads].sum())

    def second_order(self, unit: Unit, heads: slice) -> float:
        """The estimate with its second-order term."""
        is_group = heads.stop - heads.start > 1
        term = (
            self.group_curvatures[unit.layer, unit.kv_group]
            if is_group
            else self.head_curvatures[unit.layer, heads.start]
        )
        return self.first_order(unit, heads) + float(term)


def estimate_effects(
    replay: Replay, interventions: Mapping[InterventionKey, Intervention], draws: int, seed: int
) -> dict[InterventionKey, EffectEstimate]:
    """The estimates of every intervention on one recorded text. Call inside `replay.capturing`.

    Costs a recomputation of the pass, 1 + `draws` backward passes, and an attention pass for each intervention.
    """
    geometry, tokens = replay.model.geometry, replay.target_count
    layers, heads, kv_groups = geometry.layers, geometry.heads, geometry.kv_groups
    estimates = {
        key: EffectEstimate(*(torch.zeros(layers, n, dtype=torch.float64) for n in (heads, heads, kv_groups)))
        for key in interventions
    }

    def add_layer(layer: int, z: Tensor, call: backend.AttentionCall, gradients: Sequence[Tensor]) -> None:
        units = [unit for unit in kv_group_units(geometry) if unit.layer == layer]
        for key, intervention in interventions.items():
            change = layer_output_edit(intervention, units, geometry)(z, call).float() - z.float()
            slope, *sampled_slopes = ((gradient.float() * change).sum(-1)[0].double().cpu() for gradient in gradients)
            sums = estimates[key]
            sums.head_slopes[layer, : len(slope)] = slope.sum(-1) / tokens
            for sampled in sampled_slopes:
                by_group = sampled.view(geometry.layer_kv_groups[layer], -1, sampled.shape[-1]).sum(1)
                for term, product in ((sums.head_curvatures, sampled), (sums.group_curvatures, by_group)):
                    term[layer, : len(product)] += product.square().sum(-1) / (2 * len(sampled_slopes) * tokens)

    objectives = [text_loss, *(sampled_loss(seed * CURVATURE_DRAWS + number) for number in range(draws))]
    replay.backpropagate(objectives, add_layer)
    return estimates


def text_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Sum of the losses of the text's own tokens."""
    return nn.functional.cross_entropy(logits, tokens, reduction="sum")


def sampled_loss(seed: int) -> Objective:
    """Sum of the losses of tokens sampled from the model's own predictions."""
    generator = torch.Generator().manual_seed(seed)

    def objective(logits: Tensor, tokens: Tensor) -> Tensor:
        cumulative = logits.detach().softmax(-1).cumsum(-1)
        level = torch.rand(len(logits), 1, generator=generator).to(logits.device) * cumulative[:, -1:]
        sampled = torch.searchsorted(cumulative, level)[:, 0].clamp(max=logits.shape[-1] - 1)
        return nn.functional.cross_entropy(logits, sampled, reduction="sum")

    return objective
