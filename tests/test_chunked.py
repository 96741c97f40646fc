"""Documents read in chunks, layer by layer: what is measured is what one pass measures, for less memory."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from weakref import WeakSet

import numpy as np
import pytest
import torch
from support import eager_reference, families
from torch import Tensor

import headscope as hs
from headscope.attention import kernel
from headscope.errors import BadInput
from headscope.forward import chunked_pass
from headscope.forward.logits import last_hidden_states
from headscope.measures.top_keys import TopKeysAccumulator
from headscope.positions import AdaRoPE, resolve
from headscope.positions.model import Model
from probes.measure.run import measure_tokens

LENGTH, SIZE = 100, 32
"""The last chunk is a short one."""
IDS = torch.randint(3, families.VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0))
TABLES = ("attention", "pairs", "distance", "nll")
EQUAL = 1e-5


@cache
def tiny(family: str) -> Model:
    """Shared: leave it as you found it."""
    build = families.FAMILIES.get(family) or families.DYNAMIC.get(family) or families.OTHERS[family].build
    return hs.load(build(), device="cpu")


@pytest.fixture
def long(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Say from how many tokens on a document is long, and how many make a chunk."""

    def set_to(whole: int, size: int) -> None:
        monkeypatch.setattr(chunked_pass, "MAX_SINGLE_PASS_TOKENS", {"cpu": whole})
        monkeypatch.setattr(chunked_pass, "TOKENS_PER_CHUNK", {"cpu": size})

    return set_to


Columns = Mapping[str, Mapping[str, np.ndarray]]


def errors(found: Columns, expected: Columns) -> Iterator[tuple[str, float]]:
    """The largest difference of each column, as a share of its value, or of what it was added up from."""
    assert found.keys() == expected.keys()
    for table, columns in expected.items():
        assert found[table].keys() == columns.keys()
        for name, values in columns.items():
            if not np.issubdtype(values.dtype, np.floating):
                assert (found[table][name] == values).all(), f"{table}.{name}"
                continue
            size = np.maximum(np.abs(values), 1.0 if table == "attention" else 1e-3)
            if name == "mean_signed":  # terms of both signs
                size = np.abs(values).max()
            yield f"{table}.{name}", float((np.abs(found[table][name] - values) / size).max())


def both(model: Model, ids: Tensor, rows: int | None, long: Callable[..., None], size: int) -> tuple[Columns, Columns]:
    """What is measured in chunks, and in one pass."""
    long(len(ids) - 1, size)
    in_chunks = measure_tokens(model, ids, TABLES, rows)
    long(len(ids), size)
    return in_chunks, measure_tokens(model, ids, TABLES, rows)


FAMILIES = ["llama-gqa", "mistral-sliding", "gemma3", "gpt_neox", "cohere", "qwen3"]
OTHERS = ["gemma2", "gpt_oss", "gemma3n", "llama4", "deepseek_v2", "deepseek_v3", "nanochat", "gpt2", "hunyuan"]
"""Soft caps, sinks, several streams, chunked attention, latent attention, norms after the rotation, no rotation."""


@pytest.mark.parametrize("family", FAMILIES + OTHERS)
def test_chunks_give_the_tables_of_one_pass(family: str, long: Callable[..., None]) -> None:
    model = tiny(family)
    for rows in (None, 8):
        found, expected = both(model, IDS, rows, long, SIZE)
        allowed = EQUAL if family in FAMILIES else 1e-4
        assert max(error for _, error in errors(found, expected)) <= allowed
    assert asked(model, long) == SIZE, "it was read in chunks"


@pytest.mark.parametrize("scheme", ["yarn:factor=4", "nope", "logn:length=16", "alibi"])
def test_chunks_give_the_tables_of_one_pass_under_every_kind_of_scheme(scheme: str, long: Callable[..., None]) -> None:
    found, expected = both(tiny("llama-gqa").with_scheme(scheme), IDS, 8, long, SIZE)
    assert max(error for _, error in errors(found, expected)) <= EQUAL


def asked(model: Model, long: Callable[..., None]) -> int | None:
    """How a document is read that is one token too long."""
    long(LENGTH - 1, SIZE)
    with hs.attached(model), hs.capturing(model), torch.no_grad():
        return chunked_pass.choose_chunk_size(model, IDS[None])


@pytest.mark.parametrize("family", ["llama-dynamic", "phi3-longrope", "qwen3_next", "lfm2", "jamba", "shared keys"])
def test_what_cannot_be_read_in_chunks_is_read_whole_to_the_last_bit(family: str, long: Callable[..., None]) -> None:
    """Frequencies by length, states that no cache of keys holds, keys that go from layer to layer."""
    if family == "shared keys":
        options = families.OTHERS["gemma3n"].options | {"num_kv_shared_layers": 2}
        model = hs.load(families.build("gemma3n_text", options), device="cpu")
    else:
        model = tiny(family)
    found, expected = both(model, IDS, 8, long, SIZE)
    assert {error for _, error in errors(found, expected)} == {0.0}
    assert asked(model, long) is None


def test_queries_that_depend_on_the_total_length_are_read_whole(tmp_path: Path, long: Callable[..., None]) -> None:
    learned = AdaRoPE.untrained(tiny("llama-gqa"), resolve(tiny("llama-gqa"), "yarn:factor=4"), reference_length=16)
    learned.save(tmp_path / "a.safetensors")
    for of, size in (("visible", SIZE), ("sequence", None)):
        model = tiny("llama-gqa").with_scheme(f"adarope:adapter={tmp_path}/a.safetensors,length={of}")
        assert asked(model, long) == size


def test_layers_are_heard_one_after_the_other_each_in_chunks_of_its_queries() -> None:
    model, heard = tiny("gemma3"), []
    with hs.attached(model), hs.capturing(model) as layers, torch.no_grad():
        layers.listen(lambda each: heard.append((each.layer, each.first_key, each.q.shape[1], each.k.shape[1])))
        hidden = chunked_pass.chunked_hidden_states(model, IDS[None], SIZE)
    ends = [32, 64, 96, 100]
    sizes = [32, 32, 32, 4]
    assert heard == [(layer, 0, n, end) for layer in range(4) for n, end in zip(sizes, ends, strict=True)]
    assert "forward" not in {name for module in model.module.modules() for name in vars(module)}
    torch.testing.assert_close(hidden, last_hidden_states(model, IDS[None]), rtol=1e-4, atol=1e-4)


def test_keys_are_held_of_one_layer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is held of the tokens beside them is the residual stream."""
    model, alive = tiny("llama-gqa"), WeakSet()
    make = chunked_pass._LayerKVCache.lazy_initialization
    most = 0

    def made(self: Any, keys: Tensor, values: Tensor) -> None:
        nonlocal most
        make(self, keys, values)
        alive.update((self.keys, self.values))
        most = max(most, len(alive))

    monkeypatch.setattr(chunked_pass._LayerKVCache, "lazy_initialization", made)
    with hs.attached(model), hs.capturing(model), torch.no_grad():
        chunked_pass.chunked_hidden_states(model, IDS[None], SIZE)
    assert most == 2


@pytest.mark.parametrize("sink", [None, torch.tensor([0.5, -1.0, 3.0, 0.0])])
def test_many_queries_on_cached_keys_attend_as_eager_ones_do(sink: Tensor | None) -> None:
    """More of them than a block has rows: over cached keys and their own apart, then both by weight."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 700, 16, generator=generator) for heads in (4, 2, 2))
    alpha = eager_reference.weights(q[0], k[0], 0.3, sink=sink)[:, 400:]
    with torch.no_grad():
        out, lse = kernel.attend(q[:, :, 400:], k, v, None, kernel.AttentionRule(0.3, sink=sink), 0.0, True)
    torch.testing.assert_close(out[0], (alpha @ v[0].double().repeat_interleave(2, 0)).float(), rtol=1e-5, atol=1e-6)
    expected = eager_reference.with_sink(eager_reference.logits(q[0], k[0], 0.3), sink).logsumexp(-1)[:, 400:]
    assert lse is not None
    torch.testing.assert_close(lse[0], expected.float(), rtol=1e-6, atol=1e-5)


def test_the_keys_that_rows_read_are_the_same_in_chunks() -> None:
    model, rows = tiny("mistral-sliding"), torch.tensor([3, 31, 32, 50, 99])
    found = []
    for size in (LENGTH, SIZE):
        reads = TopKeysAccumulator(model.geometry, rows, 4)
        with hs.attached(model), hs.capturing(model) as layers, torch.no_grad():
            layers.listen(reads.update)
            chunked_pass.chunked_hidden_states(model, IDS[None], size)
        found.append((reads.compute(), reads.compute_far_keys()))
    for one, other in zip(*found, strict=True):
        for name in one:
            np.testing.assert_allclose(other[name], one[name], rtol=1e-4, err_msg=name)


def test_numbers_that_are_not_finite_are_refused_in_chunks_too() -> None:
    model = hs.load(families.FAMILIES["llama-gqa"](), device="cpu")
    with torch.no_grad():
        model.module.model.layers[2].mlp.down_proj.weight[0, 0] = torch.inf
        with pytest.raises(BadInput, match="first out of layer 2"):
            chunked_pass.chunked_hidden_states(model, IDS[None], SIZE)


@pytest.mark.model
def test_chunks_of_smollm2_give_the_tables_of_one_pass(
    smollm2: Model, tokens: Tensor, long: Callable[..., None]
) -> None:
    found, expected = both(smollm2, tokens[0, :300], 16, long, 128)
    worst = dict(errors(found, expected))
    assert max(worst.values()) <= EQUAL, worst
