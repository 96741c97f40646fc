"""Checkpoints quantized by bitsandbytes: logits as in transformers, and a digest that includes the scales."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_studies import save_checkpoint
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

import headscope as hs

pytest.importorskip("bitsandbytes", reason="bitsandbytes is optional")

KINDS = {
    "four bits": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, ".absmax"),
    "eight bits": ({"load_in_8bit": True}, ".SCB"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_checkpoint_has_the_logits_of_transformers_and_digests_its_scales(kind: str, tmp_path: Path) -> None:
    options, scales = KINDS[kind]
    tiny, folder = save_checkpoint(tmp_path / "tiny"), tmp_path / "quantized"
    plain = AutoModelForCausalLM.from_pretrained(
        tiny,
        quantization_config=BitsAndBytesConfig(**options),
        device_map={"": "cpu"},
        dtype=torch.float32,
        attn_implementation="eager",
    )
    plain.save_pretrained(folder)
    for file in tiny.glob("tokenizer*"):
        shutil.copy(file, folder)
    model = hs.load(str(folder), device="cpu")
    ids = torch.arange(3, 43)[None]
    with torch.no_grad(), hs.attached(model, "base"):
        torch.testing.assert_close(model.module(ids).logits, plain(ids).logits, atol=1e-4, rtol=1e-4)
    assert model.weights_sha256 != hs.load(str(tiny), device="cpu").weights_sha256
    stored = load_file(folder / "model.safetensors")
    key = next(key for key in sorted(stored) if key.endswith(scales))
    stored[key].flatten()[0] += 1
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    assert hs.load(str(folder), device="cpu").weights_sha256 != model.weights_sha256
