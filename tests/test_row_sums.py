"""Output and row sums of one sweep compared with eager L x L formulas, with tiles that every test crosses."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import eager_reference
from torch import Tensor

from headscope.attention import row_sums as sweep_module
from headscope.attention.kernel import AttentionVariant, attend
from headscope.attention.record import AttentionRecord
from headscope.attention.row_sums import attend_with_row_sums
from headscope.measures.attention_rows import ROW_STATISTICS, row_statistics

EAGER = 1e-5
NEAR_ZERO = {"mean_distance": EAGER, "log_ess2": EAGER}


@pytest.fixture
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    set_small_tiles(monkeypatch)


def set_small_tiles(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sweep_module, "ROWS_PER_TILE", 7)
    patch.setattr(sweep_module, "KEYS_PER_TILE", 11)
    patch.setattr(sweep_module, "MAX_TILE_ELEMENTS", 200)


@st.composite
def calls(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor, AttentionVariant]:
    """One layer's q [H, L, d], k [G, L, d] and v [G, L, dv] under any variant."""
    length, groups, per_group = draw(st.integers(1, 60)), draw(st.integers(1, 4)), draw(st.integers(1, 3))
    generator, size = torch.Generator().manual_seed(draw(st.integers(0, 2**32))), draw(st.floats(0.1, 8))
    q, k = (size * torch.randn(heads, length, 4, generator=generator) for heads in (groups * per_group, groups))
    v = torch.randn(groups, length, draw(st.integers(1, 6)), generator=generator)
    window = draw(st.none() | st.integers(1, 64))
    chunk_size = draw(st.none() | st.integers(1, 64)) if window is None else None
    softcap = draw(st.none() | st.floats(0.5, 5))
    sinks = st.lists(st.floats(-3, 6), min_size=len(q), max_size=len(q))
    sink = draw(st.none() | sinks.map(torch.tensor))
    return q, k, v, AttentionVariant(0.4, window, chunk_size, softcap, sink)


def eager(q: Tensor, k: Tensor, variant: AttentionVariant) -> tuple[Tensor, Tensor]:
    """Logits [H, L, L] and weights alpha [H, L, L], float64."""
    rule = (variant.scaling, variant.window, variant.chunk_size, variant.softcap)
    return eager_reference.logits(q, k, *rule), eager_reference.weights(q, k, *rule, variant.sink)


def swept_record(q: Tensor, k: Tensor, v: Tensor, variant: AttentionVariant, first_key: int = 0) -> AttentionRecord:
    z, lse, sums = attend_with_row_sums(q, k, v, variant, first_key)
    options = (first_key, variant.chunk_size, variant.softcap, variant.sink, sums)
    return AttentionRecord(0, 0, q, k, v, z, lse, variant.scaling, variant.window, *options)


def assert_rows_equal(record: AttentionRecord, logits: Tensor, alpha: Tensor, rows: slice = slice(None)) -> None:
    expected: dict[str, Any] = eager_reference.row_statistics(alpha)
    actual = row_statistics(record, torch.arange(record.q.shape[1])).double()
    for name, values in zip(ROW_STATISTICS, actual, strict=True):
        atol = NEAR_ZERO.get(name, 1e-6)
        torch.testing.assert_close(values, expected[name][:, rows], rtol=EAGER, atol=atol, msg=name)
    assert record.row_sums is not None
    torch.testing.assert_close(record.row_sums.max_logit.double(), logits.amax(-1)[:, rows], rtol=EAGER, atol=EAGER)


@settings(max_examples=80, deadline=None)
@given(calls())
def test_one_sweep_equals_eager_attention_and_eager_statistics(call: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        set_small_tiles(patch)
        q, k, v, variant = call
        logits, alpha = eager(q, k, variant)
        record = swept_record(q, k, v, variant)
        repeats = len(q) // len(k)
        torch.testing.assert_close(
            record.z.double(), alpha @ v.double().repeat_interleave(repeats, 0), rtol=0, atol=EAGER
        )
        lse = eager_reference.with_sink(logits, variant.sink).logsumexp(-1)
        torch.testing.assert_close(record.lse.double(), lse, rtol=EAGER, atol=EAGER)
        assert_rows_equal(record, logits, alpha)


@settings(max_examples=40, deadline=None)
@given(calls())
def test_the_largest_logit_is_at_most_the_log_sum_exp_which_exceeds_it_by_at_most_ln_n(call: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        set_small_tiles(patch)
        q, k, v, variant = call
        record = swept_record(q, k, v, replace(variant, sink=None))
        assert record.row_sums is not None
        excess = record.lse.double() - record.row_sums.max_logit.double()
        rounding = EAGER * (1 + record.lse.abs())
        assert (excess >= -rounding).all()
        assert (excess <= record.visible_counts.double().log() + rounding).all()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("queries", [1, 5, 20])
@pytest.mark.parametrize("rule", [{}, {"window": 9}, {"chunk_size": 12}])
def test_rows_after_cached_keys_equal_those_of_the_full_pass(queries: int, rule: dict[str, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, 45, 8, generator=generator) for heads in (4, 2, 2))
    variant = AttentionVariant(0.5, **rule)
    logits, alpha = eager(q, k, variant)
    rows = slice(45 - queries, None)
    assert_rows_equal(swept_record(q[:, rows], k, v, variant), logits, alpha, rows)


@pytest.mark.usefixtures("small_tiles")
def test_keys_that_a_sliding_cache_dropped_keep_their_numbers() -> None:
    """Key 0 has no weight then, and chunks are counted from the start of the sequence."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 40, 8, generator=generator) for _ in range(3))
    for variant in (AttentionVariant(0.5, window=6), AttentionVariant(0.5, chunk_size=12)):
        full = swept_record(q, k, v, variant)
        rest = swept_record(q[:, 30:], k[:, 24:], v[:, 24:], variant, 24)
        statistics = row_statistics(full, torch.arange(30, 40)), row_statistics(rest, torch.arange(10))
        torch.testing.assert_close(statistics[1], statistics[0])
        torch.testing.assert_close(rest.z, full.z[:, 30:])


@pytest.mark.usefixtures("small_tiles")
def test_logits_far_above_the_first_and_the_own_key_rescale_the_sums() -> None:
    """The reference starts at these two keys; others exceed it by up to 400 base-2 logits, in several tiles."""
    q, k = torch.ones(2, 50, 1), torch.zeros(1, 50, 1)
    k[0, [20, 30, 5], 0] = torch.tensor([60.0, 55.0, 280.0])
    v, variant = torch.randn(1, 50, 3), AttentionVariant(1.0)
    logits, alpha = eager(q, k, variant)
    record = swept_record(q, k, v, variant)
    torch.testing.assert_close(record.z.double(), alpha @ v.double(), rtol=0, atol=EAGER)
    assert_rows_equal(record, logits, alpha)


@pytest.mark.parametrize("heads", [(9, 3), (40, 1), (32, 32)])
def test_full_tiles_agree_with_the_fused_kernel(heads: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(n, 700, 16, generator=generator) for n in (heads[0], heads[1], heads[1]))
    variant = AttentionVariant(0.25)
    z, lse, _ = attend_with_row_sums(q, k, v, variant)
    out, expected = attend(q[None], k[None], v[None], None, variant, 0.0, True)
    assert expected is not None
    torch.testing.assert_close(z, out[0], rtol=0, atol=3e-6)
    torch.testing.assert_close(lse, expected[0], rtol=1e-6, atol=3e-6)


def test_half_precision_is_computed_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 30, 8, generator=generator).bfloat16() for _ in range(3))
    z, lse, sums = attend_with_row_sums(q, k, v, AttentionVariant(0.5))
    exact = attend_with_row_sums(q.float(), k.float(), v.float(), AttentionVariant(0.5))
    assert z.dtype == torch.bfloat16
    assert torch.equal(z, exact[0].bfloat16())
    assert torch.equal(lse, exact[1])
    assert torch.equal(sums.squares, exact[2].squares)
