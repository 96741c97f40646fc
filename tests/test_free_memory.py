"""How many tokens go through a model at once, by the free memory of a GPU that is only described."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support import families
from transformers.pytorch_utils import Conv1D

import headscope as hs
from headscope.forward import free_memory

WEIGHT_BYTES = 1000
GIGABYTE = 1e9


@pytest.fixture(scope="module")
def cpu_model() -> Any:
    return hs.load(families.build("llama", {}))


@pytest.fixture
def gpu_model(cpu_model: Any) -> Any:
    """The same model, said to be on a GPU."""
    module = SimpleNamespace(
        parameters=lambda: [SimpleNamespace(device=torch.device("cuda:0"), nbytes=WEIGHT_BYTES)],
        dtype=torch.bfloat16,
        get_input_embeddings=cpu_model.module.get_input_embeddings,
        config=cpu_model.module.config,
        base_model=cpu_model.module.base_model,
    )
    return SimpleNamespace(
        device=torch.device("cuda:0"),
        module=module,
        attention_modules=cpu_model.attention_modules,
        geometry=cpu_model.geometry,
    )


@pytest.mark.parametrize("stacked", [False, True])
def test_the_memory_of_experts_and_of_other_linear_maps_counts(stacked: bool) -> None:
    if stacked:
        experts = torch.nn.Module()
        experts.weight = torch.nn.Parameter(torch.zeros(8, 24, 6))
        assert free_memory._output_width(experts, experts_per_token=2) == 2 * 24
    else:
        assert free_memory._output_width(Conv1D(12, 5), experts_per_token=1) == 12
        assert free_memory._output_width(torch.nn.Linear(5, 7), experts_per_token=1) == 7


def set_free(monkeypatch: pytest.MonkeyPatch, free: float, reserved: float = 0.0) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (int(free), 80 * 10**9))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda gpu: int(reserved) + 1000)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda gpu: 1000)


def test_a_cpu_computes_a_fixed_number_of_tokens_at_once(cpu_model: Any) -> None:
    assert [free_memory.runs_per_batch(cpu_model, tokens) for tokens in (16, 2048, 5000)] == [128, 1, 1]
    assert [free_memory.fits_one_pass(cpu_model, tokens) for tokens in (2**14, 2**14 + 1)] == [True, False]
    assert free_memory.cached_sequences_per_batch(cpu_model, 16) == free_memory.texts_per_batch(cpu_model, 16) == 1
    assert free_memory.tokens_per_chunk(cpu_model) == 2**10


def test_batches_on_a_gpu_grow_with_its_free_memory_up_to_a_limit(
    gpu_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token needs the outputs of q, k, v, o, gate, up and down, four streams, and logits in two precisions."""
    config = gpu_model.module.config
    hidden, heads = config.hidden_size, config.num_attention_heads
    head_dim, groups = hidden // heads, config.num_key_value_heads
    widths = heads * head_dim + 2 * groups * head_dim + hidden + 2 * config.intermediate_size + hidden
    per_token = 2 * (widths + 4 * hidden) + config.vocab_size * (2 + 8)
    set_free(monkeypatch, 2 * 100 * 16 * per_token)
    assert free_memory.runs_per_batch(gpu_model, 16) == 100
    set_free(monkeypatch, 0, reserved=2 * 100 * 16 * per_token)  # what torch holds and does not use is free, too
    assert free_memory.runs_per_batch(gpu_model, 16) == 100
    set_free(monkeypatch, 0)
    assert free_memory.runs_per_batch(gpu_model, 16) == 1
    set_free(monkeypatch, 70 * GIGABYTE)
    assert free_memory.runs_per_batch(gpu_model, 16) == free_memory.MAX_BATCH_TOKENS // 16


def test_a_text_is_read_in_one_pass_if_its_activations_fit(gpu_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    length = 2**17
    needed = 2 * length * free_memory._activation_bytes(gpu_model)
    set_free(monkeypatch, 0)  # the free memory does not matter: numbers must not depend on other processes
    for beside_weights, fits in ((needed, True), (needed - 2, False)):
        properties = SimpleNamespace(total_memory=WEIGHT_BYTES + beside_weights)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu, properties=properties: properties)
        assert free_memory.fits_one_pass(gpu_model, length) is fits
        assert free_memory.fits_one_pass(gpu_model, 2**16)


def test_answers_are_generated_together_as_far_as_their_keys_fit(
    gpu_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three copies of the keys and values of every layer in bfloat16, and one layer in float32."""
    config = gpu_model.module.config
    layer = 2 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    sequence = 1000 * (3 * 2 * config.num_hidden_layers * layer + 4 * layer)
    for free, count in ((2 * 5 * sequence, 5), (0, 1), (70 * GIGABYTE, free_memory.MAX_BATCH_SEQUENCES)):
        set_free(monkeypatch, free)
        assert free_memory.cached_sequences_per_batch(gpu_model, 1000) == count


def test_chunks_are_the_largest_power_of_two_whose_activations_fit(
    gpu_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    per_token = 2 * free_memory._activation_bytes(gpu_model)
    for tokens, chunk in ((2**15, 2**15), (2**15 - 1, 2**14), (5, 2**10)):
        properties = SimpleNamespace(total_memory=WEIGHT_BYTES + tokens * per_token)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda gpu, properties=properties: properties)
        assert free_memory.tokens_per_chunk(gpu_model) == chunk
