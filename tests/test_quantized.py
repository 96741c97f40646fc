"""Checkpoints quantized by bitsandbytes: logits as in transformers, and a digest that includes the scales."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.tiny_studies import PAIRS, save_texts, tokenizer
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM

import headscope as hs
from headscope.errors import UnsupportedModel

pytest.importorskip("bitsandbytes", reason="bitsandbytes is optional")

KINDS = {
    "four bits": ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, ".absmax"),
    "eight bits": ({"load_in_8bit": True}, ".SCB"),
}


def save_wide_checkpoint(folder: Path) -> Path:
    """A checkpoint whose matrices have whole blocks of 64 columns, which bitsandbytes needs to pack them on a CPU."""
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "vocab_size": 128}
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, **heads)
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_quantized_checkpoint_has_the_logits_of_transformers_and_digests_its_scales(kind: str, tmp_path: Path) -> None:
    options, scales = KINDS[kind]
    tiny, folder = save_wide_checkpoint(tmp_path / "tiny"), tmp_path / "quantized"
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


@pytest.fixture
def four_bits(tmp_path: Path) -> Any:
    """A 4-bit model that has run on a CPU, which packs its weights."""
    tiny = save_wide_checkpoint(tmp_path / "tiny")
    quantization = BitsAndBytesConfig(**KINDS["four bits"][0])
    options: dict[str, Any] = {"device_map": {"": "cpu"}, "dtype": torch.float32}
    module = AutoModelForCausalLM.from_pretrained(tiny, quantization_config=quantization, **options).eval()
    with torch.no_grad():
        module(IDS)
    return module


IDS = torch.arange(3, 43)[None]


def test_digesting_a_packed_model_leaves_it_unchanged(four_bits: Any, tmp_path: Path) -> None:
    with torch.no_grad():
        expected = four_bits(IDS).logits
        model = hs.load(four_bits, tokenizer=tokenizer())
        first, _ = model.identity, four_bits(IDS)
        text = save_texts(tmp_path / "texts")
        run = hs.measure(model, text=text, docs=1, lengths=[40], rows=8, out=tmp_path / "runs")
        assert torch.equal(four_bits(IDS).logits, expected)
    assert model.identity.weights == first.weights
    assert run.manifest["models"][0]["identity"]["quantization"] == "bitsandbytes 4-bit"


def test_digest_of_a_quantized_folder_does_not_change_in_the_first_pass(four_bits: Any, tmp_path: Path) -> None:
    four_bits.save_pretrained(tmp_path / "quantized")
    model = hs.load(str(tmp_path / "quantized"), tokenizer=tokenizer(), device="cpu")
    before = model.identity.weights
    with torch.no_grad():
        model.module(IDS)
    assert model.identity.weights == before
    assert hs.load(str(tmp_path / "quantized"), tokenizer=tokenizer(), device="cpu").identity.weights == before


@pytest.mark.parametrize("probe", ["attribution", "weights", "paths", "patch", "influence"])
def test_gradients_and_weights_of_four_bits_are_refused_by_name(probe: str, four_bits: Any, tmp_path: Path) -> None:
    model = hs.load(four_bits, tokenizer=tokenizer())
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    texts = {"text": save_texts(tmp_path / "texts"), "docs": 2, "lengths": [24]}
    pairs = {"pairs": [str(tmp_path / "pairs.jsonl")], "metric": "logprob"}
    options: dict[str, dict[str, Any]] = {
        "attribution": texts,
        "weights": texts,
        "paths": {**pairs, "verify_top": 1, "verify_random": 1},
        "patch": {**pairs, "method": "estimate"},
        "influence": {**texts, "method": "estimate", "components": ["zero"]},
    }
    run = getattr(hs, probe)
    with pytest.raises(UnsupportedModel, match=r"keeps quantised weights|no gradients of 4-bit weights on a CPU"):
        run(model, out=tmp_path / "runs", quiet=True, **options[probe])


def test_runs_of_llm_int8_say_that_it_is_noisy(tmp_path: Path) -> None:
    quantization = BitsAndBytesConfig(**KINDS["eight bits"][0])
    tiny, options = save_wide_checkpoint(tmp_path / "tiny"), {"device_map": {"": "cpu"}, "dtype": torch.float32}
    module = AutoModelForCausalLM.from_pretrained(tiny, quantization_config=quantization, **options).eval()
    text = save_texts(tmp_path / "texts")
    run = hs.measure(
        hs.load(module, tokenizer=tokenizer()), text=text, docs=1, lengths=[40], rows=8, out=tmp_path / "r"
    )
    assert any("LLM.int8" in finding and "noise" in finding for finding in run.findings()["text"])
