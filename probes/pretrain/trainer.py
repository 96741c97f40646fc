"""Models of pretraining: tokenizer, random weights, first positions, checkpoint folders, and optimiser steps."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from headscope.errors import TrainingDiverged
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import resolve_schedule
from headscope.positions.model import ADAPTER_FILE, ADAROPE_POSITIONS, POSITIONS_KEY, PRETRAINING_KEY, Model, load
from headscope.positions.schedule import FixedSchedule
from headscope.training.adapter_trainer import BETAS, EPSILON, load_state, save_state
from headscope.training.adarope_variants import VARIANT_SETUPS
from probes.pretrain.declaration import PretrainOptions, TrainingKey

REFERENCE_LENGTH = 64
"""L_ref of AdaScale (paper, Detailed Setting)."""
FIXED_SCHEMES = {"rope": "base", "prope": "prope", "alibi": "alibi", "nope": "nope"}
"""Variants without trained positions -> their position scheme."""
ROPE_BASE = 10_000.0
EXPERTS_PER_LAYER, EXPERTS_PER_TOKEN = 8, 2
"""All experts of a layer, and those active for a token; the paper has 32 and 4 [ours, for such small models]."""
BALANCE_LOSS_WEIGHT = 0.01
"""Weight of the loss that balances experts (paper). The paper's z-loss is omitted: transformers' class has none."""
BEGIN_TOKEN, END_TOKEN = "<s>", "</s>"
ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),  # transformers' class has QK-norm, but not the paper's gate
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
}


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-pair tokenizer of at most `vocabulary_size` tokens on `texts`; it begins every text with <s>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[BEGIN_TOKEN, END_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    begin = tokenizer.token_to_id(BEGIN_TOKEN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN_TOKEN} $A", pair=f"{BEGIN_TOKEN} $A $B", special_tokens=[(BEGIN_TOKEN, begin)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN_TOKEN, eos_token=END_TOKEN)


def random_model(options: PretrainOptions, vocabulary_size: int, seed: int) -> PreTrainedModel:
    """A float32 model with random weights, which depend on the seed and not on the variant."""
    config_class, model_class = ARCHITECTURES[options.architecture]
    moe = options.architecture == "olmoe"
    experts = (
        {
            "num_experts": EXPERTS_PER_LAYER,
            "num_experts_per_tok": EXPERTS_PER_TOKEN,
            "router_aux_loss_coef": BALANCE_LOSS_WEIGHT,
        }
        if moe
        else {}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class(
            config_class(
                vocab_size=vocabulary_size,
                hidden_size=options.width,
                intermediate_size=options.feed_forward // (EXPERTS_PER_TOKEN if moe else 1),
                num_hidden_layers=options.layers,
                num_attention_heads=options.heads,
                num_key_value_heads=options.kv_groups,
                head_dim=options.width // options.heads,
                max_position_embeddings=options.length,
                rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
                rms_norm_eps=1e-5 if moe else 1e-6,
                tie_word_embeddings=True,
                bos_token_id=0,
                eos_token_id=1,
                pad_token_id=None,
                **experts,
            )
        )
    model.set_attn_implementation("sdpa")
    return model


def initial_positions(variant: str, model: Model) -> FixedSchedule | AdaRoPE:
    """The positions from which a variant's training starts; AdaRoPE starts as RoPE."""
    if variant in FIXED_SCHEMES:
        positions = resolve_schedule(model, FIXED_SCHEMES[variant])
        assert isinstance(positions, FixedSchedule)
        return positions
    adarope = AdaRoPE.from_schedule(model, resolve_schedule(model, "base"), REFERENCE_LENGTH)
    VARIANT_SETUPS["full" if variant == "adarope" else variant](adarope)
    return adarope.to(model.device)


def save_checkpoint(
    folder: Path, model: PreTrainedModel, tokenizer: Any, training: TrainingKey, schedule: FixedSchedule | AdaRoPE
) -> None:
    """Write a checkpoint folder atomically: weights, tokenizer, and what the model was trained under.

    The config names the variant, the seed, and the position scheme unless it is that of the architecture.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    file = partial / "config.json"
    config = {**json.loads(file.read_text(encoding="utf-8")), PRETRAINING_KEY: training._asdict()}
    if training.variant != "rope":
        config[POSITIONS_KEY] = FIXED_SCHEMES.get(training.variant, ADAROPE_POSITIONS)
    file.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if isinstance(schedule, AdaRoPE):
        weights, step = load(model).identity.weights, int(folder.name.rpartition("-")[2])
        metadata = weights.to_record()
        schedule.save(partial / ADAPTER_FILE, **metadata, checkpoint=folder.name, step=step)
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)


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
