"""The prefix cache gives bit-identical answers and rows for prompts with common prefixes, with fewer tokens."""

from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import families
from support.planted_needle import read_tokens

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.forward.prefix_cache import (
    GenerationRequest,
    PrefixCachedGenerator,
    TokenIds,
    last_block_start,
    shared_prefix_length,
)
from headscope.positions import AdaRoPE, resolve_schedule
from headscope.positions.model import Model

BLOCK = 8
STEPS = 4


@cache
def model(name: str = "llama-gqa", scheme: str = "base") -> Model:
    """A model of the family. Tests share it and must not change it."""
    build = families.MEASURABLE.get(name) or families.OTHERS[name].build
    return hs.load(build()).with_scheme(scheme)


def prompts(seed: int = 0, sizes: Sequence[int] = (0, 13, 24, 30)) -> list[TokenIds]:
    """A trunk of 40 tokens, and one prompt per size: that many tokens of the trunk and 10 others."""
    rng = np.random.default_rng(seed)
    trunk = rng.integers(3, families.VOCAB, 40)
    branches = [np.concatenate([trunk[:at], rng.integers(3, families.VOCAB, 10)]) for at in sizes]
    return [prompt.astype(np.int32) for prompt in [*branches, trunk]]


class LastRows:
    """Collects the logits of the last query of every layer and step."""

    def __init__(self) -> None:
        self.rows: list[torch.Tensor] = []

    def __call__(self, record: AttentionRecord) -> None:
        k = record.k.repeat_interleave(record.q.shape[0] // record.k.shape[0], 0)
        visible = int(record.visible_counts[-1])  # a cache may still hold keys that a chunk hides
        self.rows.append((record.q[:, -1:] @ k.mT)[:, 0, -visible:] * record.scaling)


def answer(
    generator: PrefixCachedGenerator, prompt: TokenIds, max_tokens: int = 5
) -> tuple[list[int], list[torch.Tensor]]:
    last_rows = LastRows()
    tokens = generator.generate(prompt, last_rows, max_tokens, lambda token: False)
    assert len(last_rows.rows) == max_tokens * generator.model.geometry.layers
    return tokens, last_rows.rows


def small_blocks(model: Model) -> PrefixCachedGenerator:
    generator = PrefixCachedGenerator(model)
    generator.block_size = BLOCK
    return generator


SCHEMES = ["base", "yarn:factor=4", "logn:length=16", "nope"]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", SCHEMES)
def test_results_depend_on_the_prompt_alone_bit_for_bit(scheme: str) -> None:
    loaded = model(scheme=scheme)
    shared, backwards = small_blocks(loaded), small_blocks(loaded)
    together = {prompt.tobytes(): answer(shared, prompt) for prompt in prompts()}
    reverse = {prompt.tobytes(): answer(backwards, prompt) for prompt in reversed(prompts())}
    for prompt in prompts():
        tokens, rows = answer(small_blocks(loaded), prompt)
        for other_tokens, other_rows in (together[prompt.tobytes()], reverse[prompt.tobytes()]):
            assert other_tokens == tokens
            assert all(torch.equal(a, b) for a, b in zip(other_rows, rows, strict=True))
    assert shared.processed_tokens < sum(map(len, prompts())) + 5 * len(prompts())


BATCHED = ["llama-gqa", "gemma3", "gpt_neox", "gemma3n", "gpt_oss", "llama4", "deepseek_v3", "lfm2", "jamba"]


@pytest.mark.slow
@pytest.mark.parametrize("name", BATCHED)
def test_prompts_of_one_length_answered_together_equal_those_answered_alone(name: str) -> None:
    """Tokens are equal and rows to rounding; each answer ends by its own rule; models without a cache fall back."""
    loaded = model(name)
    length = min(map(len, prompts()))
    cut = [prompt[:length] for prompt in prompts(sizes=(0, 13, 24))]
    alone = [answer(small_blocks(loaded), prompt) for prompt in cut]
    steps = [5, 1, 3, 5][: len(cut)]
    requests = [
        GenerationRequest(prompt, 5, lambda token, end=tokens[count - 1], count=count: count < 5 and token == end)
        for prompt, (tokens, _), count in zip(cut, alone, steps, strict=True)
    ]
    rows = [LastRows() for _ in cut]

    def listen(numbers: Sequence[int], records: Sequence[AttentionRecord]) -> None:
        for number, record in zip(numbers, records, strict=True):
            rows[number](record)

    together = small_blocks(loaded).generate_batch(requests, listen)
    for own, last_rows, (tokens, expected), request in zip(together, rows, alone, requests, strict=True):
        ended = next((step for step, token in enumerate(tokens) if request.is_last_token(token)), 4)
        assert own == tokens[: ended + 1]
        for row, other in zip(last_rows.rows, expected[: len(own) * loaded.geometry.layers], strict=False):
            torch.testing.assert_close(row, other, rtol=1e-3, atol=1e-4)


FAMILIES = ["llama-gqa", "mistral-sliding", "gemma3", "qwen3", "gpt_neox", "cohere", "smollm3", *families.OTHERS]


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_answers_equal_greedy_generation_and_rows_those_of_a_full_pass(name: str) -> None:
    loaded = model(name)
    generator = small_blocks(loaded)
    for prompt in prompts(sizes=(13, 24)):
        ids = torch.from_numpy(prompt.astype(np.int64))[None]
        tokens, rows = answer(generator, prompt, STEPS)
        greedy = loaded.module.generate(ids, max_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=0)
        assert greedy[0, len(prompt) :].tolist() == tokens
        last_rows = LastRows()
        with torch.no_grad(), hs.attached(loaded), hs.capturing(loaded) as layers:
            layers.listen(last_rows)
            for step in range(STEPS):
                loaded.module(greedy[:, : len(prompt) + step], use_cache=False)
        assert len(last_rows.rows) == len(rows)
        for row, other in zip(rows, last_rows.rows, strict=True):
            torch.testing.assert_close(row, other, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", [*families.DYNAMIC, "qwen3_next", "lfm2", "jamba"])
def test_models_without_a_reusable_cache_reread_every_prompt(name: str) -> None:
    build = families.DYNAMIC.get(name) or families.OTHERS[name].build
    assert not PrefixCachedGenerator(hs.load(build())).shares_prefixes


def test_untrained_adapter_shares_prefixes_like_its_starting_scheme(tmp_path) -> None:
    loaded = model()
    AdaRoPE.from_schedule(loaded, resolve_schedule(loaded, "yarn:factor=4")).save(tmp_path / "a.safetensors")
    adapted = loaded.with_scheme(f"adarope:adapter={tmp_path}/a.safetensors")
    yarn, ada = small_blocks(loaded.with_scheme("yarn:factor=4")), small_blocks(adapted)
    assert ada.shares_prefixes
    for prompt in prompts():
        assert answer(ada, prompt)[0] == answer(yarn, prompt)[0]


def test_sequences_are_read_again_at_every_step_if_queries_depend_on_the_total_length(tmp_path) -> None:
    loaded = model()
    learned = AdaRoPE.from_schedule(loaded, resolve_schedule(loaded, "yarn:factor=4"), reference_length=16)
    with torch.no_grad():
        learned.gamma.add_(0.5)
    learned.save(tmp_path / "a.safetensors")
    adapted = loaded.with_scheme(f"adarope:adapter={tmp_path}/a.safetensors,length=sequence")
    generator, prompt = small_blocks(adapted), prompts()[2]
    tokens, rows = answer(generator, prompt)
    assert not generator.shares_prefixes
    assert generator.processed_tokens == sum(len(prompt) + step for step in range(5))
    last_rows = LastRows()
    sequence = torch.from_numpy(np.append(prompt, tokens).astype(np.int64))[None]
    with torch.no_grad(), hs.attached(adapted), hs.capturing(adapted) as layers:
        layers.listen(last_rows)
        for step in range(5):
            logits = adapted.module(sequence[:, : len(prompt) + step], use_cache=False).logits
            assert int(logits[0, -1].argmax()) == tokens[step]
    for row, other in zip(rows, last_rows.rows, strict=True):
        torch.testing.assert_close(row, other)


def test_an_answer_ends_with_the_first_ending_token() -> None:
    generator, prompt = small_blocks(model()), prompts()[0]
    free = answer(generator, prompt)[0]
    first = free.index(free[2])
    assert generator.generate(prompt, LastRows(), 5, lambda token: token == free[2]) == free[: first + 1]


def test_processed_tokens_equal_the_predicted_number() -> None:
    generator, order = small_blocks(model()), prompts()
    for prompt in order:
        generator.generate(prompt, LastRows(), 1, lambda token: False)
    assert generator.processed_tokens == read_tokens(order, BLOCK) < sum(map(len, order))


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


def test_a_model_in_training_mode_runs_without_dropout_and_stays_in_training_mode() -> None:
    loaded = hs.load(families.build("phi", {"resid_pdrop": 0.5, "embd_pdrop": 0.5}))
    expected = answer(small_blocks(loaded), prompts()[1])
    loaded.module.train()
    result = answer(small_blocks(loaded), prompts()[1])
    assert loaded.module.training
    assert result[0] == expected[0]
    assert all(map(torch.equal, result[1], expected[1]))


def test_an_interrupted_generator_answers_the_next_prompt_correctly(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, order = model(), prompts()
    expected = answer(small_blocks(loaded), order[1])[0]
    generator = small_blocks(loaded)
    answer(generator, order[0])
    step, calls = generator._forward, iter(range(100))

    def interrupted(*arguments: Any) -> torch.Tensor:
        if next(calls) == 1:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(generator, "_forward", interrupted)
    other = np.concatenate([order[0][::-1], order[0]])
    with pytest.raises(KeyboardInterrupt):
        answer(generator, other)
    assert answer(generator, order[1])[0] == expected


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text"])
def test_a_model_with_keys_shared_across_layers_equals_greedy_generation(name: str) -> None:
    shapes = {"head_dim": 16, "global_head_dim": 16, "layer_types": families.ALTERNATING, "sliding_window": 8}
    shapes |= {"vocab_size_per_layer_input": families.VOCAB, "hidden_size_per_layer_input": 16}
    options = families.OTHERS["gemma3n"].options if name == "gemma3n_text" else shapes
    loaded = hs.load(families.build(name, {**options, "num_kv_shared_layers": 2}))
    prompt = prompts()[0]
    ids = torch.from_numpy(prompt.astype(np.int64))[None]
    greedy = loaded.module.generate(ids, max_new_tokens=STEPS, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert (
        small_blocks(loaded).generate(prompt, lambda _: None, STEPS, lambda token: False)
        == greedy[0, len(prompt) :].tolist()
    )


def test_submodules_in_evaluation_mode_stay_in_evaluation_mode() -> None:
    loaded = hs.load(families.MEASURABLE["llama-gqa"]())
    loaded.module.train()
    loaded.attention_modules[0].eval()
    answer(small_blocks(loaded), prompts()[0])
    assert loaded.module.training
    assert loaded.attention_modules[1].training
    assert not loaded.attention_modules[0].training


@pytest.mark.model
def test_smollm2_continues_in_blocks_as_it_does_in_one_pass(smollm2: Model, tokens: torch.Tensor) -> None:
    prompt = tokens[0, :300].numpy().astype(np.int32)
    generator = PrefixCachedGenerator(smollm2)
    shared = answer(generator, prompt, 4)[0]
    greedy = smollm2.module.generate(tokens[:, :300], max_new_tokens=4, do_sample=False, eos_token_id=None)
    assert greedy[0, 300:].tolist() == shared
    assert generator.block_size * 2 < len(prompt), "in more than two blocks"
