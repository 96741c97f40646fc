"""Left padding inside contexts: a padded text gives the numbers of the text alone, or the pass is refused by name."""

from functools import cache
from typing import Any

import pytest
import torch
from support.refusals import refuses
from torch import Tensor
from zoo.build import tiny

import headscope as hs
from headscope.attention.backend import using_attention_implementation
from headscope.attention.masks import UnsupportedMask
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.prefix_cache import supports_prefix_cache
from headscope.models.padding_check import standard_positions
from headscope.positions.model import Model

IDS = torch.randint(3, 100, (1, 9), generator=torch.Generator().manual_seed(3))
PADDED = torch.cat((torch.ones(1, 3, dtype=torch.long), IDS), 1)
MASK = (torch.arange(12) >= 3).long()[None]
LEARNED_POSITIONS = ("gpt2", "gpt_neo", "gpt_bigcode", "bert", "ctrl")


@cache
def loaded(model_type: str) -> Model:
    return hs.load(tiny(model_type))


@torch.no_grad()
def captured_logits(model: Model, ids: Tensor, **inputs: Any) -> Tensor:
    """Logits [V] after the last token of ids [1, L], inside a context."""
    with hs.capturing(model):
        logits: Tensor = model.module(input_ids=ids, **inputs).logits[0, -1]
    return logits


@pytest.mark.parametrize("model_type", LEARNED_POSITIONS)
def test_left_padding_needs_position_ids_where_positions_are_learned(model_type: str) -> None:
    model = loaded(model_type)
    with refuses(BadInput, f"'{model.name}'", "padding", "position_ids"):
        captured_logits(model, PADDED, attention_mask=MASK)
    padded = captured_logits(model, PADDED, attention_mask=MASK, position_ids=standard_positions(MASK))
    torch.testing.assert_close(padded, captured_logits(model, IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["llama", "bloom", "opt", "jamba", "falcon_h1"])
def test_left_padding_without_position_ids_gives_the_logits_of_the_text_alone(model_type: str) -> None:
    model = loaded(model_type)
    padded = captured_logits(model, PADDED, attention_mask=MASK)
    torch.testing.assert_close(padded, captured_logits(model, IDS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("model_type", ["recurrent_gemma", "bart", "marian"])
def test_left_padding_that_transformers_counts_or_reads_is_refused_in_every_pass(model_type: str) -> None:
    model = loaded(model_type)
    inputs = {"attention_mask": MASK}
    with refuses(UnsupportedModel, f"'{model.name}'", "padding"):
        captured_logits(model, PADDED, **inputs)
    with hs.capturing(model), refuses(UnsupportedModel, f"'{model.name}'", "padding"):
        model.module.generate(PADDED, max_new_tokens=2, pad_token_id=1, **inputs)
    captured_logits(model, IDS, attention_mask=torch.ones_like(IDS))  # without padding it is measured


@pytest.mark.parametrize("model_type", ["roberta", "camembert", "data2vec-text", "xlm-roberta", "xmod"])
def test_positions_from_0_and_cached_padding_tokens_are_refused_where_positions_follow_the_tokens(
    model_type: str,
) -> None:
    """generate of transformers 5.23 counts positions from 0, these families from the padding index."""
    model = loaded(model_type)
    with hs.capturing(model), refuses(UnsupportedModel, f"'{model.name}'", "position_ids", "generate"):
        model.module.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=2)
    with hs.capturing(model), torch.no_grad():
        cache = model.module(IDS, use_cache=True).past_key_values
        model.module(torch.tensor([[5]]), past_key_values=cache, use_cache=True)
        with refuses(UnsupportedModel, f"'{model.name}'", "token 1", "use_cache=False"):
            model.module(torch.tensor([[1]]), past_key_values=cache, use_cache=True)
    assert not supports_prefix_cache(model)


@pytest.mark.parametrize(
    "model_type",
    [
        *(
            "llama",
            "qwen2",
            "qwen3",
            "phi3",
            "deepseek_v3",
            "gpt2",
            "gptj",
            "gpt_neox",
            "opt",
            "bloom",
            "falcon",
            "mpt",
        ),
        *("jamba", "smollm3", "starcoder2"),
    ],
)
def test_a_mask_that_hides_tokens_inside_the_text_gives_the_eager_logits(model_type: str) -> None:
    expected, logits = logits_with_gap(loaded(model_type))
    assert float((logits - expected).abs().max() / expected.abs().max()) <= 1e-5


@pytest.mark.parametrize(
    "model_type",
    [
        "mistral",
        "gemma2",
        "gemma3_text",
        "gemma3n_text",
        "gpt_oss",
        "cohere2",
        "olmo3",
        "exaone4",
        "gpt_neo",
        "llama4_text",
    ],
)
def test_a_mask_that_hides_tokens_inside_the_text_is_refused_beside_a_window_or_chunks(model_type: str) -> None:
    kind = "chunks of 8 tokens" if model_type == "llama4_text" else "a window of 8 tokens"
    with refuses(UnsupportedMask, kind, "hides tokens inside the text", "Remove"):
        logits_with_gap(loaded(model_type))


def test_tokens_hidden_after_keys_that_a_window_dropped_are_refused() -> None:
    model = loaded("mistral")
    ids, mask = with_gap()
    with hs.capturing(model), torch.no_grad():
        cache = model.module(ids[:, :13], attention_mask=torch.ones(1, 13), use_cache=True).past_key_values
        mask[:, :] = 1
        mask[:, 7:10] = 0  # the window of 8 has kept some of these keys
        with refuses(UnsupportedMask, "a window of 8 tokens"):
            model.module(ids[:, 13:14], attention_mask=mask[:, :14], past_key_values=cache, use_cache=True)


def with_gap() -> tuple[Tensor, Tensor]:
    """Token ids [1, 24], and a mask of them that hides four between others."""
    ids = torch.randint(3, 100, (1, 24), generator=torch.Generator().manual_seed(4))
    mask = torch.ones_like(ids)
    mask[:, 8:12] = 0
    return ids, mask


@torch.no_grad()
def logits_with_gap(model: Model) -> tuple[Tensor, Tensor]:
    """Logits of the tokens that the mask does not hide: of eager attention, and inside a context."""
    ids, mask = with_gap()
    with using_attention_implementation(model.module, "eager"):
        expected = model.module(input_ids=ids, attention_mask=mask).logits
    with hs.capturing(model):
        logits = model.module(input_ids=ids, attention_mask=mask).logits
    return expected[mask.bool()], logits[mask.bool()]


def test_a_cache_that_drops_keys_which_the_model_sees_without_one_is_refused() -> None:
    """Moshi's sliding cache keeps a window, its attention has none."""
    model = loaded("moshi")
    with hs.capturing(model), torch.no_grad():
        with refuses(UnsupportedModel, "moshi", "keys", "use_cache=False"):
            model.module.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=4, pad_token_id=1)
        model.module(IDS, use_cache=False)


def test_opening_a_model_runs_no_padded_batch() -> None:
    module, batch_sizes = tiny("gpt2"), list[int]()
    module.get_input_embeddings().register_forward_pre_hook(lambda _, args: batch_sizes.append(len(args[0])))
    model = hs.load(module)
    captured_logits(model, IDS)
    assert {*batch_sizes} == {1}
    captured_logits(model, PADDED, attention_mask=MASK, position_ids=standard_positions(MASK))
    assert {*batch_sizes} == {1}, "the check runs without the hooks of the model's modules"


@pytest.mark.parametrize(
    ("model_type", "scheme"),
    [("llama", "yarn:factor=4"), ("llama", "alibi"), ("gpt2", None), ("bloom", None), ("gptj", None), ("falcon", None)],
)
def test_the_check_inside_contexts_is_that_of_the_model_alone(model_type: str, scheme: str | None) -> None:
    """The first padded pass inside edits and schemes: the same effects, and no listener or hook sees the check."""
    model, calls = hs.load(tiny(model_type)), list[str]()
    expected = hs.load(tiny(model_type)).checkpoint.padding_check.effects
    frequencies = {name: buffer.clone() for name, buffer in model.module.named_buffers()}

    def zero(z: Tensor, call: Any) -> Tensor:
        calls.append("edit")
        return z * 0

    with hs.attached(model, scheme), hs.capturing(model) as layers, torch.no_grad():
        layers.listen(lambda record: calls.append("listener"), layers=[0])
        layers.edit_output(0, zero)
        layers.hook(model.attention_modules[0], lambda *_: calls.append("hook"))
        layers.hook_inputs(model.attention_modules[0], lambda *_: calls.append("input hook"))
        model.module(PADDED, attention_mask=MASK, position_ids=standard_positions(MASK))
    assert sorted(calls) == ["edit", "hook", "input hook", "listener"]
    assert "effects" in vars(model.checkpoint.padding_check), "the padded pass has run the check"
    assert model.checkpoint.padding_check.effects == expected
    for name, buffer in model.module.named_buffers():
        assert torch.equal(buffer, frequencies[name])


def test_an_attention_mask_by_position_is_checked_too() -> None:
    model = loaded("bert")
    with hs.capturing(model), torch.no_grad(), refuses(BadInput, f"'{model.name}'", "padding", "position_ids"):
        model.module(PADDED, MASK)
