"""Sets of units, and patches at several spans, run together: the results are those of one replay at a time."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, get_args

import pytest
import torch
from support import families
from support.prompt_pairs import LENGTH
from support.replayed_losses import replay_losses
from torch import Tensor, nn
from transformers import PreTrainedModel
from zoo.build import tiny

import headscope as hs
from headscope.forward.backbone import decoder_layers
from headscope.forward.interventions import (
    ABLATIONS,
    Intervention,
    KVQuantization,
    StreamingAttention,
    Unit,
    head_units,
    kv_group_units,
)
from headscope.patching import activation_patching
from headscope.patching.activation_patching import Activation, PatchingReplay, patched_units
from headscope.patching.metrics import PairTokens
from headscope.positions.model import Model
from headscope.streaming import StreamingWindow
from probes.influence import sweep as influence_sweep
from probes.influence.schema import InfluenceOptions
from probes.influence.sweep import TextReplay, plan_sweep

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama-gqa": families.MEASURABLE["llama-gqa"],
    "mistral-sliding": families.MEASURABLE["mistral-sliding"],
    "gemma3": families.MEASURABLE["gemma3"],
    "gpt_oss": families.OTHERS["gpt_oss"].build,
    "gpt2": families.OTHERS["gpt2"].build,
    "lfm2": families.OTHERS["lfm2"].build,
    "zamba2": partial(tiny, "zamba2"),
    "hy_v4": partial(tiny, "hy_v4"),
}
"""Among them sliding windows, alternating windows, a sink, recurrent layers (LFM2, Zamba2), and an indexer (HY-V4)."""
MAX_ERROR = 1e-5
SPANS = [None, range(3), range(4, 5), range(5, 6), range(8, 16)]
IDS = torch.randint(3, 56, (1, 40), generator=torch.Generator().manual_seed(0))


@cache
def loaded(family: str) -> Model:
    return hs.load(FAMILIES[family]())


@contextmanager
def counting_runs(model: Model) -> Iterator[list[int]]:
    """The number of runs in each forward pass that goes through the last layer."""
    runs: list[int] = []

    def count(module: nn.Module, args: tuple[Tensor, ...], output: Any) -> None:
        runs.append(len(args[0]))

    handle = decoder_layers(model)[-1].register_forward_hook(count)
    try:
        yield runs
    finally:
        handle.remove()


def limit_batches(monkeypatch: pytest.MonkeyPatch, module: Any, most: int) -> None:
    """The memory holds at most so many runs at once."""
    monkeypatch.setattr(module, "runs_per_batch", lambda *_: most)


def passes_of(counts: list[int], most: int) -> int:
    """Forward passes of runs that start in the same layer each, so many of them per layer."""
    return sum(-(-count // most) for count in counts)


def sets_of(model: Model) -> list[tuple[Intervention, list[Unit]]]:
    """Sets that share units, layers and interventions, start in different layers, and are not in order of these."""
    heads, groups = head_units(model.geometry), kv_group_units(model.geometry)
    streaming = StreamingAttention(StreamingWindow(1, 3))
    quantized = KVQuantization(4, model.geometry.head_dim)
    zero, mean, uniform = (ABLATIONS[name] for name in ("zero", "mean", "uniform"))
    sets: list[tuple[Intervention, list[Unit]]] = [
        (zero, heads[-3:]),
        (zero, heads),
        (uniform, heads[::2]),
        (zero, heads[:1]),
        (mean, heads[1::3]),
        (zero, [heads[0], heads[-1]]),
        (quantized, groups),
        (uniform, [heads[-1], heads[-1]]),
    ]
    # Streaming over keys that an indexer chose is not supported.
    return sets + [(streaming, heads[:2]), (streaming, heads[-1:])] * (model.module.config.model_type != "hy_v4")


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_sets_of_units_in_batches_have_the_influence_of_single_replays(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many forward passes as the lowest layers of sets differ, or more if the memory holds fewer runs."""
    model = loaded(family)
    sets = sets_of(model)
    *losses, unchanged = replay_losses(model, model.schedule, sets, IDS)
    options = InfluenceOptions(method="exact", components=["zero"])
    replay = TextReplay(plan_sweep("tiny", model, options), IDS, memory=1e9)
    lowest = [min(unit.layer for unit in units) for _, units in sets]
    by_layer = [lowest.count(layer) for layer in sorted(set(lowest))]
    for most in (1, 3, 100):
        limit_batches(monkeypatch, influence_sweep, most)
        with replay.replay.capturing(), counting_runs(model) as runs:
            changes = replay.set_loss_changes(sets)
        assert changes == pytest.approx([loss - unchanged for loss in losses], abs=MAX_ERROR)
        assert (sum(runs), max(runs)) == (len(sets), min(most, max(by_layer)))
        assert len(runs) == passes_of(by_layer, most)
    assert len(runs) < len(sets)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama-gqa", "lfm2"])
def test_rows_of_ranked_sets_keep_their_order_and_components_share_batches(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(family)
    sweep = plan_sweep("tiny", model, InfluenceOptions(method="exact", components=["zero", "uniform"]))
    ranked = {key: units[1:] + units[:1] for key, units in sweep.units.items()}
    replay, tables = TextReplay(sweep, IDS, memory=1e9), []
    for most in (1, 100):
        limit_batches(monkeypatch, influence_sweep, most)
        with replay.replay.capturing(), counting_runs(model) as runs:
            tables.append([*sweep.evaluate_ranked_sets(replay, ranked, draws=2, seed=0)])
        assert len(runs) == (len(tables[0]) if most == 1 else 1)  # every set has a head of the first layer
    alone, together = tables
    changes = [[row.pop("delta_nll") for row in rows] for rows in tables]
    assert alone == together
    assert changes[1] == pytest.approx(changes[0], abs=MAX_ERROR)
    assert [row["component"] for row in together] == sorted((row["component"] for row in together), reverse=True)


def pair_of(family: str) -> PairTokens:
    """Two prompts that differ at three positions, of tokens that every family has."""
    generator = torch.Generator().manual_seed(0)
    clean = torch.randint(3, 56, (1, LENGTH + 1), generator=generator)
    corrupted = clean.clone()
    corrupted[0, [2, 9, 15]] = torch.randint(3, 56, (3,), generator=generator)
    return PairTokens(clean, corrupted, clean[0, -1:], torch.tensor([9]), LENGTH)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_patches_at_several_spans_in_batches_equal_single_replays(
    family: str, activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of units one at a time and together: one pass for all spans, or more if the memory holds fewer runs."""
    model, direction = loaded(family), "noising"
    replay = PatchingReplay(model, pair_of(family), "logit_diff", memory_bytes=1e9)
    units = patched_units(model, activation)
    layers = len({unit.layer for unit in units})
    single: list[list[float]] = []
    together: list[list[float]] = []
    for most in (1, 3, 1000):
        limit_batches(monkeypatch, activation_patching, most)
        with replay.capturing(), counting_runs(model) as runs:
            patches = [*replay.patch(activation, direction, units, SPANS)]
            in_patch = len(runs)
            joint = [*replay.patch_together(activation, direction, units[::2], SPANS)]
        assert [(unit, span) for unit, span, _ in patches] == [
            (unit, span) for layer in range(layers) for span in SPANS for unit in units if unit.layer == layer
        ]
        assert [span for span, _ in joint] == SPANS
        assert max(runs) <= most
        assert [sum(runs[:in_patch]), sum(runs[in_patch:])] == [len(units) * len(SPANS), len(SPANS)]
        if most == 1000:
            assert [len(runs[:in_patch]), len(runs[in_patch:])] == [layers, 1]
        single.append([value for *_, value in patches])
        together.append([value for _, value in joint])
    for values in (single, together):
        assert values[1] == pytest.approx(values[0], abs=MAX_ERROR)
        assert values[2] == pytest.approx(values[0], abs=MAX_ERROR)
        assert max(values[0]) - min(values[0]) > 100 * MAX_ERROR
