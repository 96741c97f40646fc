"""Laws that every accumulator of `headscope.measures` obeys, and random documents to test them on.

A measure needs one `Case`: how to create an empty accumulator and how to update it with a document.
"""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from support import eager_reference

LENGTH = 40
TOLERANCE = 1e-12


def geometry_of(
    heads: int = 4,
    groups: int = 2,
    head_dim: int = 8,
    pairs: int = 4,
    layout: Any = "half",
    windows: Any = (None, None),
    start: int = 0,
    numbers: Any = None,
) -> Geometry:
    layers = tuple(numbers or range(len(windows)))
    rotates, layer_groups = (True,) * len(layers), (groups,) * len(layers)
    return Geometry(layers, heads, groups, head_dim, pairs, layout, 256, tuple(windows), rotates, layer_groups, start)


def full_pass_record(
    q: Tensor,
    k: Tensor,
    scaling: float = 0.3,
    window: int | None = None,
    layer: int = 0,
    chunk_size: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> AttentionRecord:
    """The record of a full pass with these q [H, L, d] and k [G, L, d]; lse is computed in float64."""
    s = eager_reference.with_sink(eager_reference.logits(q, k, scaling, window, chunk_size, softcap), sink)
    v, z, lse = torch.zeros_like(k), torch.zeros_like(q), s.logsumexp(-1).float()
    return AttentionRecord(
        layer, 0, q, k, v, z, lse, scaling, window, chunk_size=chunk_size, softcap=softcap, sink=sink
    )


def weights(layer: AttentionRecord) -> Tensor:
    """The eager weights of a record, [H, L, L]."""
    return eager_reference.weights(
        layer.q, layer.k, layer.scaling, layer.window, layer.chunk_size, layer.softcap, layer.sink
    )


def random_record(
    geometry: Geometry, length: int, seed: int, layer: int = 0, size: float = 1.5, **rule: Any
) -> AttentionRecord:
    generator = torch.Generator().manual_seed(seed)
    q = size * torch.randn(geometry.heads, length, geometry.head_dim, generator=generator)
    k = size * torch.randn(geometry.kv_groups, length, geometry.head_dim, generator=generator)
    return full_pass_record(q, k, window=geometry.windows[layer], layer=layer, **rule)


def layers_of(geometry: Geometry, length: int, document: int) -> list[AttentionRecord]:
    """Every layer of one random document."""
    return [random_record(geometry, length, 100 * document + layer, layer) for layer in range(geometry.layers)]


@dataclass(frozen=True)
class Case:
    """One accumulator under test. `parts(document)` are the arguments of its updates with a document, in order."""

    empty: Callable[[], Any]
    parts: Callable[[int], list[tuple[Any, ...]]]

    def after(self, *documents: int) -> Any:
        return self.fed(part for document in documents for part in self.parts(document))

    def fed(self, parts: Iterable[tuple[Any, ...]]) -> Any:
        accumulator = self.empty()
        for part in parts:
            accumulator.update(*part)
        return accumulator


def assert_same(actual: Any, expected: Any, tolerance: float = TOLERANCE) -> None:
    """The two accumulators compute the same columns; counts and keys exactly."""
    actual, expected = actual.compute(), expected.compute()
    assert list(actual) == list(expected)
    for name, column in expected.items():
        exact = not np.issubdtype(column.dtype, np.floating)
        np.testing.assert_allclose(actual[name], column, rtol=0 if exact else tolerance, atol=0, err_msg=name)


def merging_a_fresh_one_is_neutral(case: Case) -> None:
    merged, fresh = case.after(1), case.empty()
    merged.merge(case.empty())
    fresh.merge(case.after(1))
    assert_same(merged, case.after(1), 0)
    assert_same(fresh, case.after(1), 0)


def merging_equals_one_after_the_other(case: Case) -> None:
    merged = case.after(1)
    merged.merge(case.after(2))
    assert_same(merged, case.after(1, 2))


def merging_is_commutative(case: Case) -> None:
    one, other = case.after(1), case.after(2)
    one.merge(case.after(2))
    other.merge(case.after(1))
    assert_same(one, other)


def what_is_merged_in_stays_as_it_was(case: Case) -> None:
    into, other = case.after(1), case.after(2)
    before = copy.deepcopy(vars(other))
    into.merge(other)
    into.update(*case.parts(3)[0])  # nor is it shared
    for name, value in before.items():
        now = getattr(other, name)
        assert np.array_equal(now, value), name


def computing_changes_nothing(case: Case) -> None:
    accumulator = case.after(1)
    accumulator.compute()
    assert_same(accumulator, case.after(1), 0)
    accumulator.update(*case.parts(2)[0])
    assert_same(accumulator, case.fed([*case.parts(1), case.parts(2)[0]]), 0)


def the_order_of_updates_does_not_matter(case: Case) -> None:
    assert_same(case.fed(reversed(case.parts(1))), case.after(1))


LAWS = (
    merging_a_fresh_one_is_neutral,
    merging_equals_one_after_the_other,
    merging_is_commutative,
    what_is_merged_in_stays_as_it_was,
    computing_changes_nothing,
    the_order_of_updates_does_not_matter,
)
