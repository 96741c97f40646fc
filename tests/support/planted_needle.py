"""A tiny model with one retrieval head, haystacks and needles that it can solve."""

import json
import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import headscope as hs
from headscope.forward.prefix_cache import TokenIds, last_block_start, shared_prefix_length
from headscope.positions.model import Model
from headscope.prompts.needles import Needle
from headscope.run import Run

VOCAB = 128


FACT = range(40, 46)
"""Tokens w40 .. w45, which follow w39 in the needle and occur nowhere else."""


def words() -> PreTrainedTokenizerFast:
    """Words w3 .. w124 and three full stops, one token each."""
    names = ["<unk>", "<s>", "</s>", *(f"w{n}" for n in range(3, 125)), "w5.", "w6.", "w7."]
    tokenizer = Tokenizer(models.WordLevel({name: n for n, name in enumerate(names)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


def planted_model() -> Model:
    """Two layers of four heads, without rotation, all zero but layer 0 head 2: from word n it attends to word n + 1
    wherever that stands, and writes what it finds. Nothing else copies or speaks."""
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=2 * VOCAB, intermediate_size=8, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, head_dim=VOCAB, tie_word_embeddings=False, eos_token_id=2,
    )  # fmt: skip
    module = LlamaForCausalLM(config).eval()
    code = torch.eye(VOCAB)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        module.model.embed_tokens.weight[:, :VOCAB] = code
        attention = module.model.layers[0].self_attn
        own_dims = slice(2 * VOCAB, 3 * VOCAB)
        attention.q_proj.weight[own_dims, :VOCAB] = code.roll(1, 0)  # word n asks for n + 1
        attention.k_proj.weight[own_dims, :VOCAB] = code
        attention.v_proj.weight[own_dims, :VOCAB] = code
        attention.o_proj.weight[VOCAB:, own_dims] = code
        module.lm_head.weight[:, VOCAB:] = code
    return hs.load(module, tokenizer=words()).with_scheme("nope")


def write_needle_files(folder: Path) -> Path:
    """Two haystacks of words w3 .. w30, and two needles whose facts are words of their own."""
    (folder / "hay").mkdir()
    for name in "ab":
        chance = random.Random(name)
        text = " ".join(chance.choice([*(f"w{n}" for n in range(8, 31)), "w5.", "w6."]) for _ in range(600))
        (folder / "hay" / f"{name}.txt").write_text(text)
    fact = " ".join(f"w{n}" for n in FACT)
    needles = [Needle("one", "w31 w32", "w38 w39", fact), Needle("two", "w33", "w60 w61 w62", "w63 w64 w65 w66")]
    (folder / "needles.jsonl").write_text("\n".join(json.dumps(vars(needle)) for needle in needles))
    return folder


def run_needle_probe(folder: Path, model: Any, out: str = "runs", **changes: Any) -> Run:
    grid = {"lengths": [60, 200], "depths": 3, "file": str(folder / "needles.jsonl"), "seeds": 2, **changes}
    return hs.needle(model, **{"text": f"file:{folder}/hay/*.txt", "out": folder / out, "quiet": True, **grid})


def read_tokens(prompts: Iterable[TokenIds], block: int) -> int:
    """Prompt tokens that go through the model when these prompts are read in this order."""
    total, cached = 0, np.empty(0, np.int32)
    for prompt in prompts:
        total += len(prompt) - shared_prefix_length(cached, prompt, block)
        cached = prompt[: last_block_start(len(prompt), block)]
    return total
