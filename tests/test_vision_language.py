"""Vision-language checkpoints: the language model opens, with the logits and attention of eager transformers."""

from pathlib import Path

import pytest
import torch
from support.tiny_studies import tokenizer
from support.vision_language import MODELS, TEXT
from transformers import AutoConfig, AutoModelForImageTextToText

import headscope as hs


@pytest.mark.slow
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
