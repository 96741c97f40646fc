"""Generation with a cache that drops tokens gives the same tokens as the masked model, in less memory."""

from functools import cache
from typing import Any

import pytest
import torch
from support import families
from support.refusals import refuses
from zoo.build import tiny

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.capture import capturing
from headscope.forward.stored_cache import observe_cache
from headscope.forward.streaming_cache import StreamingCache, streaming_cache
from headscope.positions.model import Model
from headscope.streaming import StreamingWindow

IDS = torch.randint(3, families.VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))
GROUPS = {0: (0,), 2: (0, 1)}
WINDOW = StreamingWindow(2, 5)


def heads_of(model: Model, groups: dict[int, tuple[int, ...]]) -> list[str]:
    """The query heads of KV groups by layer number."""
    geometry = model.geometry
    return [
        f"L{number}H{head}"
        for number, members in groups.items()
        for head in range(geometry.layer_heads[geometry.layer_numbers.index(number)])
        if geometry.kv_group(geometry.layer_numbers.index(number), head) in members
    ]


def greedy_tokens(model: Model, ids: torch.Tensor, cache: Any, count: int) -> list[int]:
    """Greedy tokens after ids [1, L], one call per token with the cache, or over the whole text without one."""
    tokens: list[int] = []
    rest = ids
    for _ in range(count):
        keywords = {"use_cache": False} if cache is None else {"past_key_values": cache, "use_cache": True}
        token = int(model.module(rest, **keywords).logits[0, -1].argmax())
        tokens.append(token)
        new = torch.tensor([[token]])
        rest = torch.cat((rest, new), 1) if cache is None else new
    return tokens


@torch.no_grad()
def test_generation_with_dropped_tokens_equals_the_masked_model() -> None:
    model = hs.load(families.MEASURABLE["llama-gqa"]())
    with hs.ablated(model, heads_of(model, GROUPS), str(WINDOW)):
        expected = greedy_tokens(model, IDS, None, 20)
    with streaming_cache(model, GROUPS, WINDOW) as cache:
        assert greedy_tokens(model, IDS, cache, 20) == expected
        assert cache.get_seq_length() == IDS.shape[1] + 19
    with streaming_cache(model, GROUPS, WINDOW) as cache:  # the same with transformers' own loop
        generated = model.module.generate(
            IDS, past_key_values=cache, max_new_tokens=20, min_new_tokens=20, do_sample=False, pad_token_id=0
        )
        masked = expected[: expected.index(2)] if 2 in expected else expected
        assert generated[0, IDS.shape[1] :].tolist()[: len(masked)] == masked


PADDED_LENGTHS = (40, 33, 8, 2)


@torch.no_grad()
def test_a_left_padded_batch_generates_what_each_text_alone_does() -> None:
    """Each row keeps its own first tokens, also a text that is shorter than the window."""
    model = hs.load(families.MEASURABLE["llama-gqa"]())
    options = {"max_new_tokens": 15, "min_new_tokens": 15, "do_sample": False, "pad_token_id": 0}
    expected = []
    for length in PADDED_LENGTHS:
        with streaming_cache(model, GROUPS, WINDOW) as cache:
            expected.append(model.module.generate(IDS[:, -length:], past_key_values=cache, **options)[0, length:])
    padded = [torch.nn.functional.pad(IDS[0, -length:], (40 - length, 0)) for length in PADDED_LENGTHS]
    mask = torch.stack([torch.arange(40) >= 40 - length for length in PADDED_LENGTHS]).long()
    with streaming_cache(model, GROUPS, WINDOW) as cache:
        generated = model.module.generate(
            torch.stack(padded), attention_mask=mask, past_key_values=cache, output_logits=True,
            return_dict_in_generate=True, **options,
        )  # fmt: skip
    assert torch.stack(generated.logits).isfinite().all()
    assert torch.equal(generated.sequences[:, 40:], torch.stack(expected))
    with streaming_cache(model, GROUPS, WINDOW) as cache, refuses(BadInput, "streaming_cache", "padding"):
        model.module(torch.stack(padded), attention_mask=mask.flip(1), past_key_values=cache, use_cache=True)


@torch.no_grad()
def test_beam_search_with_dropped_tokens_equals_beam_search_of_the_masked_model() -> None:
    model = hs.load(families.MEASURABLE["llama-gqa"]())
    options = {"num_beams": 3, "max_new_tokens": 15, "min_new_tokens": 15, "do_sample": False, "pad_token_id": 0}
    with hs.ablated(model, heads_of(model, GROUPS), str(WINDOW)):
        expected = model.module.generate(IDS, use_cache=False, **options)
    with streaming_cache(model, GROUPS, WINDOW) as cache:
        assert torch.equal(model.module.generate(IDS, past_key_values=cache, **options), expected)


@torch.no_grad()
def test_the_cache_stores_what_the_arithmetic_says() -> None:
    from probes.budget.streaming_order import cache_bytes

    model = hs.load(families.MEASURABLE["llama-gqa"]())
    with streaming_cache(model, GROUPS, WINDOW) as cache:
        for part in torch.split(IDS, 7, 1):
            model.module(part, past_key_values=cache, use_cache=True)
    geometry, length = model.geometry, IDS.shape[1]
    computed = cache_bytes(observe_cache(model), kv_groups(model), GROUPS, WINDOW, length, 4)
    token_of_a_group = 2 * geometry.head_dim * 4
    assert cache.stored_bytes == computed - 3 * token_of_a_group  # three groups: the own token comes with its query
    assert computed == token_of_a_group * (3 * 7 + (sum(geometry.layer_kv_groups) - 3) * length)


@pytest.mark.parametrize(
    "model_type",
    [
        *("llama", "mistral", "gemma2", "gemma3_text", "gemma3n_text", "llama4_text", "gpt_oss", "cohere2", "olmo3"),
        *("deepseek_v2", "deepseek_v3", "minicpm3", "glm4_moe_lite", "jamba", "gpt2", "gpt_neo", "bloom", "falcon"),
    ],
)
@torch.no_grad()
def test_the_computed_size_is_that_of_the_cache_of_transformers(model_type: str) -> None:
    """Windows and chunks count the query's own token, which transformers drops before the next one."""
    from probes.budget.streaming_order import cache_bytes

    model = loaded(model_type)
    layers = model.module(IDS, use_cache=True).past_key_values.layers
    stored = [part for layer in layers for part in (getattr(layer, "keys", None), getattr(layer, "values", None))]
    expected = sum(part.nbytes for part in stored if isinstance(part, torch.Tensor))
    observed, counts = observe_cache(model), kv_groups(model)
    own_tokens = sum(layer.values * 4 for layer in observed.values() if layer.limit)
    assert cache_bytes(observed, counts, {}, WINDOW, IDS.shape[1], 4) == expected + own_tokens
    everything = {number: range(count) for number, count in counts.items()}
    streamed = cache_bytes(observed, counts, everything, WINDOW, IDS.shape[1], 4)
    if any(layer.has_groups for layer in observed.values()):
        assert streamed < expected
    else:
        assert streamed == expected


@pytest.mark.parametrize(
    "model_type",
    ["llama", "mistral", "gemma2", "gemma3_text", "llama4_text", "gpt_oss", "cohere2", "olmo3", "gpt_neo", "bloom"],
)
@torch.no_grad()
def test_a_streaming_group_never_enlarges_the_cache_and_gives_the_logits_of_the_masked_model(model_type: str) -> None:
    model = loaded(model_type)
    plain = model.module(IDS, use_cache=True).past_key_values
    with capturing(model) as layers:
        layers.stream(0, (0,), WINDOW)
        expected = model.module(IDS, use_cache=False).logits
    groups = {model.geometry.layer_numbers[0]: (0,)}
    with streaming_cache(model, groups, WINDOW) as cache:
        parts = torch.split(IDS, [20, 1, 12, *[1] * 7], 1)
        logits = torch.cat([model.module(part, past_key_values=cache, use_cache=True).logits for part in parts], 1)
    assert float((logits - expected).abs().max() / expected.abs().max()) <= 1e-5
    assert cache.stored_bytes < sum(layer.keys.nbytes + layer.values.nbytes for layer in plain.layers)


@torch.no_grad()
def test_a_left_padded_batch_of_a_model_with_windows_generates_what_each_text_alone_does() -> None:
    model = loaded("mistral")
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    texts, expected = [IDS[0, -length:] for length in (20, 13, 6)], []
    for text in texts:
        with streaming_cache(model, GROUPS, WINDOW) as cache:
            expected.append(model.module.generate(text[None], past_key_values=cache, **options)[0, len(text) :])
    padded = torch.stack([torch.nn.functional.pad(text, (20 - len(text), 0)) for text in texts])
    mask = torch.stack([torch.arange(20) >= 20 - len(text) for text in texts]).long()
    with streaming_cache(model, GROUPS, WINDOW) as cache:
        generated = model.module.generate(padded, attention_mask=mask, past_key_values=cache, **options)
    assert torch.equal(generated[:, 20:], torch.stack(expected))


def test_groups_that_cannot_stream_are_refused_by_name() -> None:
    cases = (
        (UnsupportedModel, "deepseek_v3", {0: (0,)}, ("layer 0", "latent attention")),
        (BadInput, "llama", {0: (0, 9)}, ("layer 0", "not 9")),
        (BadInput, "llama", {7: (0,)}, ("layer 7", "0 KV groups")),
    )
    for error, model_type, groups, words in cases:
        with refuses(error, *words), streaming_cache(loaded(model_type), groups, WINDOW):
            pass


@torch.no_grad()
def test_the_pass_that_observes_a_cache_is_neither_heard_nor_changed_by_open_contexts() -> None:
    model, records = loaded("llama"), []
    expected = observe_cache(model)
    with capturing(model) as layers, hs.ablated(model, ["L0H0"]):
        layers.listen(records.append)
        assert observe_cache(model) == expected
        with streaming_cache(model, {0: (0,)}, WINDOW):
            pass
    assert not records
    with refuses(UnsupportedModel, "recurrent_gemma", "KV cache"):
        observe_cache(loaded("recurrent_gemma"))


@cache
def loaded(model_type: str) -> Model:
    return hs.load(tiny(model_type))


def kv_groups(model: Model) -> dict[int, int]:
    """The number of KV groups by layer number."""
    return dict(zip(model.geometry.layer_numbers, model.geometry.layer_kv_groups, strict=True))


@torch.no_grad()
def test_another_attention_function_gives_nan_instead_of_a_wrong_token() -> None:
    model = hs.load(families.MEASURABLE["llama-gqa"]())
    cache = StreamingCache(GROUPS, [None] * model.module.config.num_hidden_layers, WINDOW)
    model.module(IDS, past_key_values=cache, use_cache=True)
    assert model.module(IDS[:, :1], past_key_values=cache, use_cache=True).logits.isnan().all()


@pytest.mark.slow
@torch.no_grad()
def test_streaming_groups_equal_the_edited_outputs_in_every_family_and_leave_no_trace() -> None:
    for name, build in families.MEASURABLE.items():
        model = hs.load(build())
        groups = {model.geometry.layer_numbers[-1]: (0,)}
        with hs.ablated(model, heads_of(model, groups), str(WINDOW)):
            expected = model.module(IDS, use_cache=False).logits
        plain = model.module(IDS, use_cache=False).logits
        with capturing(model) as layers:
            layers.stream(model.geometry.layers - 1, (0,), WINDOW)
            actual = model.module(IDS, use_cache=False).logits
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4, msg=name)
        assert torch.equal(plain, model.module(IDS, use_cache=False).logits), name


@torch.no_grad()
def test_listeners_get_the_weights_of_groups_that_stream() -> None:
    model = hs.load(families.MEASURABLE["llama-gqa"]())
    records: list[AttentionRecord] = []
    with capturing(model) as layers:
        layers.listen(records.append, [0])
        layers.stream(0, (0,), WINDOW)
        model.module(IDS, use_cache=False)
    weights = records[0].weights(range(IDS.shape[1]))
    i, j = torch.arange(IDS.shape[1])[:, None], torch.arange(IDS.shape[1])
    seen = (j <= i) & ((j < WINDOW.sink) | (i - j < WINDOW.recent))
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:2]))
    assert torch.equal(weights[:2] > 0, seen.expand(2, -1, -1))
    assert torch.equal(weights[2:] > 0, (j <= i).expand(2, -1, -1))


@pytest.mark.model
@torch.no_grad()
def test_smollm2_generates_the_same_tokens_from_a_smaller_cache() -> None:
    model = hs.load("smollm2-135m")
    groups = dict.fromkeys(range(0, 30, 2), (0, 2))
    window = StreamingWindow(4, 28)
    text = " ".join(f"{number}: the bell was cast in {1800 + number}." for number in range(16))
    ids = torch.tensor([model.tokenizer(text)["input_ids"]])
    with streaming_cache(model, groups, window) as cache:
        generated = greedy_tokens(model, ids, cache, 12)
    with hs.ablated(model, heads_of(model, groups), str(window)):
        whole = torch.cat((ids, torch.tensor([generated])), 1)
        logits = model.module(whole, use_cache=False).logits[0, ids.shape[1] - 1 : -1]
    assert logits.argmax(-1).tolist() == generated
    length = cache.get_seq_length()
    assert cache.stored_bytes == 2 * 64 * 4 * (30 * 31 + 60 * length)
