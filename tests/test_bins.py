"""Bins of visible keys and token positions."""

import numpy as np
import pytest

from headscope.bins import bin_center, in_last_octave, position_bin_edges, visible_bin_edges


def test_edges_are_four_per_octave_from_16():
    assert visible_bin_edges(128).tolist() == [16, 19, 23, 27, 32, 38, 45, 54, 64, 76, 91, 108, 128]


@pytest.mark.parametrize("limit", [1, 2, 15, 16, 17, 19, 20, 23, 63, 64, 65, 1000, 1024, 1025, 131072])
def test_edges_cover_the_limit_without_a_spare_bin(limit):
    edges = visible_bin_edges(limit)
    assert edges[-1] >= limit
    assert len(edges) == 1 or edges[-2] < limit
    assert (np.diff(edges) > 0).all()


def test_bin_center_is_the_geometric_mean_of_the_bin_limits():
    edges = visible_bin_edges(5000)
    ends = zip(np.concatenate([[1], edges[:-1] + 1]), edges, strict=True)
    assert bin_center(edges) == pytest.approx([np.sqrt(low * high) for low, high in ends])
    assert float(bin_center(16)) == 4


def test_bin_center_of_a_cut_bin_uses_the_limit():
    assert float(bin_center(1024, limit=900)) == pytest.approx(np.sqrt(862 * 900))


@pytest.mark.parametrize("limit", [32, 64, 100, 512, 1000, 1024, 10000])
def test_last_octave_is_four_bins(limit):
    edges = visible_bin_edges(limit)
    far = edges[in_last_octave(edges, edges[-1])]
    assert len(far) == 4
    assert far[-1] == edges[-1]
    assert edges[len(edges) - 5] <= edges[-1] / 2 + 1


@pytest.mark.parametrize("length", [2, 3, 17, 18, 20, 256, 1000, 1025])
def test_position_bins_partition_the_predicted_tokens(length):
    edges = position_bin_edges(length)
    assert edges[-1] == length - 1
    assert np.diff(edges, prepend=0).min() >= 1
    assert set(edges[:-1]) <= set(visible_bin_edges(length))
