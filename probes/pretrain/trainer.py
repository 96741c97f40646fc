"""Optimiser steps of pretraining: all weights of a model, and its AdaRoPE parameters."""

from pathlib import Path

import torch
from torch import Tensor, nn

from headscope.errors import TrainingDiverged
from headscope.positions.adarope import AdaRoPE
from headscope.positions.model import Model
from headscope.positions.schedule import FixedSchedule
from headscope.training.adapter_trainer import BETAS, EPSILON, load_state, save_state
from probes.pretrain.model_setup import BALANCE_LOSS_WEIGHT
from probes.pretrain.schema import PretrainOptions

IGNORED_TARGET = -100


class PretrainTrainer:
    """Trains every weight of a model and the AdaRoPE parameters that require gradients.

    The optimiser is AdamW with the paper's betas and epsilon. xi, tau and gamma have no weight decay, which would pull
    them to 0. The caller attaches the schedule to the model before it takes steps.
    """

    def __init__(self, model: Model, schedule: FixedSchedule | AdaRoPE, options: PretrainOptions):
        self.model = model
        self.balances_experts = options.architecture == "olmoe"
        positions = list(schedule.named_parameters()) if isinstance(schedule, AdaRoPE) else []
        positions = [(name, p) for name, p in positions if p.requires_grad]
        groups = [
            (list(model.module.parameters()), options.learning_rate, options.weight_decay),
            ([p for name, p in positions if "xi" in name], options.frequency_learning_rate, 0.0),
            ([p for name, p in positions if "xi" not in name], options.scale_learning_rate, 0.0),
        ]
        groups = [group for group in groups if group[0]]
        self.learning_rates = [rate for _, rate, _ in groups]
        self.trainable_parameters = [parameter for parameters, _, _ in groups for parameter in parameters]
        self.optimizer = torch.optim.AdamW(
            [{"params": parameters, "lr": rate, "weight_decay": decay} for parameters, rate, decay in groups],
            betas=BETAS,
            eps=EPSILON,
        )

    def step(self, batch: Tensor, rate_factor: float) -> float:
        """Take one optimiser step on ids [B, L] at `rate_factor` times the learning rates.

        Returns the mean next-token loss in nats per token. Raises TrainingDiverged and changes no parameter if the loss
        or a gradient is not finite.
        """
        self.optimizer.zero_grad()
        loss, balance = self.compute_losses(batch.to(self.model.device))
        (loss + balance).backward()  # type: ignore[no-untyped-call]
        gradients = torch.stack([p.grad.sum() for p in self.trainable_parameters if p.grad is not None])
        if not (gradients.isfinite().all() and loss.isfinite()):
            raise TrainingDiverged(f"the loss became {float(loss):g}, or a gradient is not finite")
        for group, rate in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = rate * rate_factor
        self.optimizer.step()
        return float(loss.detach())

    def compute_losses(self, ids: Tensor) -> tuple[Tensor, Tensor | float]:
        """Mean next-token loss of ids [B, L], and the weighted loss that balances experts (0 without experts)."""
        router_options = {"output_router_logits": True} if self.balances_experts else {}
        output = self.model.module(input_ids=ids, use_cache=False, **router_options)
        # The last position has no target; slicing it off would copy all logits.
        targets = nn.functional.pad(ids[:, 1:], (0, 1), value=IGNORED_TARGET)
        loss = nn.functional.cross_entropy(output.logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED_TARGET)
        return loss, BALANCE_LOSS_WEIGHT * output.aux_loss if self.balances_experts else 0.0

    def save(self, file: Path) -> None:
        """Write weights, position parameters and the optimiser state atomically."""
        save_state(file, self.trainable_parameters, self.optimizer)

    def load(self, file: Path) -> None:
        """Restore what `save` wrote."""
        load_state(file, self.trainable_parameters, self.optimizer)
