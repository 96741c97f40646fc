"""Vision-language checkpoints: the language model opens, with the logits and attention of eager transformers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_studies import tokenizer
from transformers import AutoConfig, AutoModelForImageTextToText

import headscope as hs

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
}
MROPE = {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}}
IDS = {"image_token_id": 126, "video_token_id": 125, "vision_start_token_id": 124, "vision_end_token_id": 123}

MODELS: dict[str, dict[str, Any]] = {
    "gemma3": {"text_config": {"model_type": "gemma3_text"}, "vision_config": VISION, "mm_tokens_per_image": 4},
    "llava": {"text_config": {"model_type": "llama"}, "vision_config": {"model_type": "clip_vision_model", **VISION}},
    "llava_next": {"text_config": {"model_type": "mistral"}, "vision_config": VISION},
    "llava_onevision": {"text_config": {"model_type": "qwen2"}, "vision_config": VISION},
    "mistral3": {"text_config": {"model_type": "mistral"}, "vision_config": {"model_type": "pixtral", **VISION}},
    "internvl": {"text_config": {"model_type": "qwen2"}, "vision_config": VISION},
    "idefics3": {"text_config": {"model_type": "llama"}, "vision_config": VISION, "scale_factor": 2},
    "smolvlm": {"text_config": {"model_type": "llama"}, "vision_config": VISION, "scale_factor": 2},
    "qwen2_vl": {"text_config": MROPE, "vision_config": {**QWEN_VISION, "embed_dim": 32, "hidden_size": 64}, **IDS},
    "qwen2_5_vl": {"text_config": MROPE, "vision_config": QWEN_VISION, **IDS},
    "qwen3_vl": {"text_config": MROPE, "vision_config": {**QWEN_VISION, "deepstack_visual_indexes": [0]}, **IDS},
    "aya_vision": {"text_config": {"model_type": "cohere2"}, "vision_config": VISION},
}


@pytest.mark.parametrize("kind", MODELS)
def test_language_model_has_eager_logits_and_attention(kind: str, tmp_path: Path) -> None:
    options = dict(MODELS[kind])
    options["text_config"] = TEXT | options["text_config"]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **options)
        plain = AutoModelForImageTextToText.from_config(config, dtype=torch.float32).eval()
    plain.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    plain.set_attn_implementation("eager")
    model = hs.load(str(tmp_path), device="cpu")
    assert (model.geometry.layers, model.geometry.heads, model.geometry.kv_groups) == (2, 4, 2)
    assert model.geometry.native_context == 256
    ids, records = torch.arange(3, 43)[None], []
    with torch.no_grad():
        expected = plain(input_ids=ids, output_attentions=True)
        with hs.capturing(model) as layers:
            layers.listen(records.append)
            logits = model.module(input_ids=ids).logits
    torch.testing.assert_close(logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert len(records) == len(expected.attentions) == 2
    for record, weights in zip(records, expected.attentions, strict=True):
        products = record.scaling * torch.einsum("hqd,hkd->hqk", record.q, record.k.repeat_interleave(2, 0))
        pattern = products.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf).softmax(-1)
        torch.testing.assert_close(pattern, weights[0], atol=1e-5, rtol=1e-4)


def test_capture_restores_the_attention_implementation_of_each_part() -> None:
    options = MODELS["llava"] | {"text_config": TEXT | MODELS["llava"]["text_config"]}
    module = AutoModelForImageTextToText.from_config(AutoConfig.for_model("llava", **options)).eval()
    module.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    parts = (module.config.text_config, module.config.vision_config)
    before = [part._attn_implementation for part in parts]
    assert before == ["eager", "sdpa"]
    with hs.capturing(hs.load(module)), torch.no_grad():
        module(input_ids=torch.arange(3, 43)[None])
    assert [part._attn_implementation for part in parts] == before
