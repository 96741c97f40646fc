"""Sampled and exact query rows estimate the same means, in windows and chunks too; key 0 counts where it is seen."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import eager_reference, families
from support.measure_laws import geometry_of, random_record, weights

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.measures import AttentionRows, row_sampling
from headscope.measures.binned_means import BinnedRowMeans
from headscope.measures.row_sampling import (
    IntArray,
    draw_evenly,
    log_spaced_rows,
    select_last_octave,
    select_rows,
    visible_keys,
)
from headscope.measures.value_attention import ValueWeightedRows
from headscope.positions.model import Model
from headscope.runs.aggregation import last_octave_means
from probes.measure.analysis import _attention_statistics
from probes.measure.run import measure_tokens

SEEDS = 60
limits = st.none() | st.integers(1, 260)


class PlantedRows(BinnedRowMeans):
    """Means of a planted value of every row, as a statistic of all rows and as one of the rows that see key 0."""

    name = "planted"
    statistic_names = ("value", "sink_value")
    sink_statistics = frozenset({"sink_value"})

    def __init__(self, values: torch.Tensor, n_rows: int | None, seed: int):
        super().__init__(geometry_of(1, 1), len(values), n_rows, seed)
        self.values = values

    def row_values(self, record: AttentionRecord, rows: IntArray) -> torch.Tensor:
        return self.values[rows].expand(2, 1, -1)


def planted_means(
    values: torch.Tensor, window: int | None, chunk: int | None, n_rows: int | None, seed: int
) -> pd.DataFrame:
    """The columns of every bin, by its upper edge."""
    rows = torch.empty(1, len(values), 2)
    record = SimpleNamespace(layer=0, q=rows, k=rows, first_key=0, window=window, chunk_size=chunk)
    measure = PlantedRows(values, n_rows, seed)
    measure.update(cast(AttentionRecord, record))
    return pd.DataFrame(measure.compute()).set_index("visible")


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.integers(20, 300), limits, limits, st.integers(2, 60), st.integers(0, 99))
def test_means_of_sampled_rows_are_unbiased_in_every_bin_of_a_window_or_chunk(
    length: int, window: int | None, chunk: int | None, n_rows: int, seed: int
) -> None:
    if (visible_keys(np.arange(length), window, chunk) > np.arange(length)).all():
        return  # every row sees key 0: see the test below
    position = torch.arange(length, dtype=torch.float64)
    noise = torch.rand(length, generator=torch.Generator().manual_seed(seed))
    values = position / length + noise
    exact = planted_means(values, window, chunk, None, 0)
    samples = pd.concat([planted_means(values, window, chunk, n_rows, seed) for seed in range(SEEDS)])
    for name in ("value", "sink_value"):
        groups = samples.groupby(level="visible")[name]
        error = groups.mean() - exact[name].reindex(groups.mean().index)
        assert (error.abs() <= 4.5 * groups.std().fillna(0) / np.sqrt(groups.size()) + 1e-6).all()
    for name in ("population", "sink_population"):
        assert (samples[name] == exact[name].reindex(samples.index)).all()
    assert (samples["rows"] >= samples["sink_rows"]).all()
    assert (samples["sink_rows"] >= 1).all()


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 3000), st.integers(0, 500), st.integers(2, 100), st.integers(0, 99))
def test_rows_of_layers_in_which_every_row_sees_the_first_key_stay_log_spaced(
    length: int, more: int, n_rows: int, seed: int
) -> None:
    expected = log_spaced_rows(length, n_rows, seed).numpy()
    for window, chunk in ((None, None), (length + more, None), (None, length + more)):
        assert np.array_equal(select_rows(length, expected, seed, window, chunk).rows, expected)


def test_log_spaced_rows_differ_from_all_rows_by_less_than_a_hundredth_within_a_bin() -> None:
    values = torch.arange(1, 2049, dtype=torch.float64)  # grows in proportion to the visible keys
    exact = planted_means(values, None, None, None, 0)["value"]
    sampled = pd.concat([planted_means(values, None, None, 64, seed)["value"] for seed in range(100)])
    means = sampled.groupby(level="visible").mean()
    assert means.drop(16).to_numpy() == pytest.approx(exact.drop(16).to_numpy(), rel=0.01)


@given(st.integers(1, 300), st.integers(1, 320), st.integers(0, 99))
def test_evenly_drawn_rows_lie_one_in_each_equal_part(size: int, count: int, seed: int) -> None:
    rows = np.arange(size) + 7
    drawn = draw_evenly(rows, count, np.random.default_rng(seed))
    if count >= size:
        assert np.array_equal(drawn, rows)
        return
    assert len(drawn) == count
    part = np.arange(count) * size / count
    assert ((drawn - 7 >= np.floor(part)) & (drawn - 7 <= part + size / count)).all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 600), limits, limits)
def test_the_last_octave_is_that_of_the_last_four_bins(length: int, window: int | None, chunk: int | None) -> None:
    visible = visible_keys(np.arange(length), window, chunk)
    edges = eager_reference.bin_edges(int(visible.max()))
    start = edges[-5] if len(edges) > 4 else 0
    expected = np.flatnonzero(visible > start)
    assert np.array_equal(select_last_octave(length, None, 0, window, chunk), expected)
    assert abs(start - edges[-1] / 2) <= 1 or len(edges) <= 4


# The first key -----------------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 20), st.integers(0, 50), st.booleans())
def test_the_sink_mass_is_the_mean_over_the_rows_that_see_the_first_key(limit: int, seed: int, is_chunk: bool) -> None:
    geometry = geometry_of(2, 1, 8, windows=[None if is_chunk else limit])
    record = random_record(geometry, 40, seed, chunk_size=limit if is_chunk else None)
    alpha = weights(record)
    sees_first = record.visible_counts > torch.arange(40)
    measure = AttentionRows(geometry, 40, None, 0)
    measure.update(record)
    bins = pd.DataFrame(measure.compute())
    for edge, of_bin in bins.groupby("visible"):
        lower = max((e for e in eager_reference.bin_edges(40) if e < edge), default=0)
        rows = sees_first & (record.visible_counts > lower) & (record.visible_counts <= edge)
        assert (of_bin["sink_rows"] == int(rows.sum())).all()
        expected = alpha[:, rows, 0].mean(-1).numpy()
        np.testing.assert_allclose(of_bin["sink_mass"], expected, rtol=1e-5, atol=1e-7)


def test_value_weighted_sink_shares_are_means_over_the_rows_that_see_the_first_key() -> None:
    geometry = geometry_of(2, 1, 8, windows=[6])
    record = random_record(geometry, 40, 3)
    record = replace(record, v=torch.randn(record.v.shape, generator=torch.Generator().manual_seed(0)))
    measure = ValueWeightedRows(geometry, 40, None, 0, {0: torch.eye(8).expand(2, 8, 8)})
    measure.update(record)
    columns: Any = measure.compute()
    expected = weights(record)[:, :6, 0].mean(-1)
    np.testing.assert_allclose(columns["sink_share"], expected, rtol=1e-5)
    norms = record.v[0].double().norm(dim=-1)
    weighted = weights(record) * norms
    share = (weighted / weighted.sum(-1, keepdim=True))[:, :6, 0].mean(-1)
    np.testing.assert_allclose(columns["value_sink_share"], share, rtol=1e-5)
    assert columns["sink_rows"].tolist() == [6, 6]


def last_octave_means_of(model: Model, ids: torch.Tensor, rows: int | None, seed: int) -> pd.DataFrame:
    """Statistics of every head over the last octave, by layer and head."""
    columns = measure_tokens(model, ids, ["attention"], rows, seed)["attention"]
    frame = pd.DataFrame(columns).assign(model="m", context_length=len(ids), doc="d")
    names = ["log_ess2", "local_mass", "max_weight"]
    means = last_octave_means(frame, names).join(last_octave_means(frame, ["sink_mass"], "sink_population"))
    return means.droplevel(["model", "kv_group", "context_length", "doc"])


@pytest.mark.slow
def test_sampled_and_exact_statistics_of_a_windowed_model_agree_over_the_last_octave() -> None:
    model = hs.load(families.MEASURABLE["gemma3"]())
    ids = torch.randint(3, families.VOCAB, (240,), generator=torch.Generator().manual_seed(0))
    exact = last_octave_means_of(model, ids, None, 0)
    samples = pd.concat([last_octave_means_of(model, ids, 32, seed) for seed in range(30)])
    groups = samples.groupby(level=["layer", "head"])
    error = (groups.mean() - exact).abs()
    assert (error <= 4.5 * groups.std() / np.sqrt(30) + 0.01 * exact).all(axis=None)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("length", [64, 150])
def test_the_effective_length_is_that_of_the_words_in_the_docs(family: str, length: int) -> None:
    """Exp of the mean ln ESS2 over the rows in the last four bins that rows of the layer fill, each counted once."""
    model = hs.load(families.MEASURABLE[family]())
    ids = torch.randint(3, families.VOCAB, (length,), generator=torch.Generator().manual_seed(0))
    columns = measure_tokens(model, ids, ["attention"], None)["attention"]
    frame = pd.DataFrame(columns).assign(model="m", context_length=length, doc="d")
    heads = _attention_statistics(frame).reset_index().set_index(["layer", "head"])
    records: list[AttentionRecord] = []
    with hs.capturing(model) as layers, torch.no_grad():
        layers.listen(records.append)
        model.module(ids[None], use_cache=False)
    for number, record in enumerate(records):
        visible = record.visible_counts
        edges = [16]
        while edges[-1] < visible.max():
            edges.append(round(16 * 2 ** (len(edges) / 4)))
        rows = visible > (edges[-5] if len(edges) > 4 else 0)
        log_ess2 = -weights(record)[:, rows].square().sum(-1).log()
        np.testing.assert_allclose(heads.loc[number, f"ess2_{length}"], log_ess2.mean(-1).exp(), rtol=1e-4)
        sees_first = rows & (visible > torch.arange(length))
        sink = weights(record)[:, sees_first, 0].mean(-1)
        np.testing.assert_allclose(heads.loc[number, "sink_mass"], sink, rtol=1e-4, atol=1e-6)


def test_one_value_that_is_not_finite_damages_its_own_cell_only() -> None:
    """By the product with a one-hot matrix of a GPU, in which 0 * inf would reach every cell."""
    values, cells = torch.tensor([[1.0, 2.0, torch.inf, 4.0]], dtype=torch.float64), np.array([0, 1, 2, 1])
    sums = torch.zeros(1, 4, dtype=torch.float64)
    row_sampling._add_by_product(sums, values, cells)
    assert sums[0, [0, 1, 3]].tolist() == [1.0, 6.0, 0.0]
    assert not sums[0, 2].isfinite()
