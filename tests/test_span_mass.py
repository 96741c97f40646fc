"""Mass between spans: equal to sums of eager weights, chance in closed form, laws, and two published formulas."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import eager_reference, families
from support.measure_laws import full_pass_record, geometry_of, weights
from support.refusals import refuses
from torch import Tensor

import headscope
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput
from headscope.forward.capture import capturing
from headscope.forward.chunked_pass import chunked_hidden_states
from headscope.forward.logits import finite_hidden_states
from headscope.measures.span_mass import LookbackRatios, SpanLayout, SpanMass, TokenWeights
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model

LENGTH, PROMPT = 48, 36
EIGHT = ("llama-gqa", "mistral-sliding", "llama4", "gpt_oss", "gemma2", "qwen3_next", "deepseek_v2", "smollm3")
"""Grouped queries, windows, chunks, learned sinks, soft caps, a hybrid with experts, latent attention, NoPE layers."""


def example_layout(ids: Tensor, with_bos: bool) -> SpanLayout:
    """A partition of the tokens, an overlapping class, the last prompt token and all tokens; same and matching keys."""
    positions = np.arange(LENGTH)
    starts = [0, 1, 9, 20, 30, PROMPT] if with_bos else [0, 8, 20, 30, PROMPT]
    partition = [(positions >= a) & (positions < b) for a, b in zip(starts, [*starts[1:], LENGTH], strict=True)]
    digits = ids.numpy() % 5 == 0
    queries = [*partition, digits, positions == PROMPT - 1, np.ones(LENGTH, dtype=bool)]
    matching = np.where(positions % 4 == 3, positions - 3, -1)
    return SpanLayout(np.array(queries), np.array([*partition, digits]), ids.numpy(), matching)


def expected(alpha: Tensor, visible: Tensor, layout: SpanLayout) -> dict[tuple[int, int], tuple[Any, ...]]:
    """(query, key) -> mass [H], chance, rows and hidden rows, row by row from dense weights [H, L, L]."""
    alpha, length = alpha.double(), layout.keys.shape[1]
    kinds = [torch.from_numpy(mask).expand(length, -1) for mask in layout.keys]
    if layout.tokens is not None:
        tokens = torch.from_numpy(layout.tokens)
        kinds.append((tokens[:, None] == tokens) & ~torch.eye(length, dtype=torch.bool))
    if layout.matching is not None:
        kinds.append(torch.arange(length) == torch.from_numpy(layout.matching)[:, None])
    results = {}
    for query, is_query in enumerate(layout.queries):
        for key, kind in enumerate(kinds):
            seen = kind & visible
            rows = [i for i in np.flatnonzero(is_query) if seen[i].any()]
            if rows:
                mass = torch.stack([alpha[:, i, seen[i]].sum(-1) for i in rows]).mean(0)
                chance = np.mean([float(seen[i].sum()) / float(visible[i].sum()) for i in rows])
                results[query, key] = mass, chance, len(rows), int(is_query.sum()) - len(rows)
    return results


def largest_error(columns: Any, number: int, results: dict[tuple[int, int], tuple[Any, ...]]) -> float:
    """Largest difference of the masses of one layer to those expected; the rest must be equal."""
    frame = pd.DataFrame(columns)
    frame = frame[frame["layer"] == number]
    assert {*zip(frame["query"], frame["key"], strict=True)} == {*results}
    error = 0.0
    for (query, key), block in frame.groupby(["query", "key"]):
        mass, chance, rows, hidden = results[query, key]
        assert list(block["head"]) == list(range(len(mass)))
        assert ({*block["rows"]}, {*block["hidden_rows"]}) == ({rows}, {hidden})
        np.testing.assert_allclose(block["chance"], chance, rtol=1e-12)
        error = max(error, float(np.abs(block["mass"].to_numpy() - mass.numpy()).max()))
    return error


def measured(model: Model, ids: Tensor, *accumulators: Any, chunk: int | None = None) -> None:
    with attached(model), evaluating(model), capturing(model) as layers:
        for accumulator in accumulators:
            layers.listen(accumulator.update, key_columns=getattr(accumulator, "key_columns", None))
        hidden = finite_hidden_states if chunk is None else chunked_hidden_states
        hidden(*([model, ids[None]] if chunk is None else [model, ids[None], chunk]))


def test_key_columns_are_checked_and_columns_of_several_listeners_are_shared() -> None:
    model, ids = headscope.load(families.MEASURABLE["llama-gqa"](), device="cpu"), torch.arange(3, 3 + LENGTH)
    columns = torch.eye(LENGTH, dtype=torch.bool)[:, : model.geometry.head_dim]
    records: dict[str, AttentionRecord] = {}

    def listen(**columns_by_name: Tensor) -> None:
        with attached(model), evaluating(model), capturing(model) as layers:
            for name, own in columns_by_name.items():
                layers.listen(lambda record, name=name: records.update({name: record}), [1], key_columns=own)
            finite_hidden_states(model, ids[None])

    listen(all=columns, repeated=columns[:, [3, 1, 3]], none=columns[:, :0])
    for name, places in {"all": slice(model.geometry.head_dim), "repeated": [3, 1, 3]}.items():
        expected_sums = records[name].weights(range(LENGTH))[..., places]
        torch.testing.assert_close(records[name].key_sums, expected_sums, atol=1e-5, rtol=0)
    assert records["none"].key_sums is None
    listen(many=columns, more=torch.ones(LENGTH, 1))
    assert records["many"].key_sums is records["more"].key_sums is None
    for wrong, named in {LENGTH - 1: (LENGTH - 1, LENGTH), None: ((LENGTH,),)}.items():
        with refuses(BadInput, "key_columns", *named):
            listen(wrong=columns[:, 0] if wrong is None else columns[:wrong])


@pytest.mark.slow
@pytest.mark.parametrize("with_bos", [True, False])
@pytest.mark.parametrize("family", EIGHT)
def test_mass_of_every_family_equals_sums_of_eager_weights(family: str, with_bos: bool) -> None:
    build = families.MEASURABLE.get(family) or families.OTHERS[family].build
    model = headscope.load(build(), device="cpu")
    ids = torch.randint(3, families.VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0))
    ids[0] = 1 if with_bos else ids[0]
    layout = example_layout(ids, with_bos)
    mass = SpanMass(model.geometry, layout)
    lookback = LookbackRatios(model.geometry, layout.keys[:2], PROMPT)
    tokens = TokenWeights(model.geometry, layout.queries[3])
    measured(model, ids, mass, lookback, tokens)
    _, layers = eager_reference.eager_qk(model.module, ids[None])
    assert len(layers) == model.geometry.layers
    for number, layer in zip(model.geometry.layer_numbers, layers, strict=True):
        alpha = eager_reference.layer_weights(layer)
        assert largest_error(mass.compute(), number, expected(alpha, layer.mask, layout)) <= 1e-5
        frame = pd.DataFrame(lookback.compute()).query(f"layer == {number}")
        np.testing.assert_allclose(
            frame.pivot(index="head", columns="key", values="ratio"),
            published_lookback(alpha, layout.keys[:2]),
            atol=1e-5,
        )
        by_token = pd.DataFrame(tokens.compute()).query(f"layer == {number}")["weight"].to_numpy()
        np.testing.assert_allclose(by_token, alpha[:, layout.queries[3]].mean(1).flatten(), atol=1e-5)


def published_lookback(alpha: Tensor, spans: Any) -> Any:
    """Lookback ratios [H, spans] of Chuang et al. 2024: at each step, mean weight on the context over the sum of it and
    the mean weight on the new tokens; then the mean over steps."""
    steps = []
    for row in range(PROMPT, alpha.shape[-1]):
        new = alpha[:, row, PROMPT : row + 1].mean(-1)
        context = torch.stack([alpha[:, row, torch.from_numpy(span)].mean(-1) for span in spans], -1)
        total = context + new[:, None]
        steps.append(torch.where(total > 0, context / total, torch.nan))
    return torch.stack(steps).nanmean(0).numpy()


def test_all_layers_are_copied_from_the_device_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = example_layout(torch.arange(LENGTH) % 7, True)
    geometry = geometry_of(2, 1, windows=(None, None))
    copies: list[int] = []
    copy = torch.Tensor.cpu
    accumulators = (
        SpanMass(geometry, layout),
        LookbackRatios(geometry, layout.keys[:2], PROMPT),
        TokenWeights(geometry, layout.queries[3]),
    )
    for accumulator in accumulators:
        for layer in range(2):
            record = full_pass_record(torch.randn(2, LENGTH, 8), torch.randn(1, LENGTH, 8))
            accumulator.update(replace(record, layer=layer))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copies.append(1) or copy(tensor))
    for accumulator in accumulators:
        copies.clear()
        assert {*accumulator.compute()["layer"]} == {0, 1}
        assert len(copies) == 1


@pytest.mark.parametrize("extra", [{"softcap": 2.0}, {"chunk_size": 27}, {"sink": torch.tensor([1.0, -1.0])}, {}])
def test_mass_respects_soft_caps_chunks_and_sinks(extra: Any) -> None:
    q, k = torch.randn(2, LENGTH, 8), torch.randn(1, LENGTH, 8)
    alpha, visible, lse = eager_reference.explicit_weights(q, k, **extra)
    layout = example_layout(torch.arange(LENGTH) % 7, True)
    mass = SpanMass(geometry_of(2, 1, windows=(None,)), layout)
    mass.update(AttentionRecord(0, 0, q, k, torch.zeros_like(k), torch.zeros_like(q), lse, 0.7, None, **extra))
    assert largest_error(mass.compute(), 0, expected(alpha, visible, layout)) <= 1e-5


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding", "gemma3"])
def test_a_text_read_in_chunks_gives_the_same_mass(family: str) -> None:
    model = headscope.load(families.MEASURABLE[family](), device="cpu")
    ids = torch.randint(3, families.VOCAB, (LENGTH,), generator=torch.Generator().manual_seed(0))
    layout = example_layout(ids, True)
    whole, chunked = SpanMass(model.geometry, layout), SpanMass(model.geometry, layout)
    measured(model, ids, whole)
    measured(model, ids, chunked, chunk=13)
    for name, column in whole.compute().items():
        np.testing.assert_allclose(chunked.compute()[name], column, atol=1e-5)


def uniform_record(length: int, window: int | None, chunk_size: int | None = None) -> AttentionRecord:
    return full_pass_record(torch.zeros(2, length, 8), torch.ones(1, length, 8), window=window, chunk_size=chunk_size)


@pytest.mark.parametrize(("window", "chunk_size"), [(None, None), (8, None), (None, 11)])
def test_uniform_heads_have_the_mass_of_chance(window: int | None, chunk_size: int | None) -> None:
    layout = example_layout(torch.arange(LENGTH) % 7, True)
    mass = SpanMass(geometry_of(2, 1, windows=(window,)), layout)
    mass.update(uniform_record(LENGTH, window, chunk_size))
    columns = mass.compute()
    np.testing.assert_allclose(columns["mass"], columns["chance"], atol=1e-6)


def test_chance_has_its_closed_form() -> None:
    """Rows a..b-1 over the first n keys see n of i + 1 keys: chance is n (harmonic(b) - harmonic(a)) / (b - a)."""
    positions = np.arange(LENGTH)
    layout = SpanLayout(np.array([positions >= 30]), np.array([positions < 10]))
    mass = SpanMass(geometry_of(2, 1, windows=(None,)), layout)
    mass.update(uniform_record(LENGTH, None))
    harmonic = sum(10 / row for row in range(31, LENGTH + 1)) / (LENGTH - 30)
    np.testing.assert_allclose(mass.compute()["chance"], harmonic, rtol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 4), min_size=2, max_size=40),
    st.sampled_from([None, 1, 5]),
    st.sampled_from([None, 3, 16]),
    st.booleans(),
)
def test_spans_of_a_partition_sum_to_one(
    labels: list[int], window: int | None, chunk_size: int | None, has_sink: bool
) -> None:
    """Over all spans B of a partition, the masses of A weighted by their rows sum to 1 less the share of a sink."""
    is_in = np.array([np.array(labels) == label for label in sorted({*labels})])
    generator = torch.Generator().manual_seed(len(labels))
    q, k = (torch.randn(heads, len(labels), 8, generator=generator) for heads in (2, 1))
    sink = torch.tensor([0.5, -1.0]) if has_sink else None
    record = full_pass_record(q, k, window=window, chunk_size=chunk_size, sink=sink)
    mass = SpanMass(geometry_of(2, 1, windows=(window,)), SpanLayout(is_in, is_in))
    mass.update(record)
    frame = pd.DataFrame(mass.compute())
    assert (frame["mass"].between(0, 1) & frame["chance"].between(0, 1)).all()
    for part in ("mass", "chance"):
        sums = (frame[part] * frame["rows"]).groupby([frame["head"], frame["query"]]).sum().unstack()
        rows = weights(record).sum(-1).double() if part == "mass" else torch.ones(2, len(labels))
        np.testing.assert_allclose(sums / is_in.sum(1), rows.numpy() @ is_in.T / is_in.sum(1), atol=1e-5)
    np.testing.assert_array_equal(frame["rows"] + frame["hidden_rows"], is_in.sum(1)[frame["query"]])


def test_planted_heads_have_all_their_mass_on_the_matching_bracket_and_on_copies() -> None:
    length = 12
    tokens, matching = np.arange(length) % 6, np.where(np.arange(length) == 9, 2, -1)
    q = 200 * torch.stack([torch.eye(length)[2].expand(length, -1), torch.eye(length)[np.arange(length) % 6]])
    every = np.ones((1, length), dtype=bool)
    layout = SpanLayout(every, every, tokens, matching)
    mass = SpanMass(geometry_of(2, 2, length, windows=(None,)), layout)
    mass.update(full_pass_record(q, torch.eye(length).expand(2, -1, -1), scaling=1.0))
    frame = pd.DataFrame(mass.compute()).set_index(["head", "key"])
    assert frame.loc[(0, 2), "mass"] == pytest.approx(1)
    assert frame.loc[(0, 2), ["rows", "hidden_rows"]].tolist() == [1, 11]
    assert frame.loc[(1, 1), "mass"] == pytest.approx(1)
    assert frame.loc[(1, 1), "rows"] == 6
