"""Prompts that share their beginnings: answers and rows as one at a time, to the last bit, for fewer tokens."""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import families
from support.planted_needle import read_tokens

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.forward.prefix_cache import PrefixCachedGenerator, TokenIds, last_block_start, shared_prefix_length
from headscope.positions import AdaRoPE, resolve_schedule
from headscope.positions.model import Model

BLOCK = 8
STEPS = 4


@cache
def model(name: str = "llama-gqa", scheme: str = "base") -> Model:
    """Shared: leave it as you found it."""
    build = families.MEASURABLE.get(name) or families.OTHERS[name].build
    return hs.load(build()).with_scheme(scheme)


def prompts(seed: int = 0, sizes: Sequence[int] = (0, 13, 24, 30)) -> list[TokenIds]:
    """A trunk of 40 tokens that the prompts leave at the given places, 10 tokens each, and the trunk itself."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(3, families.VOCAB, 40)
    branches = [np.concatenate([trunk[:at], rng.integers(3, families.VOCAB, 10)]) for at in sizes]
    return [each.astype(np.int32) for each in [*branches, trunk]]


class Heard:
    """Keeps the last row of q and the keys of every layer and step."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def __call__(self, heard: AttentionRecord) -> None:
        k = heard.k.repeat_interleave(heard.q.shape[0] // heard.k.shape[0], 0)
        seen = int(heard.visible_counts[-1])  # a cache may still hold keys that a chunk hides
        self.rows.append((heard.q[:, -1:] @ k.mT)[:, 0, -seen:] * heard.scaling)


def answered(reader: PrefixCachedGenerator, prompt: TokenIds, most: int = 5) -> tuple[list[int], list[torch.Tensor]]:
    heard = Heard()
    tokens = reader.generate(prompt, heard, most, lambda token: False)
    assert len(heard.rows) == most * reader.model.geometry.layers
    return tokens, heard.rows


def small(model: Model) -> PrefixCachedGenerator:
    reader = PrefixCachedGenerator(model)
    reader.block_size = BLOCK
    return reader


SCHEMES = ["base", "yarn:factor=4", "logn:length=16", "nope"]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_what_is_read_depends_on_the_prompt_alone_to_the_last_bit(scheme: str) -> None:
    opened = model(scheme=scheme)
    shared, backwards = small(opened), small(opened)
    together = {prompt.tobytes(): answered(shared, prompt) for prompt in prompts()}
    reverse = {prompt.tobytes(): answered(backwards, prompt) for prompt in reversed(prompts())}
    for prompt in prompts():
        tokens, rows = answered(small(opened), prompt)
        for other_tokens, other_rows in (together[prompt.tobytes()], reverse[prompt.tobytes()]):
            assert other_tokens == tokens
            assert all(torch.equal(a, b) for a, b in zip(other_rows, rows, strict=True))
    assert shared.processed_tokens < sum(map(len, prompts())) + 5 * len(prompts())


FAMILIES = ["llama-gqa", "mistral-sliding", "gemma3", "qwen3", "gpt_neox", "cohere", "smollm3", *families.OTHERS]


@pytest.mark.parametrize("name", FAMILIES)
def test_answers_are_the_models_own_greedy_ones_and_rows_those_of_a_full_pass(name: str) -> None:
    opened = model(name)
    reader = small(opened)
    for prompt in prompts(sizes=(13, 24)):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        tokens, rows = answered(reader, prompt, STEPS)
        own = opened.module.generate(ids, max_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert own[0, len(prompt) :].tolist() == tokens
        heard = Heard()
        with torch.no_grad(), hs.attached(opened), hs.capturing(opened) as layers:
            layers.listen(heard)
            for step in range(STEPS):
                opened.module(own[:, : len(prompt) + step], use_cache=False)
        assert len(heard.rows) == len(rows)
        for row, other in zip(rows, heard.rows, strict=True):
            torch.testing.assert_close(row, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [*families.DYNAMIC, "qwen3_next", "lfm2", "jamba"])
def test_what_a_cache_cannot_give_again_is_not_shared(name: str) -> None:
    build = families.DYNAMIC.get(name) or families.OTHERS[name].build
    assert not PrefixCachedGenerator(hs.load(build())).shares_prefixes


def test_an_untrained_adapter_shares_like_the_scheme_it_starts_from(tmp_path) -> None:
    opened = model()
    AdaRoPE.from_schedule(opened, resolve_schedule(opened, "yarn:factor=4")).save(tmp_path / "a.safetensors")
    adapted = opened.with_scheme(f"adarope:adapter={tmp_path}/a.safetensors")
    yarn, ada = small(opened.with_scheme("yarn:factor=4")), small(adapted)
    assert ada.shares_prefixes
    for prompt in prompts():
        assert answered(ada, prompt)[0] == answered(yarn, prompt)[0]


def test_queries_that_depend_on_the_total_length_are_read_again_at_every_step(tmp_path) -> None:
    opened = model()
    learned = AdaRoPE.from_schedule(opened, resolve_schedule(opened, "yarn:factor=4"), reference_length=16)
    with torch.no_grad():
        learned.gamma.add_(0.5)
    learned.save(tmp_path / "a.safetensors")
    adapted = opened.with_scheme(f"adarope:adapter={tmp_path}/a.safetensors,length=sequence")
    reader, prompt = small(adapted), prompts()[2]
    tokens, rows = answered(reader, prompt)
    assert not reader.shares_prefixes
    assert reader.processed_tokens == sum(len(prompt) + step for step in range(5))
    heard = Heard()
    sequence = torch.from_numpy(np.append(prompt, tokens).astype(np.int64))[None]
    with torch.no_grad(), hs.attached(adapted), hs.capturing(adapted) as layers:
        layers.listen(heard)
        for step in range(5):
            logits = adapted.module(sequence[:, : len(prompt) + step], use_cache=False).logits
            assert int(logits[0, -1].argmax()) == tokens[step]
    for row, other in zip(rows, heard.rows, strict=True):
        torch.testing.assert_close(row, other)


def test_an_answer_ends_with_the_first_ending_token() -> None:
    reader, prompt = small(model()), prompts()[0]
    free = answered(reader, prompt)[0]
    first = free.index(free[2])
    assert reader.generate(prompt, Heard(), 5, lambda token: token == free[2]) == free[: first + 1]


def test_the_tokens_read_are_those_counted_beforehand() -> None:
    reader, order = small(model()), prompts()
    for prompt in order:
        reader.generate(prompt, Heard(), 1, lambda token: False)
    assert reader.processed_tokens == read_tokens(order, BLOCK) < sum(map(len, order))


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.integers(0, 1), max_size=30), st.lists(st.integers(0, 1), min_size=1, max_size=30), st.integers(1, 9)
)
def test_shared_tokens_are_whole_blocks_of_the_common_beginning(
    cached: list[int], prompt: list[int], block: int
) -> None:
    before, after = np.array(cached, np.int32), np.array(prompt, np.int32)
    shared = shared_prefix_length(before, after, block)
    assert shared % block == 0
    assert cached[:shared] == prompt[:shared]
    assert shared <= last_block_start(len(prompt), block) < len(prompt)
    longer = shared + block
    assert longer > last_block_start(len(prompt), block) or cached[:longer] != prompt[:longer] or longer > len(cached)


def test_a_model_in_training_mode_is_read_without_dropout_and_left_in_it() -> None:
    opened = hs.load(families.build("phi", {"resid_pdrop": 0.5, "embd_pdrop": 0.5}))
    expected = answered(small(opened), prompts()[1])
    opened.module.train()
    found = answered(small(opened), prompts()[1])
    assert opened.module.training
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1], expected[1]))


def test_an_interrupted_reader_answers_the_next_prompt_by_its_own_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    opened, order = model(), prompts()
    expected = answered(small(opened), order[1])[0]
    reader = small(opened)
    answered(reader, order[0])
    step, calls = reader._forward, iter(range(100))

    def interrupted(ids: np.ndarray) -> torch.Tensor:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return step(ids)

    monkeypatch.setattr(reader, "_forward", interrupted)
    other = np.concatenate([order[0][::-1], order[0]])
    with pytest.raises(KeyboardInterrupt):
        answered(reader, other)
    assert answered(reader, order[1])[0] == expected


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_a_model_that_lends_keys_answers_as_it_does_alone(name: str) -> None:
    shapes = {"head_dim": 16, "global_head_dim": 16, "layer_types": families.ALTERNATING, "sliding_window": 8}
    shapes |= {"vocab_size_per_layer_input": families.VOCAB, "hidden_size_per_layer_input": 16}
    options = families.OTHERS["gemma3n"].options if name == "gemma3n_text" else shapes
    opened = hs.load(families.build(name, {**options, "num_kv_shared_layers": 2}))
    prompt = prompts()[0]
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    own = opened.module.generate(ids, max_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert small(opened).generate(prompt, lambda _: None, STEPS, lambda token: False) == own[0, len(prompt) :].tolist()


def test_parts_that_were_not_training_are_left_so() -> None:
    opened = hs.load(families.MEASURABLE["llama-gqa"]())
    opened.module.train()
    opened.attention_modules[0].eval()
    answered(small(opened), prompts()[0])
    assert opened.module.training
    assert opened.attention_modules[1].training
    assert not opened.attention_modules[0].training


@pytest.mark.model
def test_smollm2_continues_in_blocks_as_it_does_in_one_pass(smollm2: Model, tokens: torch.Tensor) -> None:
    prompt = tokens[0, :300].numpy().astype(np.int32)
    reader = PrefixCachedGenerator(smollm2)
    shared = answered(reader, prompt, 4)[0]
    own = smollm2.module.generate(tokens[:, :300], max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert own[0, 300:].tolist() == shared
    assert reader.block_size * 2 < len(prompt), "in more than two blocks"
