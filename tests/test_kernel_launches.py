"""On a GPU every operation is a launch: how many the measures of a layer take, counted where there is no GPU."""

from typing import Any

import numpy as np
import pytest
import torch
from support.measure_laws import geometry_of
from support.simulated_cuda import simulating_cuda

from headscope.attention.record import AttentionRecord
from headscope.measures import AttentionRows, DistanceProfile, LearnedSink, RotaryPairs
from headscope.measures.copying import AnswerKeys, CopyScoreAccumulator, last_query_weights
from headscope.measures.detectors import DetectorScores
from headscope.measures.far_mass import StreamingScores
from headscope.measures.pooled_map import PooledMaps
from headscope.measures.sparse_rows import SparseRows
from headscope.measures.sparse_rules import parse_rule
from headscope.measures.top_keys import TopKeysAccumulator
from headscope.measures.value_attention import ValueWeightedRows
from headscope.streaming import StreamingWindow
from probes.sparsity.patterns import BlockSparse, HeadPatterns

LENGTH, ROWS, MOST = 65_536, 64, 120
RULES = ("top:5", "group-top:5", "layer-top:5", "block:4:3", "block-mean:4:3", "block-bounds:4:3", "streaming:2:7",
         "vertical-slash:3:4")  # fmt: skip
VARIANTS: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"window": 4096},
    "chunk_size": {"chunk_size": 8192},
    "softcap": {"softcap": 50.0},
    "sink": {"sink": 9},
}


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("queries", [LENGTH, LENGTH // 4])
@pytest.mark.parametrize("rule", VARIANTS)
def test_measures_of_sampled_rows_launch_few_kernels_per_layer(rule: str, queries: int, dtype: torch.dtype) -> None:
    """Nor does any wait for the GPU while it goes on."""
    geometry = geometry_of(9, 3, 64, 32, windows=[None])
    measures = [
        AttentionRows(geometry, LENGTH, ROWS, 0),
        LearnedSink(geometry, LENGTH, ROWS, 0),
        RotaryPairs(geometry, LENGTH, ROWS, 0),
        DistanceProfile(geometry, LENGTH),
    ]
    with simulating_cuda() as launches:
        terms = {name: torch.zeros(9, device="cuda") if name == "sink" else n for name, n in VARIANTS[rule].items()}
        q = torch.empty(9, queries, 64, dtype=dtype, device="cuda")
        k = torch.empty(3, LENGTH, 64, dtype=dtype, device="cuda")
        lse = torch.empty(9, queries, device="cuda")
        record = AttentionRecord(0, 0, q, k, k, q, lse, 0.125, **{"window": None, **terms})
        for measure in measures:
            measure.update(record)
    assert 30 < launches.total() <= MOST, launches
    assert not launches.waits


@pytest.mark.parametrize("measure", ["top_keys", "maps", "streaming", "detectors", "values", "sparse", "answers"])
def test_no_other_measure_of_a_layer_waits_for_the_gpu(measure: str) -> None:
    geometry = geometry_of(6, 3, 16, 8, windows=[None])
    rules = [
        *map(parse_rule, RULES),
        HeadPatterns((parse_rule("streaming:1:1"), BlockSparse(4, 1)), (torch.arange(6) % 2,)),
    ]
    accumulator: Any = {
        "top_keys": lambda: TopKeysAccumulator(geometry, torch.arange(0, 300, 7), 5),
        "maps": lambda: PooledMaps(geometry, 300),
        "streaming": lambda: StreamingScores(geometry, 300, 30, 0, StreamingWindow(4, 64)),
        "detectors": lambda: DetectorScores(geometry, 10, 145),
        "sparse": lambda: SparseRows(geometry, rules, lambda *_: np.arange(0, 300, 7)),
        "answers": _Answers,
        "values": lambda: ValueWeightedRows(geometry, 300, 30, 0, {0: torch.zeros(6, 20, 16)}),
    }[measure]()
    with simulating_cuda() as launches:
        if measure == "values":
            accumulator._grams = {0: torch.empty(6, 16, 16, device="cuda")}
        q, k = (torch.empty(heads, 300, 16, device="cuda") for heads in (6, 3))
        lse = torch.empty(6, 300, device="cuda")
        accumulator.update(AttentionRecord(0, 0, q, k, k, q, lse, 0.25, None))
    assert launches.total() > (0 if measure == "maps" else 5)
    assert not launches.waits


class _Answers:
    """What the needle probe collects at every answer step."""

    def update(self, record: AttentionRecord) -> None:
        weights = last_query_weights([record, record])
        CopyScoreAccumulator(1, [[(3, 9)], [(3, 9), (20, 26)]]).add(0, [0, 1], weights)
        AnswerKeys(1, 0.15).add(0, [0, 1], weights)
