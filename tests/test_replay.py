"""Runs that start at a layer, where layers pass more to later layers than the residual stream."""

from collections.abc import Sequence
from typing import Any

import pytest
from support.refusals import refuses
from torch import Tensor
from zoo import layout_checks, use_checks
from zoo.build import tiny
from zoo.eager import eager, tokens

import headscope as hs
from headscope.errors import UnsupportedModel
from headscope.forward.carried_state import CarriedState
from headscope.interventions import replay_check
from headscope.interventions.replay import Replay

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "BLOOM": ("bloom", {}),
    "Falcon with ALiBi": ("falcon", {"alibi": True, "multi_query": False}),
    "StarCoder": ("gpt_bigcode", {}),
    "Zamba": ("zamba", {}),
    "Zamba2": ("zamba2", {}),
    "XMOD": ("xmod", {}),
    "Mllama": ("mllama", {"cross_attention_layers": [1]}),
    "HY-V4": ("hy_v4", {}),
    "Zaya": ("zaya", {}),
}
MAX_ERROR = 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_resumed_batches_equal_full_passes(family: str) -> None:
    """Runs with different edits from every layer with attention; also with as many tokens as copies."""
    module = tiny(*FAMILIES[family])
    errors = use_checks._resumed_batches(hs.load(module), tokens(module), None)
    assert max(errors.values()) <= MAX_ERROR


@pytest.mark.parametrize("family", ["BLOOM", "StarCoder", "HY-V4", "Zaya"])
def test_patching_in_batches_and_influence_equal_eager_attention(family: str) -> None:
    """Zaya's estimates carry gradients through the state of its router."""
    module = tiny(*FAMILIES[family])
    ids = tokens(module)
    model, truth = hs.load(module), eager(module, ids)
    for measure in (layout_checks._patching, layout_checks._influence):
        assert max(measure(model, ids, truth).values()) <= layout_checks.MAX_ERROR


def replay_of(model: hs.Model, ids: Tensor) -> Replay:
    return Replay(model, model.schedule, ids, memory_bytes=1e9)


def test_a_model_is_compared_once_and_refused_by_name_if_it_carries_the_wrong_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted fault: layers that a run leaves out return no router state."""
    module = tiny("zaya")
    monkeypatch.setattr(CarriedState, "outputs", lambda self, layer, stream, copies, kwargs: (stream, None))
    model, calls, counts = hs.load(module), [], []
    difference = replay_check._difference
    monkeypatch.setattr(replay_check, "_difference", lambda *args: calls.append(1) or difference(*args))
    for _ in range(2):
        replay = replay_of(model, tokens(module))
        with (
            replay.capturing(),
            refuses(UnsupportedModel, replay.model.name, "zaya", "differs"),
        ):
            replay.record_streams()
        counts.append(len(calls))
    assert counts[0] == counts[1] > 0


def test_a_resumed_pass_that_fails_is_refused_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError("the sizes of tensors must match")

    monkeypatch.setattr(CarriedState, "outputs", fail)
    module = tiny("zamba")
    replay = replay_of(hs.load(module), tokens(module))
    cause = "RuntimeError: the sizes of tensors must match"
    with replay.capturing(), refuses(UnsupportedModel, "zamba", cause):
        replay.record_streams()


@pytest.mark.parametrize("fault", ["wrong", "failing"])
def test_a_model_whose_batch_cannot_grow_has_one_for_each_first_layer(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted fault: runs that join a batch later are scaled, or cannot join."""
    grow = Replay._run_growing_batch

    def with_fault(self: Replay, firsts: Sequence[int]) -> Tensor:
        if fault == "failing" and len({*firsts}) > 1:
            raise RuntimeError("the sizes of tensors must match")
        return grow(self, firsts) * (1 + 0.1 * (Tensor([firsts]).mT[..., None] > min(firsts)))

    monkeypatch.setattr(Replay, "_run_growing_batch", with_fault)
    module = tiny("llama")
    model = hs.load(module)
    errors = use_checks._resumed_batches(model, tokens(module), None)
    assert max(errors.values()) <= MAX_ERROR
    assert not replay_check.grows_batches(model)


def test_the_check_of_types_notices_a_state_that_is_not_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same fault without the replay check: the zoo's comparison sees it."""
    module = tiny("zaya")
    monkeypatch.setattr(CarriedState, "outputs", lambda self, layer, stream, copies, kwargs: (stream, None))
    monkeypatch.setattr("headscope.interventions.replay.check_once", lambda *args: None)
    errors = use_checks._resumed_batches(hs.load(module), tokens(module), None)
    assert max(errors.values()) > 100 * MAX_ERROR
