"""Copy scores: last-query weights equal the eager softmax, and copies follow the definition."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headscope.attention.record import AttentionRecord
from headscope.measures.copying import AnswerKeys, CopyScoreAccumulator, last_query_weights
from headscope.measures.logit_attribution import last_query_outputs


def random_record(
    seed: int,
    keys: int,
    queries: int = 1,
    groups: int = 2,
    heads: int = 6,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
) -> AttentionRecord:
    generator = torch.Generator().manual_seed(seed)
    q, z = (torch.randn(heads, queries, 8, generator=generator) for _ in range(2))
    k, v = (torch.randn(groups, keys, 8, generator=generator) for _ in range(2))
    row = AttentionRecord(0, 0, q, k, v, z, torch.zeros(heads, queries), 0.7, window, softcap=softcap)
    if sinks:
        row = replace(row, sink=torch.randn(heads, generator=generator))
    return with_log_sum(row)


def with_log_sum(row: AttentionRecord) -> AttentionRecord:
    """The record with the log-sum-exp of the last query in every row."""
    return replace(row, lse=logits(row).logsumexp(-1).float()[:, None].expand(-1, row.q.shape[1]))


def logits(row: AttentionRecord) -> Tensor:
    """Logits of the last query, [H, Lk]; with a learned sink, [H, Lk + 1]."""
    k = row.k.repeat_interleave(row.q.shape[0] // row.k.shape[0], 0)
    row_logits = torch.einsum("hd,hkd->hk", row.q[:, -1].double(), k.double()) * row.scaling
    if row.softcap is not None:
        row_logits = row.softcap * torch.tanh(row_logits / row.softcap)
    if row.window is not None:
        row_logits[:, : max(0, k.shape[1] - row.window)] = -torch.inf
    return row_logits if row.sink is None else torch.cat((row_logits, row.sink.double()[:, None]), -1)


def eager(row: AttentionRecord) -> Tensor:
    """Attention weights of the last query on the keys, [H, Lk]."""
    return logits(row).softmax(-1)[:, : row.k.shape[1]]


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 999),
    st.integers(2, 60),
    st.integers(1, 3),
    st.sampled_from([None, 1, 5, 100]),
    st.sampled_from([None, 0.7, 4.0]),
    st.booleans(),
)
def test_the_last_row_equals_the_eager_softmax(
    seed: int, keys: int, queries: int, window: int | None, softcap: float | None, sinks: bool
) -> None:
    row = random_record(seed, keys, min(queries, keys), window=window, softcap=softcap, sinks=sinks)
    spans = [(0, keys), (keys // 2, keys // 2 + 1), (1, 1)]
    other = random_record(seed + 1, keys, min(queries, keys), window=window, softcap=softcap, sinks=sinks)
    scores = CopyScoreAccumulator(1, [spans[:1], spans])
    heavy_keys = AnswerKeys(1, 0.2)
    for collected in (scores, heavy_keys):  # beside another sequence
        collected.add(0, [0, 1], last_query_weights([other, row]))
    top_key, mass = scores._top_keys.steps_of(1, -1)[0, 0], scores._span_mass.steps_of(1, 0)[0, 0]
    weights = eager(row)
    assert torch.equal(top_key, weights.argmax(-1))
    expected = torch.stack([weights[:, a:b].sum(-1) for a, b in spans])
    torch.testing.assert_close(mass.double(), expected, rtol=1e-5, atol=1e-6)
    head, key = (weights[:, 1:] >= 0.2).nonzero(as_tuple=True)
    indices, values = heavy_keys.compute(1, 1)
    assert torch.equal(indices[:, 2:], torch.stack((head, key + 1), 1))
    torch.testing.assert_close(values.double(), weights[head, key + 1], rtol=1e-5, atol=1e-6)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 999), st.integers(2, 60), st.sampled_from([None, 5]), st.booleans())
def test_outputs_through_spans_that_cover_all_keys_sum_to_the_eager_output(
    seed: int, keys: int, window: int | None, sinks: bool
) -> None:
    row = random_record(seed, keys, window=window, sinks=sinks)
    spans = [(0, keys // 2), (keys // 2, keys), (1, 1)]
    outputs = last_query_outputs(row, last_query_weights([row])[0], spans)
    v = row.v.double().repeat_interleave(3, 0)
    torch.testing.assert_close(outputs[0], row.z[:, -1])
    torch.testing.assert_close(
        (outputs[1] + outputs[2]).double(), (eager(row)[..., None] * v).sum(1), rtol=1e-5, atol=1e-6
    )
    assert not outputs[3].any()


def accumulate_steps(top_keys: list[list[int]], keys: int) -> CopyScoreAccumulator:
    """Accumulate steps of one layer, in which head h has its largest weight on key top_keys[step][h]."""
    rows = CopyScoreAccumulator(1, [[(2, 5)]])
    for keys_by_head in top_keys:
        k = torch.eye(keys)[None]
        q = torch.eye(keys)[keys_by_head][:, None] * 50
        record = AttentionRecord(0, 0, q, k, k, q, torch.zeros(len(keys_by_head), 1), 1.0, None)
        rows.add(0, [0], last_query_weights([with_log_sum(record)]))
    return rows


PROMPT = torch.tensor([7, 8, 20, 21, 22, 9, 20, 8])
"""The span is 20 21 22 at positions 2..4; there is another 20 outside."""


def test_copy_requires_the_same_token_within_the_span() -> None:
    top_keys = [[2, 6, 3, 2], [3, 3, 2, 2], [4, 4, 4, 2]]
    scores = accumulate_steps(top_keys, 8).compute(0, PROMPT, torch.tensor([20, 21, 22]))
    assert scores.scores[0, 0].tolist() == pytest.approx([1, 2 / 3, 1 / 3, 1 / 3])
    assert scores.copy_counts[0, 0].tolist() == [3, 2, 1, 1]
    assert scores.span_mass[0, 0].tolist() == pytest.approx([1, 2 / 3, 1, 1], abs=1e-6)
    copied = [(0, 0, 2), (0, 3, 2), (1, 0, 3), (1, 1, 3), (2, 0, 4), (2, 1, 4), (2, 2, 4)]  # step, head, key
    assert sorted(map(tuple, scores.copy_events.tolist())) == [(0, 0, *event) for event in copied]


def test_a_repeated_copy_counts_once_in_the_score_and_each_time_in_copies() -> None:
    scores = accumulate_steps([[2], [2], [2], [2]], 8).compute(0, PROMPT, torch.tensor([20, 20, 20, 20]))
    assert scores.scores.item() == pytest.approx(1 / 3)
    assert scores.copy_counts.item() == 4


def test_steps_beyond_the_scored_answer_do_not_count() -> None:
    rows = accumulate_steps([[2], [3]], 8)
    assert rows.compute(0, PROMPT, torch.tensor([20])).copy_counts.item() == 1
    nothing = rows.compute(0, PROMPT, torch.tensor([], dtype=torch.int64))
    assert (nothing.scores.item(), nothing.copy_counts.item(), nothing.span_mass.item()) == (0, 0, 0)
