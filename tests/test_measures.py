"""Measures compared with eager L x L formulas and with laws of the paper, on small random layers.

Tiles are so small that every test crosses their borders; `test_measure_model` uses them in full size.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import eager_reference
from support.measure_laws import full_pass_record, geometry_of, layers_of, random_record, weights
from support.random_layers import layers
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.base.bins import position_bin_edges
from headscope.measures import AttentionRows, DistanceProfile, LearnedSink, LossByPosition, RotaryPairs
from headscope.measures import attention_rows as rows_module
from headscope.measures import distance_profile as profile_module
from headscope.measures import rotary_pairs as pairs_module
from headscope.measures.attention_rows import ROW_STATISTICS, row_statistics, with_row_sums
from headscope.measures.distance_profile import log_spaced_distances, profile_sums
from headscope.measures.max_logit import max_logits
from headscope.measures.rotary_pairs import mean_abs_by_row, pair_moment_sums, planes_by_head, rotary_planes
from headscope.measures.row_sampling import log_spaced_rows, pair_weighted_rows, stratified_pair_quantiles

EAGER = 1e-5
"""Relative tolerance of streaming in float32 compared with eager in float64."""
NEAR_ZERO = {"mean_distance": EAGER, "log_ess2": EAGER}
"""Absolute tolerance of statistics that may be 0: a mean distance in tokens, and a logarithm."""


@pytest.fixture(scope="module", autouse=True)
def small_tiles() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rows_module, "ROW_TILE", 7)
        patch.setattr(rows_module, "KEY_TILE", 11)
        patch.setattr(pairs_module, "QUERIES_PER_CHUNK", 13)
        patch.setattr(pairs_module, "KEYS_PER_CHUNK", 17)
        patch.setattr(pairs_module, "TOKENS_PER_CHUNK", 15)
        patch.setattr(profile_module, "DISTANCES_PER_CHUNK", 3)
        yield


def all_rows(layer: AttentionRecord) -> dict[str, Tensor]:
    statistics = row_statistics(layer, torch.arange(layer.q.shape[1]))
    return dict(zip(ROW_STATISTICS, statistics.double(), strict=True))


def by_unit(columns: Any, name: str, geometry: Geometry) -> np.ndarray:
    """A column of a one-layer table as [H, ..]."""
    shaped: np.ndarray = columns[name].reshape(geometry.heads, -1)
    return shaped


def pair_rows(visible: Tensor, count: int, seed: int) -> Tensor:
    return torch.from_numpy(pair_weighted_rows(visible.numpy(), stratified_pair_quantiles(count, seed)))


properties = settings(max_examples=60, deadline=None)

# Attention rows ----------------------------------------------------------------------------------------------------


@properties
@given(layers())
def test_streamed_rows_equal_eager_rows(geometry_and_layer: tuple[Geometry, AttentionRecord]) -> None:
    _, layer = geometry_and_layer
    expected = eager_reference.row_statistics(weights(layer))
    for name, actual in all_rows(layer).items():
        torch.testing.assert_close(actual, expected[name], rtol=EAGER, atol=NEAR_ZERO.get(name, 1e-6), msg=name)


@properties
@given(layers())
def test_the_largest_logit_and_its_pair_are_those_of_all_logits(
    geometry_and_layer: tuple[Geometry, AttentionRecord],
) -> None:
    _, layer = geometry_and_layer
    rule = (layer.window, layer.chunk_size, layer.softcap)
    logits = eager_reference.logits(layer.q, layer.k, layer.scaling, *rule)
    largest, query, key = max_logits(with_row_sums(layer))
    np.testing.assert_allclose(largest, logits.amax((1, 2)), rtol=EAGER, atol=EAGER)
    np.testing.assert_allclose(largest, logits[range(len(logits)), query, key], rtol=EAGER, atol=EAGER)


@properties
@given(layers())
def test_effective_lengths_lie_between_one_and_the_visible_keys_and_fall_with_their_order(
    geometry_and_layer: Any,
) -> None:
    _, layer = geometry_and_layer
    actual = all_rows(layer)
    rounding = 1 + 1e-5
    assert (actual["ess2"] >= 1).all()
    assert (actual["ess2"] <= actual["ess1"] * rounding).all()
    assert (actual["ess1"] <= layer.visible_counts * rounding).all()
    assert (actual["log_ess2"] - actual["ess2"].log()).abs().max() < 1e-5
    # The share of the keys has an error of 1e-5 of the whole row, since the log-sum-exp is float32.
    key_share = 1 if layer.sink_weight is None else 1 - layer.sink_weight.double() - EAGER
    assert (key_share / actual["max_weight"] <= actual["ess2"] * rounding).all()
    for name in ("max_weight", "sink_mass", "local_mass"):
        assert ((actual[name] >= 0) & (actual[name] <= 1)).all(), name
    assert (
        (actual["mean_distance"] >= 0) & (actual["mean_distance"] <= (layer.visible_counts - 1) * rounding + EAGER)
    ).all()


@pytest.mark.parametrize("window", [None, 8])
def test_uniform_rows_have_the_effective_length_of_their_visible_keys(window: int | None) -> None:
    layer = full_pass_record(torch.zeros(2, 50, 4), torch.ones(1, 50, 4), window=window)
    actual = all_rows(layer)
    for name in ("ess2", "ess1"):
        torch.testing.assert_close(actual[name], layer.visible_counts.double().expand(2, -1), rtol=1e-5, atol=0)


def one_hot(length: int, height: float, at: int) -> AttentionRecord:
    """Every row has logit `height` at key `at` and 0 elsewhere."""
    q, k = torch.full((1, length, 2), height), torch.zeros(1, length, 2)
    k[0, at, 0] = 1
    return full_pass_record(q, k, scaling=1.0)


def test_one_hot_rows_have_an_effective_length_of_one() -> None:
    actual = all_rows(one_hot(50, 90.0, 0))
    for name in ("ess2", "ess1", "max_weight", "sink_mass"):
        torch.testing.assert_close(actual[name], torch.ones(1, 50, dtype=torch.float64), rtol=1e-6, atol=0)
    torch.testing.assert_close(actual["mean_distance"], torch.arange(50.0)[None].double())


@properties
@given(st.floats(0, 40), st.integers(2, 60), st.integers(0, 59))
def test_one_hot_logits_have_the_closed_form_of_the_paper(height: float, length: int, at: int) -> None:
    actual = all_rows(one_hot(length, height, at % length))
    height = float(np.float32(height))
    z = math.exp(height) + length - 1
    ess2 = z**2 / (math.exp(2 * height) + length - 1)
    ess1 = math.exp(math.log(z) - height * math.exp(height) / z)
    assert float(actual["ess2"][0, -1]) == pytest.approx(ess2, rel=EAGER)
    assert float(actual["ess1"][0, -1]) == pytest.approx(ess1, rel=EAGER)


@properties
@given(layers(), st.floats(-20, 20))
def test_rows_do_not_change_when_a_constant_is_added_to_their_logits(geometry_and_layer: Any, shift: float) -> None:
    _, layer = geometry_and_layer
    direction = torch.ones(layer.k.shape[-1]) / layer.k.shape[-1]
    keys = (layer.k, layer.k + shift * direction)
    before, after = (all_rows(full_pass_record(layer.q, k, layer.scaling, layer.window)) for k in keys)
    for name in ROW_STATISTICS:  # the shift is up to 20 |q|, and float32 logits of that size have an error of 1e-5
        torch.testing.assert_close(after[name], before[name], rtol=1e-4, atol=1e-4, msg=name)


@properties
@given(layers(), st.randoms(use_true_random=False))
def test_effective_length_does_not_depend_on_the_order_of_keys(geometry_and_layer: Any, random: Any) -> None:
    _, layer = geometry_and_layer
    order = list(range(layer.k.shape[1]))
    random.shuffle(order)
    before, after = (all_rows(full_pass_record(layer.q, k, layer.scaling)) for k in (layer.k, layer.k[:, order]))
    for name in ("ess2", "ess1", "max_weight"):
        torch.testing.assert_close(after[name][:, -1], before[name][:, -1], rtol=EAGER, atol=1e-6, msg=name)
    # The absolute error of the logarithm is the relative error of the length.
    torch.testing.assert_close(after["log_ess2"][:, -1], before["log_ess2"][:, -1], rtol=0, atol=EAGER)


@properties
@given(layers(), st.integers(1, 30), st.integers(0, 1000))
def test_sampled_rows_have_the_values_that_they_have_among_all_rows(
    geometry_and_layer: Any, count: int, seed: int
) -> None:
    geometry, layer = geometry_and_layer
    length = layer.q.shape[1]
    rows = log_spaced_rows(length, count, seed)
    all_rows = row_statistics(layer, torch.arange(length))
    torch.testing.assert_close(row_statistics(layer, rows), all_rows[..., rows], rtol=EAGER, atol=EAGER)
    q, k = rotary_planes(layer.q, geometry), rotary_planes(layer.k, geometry)
    rows = pair_rows(layer.visible_counts, count, seed)
    all_rows = mean_abs_by_row(q, k, torch.arange(length), layer.visible_counts)
    torch.testing.assert_close(
        mean_abs_by_row(q, k, rows, layer.visible_counts[rows]), all_rows[rows], rtol=1e-6, atol=1e-7
    )


@properties
@given(layers(max_length=70))
def test_bins_hold_every_row_once_and_their_eager_means(geometry_and_layer: tuple[Geometry, AttentionRecord]) -> None:
    geometry, layer = geometry_and_layer
    measure = AttentionRows(geometry, layer.q.shape[1], None, 0)
    measure.update(layer)
    columns = measure.compute()
    assert (columns["rows"].reshape(-1, geometry.heads).sum(0) == layer.q.shape[1]).all()
    expected = eager_reference.binned(eager_reference.row_statistics(weights(layer)), layer.window, layer.chunk_size)
    assert sorted(set(columns["visible"].tolist())) == sorted(expected)
    for edge, values in expected.items():
        in_bin = columns["visible"] == edge
        assert columns["head"][in_bin].tolist() == list(range(geometry.heads))
        assert (columns["kv_group"][in_bin] == columns["head"][in_bin] // geometry.heads_per_group(0)).all()
        assert (columns["rows"][in_bin] == values["rows"]).all()
        for name in ROW_STATISTICS:
            atol = NEAR_ZERO.get(name, 1e-6)
            np.testing.assert_allclose(columns[name][in_bin], values[name], rtol=EAGER, atol=atol, err_msg=name)


def test_every_table_has_the_layer_numbers_of_the_model() -> None:
    geometry = geometry_of(numbers=(3, 7))
    for measure in (
        AttentionRows(geometry, 20, None, 0),
        RotaryPairs(geometry, 20, 4, 0),
        DistanceProfile(geometry, 20),
    ):
        for layer in layers_of(geometry, 20, 0):
            measure.update(layer)
        assert sorted(set(measure.compute()["layer"].tolist())) == [3, 7]


def test_the_mean_distance_of_a_local_head_is_exact_far_from_the_start() -> None:
    """Key indices are large and the distance is small, so float32 must not subtract them."""
    length = 8000
    near = torch.zeros(1, length, 4)
    near[0, -3:] = 30.0
    q, lse = torch.ones(1, 1, 4), near.sum(-1).logsumexp(-1)[:, None]
    layer = AttentionRecord(0, 0, q, near, near, q, lse, 1.0, None)
    mean_distance = row_statistics(layer, torch.tensor([0]))[ROW_STATISTICS.index("mean_distance")]
    assert float(mean_distance) == pytest.approx(1.0, rel=EAGER)


# Rotary pairs ------------------------------------------------------------------------------------------------------


def exact_pairs(geometry: Geometry, layer: AttentionRecord) -> dict[str, np.ndarray]:
    measure = RotaryPairs(geometry, layer.q.shape[1], None, 0)
    measure.update(layer)
    columns = measure.compute()
    names = ("mean_abs", "mean_abs_se", "mean_signed", "rms", "norm_product")
    return {name: by_unit(columns, name, geometry) for name in names}


@properties
@given(layers())
def test_pair_statistics_equal_the_l_by_l_formula(geometry_and_layer: tuple[Geometry, AttentionRecord]) -> None:
    geometry, layer = geometry_and_layer
    rotary = (2 * geometry.pairs, geometry.rotary_layout)
    expected = eager_reference.pair_statistics(
        layer.q, layer.k, layer.scaling, *rotary, layer.window, layer.chunk_size, geometry.rotary_start
    )
    actual = exact_pairs(geometry, layer)
    for name, values in expected.items():
        # mean_abs sums float32 products, exact relative to |q_f| |k_f|; the others are float64 throughout.
        size = expected["norm_product" if name == "mean_abs" else "rms"].numpy()
        assert (np.abs(actual[name] - values.numpy()) / size).max() <= EAGER, name
    assert (actual["mean_abs_se"] == 0).all()


@properties
@given(layers())
def test_pair_statistics_are_ordered(geometry_and_layer: tuple[Geometry, AttentionRecord]) -> None:
    actual = exact_pairs(*geometry_and_layer)
    rounding = EAGER * actual["norm_product"]
    assert (np.abs(actual["mean_signed"]) <= actual["mean_abs"] + rounding).all()
    assert (actual["mean_abs"] <= actual["rms"] + rounding).all()
    assert (actual["mean_abs"] <= actual["norm_product"] + rounding).all()


@properties
@given(layers())
def test_signed_means_of_all_pairs_sum_to_the_mean_logit(geometry_and_layer: tuple[Geometry, AttentionRecord]) -> None:
    geometry, layer = geometry_and_layer
    s = eager_reference.logits(layer.q, layer.k, layer.scaling, layer.window, layer.chunk_size)  # before any cap
    visible_mask = eager_reference.visible(layer.q.shape[1], layer.window, layer.chunk_size)
    actual = exact_pairs(geometry, layer)
    error = actual["mean_signed"].sum(-1) - s[:, visible_mask].mean(-1).numpy()
    assert (np.abs(error) <= EAGER * actual["rms"].sum(-1)).all()


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 20])
def test_sampled_usage_is_unbiased_and_its_standard_error_is_not_too_small(
    window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    geometry = geometry_of(4, 2, 8, 3, windows=[window])
    layer = random_record(geometry, 60, 3)
    exact = exact_pairs(geometry, layer)["mean_abs"]
    q, k = rotary_planes(layer.q, geometry), rotary_planes(layer.k, geometry)
    moments = pair_moment_sums(q, k, layer.visible_counts)
    monkeypatch.setattr(pairs_module, "pair_moment_sums", lambda *_: moments)  # they cover every row for any seed
    estimates, errors = [], []
    for seed in range(400):
        measure = RotaryPairs(geometry, 60, 6, seed)
        measure.update(layer)
        columns = measure.compute()
        estimates.append(by_unit(columns, "mean_abs", geometry))
        errors.append(by_unit(columns, "mean_abs_se", geometry))
    spread = np.std(estimates, axis=0)
    bias = np.abs(np.mean(estimates, axis=0) - exact)
    assert (bias <= 4.5 * spread / math.sqrt(400)).all()
    assert (np.sqrt(np.mean(np.square(errors), axis=0)) >= 0.8 * spread).all()


# A document in chunks ----------------------------------------------------------------------------------------------


@settings(max_examples=25, deadline=None)
@given(layers(), st.integers(1, 40), st.none() | st.integers(2, 9))
def test_chunks_of_queries_give_the_tables_of_one_pass(
    geometry_and_layer: tuple[Geometry, AttentionRecord], size: int, rows: int | None
) -> None:
    geometry, layer = geometry_and_layer
    length = layer.q.shape[1]
    for measure in (AttentionRows, LearnedSink, RotaryPairs, lambda *arguments: DistanceProfile(*arguments[:2])):
        single_pass, chunked = measure(geometry, length, rows, 5), measure(geometry, length, rows, 5)
        single_pass.update(layer)
        for start in range(0, length, size):
            cut = slice(start, start + size)
            k, lse = layer.k[:, : start + size], layer.lse[:, cut]
            chunked.update(replace(layer, q=layer.q[:, cut], k=k, v=k, z=layer.z[:, cut], lse=lse))
        expected = single_pass.compute()
        for name, values in chunked.compute().items():
            # Columns that may be 0 are exact relative to the sum of absolute terms; lengths and distances, to 1.
            size_of = expected.get("norm_product" if name.startswith("mean_abs") else name, expected[name])
            least = 1 if name in NEAR_ZERO else 1e-6
            assert np.abs(values - expected[name]).max(initial=0) <= EAGER * np.abs(size_of).max(initial=least), name


# Row sampling ----------------------------------------------------------------------------------------------


@properties
@given(st.integers(1, 5000), st.integers(1, 200), st.integers(0, 2**31))
def test_log_spaced_rows_are_distinct_sorted_rows_of_the_sequence(length: int, count: int, seed: int) -> None:
    rows = log_spaced_rows(length, count, seed)
    assert 1 <= len(rows) <= count
    assert (rows.diff() > 0).all()
    assert min(16, length) - 1 <= int(rows[0])
    assert int(rows[-1]) <= length - 1
    assert torch.equal(rows, log_spaced_rows(length, count, seed))


@given(st.integers(0, 2**31))
def test_log_spaced_rows_give_every_octave_its_share(seed: int) -> None:
    visible = log_spaced_rows(16 * 2**6, 60, seed) + 1
    octaves = torch.bincount((visible / 16).log2().floor().long().clamp(max=5), minlength=6)
    assert ((octaves[1:] - 10).abs() <= 2).all()
    assert octaves[0] <= 11  # in the first octave, equal rows count once


@properties
@given(st.integers(1, 3000), st.none() | st.integers(1, 500), st.integers(1, 100), st.integers(0, 2**31))
def test_pair_weighted_rows_have_one_row_in_each_stratum_of_pairs(
    length: int, window: int | None, count: int, seed: int
) -> None:
    visible = torch.arange(1, length + 1).clamp(max=window or length)
    rows = pair_rows(visible, count, seed)
    assert len(rows) == count
    ends = visible.cumsum(0).double()
    edges = torch.arange(count + 1) * ends[-1] / count
    assert (ends[rows] >= edges[:-1] - 1e-3 * ends[-1]).all()  # the row's own pairs overlap its stratum
    assert ((ends - visible)[rows] <= edges[1:] + 1e-3 * ends[-1]).all()


def test_averages_over_pair_weighted_rows_are_unbiased_for_the_mean_over_all_pairs() -> None:
    visible = torch.arange(1, 201).clamp(max=90)
    value = torch.sin(torch.arange(200) / 30.0).double() + torch.arange(200) / 100
    exact = float((visible * value).sum() / visible.sum())
    estimates = torch.stack([value[pair_rows(visible, 4, seed)].mean() for seed in range(2000)])
    assert abs(float(estimates.mean()) - exact) <= 4 * float(estimates.std()) / math.sqrt(2000)


def test_another_seed_samples_other_rows() -> None:
    assert not torch.equal(log_spaced_rows(4096, 64, 0), log_spaced_rows(4096, 64, 1))
    visible = torch.arange(1, 4097)
    assert not torch.equal(pair_rows(visible, 64, 0), pair_rows(visible, 64, 1))


# Distances ---------------------------------------------------------------------------------------------------------


@properties
@given(layers(max_length=30))
def test_the_distance_profile_equals_eager_at_every_distance(
    geometry_and_layer: tuple[Geometry, AttentionRecord],
) -> None:
    geometry, layer = geometry_and_layer
    length = layer.q.shape[1]
    measure = DistanceProfile(geometry, length)
    measure.update(layer)
    columns = measure.compute()
    distances = [d for d in log_spaced_distances(length).tolist() if d < layer.visible_counts.max()]
    assert sorted(set(columns["distance"].tolist())) == distances
    size = exact_pairs(geometry, layer)["norm_product"].reshape(-1)
    rotary = (2 * geometry.pairs, geometry.rotary_layout)
    c = eager_reference.contributions(layer.q, layer.k, layer.scaling, *rotary, geometry.rotary_start)
    visible_mask = eager_reference.visible(length, chunk_size=layer.chunk_size)
    for distance in distances:
        at_distance = columns["distance"] == distance
        assert (columns["n"][at_distance] == int((layer.visible_counts > distance).sum())).all()
        # Like `eager_reference.distance_profile`, but computes the contributions only once.
        expected = torch.stack(
            [c[:, i, i - distance] for i in range(distance, length) if visible_mask[i, i - distance]]
        ).mean(0)
        units = columns["head"][at_distance] * geometry.all_pairs + columns["pair"][at_distance]
        assert units.tolist() == list(range(expected.numel()))
        error = columns["mean_signed"][at_distance] - expected.reshape(-1).numpy()
        # A mean over few products has their size, not that of the mean over all pairs.
        largest = np.maximum(size, np.abs(expected.reshape(-1).numpy()))
        assert (np.abs(error) <= EAGER * largest).all()


@properties
@given(layers(max_length=30))
def test_profiles_over_all_distances_sum_to_the_signed_moment(
    geometry_and_layer: tuple[Geometry, AttentionRecord],
) -> None:
    geometry, layer = geometry_and_layer
    length = layer.q.shape[1]
    q, k = rotary_planes(layer.q, geometry), rotary_planes(layer.k, geometry)
    sums = profile_sums(q, k, torch.arange(length), layer.visible_counts).double().sum(-1)
    moments = pair_moment_sums(q, k, layer.visible_counts)
    # float32 products of nearly orthogonal q_f and k_f are exact relative to |q_f| |k_f|, not to their own size.
    assert ((sums - moments[0]).abs() <= EAGER * moments[2]).all()


@given(st.integers(1, 20_000))
def test_distances_are_zero_and_log_spaced_below_the_length(length: int) -> None:
    at = log_spaced_distances(length)
    assert at[0] == 0
    assert int(at[-1]) < length
    assert (at.diff() > 0).all()
    assert length == 1 or (at[1:].diff() <= at[1:-1].clamp(min=2) / 4 + 1).all()


@properties
@given(layers())
def test_planes_by_head_undoes_the_grouping_of_rotary_planes(
    geometry_and_layer: tuple[Geometry, AttentionRecord],
) -> None:
    geometry, layer = geometry_and_layer
    planes = rotary_planes(layer.q, geometry)
    pairs = eager_reference.planes(geometry.head_dim, 2 * geometry.pairs, geometry.rotary_layout, geometry.rotary_start)
    for axis in range(2):
        for i in range(layer.q.shape[1]):
            expected = layer.q[:, i][:, [pair[axis] for pair in pairs]]
            assert torch.equal(planes_by_head(planes[axis, ..., i], geometry), expected)


# Loss --------------------------------------------------------------------------------------------------------------


@properties
@given(st.integers(2, 90), st.integers(1, 40), st.integers(0, 2**31))
def test_loss_by_position_is_the_cross_entropy_of_the_whole_sequence(length: int, chunk: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 5 * torch.randn(length - 1, 13, generator=generator)
    targets = torch.randint(13, (length - 1,), generator=generator)
    measure = LossByPosition(length)
    for start in range(0, length - 1, chunk):
        measure.update(logits[start : start + chunk], targets[start : start + chunk], start + 1)
    columns = measure.compute()
    losses = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    assert columns["position"].tolist() == position_bin_edges(length).tolist()
    assert columns["tokens"].sum() == length - 1
    first = 1
    for last, nll, tokens in zip(*columns.values(), strict=True):
        expected = losses[first - 1 : last]
        assert tokens == len(expected)
        assert nll == pytest.approx(float(expected.mean()), rel=EAGER, abs=1e-6)
        first = last + 1
    overall = (columns["nll"] * columns["tokens"]).sum() / (length - 1)
    assert overall == pytest.approx(float(losses.mean()), rel=EAGER, abs=1e-6)
