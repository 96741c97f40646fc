"""Training of AdaRoPE parameters and of a LoRA on a frozen model, and the validation loss by position.

Memory is bounded by one sequence: the loss is computed in chunks of positions, the gradients of a batch are accumulated
sequence by sequence, and long sequences recompute their activations.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headscope.errors import TrainingDiverged, UnsupportedModel
from headscope.forward.logits import compute_loss_by_position, last_hidden_states, next_token_logits
from headscope.models.checkpoint import LoadedModel, evaluating
from headscope.models.lora import import_peft, lora_of_adapter
from headscope.positions import attached
from headscope.positions.adarope import AdaRoPE
from headscope.positions.model import Model
from headscope.positions.schedule import FixedSchedule
from headscope.prompts.texts import TokenDocument

log = logging.getLogger("headscope")
LORA_MODULES = ("q_proj", "k_proj")
"""The layers that a LoRA is trained on."""
BETAS = (0.8, 0.95)
EPSILON = 1e-8
DECAY_FRACTION, FINAL_RATE_FACTOR = 0.1, 0.1
"""Over the last tenth of the steps the learning rate falls linearly to a tenth (paper, Detailed Setting)."""


def wsd_rate_factor(step: int, steps: int, warmup: int) -> float:
    """Factor in (0, 1] on every learning rate at `step` of `steps`: warm-up, stable, decay."""
    decay_steps = max(1, round(DECAY_FRACTION * steps))
    decayed = max(0, step + 1 - (steps - decay_steps)) / decay_steps
    return min(1.0, (step + 1) / max(1, warmup)) * (1 - (1 - FINAL_RATE_FACTOR) * decayed)


def warn_if_warmup_too_long(steps: int, warmup: int) -> None:
    """Warn if the training ends before its learning rates reach their full values."""
    if steps <= warmup:
        highest = max(wsd_rate_factor(step, steps, warmup) for step in range(steps))
        log.warning(
            "the training ends during warm-up: %s steps, %s warm-up steps. "
            "The learning rates reach at most %.0f %% of their values. Use a smaller --warmup",
            steps,
            warmup,
            100 * highest,
        )


def validation_loss(
    model: Model, scheme: str | FixedSchedule | AdaRoPE, documents: Sequence[TokenDocument]
) -> dict[str, Any]:
    """Loss by position of documents of one length: the columns of table `validation` from `context_length` on."""
    parts = []
    with attached(model, scheme), evaluating(model):
        for document in documents:
            ids = torch.tensor(document.ids, device=model.device)[None]
            columns = compute_loss_by_position(model, ids, last_hidden_states(model, ids)).compute()
            parts.append({"doc": [document.name] * len(columns["nll"]), **columns})
    joined = {name: np.concatenate([np.asarray(part[name]) for part in parts]) for name in parts[0]}
    return {"context_length": len(documents[0].ids), **joined}


class AdapterTrainer:
    """Trainer of those parameters of `adarope` and `lora` that require gradients.

    `learning_rates` are those of xi, of (tau, gamma), and of the LoRA. The optimiser is AdamW with the paper's betas
    and epsilon and without weight decay, which would pull every log-frequency to 0 [ours].
    """

    def __init__(
        self,
        model: Model,
        adarope: AdaRoPE,
        learning_rates: tuple[float, float, float],
        lora: nn.Module | None = None,
        checkpoint_activations_above: int = 0,
    ):
        self.model, self.adarope, self.checkpoint_activations_above = model, adarope, checkpoint_activations_above
        frequencies = [p for name, p in adarope.named_parameters() if "xi" in name]
        scales = [p for name, p in adarope.named_parameters() if "xi" not in name]
        lora_weights = [p for name, p in lora.named_parameters() if "lora_" in name] if lora else []
        self.learning_rates = learning_rates
        groups = [[p for p in group if p.requires_grad] for group in (frequencies, scales, lora_weights)]
        self.trainable_parameters: list[nn.Parameter] = [parameter for group in groups for parameter in group]
        self.optimizer = torch.optim.AdamW(
            [{"params": group, "lr": rate} for group, rate in zip(groups, learning_rates, strict=True)],
            betas=BETAS,
            eps=EPSILON,
            weight_decay=0.0,
        )

    def step(self, batch: Sequence[Tensor], rate_factor: float) -> float:
        """Take one optimiser step on sequences [L] at `rate_factor` times the learning rates.

        Returns the mean loss in nats per token. Raises TrainingDiverged and changes no parameter if the loss or a
        gradient is not finite.
        """
        self.optimizer.zero_grad()
        loss = sum(self._accumulate_gradients(ids, len(batch)) for ids in batch)
        finite = all(bool(p.grad.isfinite().all()) for p in self.trainable_parameters if p.grad is not None)
        if not (finite and torch.tensor(loss).isfinite()):
            raise TrainingDiverged(f"the loss became {loss:g}" if finite else "a gradient is not finite")
        for group, rate in zip(self.optimizer.param_groups, self.learning_rates, strict=True):
            group["lr"] = rate * rate_factor
        self.optimizer.step()
        return loss

    def _accumulate_gradients(self, ids: Tensor, batch_size: int) -> float:
        """Add the gradients of one sequence's share of the mean loss, and return that share."""
        ids = ids.to(self.model.device)[None]
        weight = 1 / ((ids.shape[1] - 1) * batch_size)
        is_checkpointed = ids.shape[1] > self.checkpoint_activations_above
        with attached(self.model, self.adarope), activation_checkpointing(self.model, is_checkpointed):
            hidden = last_hidden_states(self.model, ids)
            leaf = hidden.detach().requires_grad_()
            total = 0.0
            for logits, targets, _ in next_token_logits(self.model, ids, leaf):
                loss = nn.functional.cross_entropy(logits.float(), targets, reduction="sum") * weight
                torch.autograd.backward(loss)
                total += float(loss.detach())
            torch.autograd.backward(hidden, leaf.grad)
        return total

    def save(self, file: Path) -> None:
        """Write the parameters and the optimiser state atomically."""
        save_state(file, self.trainable_parameters, self.optimizer)

    def load(self, file: Path) -> None:
        """Restore what `save` wrote."""
        load_state(file, self.trainable_parameters, self.optimizer)


@contextmanager
def adding_lora(checkpoint: LoadedModel, rank: int, alpha: int, seed: int) -> Iterator[Any]:
    """Add an untrained LoRA, which has no effect yet, to the query and key projections inside the `with`.

    Yields the PeftModel. Raises ResourceMissing without peft, UnsupportedModel unless every attention layer has
    separate linear projections.
    """
    peft = import_peft()
    projections = {name: module for name, module in checkpoint.module.named_modules() if name.endswith(LORA_MODULES)}
    if len(projections) != len(LORA_MODULES) * len(checkpoint.attention_modules) or not all(
        isinstance(module, nn.Linear) for module in projections.values()
    ):
        raise UnsupportedModel(
            f"cannot add a LoRA to '{checkpoint.name}': not every layer has separate linear "
            f"{' and '.join(LORA_MODULES)}. Train positions only (--strategy adarope)"
        )
    torch.manual_seed(seed)
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=list(LORA_MODULES))
    peft_model = peft.get_peft_model(checkpoint.module, config)
    try:
        with lora_of_adapter(checkpoint.module):
            yield peft_model
    finally:
        peft_model.unload()


def save_state(file: Path, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Write trainable parameters and their optimiser state atomically."""
    tensors = {f"learned.{n}": p.detach().cpu().contiguous() for n, p in enumerate(parameters)}
    for n, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{n}.{name}": value.cpu().contiguous() for name, value in state.items()}
    partial = file.with_suffix(".partial")
    save_file(tensors, partial)
    partial.rename(file)


def load_state(file: Path, parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer) -> None:
    """Restore what `save_state` wrote."""
    tensors = load_file(file)
    with torch.no_grad():
        for n, parameter in enumerate(parameters):
            parameter.copy_(tensors[f"learned.{n}"])
    state = optimizer.state_dict()
    for name, tensor in tensors.items():
        kind, number, *key = name.split(".")
        if kind == "optimizer":
            state["state"].setdefault(int(number), {})[key[0]] = tensor
    optimizer.load_state_dict(state)


@contextmanager
def frozen_weights(model: Model) -> Iterator[None]:
    """Freeze all weights of the model and disable dropout inside the `with`."""
    required_grad = {parameter: parameter.requires_grad for parameter in model.module.parameters()}
    training = model.module.training
    model.module.eval().requires_grad_(False)
    try:
        yield
    finally:
        model.module.train(training)
        for parameter, required in required_grad.items():
            parameter.requires_grad_(required)


@contextmanager
def activation_checkpointing(model: Model, enabled: bool) -> Iterator[None]:
    """Recompute the activations of the decoder layers in the backward pass instead of storing them."""
    if not enabled:
        yield
        return
    model.module.activation_checkpointing_enable({"use_reentrant": False})
    layers = [module for module in model.module.modules() if getattr(module, "gradient_checkpointing", False)]
    for layer in layers:
        layer.training = True  # the layer checks only this flag; its submodules stay in eval mode
    try:
        yield
    finally:
        for layer in layers:
            layer.training = False
        model.module.activation_checkpointing_disable()
