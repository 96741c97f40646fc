"""Vision-language checkpoints from a folder: their text part opens, and its numbers are eager attention's."""

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
SEEN: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
PATCHES = {
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
    "gemma3": {"text_config": {"model_type": "gemma3_text"}, "vision_config": SEEN, "mm_tokens_per_image": 4},
    "llava": {"text_config": {"model_type": "llama"}, "vision_config": {"model_type": "clip_vision_model", **SEEN}},
    "llava_next": {"text_config": {"model_type": "mistral"}, "vision_config": SEEN},
    "llava_onevision": {"text_config": {"model_type": "qwen2"}, "vision_config": SEEN},
    "mistral3": {"text_config": {"model_type": "mistral"}, "vision_config": {"model_type": "pixtral", **SEEN}},
    "internvl": {"text_config": {"model_type": "qwen2"}, "vision_config": SEEN},
    "idefics3": {"text_config": {"model_type": "llama"}, "vision_config": SEEN, "scale_factor": 2},
    "smolvlm": {"text_config": {"model_type": "llama"}, "vision_config": SEEN, "scale_factor": 2},
    "qwen2_vl": {"text_config": MROPE, "vision_config": {**PATCHES, "embed_dim": 32, "hidden_size": 64}, **IDS},
    "qwen2_5_vl": {"text_config": MROPE, "vision_config": PATCHES, **IDS},
    "qwen3_vl": {"text_config": MROPE, "vision_config": {**PATCHES, "deepstack_visual_indexes": [0]}, **IDS},
    "aya_vision": {"text_config": {"model_type": "cohere2"}, "vision_config": SEEN},
}


@pytest.mark.parametrize("kind", MODELS)
def test_the_text_part_of_a_vision_language_checkpoint_is_eager_attention_s(kind: str, tmp_path: Path) -> None:
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
    ids, heard = torch.arange(3, 43)[None], []
    with torch.no_grad():
        expected = plain(input_ids=ids, output_attentions=True)
        with hs.capturing(model) as layers:
            layers.listen(heard.append)
            logits = model.module(input_ids=ids).logits
    torch.testing.assert_close(logits, expected.logits, atol=1e-4, rtol=1e-4)
    assert len(heard) == len(expected.attentions) == 2
    for each, weights in zip(heard, expected.attentions, strict=True):
        products = each.scaling * torch.einsum("hqd,hkd->hqk", each.q, each.k.repeat_interleave(2, 0))
        ours = products.masked_fill(torch.ones(40, 40).triu(1).bool(), -torch.inf).softmax(-1)
        torch.testing.assert_close(ours, weights[0], atol=1e-5, rtol=1e-4)


def test_each_part_attends_as_before_when_a_capture_ends() -> None:
    options = MODELS["llava"] | {"text_config": TEXT | MODELS["llava"]["text_config"]}
    module = AutoModelForImageTextToText.from_config(AutoConfig.for_model("llava", **options)).eval()
    module.set_attn_implementation({"text_config": "eager", "vision_config": "sdpa"})
    parts = (module.config.text_config, module.config.vision_config)
    before = [part._attn_implementation for part in parts]
    assert before == ["eager", "sdpa"]
    with hs.capturing(hs.load(module)), torch.no_grad():
        module(input_ids=torch.arange(3, 43)[None])
    assert [part._attn_implementation for part in parts] == before
