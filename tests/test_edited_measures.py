"""Every measure of attention inside a context reads the weights that the heads use there."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from support import eager_reference
from support.eager_edits import EagerEdit
from support.edit_cases import LENGTH, Case, case_of
from support.refusals import refuses
from torch import Tensor

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput
from headscope.interventions.edits import edited
from headscope.measures.attention_rows import ROW_STATISTICS, row_statistics, with_row_sums
from headscope.measures.copying import last_query_weights
from headscope.measures.detectors import attention_weights_at
from headscope.measures.far_mass import far_mass
from headscope.measures.max_logit import max_logits
from headscope.measures.pooled_map import add_block_sums
from headscope.measures.span_mass import SpanLayout, SpanMass
from headscope.measures.top_keys import find_top_keys
from headscope.streaming import StreamingWindow

TOLERANCE = 2e-5
EDITS = {
    "top:2": [EagerEdit("top", layer, (0, 1, 2, 3), "logits", keys=2) for layer in range(4)],
    "steered": [EagerEdit("steer", layer, (0, 1, 2, 3), "logits", span=(3, 4), factor=0.01) for layer in range(4)],
    "steered and streaming": [
        EagerEdit("steer", 1, (0,), "logits", span=(3, 4), factor=0.05),
        EagerEdit("streaming", 1, (0, 2), "logits", sink=2, recent=5),
        EagerEdit("zero", 1, (1,), "q"),
    ],
    "uniform": [EagerEdit("uniform", 1, (0, 3), "logits")],
}


@pytest.fixture(params=["llama-gqa", "gemma2", "gpt_oss", "mistral-sliding"])
def case(request: pytest.FixtureRequest) -> Case:
    return case_of(request.param)


@pytest.fixture(params=EDITS)
def records(request: pytest.FixtureRequest, case: Case) -> list[tuple[AttentionRecord, Tensor]]:
    """The records of all layers inside a context, and their eager weights [H, L, L]."""
    edits, found = EDITS[request.param], list[AttentionRecord]()
    with edited(case.model, case.run(edits)) as layers:
        layers.listen(found.append)
        case.logits()
    weights = case.eager(edits)[1]
    return [(record, weights["w", record.layer]) for record in found]


Records = list[tuple[AttentionRecord, Tensor]]
ROWS = np.arange(LENGTH)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=2e-4, atol=TOLERANCE)


def test_statistics_of_rows(records: Records) -> None:
    for record, weights in records:
        expected = eager_reference.row_statistics(weights)
        for name, statistic in zip(ROW_STATISTICS, row_statistics(record, ROWS), strict=True):
            assert_close(statistic, expected[name])


def test_weights_outside_a_streaming_window(records: Records) -> None:
    window, distance = StreamingWindow(2, 4), ROWS[:, None] - ROWS
    is_far = torch.from_numpy((window.sink <= ROWS) & (distance >= window.recent))
    for record, weights in records:
        assert_close(far_mass(record, ROWS, window), (weights * is_far).sum(-1))


def test_weights_of_single_keys(records: Records) -> None:
    rows = torch.arange(1, LENGTH)
    for record, weights in records:
        assert_close(attention_weights_at(record, rows, rows - 1), weights[:, rows, rows - 1])


def test_weights_of_the_last_query(records: Records) -> None:
    for record, weights in records:
        assert_close(last_query_weights([record])[0], weights[:, -1])


def test_weights_of_rows_in_any_order_and_counted_from_the_end(records: Records) -> None:
    rows = [7, 2, -1, 2, -3]
    for record, weights in records:
        assert_close(record.weights(rows), weights[:, rows])
        assert_close(record.weights(-1)[:, 0], weights[:, -1])


def test_pooled_maps(records: Records) -> None:
    size = 4
    for record, weights in records:
        blocks = LENGTH // size
        pooled = add_block_sums(record, torch.zeros(len(record.q), blocks, blocks), size)
        assert_close(pooled, weights.view(-1, blocks, size, blocks, size).sum((2, 4)))


def test_mass_between_spans(records: Records, case: Case) -> None:
    spans = np.zeros((2, LENGTH), bool)
    spans[0, 3:5], spans[1, 10:] = True, True
    for record, weights in records:
        mass = SpanMass(case.model.geometry, SpanLayout(spans, spans))
        mass.update(record)
        columns = mass.compute()
        to_span = columns["mass"][(columns["query"] == 1) & (columns["key"] == 0)]
        sees = torch.from_numpy(eager_reference.visible(LENGTH, record.window).numpy()[10:, 3:5].any(1))
        if len(to_span):
            assert_close(torch.from_numpy(to_span), weights[:, 10:, 3:5].sum(-1)[:, sees].mean(-1))


def test_top_keys_and_largest_logits(records: Records) -> None:
    for record, weights in records:
        keys = find_top_keys(record, ROWS, 1).keys[..., 0]
        largest = weights.gather(-1, keys[..., None])[..., 0]
        assert_close(largest, weights.amax(-1))
        logit, query, key = max_logits(with_row_sums(record))
        heads = torch.arange(len(weights))
        assert_close((logit - record.lse[heads, query]).exp(), weights[heads, query, key])


def test_effective_lengths_of_heads_that_attend_to_two_keys_are_at_most_two() -> None:
    case, found = case_of("llama-gqa"), list[Tensor]()

    def listen(record: AttentionRecord) -> None:
        found.append(row_statistics(record, ROWS)[ROW_STATISTICS.index("ess2")])

    with hs.ablated(case.model, "all", "top:2"), hs.capturing(case.model) as layers:
        layers.listen(listen, needs_row_sums=True)
        case.logits()
    assert len(found) == 4
    assert float(torch.stack(found).max()) <= 2 + 1e-5


def test_a_row_that_attends_to_no_key_has_no_effective_length() -> None:
    case = case_of("llama-gqa")
    suppressed = [EagerEdit("suppress", 1, (0,), "logits", span=(*range(LENGTH),))]

    def listen(record: AttentionRecord) -> None:
        row_statistics(record, ROWS)

    def measure(listener: Callable[[AttentionRecord], None]) -> None:
        with edited(case.model, case.run(suppressed)) as layers:
            layers.listen(listener)
            case.logits()

    with refuses(BadInput, case.run(suppressed)[0].kind.name):
        measure(listen)
