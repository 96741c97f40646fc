"""What a training starts from and leaves: a vocabulary, random weights, folders that any tool opens."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
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

from headscope.positions.adarope import AdaRoPE
from headscope.positions.checkpoint_scheme import FILE, KEY
from headscope.positions.model import load
from headscope.positions.schedule import Fixed
from probes.pretrain.options import PretrainOptions

ROPE_BASE = 10_000.0
EXPERTS_PER_LAYER, EXPERTS_PER_TOKEN = 8, 2
"""Experts a layer, and those of a token; the paper has 32 and 4 [ours, for models as small as these]."""
BALANCE_LOSS_WEIGHT = 0.01
"""Weight of the loss that balances experts (paper). Its z-loss is left out: transformers' class has none."""
BEGIN_TOKEN, END_TOKEN = "<s>", "</s>"
ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),  # transformers' class has QK-norm, but not the paper's gate
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
}


def train_tokenizer(texts: Iterable[str], vocabulary_size: int) -> PreTrainedTokenizerFast:
    """Byte-pair encoding of at most `vocabulary` tokens, learned on `texts`; the begin token opens every text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocabulary_size, special_tokens=[BEGIN_TOKEN, END_TOKEN], initial_alphabet=alphabet, show_progress=False
        ),
    )
    begin = tokenizer.token_to_id(BEGIN_TOKEN)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN_TOKEN} $A", pair=f"{BEGIN_TOKEN} $A $B", special_tokens=[(BEGIN_TOKEN, begin)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BEGIN_TOKEN, eos_token=END_TOKEN)


def random_model(options: PretrainOptions, vocabulary_size: int, seed: int) -> PreTrainedModel:
    """A model of random weights, float32: drawn by the seed alone, so alike for every variant."""
    settings, kind = ARCHITECTURES[options.architecture]
    moe = options.architecture == "olmoe"
    experts = {"num_experts": EXPERTS_PER_LAYER, "num_experts_per_tok": EXPERTS_PER_TOKEN, "router_aux_loss_coef": BALANCE_LOSS_WEIGHT} if moe else {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = kind(
            settings(
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


def save_checkpoint(
    folder: Path, model: PreTrainedModel, tokenizer: Any, scheme_name: str | None, schedule: Fixed | AdaRoPE
) -> None:
    """Write a checkpoint folder, all or nothing: weights, tokenizer, and the positions that it was trained under."""
    staged = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(staged, ignore_errors=True)
    model.save_pretrained(staged)
    tokenizer.save_pretrained(staged)
    if scheme_name is not None:
        file = staged / "config.json"
        told = {**json.loads(file.read_text(encoding="utf-8")), KEY: scheme_name}
        file.write_text(json.dumps(told, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    if isinstance(schedule, AdaRoPE):
        now = load(model)  # whose digest is of the weights as they are now
        step = int(folder.name.rpartition("-")[2])
        schedule.save(staged / FILE, weights_sha256=now.weights_sha256, checkpoint=folder.name, step=step)
    shutil.rmtree(folder, ignore_errors=True)
    staged.rename(folder)
