"""Triton kernels in Triton's interpreter on the CPU, compared with the float64 formulas and with the torch code.

Whether they compile for a GPU is tested with Triton's own compiler, which needs none.
"""

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import eager_reference
from support.kernels import interpreting
from support.measure_laws import geometry_of, random_record, weights
from support.random_layers import layers

from headscope.attention.geometry import Geometry
from headscope.attention.kernels import runtime
from headscope.attention.kernels.row_sums import row_sums
from headscope.attention.record import AttentionRecord
from headscope.base import bins
from headscope.measures import AttentionRows, DistanceProfile, MaxLogit, RotaryPairs, attention_rows
from headscope.measures.attention_rows import ROW_STATISTICS, row_statistics, with_row_sums
from headscope.measures.pooled_map import PooledMaps
from headscope.measures.row_sampling import _add_by_product

EAGER = 1e-5
NEAR_ZERO = {"mean_distance": 2 * EAGER, "log_ess2": EAGER}
few = settings(max_examples=8, deadline=None)


@pytest.fixture
def interpreter() -> Iterator[None]:
    with interpreting():
        yield


def after_cached_keys(record: AttentionRecord, queries: int) -> AttentionRecord:
    return replace(record, q=record.q[:, -queries:], lse=record.lse[:, -queries:])


def in_two_chunks(record: AttentionRecord, queries: int) -> list[AttentionRecord]:
    """The record of a document that is read in chunks, of which the last has so many queries."""
    before = {name: getattr(record, name)[:, :-queries] for name in ("q", "k", "v", "z", "lse")}
    first = [] if queries == record.q.shape[1] else [replace(record, **before)]
    return [*first, after_cached_keys(record, queries)]


@pytest.mark.slow
@settings(max_examples=6, deadline=None)
@given(layers(max_length=24), st.integers(1, 24), st.sampled_from([1, 2, 4]))
def test_pooled_maps_are_the_block_means_of_eager_weights(
    layer: tuple[Geometry, AttentionRecord], queries: int, most_blocks: int
) -> None:
    """Of every variant, for blocks of any size and a document in two chunks; the end of a block may be missing."""
    geometry, record = layer
    length = record.q.shape[1]
    with pytest.MonkeyPatch.context() as patch, interpreting():
        patch.setattr(bins, "MAX_MAP_BLOCKS", most_blocks)
        maps = PooledMaps(geometry, length)
        for part in in_two_chunks(record, min(queries, length)):
            maps.update(part)
    (actual,) = maps.compute().values()
    block = torch.eye(maps.blocks, dtype=torch.float64).repeat_interleave(maps.block_size, 1)[:, :length]
    expected = block @ weights(record).double() @ block.mT / block.sum(1)[:, None]
    torch.testing.assert_close(actual.double(), expected, rtol=2 * EAGER, atol=2e-6)


@pytest.mark.slow
@few
@given(layers(), st.integers(1, 40))
def test_row_sums_equal_eager_rows_of_every_variant(layer: tuple[Geometry, AttentionRecord], queries: int) -> None:
    """For all rows and for some, after cached keys or without."""
    record = layer[1]
    rule = (record.scaling, record.window, record.chunk_size, record.softcap)
    expected = eager_reference.row_statistics(weights(record))
    logits = eager_reference.logits(record.q, record.k, *rule).amax(-1)
    record = after_cached_keys(record, min(queries, record.q.shape[1]))
    some = torch.arange(0, record.q.shape[1], 3)
    with interpreting():
        every = with_row_sums(record)
        actual = row_statistics(every, torch.arange(record.q.shape[1])), row_statistics(record, some)
    first = record.k.shape[1] - record.q.shape[1]
    for rows, statistics in zip((slice(first, None), first + some), actual, strict=True):
        for name, values in zip(ROW_STATISTICS, statistics.double(), strict=True):
            atol = NEAR_ZERO.get(name, 2e-6)
            torch.testing.assert_close(values, expected[name][:, rows], rtol=2 * EAGER, atol=atol, msg=name)
    assert every.row_sums is not None
    torch.testing.assert_close(every.row_sums.max_logit.double(), logits[:, first:], rtol=EAGER, atol=EAGER)


@pytest.mark.parametrize("rule", [{"window": 6}, {"chunk_size": 12}])
@pytest.mark.usefixtures("interpreter")
def test_keys_that_a_sliding_cache_dropped_keep_their_numbers(rule: dict[str, int]) -> None:
    """Key 0 has no weight then, and chunks are counted from the start of the sequence."""
    geometry = geometry_of(windows=[rule.get("window")])
    full = random_record(geometry, 40, 0, **({} if "window" in rule else rule))
    tail = replace(full, q=full.q[:, 30:], k=full.k[:, 24:], lse=full.lse[:, 30:], first_key=24)
    expected, actual = row_sums(full), row_sums(tail)
    for name, values in vars(actual).items():
        torch.testing.assert_close(values, getattr(expected, name)[:, 30:], msg=name)


@pytest.mark.parametrize("dim", [8, 40, 80, 256])
@pytest.mark.usefixtures("interpreter")
def test_heads_of_any_width_and_strided_tensors_give_the_sums_of_the_torch_code(dim: int) -> None:
    """q and k are views of projections [L, heads x d]; float16 stands for halves, whose products are exact."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(20, heads * dim, generator=generator) for heads in (4, 2))
    q, k = (t.half().view(20, -1, dim).transpose(0, 1) for t in (q, k))
    record = AttentionRecord(0, 0, q, k, k, q, torch.zeros(4, 20), dim**-0.5, None)
    logits = eager_reference.logits(q, k, record.scaling)
    record = replace(record, lse=logits.logsumexp(-1).float())
    sums = row_sums(record)
    alpha = logits.softmax(-1)
    torch.testing.assert_close(sums.squares.double(), alpha.square().sum(-1), rtol=EAGER, atol=1e-6)
    torch.testing.assert_close(sums.first_weight.double(), alpha[..., 0], rtol=EAGER, atol=1e-6)
    torch.testing.assert_close(sums.max_logit.double(), logits.amax(-1), rtol=EAGER, atol=EAGER)


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(layers(max_length=24), st.integers(1, 24), st.none() | st.integers(2, 6))
def test_accumulators_fill_the_same_tables_with_kernels_as_without(
    layer: tuple[Geometry, AttentionRecord], queries: int, n_rows: int | None
) -> None:
    """Every rotary layout, with unrotated dimensions before and after; the document comes in two chunks."""
    geometry, record = layer
    length = record.q.shape[1]
    parts = in_two_chunks(record, min(queries, length))

    def tables() -> list[Any]:
        measures = [AttentionRows(geometry, length, n_rows, 0), RotaryPairs(geometry, length, n_rows, 0)]
        measures += [DistanceProfile(geometry, length), MaxLogit(geometry)]
        for part in parts:
            for measure in measures:
                measure.update(with_row_sums(part) if n_rows is None or measure is measures[-1] else part)
        return [measure.compute() for measure in measures]

    expected = tables()
    with interpreting():
        actual = tables()
    size = float(record.q.abs().max() * record.k.abs().max())
    for before_columns, columns in zip(expected, actual, strict=True):
        for name, column in before_columns.items():
            atol = {"mean_abs_se": EAGER, "mean_signed": EAGER * size, "mean_abs": EAGER * size}.get(name, 2 * EAGER)
            np.testing.assert_allclose(columns[name], column, rtol=5 * EAGER, atol=atol, err_msg=name)


def test_sums_by_cell_are_those_of_a_product_with_a_one_hot_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    values, cells = torch.randn(3, 2, 50, generator=generator).double(), np.sort(np.arange(50) % 7 * 2)
    by_index, by_product = torch.ones(2, 3, 2, 16, dtype=torch.float64)
    by_index.index_add_(-1, torch.from_numpy(cells), values)
    _add_by_product(by_product, values, cells)
    torch.testing.assert_close(by_product, by_index, rtol=1e-14, atol=1e-14)


@pytest.mark.slow
def test_every_kernel_compiles_for_an_h100(tmp_path: Path) -> None:
    code = "from support.kernels import compile_kernels; print(len(compile_kernels(90)))"
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    assert result.stdout.split() == ["7"]


def test_a_kernel_that_fails_is_replaced_said_once_and_recorded(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of resource: shared memory\ndetails")

    record = random_record(geometry_of(), 20, 0)
    expected = row_statistics(record, torch.arange(20))
    monkeypatch.setattr(runtime, "_is_kernel_device", lambda device: True)
    monkeypatch.setattr(runtime, "_replaced", {})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level(logging.WARNING, "headscope"):
        monkeypatch.setattr(runtime, "launch", fail)
        for _ in range(2):
            assert torch.equal(attention_rows.row_statistics(record, torch.arange(20)), expected)
    (message,) = caplog.messages
    reason = "RuntimeError: out of resource: shared memory"
    assert message == f"row_sums for 4 heads of 8 dimensions in float32: {reason}. The slower torch code runs instead"
    assert runtime.describe_kernels()["replaced_kernels"] == {message.split(":")[0]: reason}


def test_without_triton_the_torch_code_runs_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runtime, "_is_kernel_device", lambda device: True)
    monkeypatch.setattr(runtime, "_replaced", {})
    monkeypatch.setattr(runtime, "has_triton", lambda: False)
    record = random_record(geometry_of(), 20, 0)
    with caplog.at_level(logging.WARNING, "headscope"):
        for _ in range(2):
            row_statistics(record, torch.arange(20))
    assert caplog.messages == ["all kernels: Triton is not installed. The slower torch code runs instead"]
