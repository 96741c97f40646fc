"""Estimate the effect of an intervention on the loss for all units at once, from gradients of the unchanged model.

The head's own softmax is recomputed exactly: one attention pass gives its output z' under the intervention. The layers
after it are expanded around the unchanged model. First order: <dNLL/dz, z' - z>, summed over positions. Second
order [ours]: plus half of E <dNLL*/dz, z' - z>^2, where NLL* is the loss of tokens drawn from the model's own
predictions; that is the curvature of KL(adapted || changed), the Fisher form of the loss's Hessian. Each position of z
is squared separately, which omits joint effects of two positions and lowers the variance for few draws.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headscope.interventions.edits import Run
from headscope.interventions.replay import Objective, Replay

CURVATURE_DRAWS = 2
"""Draws of tokens for a second-order term; each costs a backward pass."""


@dataclass(frozen=True)
class EffectEstimate:
    """Estimates of one run's effect on the mean loss, nats per token; equal without draws for the second order."""

    first_order: float
    second_order: float


def estimate_effects(replay: Replay, runs: Sequence[Run], draws: int, seed: int) -> list[EffectEstimate]:
    """The estimates of every run of one recorded text. Call inside `replay.capturing`.

    Costs a recomputation of the pass, 1 + `draws` backward passes, and an attention pass for each kind of edit.
    """
    tokens = replay.target_count

    def combine(products: Tensor) -> EffectEstimate:
        slope, *sampled = products
        first = float(slope.sum()) / tokens
        curvature = sum(float(products.square().sum()) for products in sampled) / (2 * max(1, draws) * tokens)
        return EffectEstimate(first, first + curvature)

    objectives = [text_loss, *(sampled_loss(seed * CURVATURE_DRAWS + number) for number in range(draws))]
    return replay.estimate(runs, objectives, combine)


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
