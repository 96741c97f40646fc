"""Path patching: equal to paths patched by hand in eager attention, for many architectures, and its identities."""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from support import eager_paths, families
from support.prompt_pairs import LENGTH, ioi_pairs, random_pair
from support.refusals import refuses
from transformers import PreTrainedModel

import headscope as hs
from headscope.errors import BadInput, UnsupportedModel
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import Direction, PairRuns
from headscope.interventions.path_patching import (
    RECEIVER_INPUTS,
    MLPs,
    Norms,
    Path,
    PathEnd,
    PathModel,
    PathPatching,
    PathSpan,
    inspect_paths,
)
from headscope.positions.model import Model

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    name: families.MEASURABLE[name] for name in ("llama-gqa", "mistral-sliding", "gemma3", "olmo2", "phi", "qwen3")
} | {name: families.OTHERS[name].build for name in ("gpt_oss", "gpt2", "lfm2")}
"""GQA, windows, norms after the attention, no norm before it, parallel MLPs, QK-norms, sinks, GPT-2, a hybrid."""
ALL_FAMILIES = pytest.mark.parametrize("family", FAMILIES)


@cache
def loaded(family: str) -> Model:
    return hs.load(FAMILIES[family]())


@cache
def path_model(family: str) -> PathModel:
    return inspect_paths(loaded(family), random_pair().clean)


def exact(
    family: str,
    paths: list[Path],
    pair: PairTokens | None = None,
    direction: Direction = "denoising",
    norms: Norms = "frozen",
    mlps: MLPs = "frozen",
) -> dict[Path, float]:
    """The change of the logit difference by each path."""
    pair_runs = PairRuns(loaded(family), pair or random_pair(), "logit_diff", memory_bytes=0)
    unpatched = pair_runs.corrupted_value if direction == "denoising" else pair_runs.clean_value
    with pair_runs.capturing():
        patching = PathPatching(pair_runs, path_model(family), direction, norms, 0, mlps)
        return {path: value - unpatched for path, value in patching.patch(paths)}


def estimates(family: str, norms: Norms = "frozen", pair: PairTokens | None = None) -> Any:
    pair_runs = PairRuns(loaded(family), pair or random_pair(), "logit_diff", memory_bytes=1e9)
    with pair_runs.capturing():
        return PathPatching(pair_runs, path_model(family), "denoising", norms).estimate()


def paths_of(family: str, end: PathEnd) -> list[Path]:
    """Paths between the first, a middle and the last attention layer."""
    last = loaded(family).geometry.layers - 1
    if end == "logits":
        return [Path((0, 2), (), "logits"), Path((last, 1), (), "logits")]
    head_pairs = {((0, 2), (last, 1)), ((0, 1), (1, 3)), ((last - 1, 0), (last, 0))}
    return [Path(sender, (receiver,), end) for sender, receiver in head_pairs]


# Independent references --------------------------------------------------------------------------------------------


@pytest.mark.exhaustive(sample=9)
@pytest.mark.slow
@ALL_FAMILIES
@pytest.mark.parametrize("end", [*RECEIVER_INPUTS, "logits"])
def test_exact_paths_equal_eager_attention_patched_by_hand(family: str, end: PathEnd) -> None:
    paths, pair, sizes = paths_of(family, end), random_pair(), []
    for direction, norms in (("denoising", "frozen"), ("noising", "recomputed")):
        for path, change in exact(family, paths, direction=direction, norms=norms).items():
            run, source = (pair.corrupted, pair.clean) if direction == "denoising" else (pair.clean, pair.corrupted)
            expected = eager_paths.patched(loaded(family), run[:, :-1], source[:, :-1], path, norms == "frozen")
            unpatched = eager_paths.patched(loaded(family), run[:, :-1], run[:, :-1], path, norms == "frozen")
            difference = (expected - unpatched)[-1]
            expected_change = (difference[pair.answer[0]] - difference[pair.wrong[0]]).item()
            assert change == pytest.approx(expected_change, rel=1e-5, abs=2e-5)
            sizes.append(abs(change))
    assert max(sizes) > 1e-3


@pytest.mark.exhaustive(sample=9)
@pytest.mark.slow
@ALL_FAMILIES
@pytest.mark.parametrize("end", [*RECEIVER_INPUTS, "logits"])
def test_paths_through_mlps_into_sets_of_receivers_equal_the_three_runs_of_wang_et_al(
    family: str, end: PathEnd
) -> None:
    last, pair, sizes = loaded(family).geometry.layers - 1, random_pair(), []
    receivers = {"several": ((1, 3), (last, 0), (last, 1)), "one": ((last, 1),)}
    paths = [Path((0, head), receivers[name], end) for head in (0, 2) for name in receivers]
    if end == "logits":
        paths = [Path((last - 1, head), (), end) for head in (0, 1)]
    for mlps, norms in (("recomputed", "recomputed"), ("recomputed", "frozen"), ("frozen", "recomputed")):
        for path, change in exact(family, paths, norms=norms, mlps=mlps).items():
            options = (path, norms == "frozen", mlps == "recomputed")
            expected, unpatched = (
                eager_paths.patched(loaded(family), pair.corrupted[:, :-1], source[:, :-1], *options)
                for source in (pair.clean, pair.corrupted)
            )
            difference = (expected - unpatched)[-1]
            expected_change = (difference[pair.answer[0]] - difference[pair.wrong[0]]).item()
            assert change == pytest.approx(expected_change, rel=1e-5, abs=2e-5)
            sizes.append(abs(change))
    assert max(sizes) > 1e-3


@pytest.mark.exhaustive(sample=3)
@pytest.mark.slow
@ALL_FAMILIES
def test_paths_at_positions_equal_eager_attention_patched_by_hand(family: str) -> None:
    """The sender changes at the first span, and the receivers' input follows at the second one."""
    last, pair = loaded(family).geometry.layers - 1, random_pair()
    spans: list[tuple[PathSpan, PathSpan]] = [((3, 6), ()), ((), (4, LENGTH)), ((2, 5), (3, LENGTH))]
    paths = [Path((0, 2), ((1, 3), (last, 1)), end, *places) for end in ("q", "k", "v") for places in spans]
    paths += [Path((last - 1, 1), (), "logits", (LENGTH - 1, LENGTH)), Path((0, 1), (), "logits", (0, LENGTH - 1))]
    for mlps in ("frozen", "recomputed"):
        changes = exact(family, paths, norms="recomputed", mlps=mlps)
        assert max(map(abs, changes.values())) > 1e-3
        for path, change in changes.items():
            expected, unpatched = (
                eager_paths.patched(
                    loaded(family), pair.corrupted[:, :-1], source[:, :-1], path, False, mlps == "recomputed"
                )
                for source in (pair.clean, pair.corrupted)
            )
            difference = (expected - unpatched)[-1]
            expected_change = (difference[pair.answer[0]] - difference[pair.wrong[0]]).item()
            assert change == pytest.approx(expected_change, rel=1e-5, abs=2e-5)


@pytest.mark.model
@torch.no_grad()
def test_paths_through_mlps_of_the_real_model_equal_the_three_runs_of_wang_et_al(smollm2: Model) -> None:
    (pair,) = ioi_pairs(smollm2, 1)
    paths = [Path((17, 4), ((20, 0), (23, 3)), "q"), Path((20, 0), ((23, 3),), "v"), Path((20, 0), (), "logits")]
    pair_runs = PairRuns(smollm2, pair, "logit_diff", memory_bytes=1e9)
    with pair_runs.capturing():
        patching = PathPatching(
            pair_runs, inspect_paths(smollm2, pair.clean), "denoising", "recomputed", mlps="recomputed"
        )
        values = dict(patching.patch(paths))
    assert max(abs(value - pair_runs.corrupted_value) for value in values.values()) > 0.01
    for path, value in values.items():
        logits = eager_paths.patched(smollm2, pair.corrupted[:, :-1], pair.clean[:, :-1], path, False, True)[-1]
        expected = (logits[pair.answer[0]] - logits[pair.wrong[0]]).item()
        assert value == pytest.approx(
            expected, abs=1e-5 * abs(pair_runs.clean_value - pair_runs.corrupted_value) + 1e-5
        )


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "gpt2", "lfm2"])
@pytest.mark.parametrize("norms", ["frozen", "recomputed"])
def test_estimates_are_the_derivative_of_exact_paths(family: str, norms: Norms) -> None:
    """A path's estimate is its effect in the limit of a small change of the sender."""
    to_heads, to_logits = estimates(family, norms)
    pair_runs = PairRuns(loaded(family), random_pair(), "logit_diff", memory_bytes=1e9)
    share = 2e-3
    with pair_runs.capturing():
        patching = PathPatching(pair_runs, path_model(family), "denoising", norms)
        changes = [patching._changes.load(layer) for layer in range(loaded(family).geometry.layers)]
        for end in (*RECEIVER_INPUTS, "logits"):
            for sign in (1, -1):
                for layer, change in enumerate(changes):
                    patching._changes._entries[layer] = sign * share * change
                values = dict(patching.patch(paths_of(family, end)))
                if sign == 1:
                    forward = values
            for path, value in values.items():
                slope = (forward[path] - value) / (2 * share)
                estimate = (
                    to_logits[path.sender]
                    if not path.receivers
                    else to_heads[(*path.sender, *path.receivers[0], RECEIVER_INPUTS.index(path.end))]
                )
                assert float(estimate) == pytest.approx(slope, rel=2e-2, abs=4e-3)


# Identities --------------------------------------------------------------------------------------------------------


@ALL_FAMILIES
def test_paths_between_equal_runs_change_nothing(family: str) -> None:
    pair = random_pair()
    same = PairTokens(pair.clean, pair.clean, pair.answer, pair.wrong, pair.aligned)
    paths = [path for end in (*RECEIVER_INPUTS, "logits") for path in paths_of(family, end)]
    assert max(map(abs, exact(family, paths, same).values())) <= 1e-5
    assert max(float(t.abs().max()) for t in estimates(family, pair=same)) <= 1e-5


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "gpt2"])
def test_direct_paths_to_the_logits_are_linear_and_equal_their_estimates(family: str) -> None:
    geometry = loaded(family).geometry
    senders = [(layer, head) for layer in range(geometry.layers) for head in range(geometry.heads)]
    changes = exact(family, [Path(sender, (), "logits") for sender in senders])
    _, to_logits = estimates(family)
    for path, change in changes.items():
        assert change == pytest.approx(float(to_logits[path.sender]), rel=1e-3, abs=1e-4)
    assert sum(changes.values()) == pytest.approx(
        eager_paths.direct_effect_of_all_heads(loaded(family), random_pair()), rel=1e-4, abs=1e-4
    )


def test_estimates_are_zero_unless_the_receiver_is_in_a_later_layer() -> None:
    to_heads, _ = estimates("llama-gqa")
    for sender in range(4):
        assert to_heads[sender, :, : sender + 1].abs().max() == 0
        assert sender == 3 or to_heads[sender, :, sender + 1 :].abs().min() > 0


def test_estimates_of_receivers_in_small_batches_equal_those_of_one_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    together = estimates("llama-gqa")
    monkeypatch.setattr("headscope.interventions.path_patching.ESTIMATE_TOKENS", LENGTH)
    for estimate, expected in zip(estimates("llama-gqa"), together, strict=True):
        torch.testing.assert_close(estimate, expected, atol=1e-5, rtol=1e-5)


def test_the_keys_of_other_heads_in_the_kv_group_stay() -> None:
    """Two heads of one KV group have different paths through k, which sum to no common change of the group."""
    paths = [Path((0, 0), ((1, head),), "k") for head in (0, 1)]
    first, second = exact("llama-gqa", paths).values()
    assert abs(first - second) > 1e-4


# Refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("receiver", [(1, 0), (0, 3)])
def test_a_receiver_that_is_not_in_a_later_layer_is_refused(receiver: tuple[int, int]) -> None:
    path = Path((1, 0), (receiver,), "q")
    with refuses(BadInput, str(path)):
        exact("llama-gqa", [path])


def test_paths_through_mlps_are_not_estimated() -> None:
    pair_runs = PairRuns(loaded("llama-gqa"), random_pair(), "logit_diff", memory_bytes=0)
    with pair_runs.capturing(), refuses(BadInput, "mlps", "'frozen'"):
        PathPatching(pair_runs, path_model("llama-gqa"), "denoising", mlps="recomputed").estimate()


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gemma2", "soft-capped"),
        ("qwen3_next", "gate"),
    ],
)
def test_architectures_without_such_paths_are_refused_by_name(family: str, reason: str) -> None:
    model = hs.load(families.OTHERS[family].build())
    with refuses(UnsupportedModel, model.name, reason, "headscope patch"):
        inspect_paths(model, random_pair().clean)
