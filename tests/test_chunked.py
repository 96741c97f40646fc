"""Documents read layer by layer in chunks have the tables of one pass, with less memory."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from support import eager_reference, families
from support.refusals import refuses
from torch import Tensor

import headscope as hs
from headscope.attention import kernel
from headscope.errors import BadInput
from headscope.forward import chunked_pass, free_memory
from headscope.forward.logits import last_hidden_states
from headscope.measures.top_keys import TopKeysAccumulator
from headscope.positions import AdaRoPE, resolve_schedule
from headscope.positions.model import Model
from probes.measure.run import measure_tokens

LENGTH, SIZE = 100, 32
"""The last chunk is a short one."""
IDS = torch.randint(3, families.VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0))
TABLES = ("attention", "pairs", "distance", "nll")
EQUAL = 1e-5


@cache
def tiny(family: str) -> Model:
    """A model of the family. Tests share it and must not change it."""
    build = families.FAMILIES.get(family) or families.DYNAMIC.get(family) or families.OTHERS[family].build
    return hs.load(build(), device="cpu")


@pytest.fixture
def set_limits(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set the number of tokens of the longest single pass, and of a chunk."""

    def set_tokens(single_pass: int, size: int) -> None:
        monkeypatch.setattr(free_memory, "CPU_PASS_TOKENS", single_pass)
        monkeypatch.setattr(chunked_pass, "tokens_per_chunk", lambda model: size)

    return set_tokens


Columns = Mapping[str, Mapping[str, np.ndarray]]


def errors(actual: Columns, expected: Columns) -> Iterator[tuple[str, float]]:
    """The largest difference of each column, as a share of its value, or of the sum of its absolute terms."""
    assert actual.keys() == expected.keys()
    for table, columns in expected.items():
        assert actual[table].keys() == columns.keys()
        for name, values in columns.items():
            if not np.issubdtype(values.dtype, np.floating):
                assert (actual[table][name] == values).all(), f"{table}.{name}"
                continue
            size = np.maximum(np.abs(values), 1.0 if table == "attention" else 1e-3)
            if name == "mean_signed":  # terms of both signs
                size = np.abs(values).max()
            yield f"{table}.{name}", float((np.abs(actual[table][name] - values) / size).max())


def measure_both(
    model: Model, ids: Tensor, rows: int | None, set_limits: Callable[..., None], size: int
) -> tuple[Columns, Columns]:
    """Tables measured in chunks, and in one pass."""
    set_limits(len(ids) - 1, size)
    in_chunks = measure_tokens(model, ids, TABLES, rows)
    set_limits(len(ids), size)
    return in_chunks, measure_tokens(model, ids, TABLES, rows)


FAMILIES = ["llama-gqa", "mistral-sliding", "gemma3", "gpt_neox", "cohere", "qwen3"]
OTHERS = ["gemma2", "gpt_oss", "gemma3n", "llama4", "deepseek_v2", "deepseek_v3", "nanochat", "gpt2", "hunyuan"]
"""Soft caps, sinks, several streams, chunked attention, latent attention, norms after the rotation, no rotation."""


@pytest.mark.exhaustive(sample=4)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES + OTHERS)
def test_chunks_give_the_tables_of_one_pass(family: str, set_limits: Callable[..., None]) -> None:
    model = tiny(family)
    for rows in (None, 8):
        chunked, expected = measure_both(model, IDS, rows, set_limits, SIZE)
        allowed = EQUAL if family in FAMILIES else 1e-4
        assert max(error for _, error in errors(chunked, expected)) <= allowed
    assert chunk_size(model, set_limits) == SIZE


@pytest.mark.parametrize("scheme", ["yarn:factor=4", "nope", "logn:length=16", "alibi"])
def test_chunks_give_the_tables_of_one_pass_under_every_kind_of_scheme(
    scheme: str, set_limits: Callable[..., None]
) -> None:
    chunked, expected = measure_both(tiny("llama-gqa").with_scheme(scheme), IDS, 8, set_limits, SIZE)
    assert max(error for _, error in errors(chunked, expected)) <= EQUAL


def chunk_size(model: Model, set_limits: Callable[..., None]) -> int | None:
    """Chunk size for a document that is one token too long for a single pass."""
    set_limits(LENGTH - 1, SIZE)
    with hs.attached(model), hs.capturing(model), torch.no_grad():
        return chunked_pass.choose_chunk_size(model, IDS[None])


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope", "qwen3_next", "lfm2", "jamba", "shared keys"])
def test_models_that_do_not_support_chunks_are_read_in_one_pass_bit_for_bit(
    family: str, set_limits: Callable[..., None]
) -> None:
    """Frequencies that depend on length, states outside the key cache, and keys shared across layers."""
    if family == "shared keys":
        options = families.OTHERS["gemma3n"].options | {"num_kv_shared_layers": 2}
        model = hs.load(families.build("gemma3n_text", options), device="cpu")
    else:
        model = tiny(family)
    chunked, expected = measure_both(model, IDS, 8, set_limits, SIZE)
    assert {error for _, error in errors(chunked, expected)} == {0.0}
    assert chunk_size(model, set_limits) is None


def test_models_whose_queries_depend_on_the_total_length_are_read_in_one_pass(
    tmp_path: Path, set_limits: Callable[..., None]
) -> None:
    learned = AdaRoPE.from_schedule(
        tiny("llama-gqa"), resolve_schedule(tiny("llama-gqa"), "yarn:factor=4"), reference_length=16
    )
    learned.save(tmp_path / "a.safetensors")
    for of, size in (("visible", SIZE), ("sequence", None)):
        model = tiny("llama-gqa").with_scheme(f"adarope:adapter={tmp_path}/a.safetensors,length={of}")
        assert chunk_size(model, set_limits) == size


def test_listeners_get_one_layer_after_the_other_in_chunks_of_queries() -> None:
    model, shapes = tiny("gemma3"), []
    with hs.attached(model), hs.capturing(model) as layers, torch.no_grad():
        layers.listen(lambda r: shapes.append((r.layer, r.first_key, r.q.shape[1], r.k.shape[1])))
        hidden = chunked_pass.chunked_hidden_states(model, IDS[None], SIZE)
    ends = [32, 64, 96, 100]
    sizes = [32, 32, 32, 4]
    assert shapes == [(layer, 0, n, end) for layer in range(4) for n, end in zip(sizes, ends, strict=True)]
    assert "forward" not in {name for module in model.module.modules() for name in vars(module)}
    torch.testing.assert_close(hidden, last_hidden_states(model, IDS[None]), rtol=1e-4, atol=1e-4)


def test_chunked_pass_keeps_keys_of_one_layer_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    model, alive = tiny("llama-gqa"), WeakSet()
    original = chunked_pass._LayerKVCache.lazy_initialization
    max_alive = 0

    def initialize(self: Any, keys: Tensor, values: Tensor) -> None:
        nonlocal max_alive
        original(self, keys, values)
        alive.update((self.keys, self.values))
        max_alive = max(max_alive, len(alive))

    monkeypatch.setattr(chunked_pass._LayerKVCache, "lazy_initialization", initialize)
    with hs.attached(model), hs.capturing(model), torch.no_grad():
        chunked_pass.chunked_hidden_states(model, IDS[None], SIZE)
    assert max_alive == 2


@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -1.0, 3.0, 0.0])])
def test_many_queries_after_cached_keys_equal_eager_attention(sink: Tensor | None) -> None:
    """More queries than a block has rows: cached and new keys are computed separately, then combined."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 700, 16, generator=generator) for heads in (4, 2, 2))
    alpha = eager_reference.weights(q[0], k[0], 0.3, sink=sink)[:, 400:]
    with torch.no_grad():
        out, lse = kernel.attend(q[:, :, 400:], k, v, None, kernel.AttentionVariant(0.3, sink=sink), 0.0, True)
    torch.testing.assert_close(out[0], (alpha @ v[0].double().repeat_interleave(2, 0)).float(), rtol=1e-5, atol=1e-6)
    expected = eager_reference.with_sink(eager_reference.logits(q[0], k[0], 0.3), sink).logsumexp(-1)[:, 400:]
    assert lse is not None
    torch.testing.assert_close(lse[0], expected.float(), rtol=1e-6, atol=1e-5)


def test_top_keys_are_the_same_in_chunks() -> None:
    model, rows = tiny("mistral-sliding"), torch.tensor([3, 31, 32, 50, 99])
    results = []
    for size in (LENGTH, SIZE):
        top_keys = TopKeysAccumulator(model.geometry, rows, 4)
        with hs.attached(model), hs.capturing(model) as layers, torch.no_grad():
            layers.listen(top_keys.update)
            chunked_pass.chunked_hidden_states(model, IDS[None], size)
        results.append((top_keys.compute(), top_keys.compute_far_keys()))
    for expected, chunked in zip(*results, strict=True):
        for name in expected:
            np.testing.assert_allclose(chunked[name], expected[name], rtol=1e-4, err_msg=name)


def test_values_that_are_not_finite_are_refused_in_chunks() -> None:
    model = hs.load(families.FAMILIES["llama-gqa"](), device="cpu")
    with torch.no_grad():
        model.module.model.layers[2].mlp.down_proj.weight[0, 0] = torch.inf
        with refuses(BadInput, f"'{model.name}'", "layer 2"):
            chunked_pass.chunked_hidden_states(model, IDS[None], SIZE)


@pytest.mark.model
def test_chunks_of_smollm2_give_the_tables_of_one_pass(
    smollm2: Model, tokens: Tensor, set_limits: Callable[..., None]
) -> None:
    chunked, expected = measure_both(smollm2, tokens[0, :300], 16, set_limits, 128)
    worst = dict(errors(chunked, expected))
    assert max(worst.values()) <= EQUAL, worst
