"""Sets of units, and patches at several spans, in batches of runs: the results are those of one run at a time."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, get_args

import pytest
import torch
from support import families
from support.prompt_pairs import LENGTH
from support.replayed_losses import replay_losses
from torch import Tensor
from transformers import PreTrainedModel
from zoo.build import tiny

import headscope as hs
from headscope.attention import backend
from headscope.attention.edits import TokenSet
from headscope.attention.streaming_kernel import StreamingKind
from headscope.interventions import replay
from headscope.interventions.edits import edit
from headscope.interventions.heads import Unit, head_units, kv_group_units
from headscope.interventions.kinds import DocumentMean, InputsFunction, RuleChoice, Steer, Suppress, Uniform, Zero
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import Activation, PairRuns, patched_units
from headscope.interventions.position_kinds import KVQuantization
from headscope.interventions.replay import Replay
from headscope.measures.sparse_rules import parse_rule
from headscope.positions.model import Model
from probes.influence.declaration import InfluenceOptions
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
    """The number of runs in each pass through the last layer with attention. Use it inside a capture."""
    runs: list[int] = []

    def count(z: Tensor, call: backend.AttentionCall) -> Tensor:
        runs.append(len(z))
        return z

    with backend.editing_output(model.attention_modules[-1], count):
        yield runs


def limit_batches(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """The memory holds at most so many runs at once."""
    monkeypatch.setattr(replay, "runs_per_batch", lambda *_: most)


def passes_of(model: Model, first_layers: Sequence[int], most: int) -> int:
    """Forward passes of runs with these first layers.

    HY-V4's layers pass on more than the residual stream: the runs of a batch have a pass for each first layer.
    """
    batches = [sorted(first_layers)[at : at + most] for at in range(0, len(first_layers), most)]
    grows = model.module.config.model_type != "hy_v4"
    return len(batches) if grows else sum(len({*batch}) for batch in batches)


def sets_of(model: Model) -> list[tuple[Any, list[Unit]]]:
    """Sets that share units, layers and kinds, start in different layers, and are not in order of these."""
    heads, groups = head_units(model.geometry), kv_group_units(model.geometry)
    sets: list[tuple[Any, list[Unit]]] = [
        (Zero(), heads[-3:]),
        (Zero(), heads),
        (Uniform(), heads[::2]),
        (Zero(), heads[:1]),
        (DocumentMean(), heads[1::3]),
        (Zero(), [heads[0], heads[-1]]),
        (KVQuantization(4), groups),
        (Uniform(), [heads[-1], heads[-1]]),
    ]
    # Streaming over keys that an indexer chose is not supported.
    streaming = StreamingKind(1, 3)
    return sets + [(streaming, heads[:2]), (streaming, heads[-1:])] * (model.module.config.model_type != "hy_v4")


@pytest.mark.exhaustive(sample=2)
@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_sets_of_units_in_batches_have_the_influence_of_single_runs(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one forward pass, or in more if the memory holds fewer runs."""
    model = loaded(family)
    sets = sets_of(model)
    *losses, unchanged = replay_losses(model, model.schedule, sets, IDS)
    options = InfluenceOptions(method="exact", components=["zero"])
    text = TextReplay(plan_sweep("tiny", model, options), IDS, memory=1e9)
    first_layers = [min(unit.layer for unit in units) for _, units in sets]
    for most in (1, 3, 100):
        limit_batches(monkeypatch, most)
        with text.replay.capturing(), counting_runs(model) as runs:
            changes = dict(text.loss_changes(sets))
        assert [changes[n] for n in range(len(sets))] == pytest.approx(
            [loss - unchanged for loss in losses], abs=MAX_ERROR
        )
        assert sum(runs) == len(sets)
        assert max(runs) <= most
        assert len(runs) == passes_of(model, first_layers, most)
    assert len(runs) < len(sets)


KINDS: list[Any] = [
    *(Zero(), DocumentMean(), Uniform(), StreamingKind(1, 3), KVQuantization(4), InputsFunction(lambda *qkv: qkv[:3])),
    *(Steer(TokenSet((3, 4)), 0.1), Suppress(TokenSet(slice(2, 9))), RuleChoice(parse_rule("top:3"))),
]
TOKENS = (None, slice(10, 12), slice(-3, None), (5, -2))


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: str(kind.name))
@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding", "gpt_oss"])
def test_runs_of_one_kind_at_other_tokens_in_a_batch_equal_single_runs(family: str, kind: Any) -> None:
    model = loaded(family)
    text = Replay(model, model.schedule, IDS, memory_bytes=1e9)
    runs = [[edit(model, kind, heads, TokenSet(tokens))] for tokens in TOKENS for heads in ("L1H2", "L1H1,L1H2,L2H0")]
    with text.capturing():
        text.record_streams()
        single = [losses for run in runs for _, losses in text.losses([run])]
        together = dict(text.losses(runs))
    for number, losses in enumerate(single):
        torch.testing.assert_close(together[number], losses, rtol=2e-6, atol=2 * MAX_ERROR)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama-gqa", "lfm2"])
def test_rows_of_ranked_sets_keep_their_order_and_components_share_batches(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = loaded(family)
    sweep = plan_sweep("tiny", model, InfluenceOptions(method="exact", components=["zero", "uniform"]))
    ranked = {key: units[1:] + units[:1] for key, units in sweep.units.items()}
    text, tables = TextReplay(sweep, IDS, memory=1e9), []
    for most in (1, 100):
        limit_batches(monkeypatch, most)
        with text.replay.capturing(), counting_runs(model) as runs:
            tables.append([*sweep.evaluate_ranked_sets(text, ranked, draws=2, seed=0)])
        assert len(runs) == (len(tables[0]) if most == 1 else 1)
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


@pytest.mark.exhaustive(sample=10)
@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_patches_at_several_spans_in_batches_equal_single_runs(
    family: str, activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of units one at a time and together: one pass for all, or more if the memory holds fewer runs."""
    model, direction = loaded(family), "noising"
    pair_runs = PairRuns(model, pair_of(family), "logit_diff", memory_bytes=1e9)
    units = patched_units(model, activation)
    sets = [*([unit] for unit in units), units[::2]]
    values = []
    for most in (1, 3, 1000):
        limit_batches(monkeypatch, most)
        with pair_runs.capturing():
            patches = [pair_runs.patch(activation, direction, members, span) for members in sets for span in SPANS]
            with counting_runs(model) as runs:
                values.append(pair_runs.evaluate(direction, patches))
        assert sum(runs) == len(patches)
        assert max(runs) <= most
        first_layers = [members[0].layer for members in sets for _ in SPANS]
        assert len(runs) == passes_of(model, first_layers, most)
    single, *batches = values
    for batch in batches:
        assert batch == pytest.approx(single, rel=2e-6, abs=MAX_ERROR)
    for of_sets in (single[: -len(SPANS)], single[-len(SPANS) :]):
        assert max(of_sets) - min(of_sets) > 100 * MAX_ERROR
