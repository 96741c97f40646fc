"""Every measure obeys the laws of `measure_laws`. A new measure needs one line in `CASES`."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.measure_laws import LAWS, LENGTH, Case, geometry_of, layers_of
from torch import Tensor
from torch.overrides import TorchFunctionMode

from headscope.measures import AttentionRows, DistanceProfile, LossByPosition, MaxLogit, RotaryPairs
from headscope.measures.attention_rows import with_row_sums

GEOMETRY = geometry_of(windows=(None, 9, None))


def layered(measure: Callable[..., Any], *options: Any) -> Case:
    """A measure that is updated with the layers of a document."""
    return Case(
        lambda: measure(GEOMETRY, LENGTH, *options),
        lambda document: [(record,) for record in layers_of(GEOMETRY, LENGTH, document)],
    )


def _chunks_of_logits(document: int) -> list[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(document)
    logits = torch.randn(LENGTH - 1, 11, generator=generator)
    starts = range(0, LENGTH - 1, 7)
    targets = torch.randint(11, (LENGTH - 1,), generator=generator)
    return [(logits[n : n + 7], targets[n : n + 7], n + 1) for n in starts]


CASES = {
    "attention": layered(AttentionRows, None, 5),
    "attention-sampled": layered(AttentionRows, 12, 5),
    "pairs": layered(RotaryPairs, None, 5),
    "pairs-sampled": layered(RotaryPairs, 12, 5),
    "distance": layered(DistanceProfile),
    "max_logit": Case(
        lambda: MaxLogit(GEOMETRY),
        lambda document: [(with_row_sums(record),) for record in layers_of(GEOMETRY, LENGTH, document)],
    ),
    "nll": Case(lambda: LossByPosition(LENGTH), _chunks_of_logits),
}


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("measure", CASES)
def test_every_measure_obeys_its_invariants(measure: str, law: Callable[[Case], None]) -> None:
    law(CASES[measure])


@pytest.mark.parametrize("measure", CASES)
def test_an_empty_accumulator_computes_an_empty_table(measure: str) -> None:
    assert {len(column) for column in CASES[measure].empty().compute().values()} == {0}


@pytest.mark.parametrize("measure", CASES)
def test_a_table_needs_one_copy_from_the_device(measure: str) -> None:
    copies = []

    class CountingCopies(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function in (Tensor.cpu, Tensor.item, Tensor.tolist, Tensor.__int__, Tensor.__float__):
                copies.append(function)
            return function(*args, **(kwargs or {}))

    accumulator = CASES[measure].after(1)
    with CountingCopies():
        accumulator.compute()
    assert copies == [Tensor.cpu]


@pytest.mark.parametrize("measure", CASES)
def test_merged_documents_differ_from_each_document(measure: str) -> None:
    """Otherwise the laws above would be trivially true."""
    first, second = CASES[measure].after(1).compute(), CASES[measure].after(2).compute()
    assert any((first[name] != second[name]).any() for name in first)
