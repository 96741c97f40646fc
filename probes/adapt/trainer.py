"""One optimiser step at a time: AdaRoPE's parameters (and a LoRA's) learn on a frozen model.

Memory is bounded by a sequence: the loss runs in chunks of positions, sequences of a batch are accumulated, and long
ones recompute their activations. Knows models and tensors; what is learned from and kept is the affair of `adapt`.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headscope.errors import Diverged
from headscope.forward.logits import last_hidden, next_token_logits
from headscope.positions import attached
from headscope.positions.adarope import AdaRoPE
from headscope.positions.model import Model

log = logging.getLogger("headscope")
BETAS = (0.8, 0.95)
EPSILON = 1e-8
DECAY_FRACTION, FINAL_RATE_FACTOR = 0.1, 0.1
"""The rate falls linearly over the last tenth of the steps, to a tenth (paper, Detailed Setting)."""


def wsd_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Warm-up, stable, decay: the factor on every learning rate at `step` of `steps`, in (0, 1]."""
    decay = max(1, round(DECAY_FRACTION * steps))
    falling = max(0, step + 1 - (steps - decay)) / decay
    return min(1.0, (step + 1) / max(1, warmup)) * (1 - (1 - FINAL_RATE_FACTOR) * falling)


def warn_if_warmup_too_long(steps: int, warmup: int) -> None:
    """Say so where a training ends before its rates are what was asked for."""
    if steps <= warmup:
        highest = max(wsd_rate_factor(step, steps, warmup) for step in range(steps))
        log.warning("Of the %s steps none has the full rates, at most %.0f %%: give --warmup", steps, 100 * highest)


class AdapterTrainer:
    """Trains what of `adarope` and `lora` requires gradients; `rates` are those of xi, of (tau, gamma) and of LoRA.

    AdamW with the paper's betas and epsilon, without weight decay: it would pull every log-frequency to 0 [ours].
    """

    def __init__(
        self,
        model: Model,
        adarope: AdaRoPE,
        learning_rates: tuple[float, float, float],
        lora: nn.Module | None = None,
        recompute_above: int = 0,
    ):
        self.model, self.adarope, self.recompute_above = model, adarope, recompute_above
        frequencies = [p for name, p in adarope.named_parameters() if "xi" in name]
        scales = [p for name, p in adarope.named_parameters() if "xi" not in name]
        added = [p for name, p in lora.named_parameters() if "lora_" in name] if lora else []
        self.learning_rates = learning_rates
        groups = [[p for p in group if p.requires_grad] for group in (frequencies, scales, added)]
        self.trainable_parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group]
        self.optimizer = torch.optim.AdamW(
            [{"params": group, "lr": rate} for group, rate in zip(groups, learning_rates, strict=True)],
            betas=BETAS,
            eps=EPSILON,
            weight_decay=0.0,
        )

    def step(self, batch: Sequence[Tensor], rate_factor: float) -> float:
        """One optimiser step on sequences [L] at `factor` times the rates; their mean loss, nats per token.

        Raises Diverged, with every parameter as it was, if the loss or a gradient is not finite.
        """
        self.optimizer.zero_grad()
        loss = sum(self._accumulate_gradients(ids, len(batch)) for ids in batch)
        finite = all(bool(p.grad.isfinite().all()) for p in self.trainable_parameters if p.grad is not None)
        if not (finite and torch.tensor(loss).isfinite()):
            raise Diverged(f"the loss became {loss:g}" if finite else "a gradient is not finite")
        for group, rate in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = rate * rate_factor
        self.optimizer.step()
        return loss

    def _accumulate_gradients(self, ids: Tensor, batch_size: int) -> float:
        """Add the gradients of one sequence's share of the mean loss; returns that share."""
        ids = ids.to(self.model.device)[None]
        share = 1 / ((ids.shape[1] - 1) * batch_size)
        with attached(self.model, self.adarope), activation_checkpointing(self.model, ids.shape[1] > self.recompute_above):
            hidden = last_hidden(self.model, ids)
            leaf = hidden.detach().requires_grad_()
            total = 0.0
            for logits, targets, _ in next_token_logits(self.model, ids, leaf):
                loss = nn.functional.cross_entropy(logits.float(), targets, reduction="sum") * share
                torch.autograd.backward(loss)
                total += float(loss.detach())
            torch.autograd.backward(hidden, leaf.grad)
        return total

    def save(self, file: Path) -> None:
        """Write parameters and the optimiser's state, all or nothing."""
        save_state(file, self.trainable_parameters, self.optimizer)

    def load(self, file: Path) -> None:
        """Go on from what `save` wrote."""
        load_state(file, self.trainable_parameters, self.optimizer)


def save_state(file: Path, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Write what learns and its optimiser's state, all or nothing."""
    tensors = {f"learned.{n}": p.detach().cpu().contiguous() for n, p in enumerate(parameters)}
    for n, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{n}.{name}": value.cpu().contiguous() for name, value in state.items()}
    staged = file.with_suffix(".partial")
    save_file(tensors, staged)
    staged.rename(file)


def load_state(file: Path, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Go on from what `save_state` wrote."""
    tensors = load_file(file)
    with torch.no_grad():
        for n, parameter in enumerate(parameters):
            parameter.copy_(tensors[f"learned.{n}"])
    whole = optimizer.state_dict()
    for name, tensor in tensors.items():
        kind, number, *key = name.split(".")
        if kind == "optimizer":
            whole["state"].setdefault(int(number), {})[key[0]] = tensor
    optimizer.load_state_dict(whole)


@contextmanager
def frozen_weights(model: Model) -> Iterator[None]:
    """No weight of the model learns inside the `with`, and nothing is dropped out."""
    before = {parameter: parameter.requires_grad for parameter in model.module.parameters()}
    training = model.module.training
    model.module.eval().requires_grad_(False)
    try:
        yield
    finally:
        model.module.train(training)
        for parameter, required in before.items():
            parameter.requires_grad_(required)


@contextmanager
def activation_checkpointing(model: Model, enabled: bool) -> Iterator[None]:
    """Let the decoder layers recompute their activations in the backward pass instead of keeping them."""
    if not enabled:
        yield
        return
    model.module.activation_checkpointing_enable({"use_reentrant": False})
    layers = [module for module in model.module.modules() if getattr(module, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True  # what the layer looks at; its children keep out of training
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
        model.module.activation_checkpointing_disable()
