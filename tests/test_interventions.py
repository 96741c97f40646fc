"""Resets and ablations of running heads equal brute force: the model rebuilt, or its tensors edited by hand."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
from support import families
from support.adapters import noisy, reset_adapter
from support.refusals import refuses
from support.replayed_losses import IDS, full_pass_loss, replay_losses
from torch import Tensor, nn

import headscope as hs
from headscope.attention.edits import TokenSet
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput
from headscope.forward.capture import capturing
from headscope.interventions.edits import edit, edit_units, edited
from headscope.interventions.heads import Unit, head_units, kv_group_units
from headscope.interventions.kinds import DocumentMean, InputsFunction, OutputFunction, Scale, Uniform, Zero
from headscope.interventions.position_kinds import PositionReset
from headscope.positions import AdaRoPE, attached, resolve_schedule
from headscope.positions.model import Model
from headscope.positions.schedule import FixedSchedule, Schedule

COMPONENTS = ("freq", "scale", "joint")


@pytest.fixture(scope="module", params=families.MEASURABLE)
def model(request: pytest.FixtureRequest) -> Model:
    """Shared by the tests of a family: leave it as you found it."""
    return hs.load(families.MEASURABLE[request.param]())


@pytest.mark.exhaustive(sample=9)
@pytest.mark.slow
@pytest.mark.parametrize("target", ["init", "base"])
def test_replayed_reset_equals_an_adapter_with_reset_parameters(model: Model, target: str) -> None:
    adapter = noisy(model)
    then = adapter.untrained_copy() if target == "init" else FixedSchedule.of_checkpoint(model)
    turn = cycle(COMPONENTS if target == "init" else COMPONENTS[1:] + COMPONENTS[:1])
    cases = [(next(turn), unit) for unit in kv_group_units(model.geometry)]  # every component in several layers
    if target == "base" and 2 * model.geometry.pairs < model.geometry.head_dim:
        cases = [case for case in cases if case[0] == "freq"]  # tau cannot express the factor of cos and sin
    resets = [(PositionReset(component, adapter, then, model.geometry), [unit]) for component, unit in cases]
    *losses, nothing = replay_losses(model, adapter, resets)
    assert nothing == pytest.approx(full_pass_loss(model, adapter), abs=1e-6)
    for (component, unit), loss in zip(cases, losses, strict=True):
        written = neutral(model) if target == "base" and component != "freq" else then
        expected = full_pass_loss(model, reset_adapter(model, adapter, component, [unit], written))
        assert loss == pytest.approx(expected, abs=1e-5), (component, unit)


def neutral(model: Model) -> AdaRoPE:
    """The checkpoint's own positions written as adapter parameters: lambda = 1."""
    return AdaRoPE.from_schedule(model, FixedSchedule.of_checkpoint(model))


@pytest.mark.slow
def test_resetting_no_unit_changes_no_bit(model: Model) -> None:
    adapter = noisy(model)
    every = kv_group_units(model.geometry), head_units(model.geometry)
    same = [
        (PositionReset(component, adapter, adapter, model.geometry), units)
        for component in COMPONENTS
        for units in every
    ]
    *losses, nothing = replay_losses(model, adapter, same)
    assert set(losses) == {nothing}


@pytest.mark.slow
@pytest.mark.parametrize("target", ["init", "base"])
def test_resetting_every_unit_jointly_is_the_model_under_the_target(model: Model, target: str) -> None:
    adapter = noisy(model)
    then = adapter.untrained_copy() if target == "init" else FixedSchedule.of_checkpoint(model)
    reset = PositionReset("joint", adapter, then, model.geometry)
    by_group, by_head, _ = replay_losses(
        model, adapter, [(reset, kv_group_units(model.geometry)), (reset, head_units(model.geometry))]
    )
    assert by_group == pytest.approx(full_pass_loss(model, then), abs=1e-5)
    assert by_head == pytest.approx(by_group, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("component", COMPONENTS)
def test_a_head_reset_without_its_group_attends_to_its_own_reset_keys(model: Model, component: Any) -> None:
    """By hand: the layer's keys before rotation are turned as the reset adapter turns them, for one head only."""
    geometry, adapter = model.geometry, noisy(model)
    unit = head_units(geometry)[geometry.heads + 1]
    then = reset_adapter(model, adapter, component, [Unit(unit.layer, unit.kv_group)], adapter.untrained_copy())
    outputs = []
    # The layer sees the same stream under both, so its z differs through the reset alone.
    for schedule in (adapter, then):
        with attached(model, schedule), capturing(model) as layers, torch.no_grad():
            layers.listen(lambda record: outputs.append(record.z.clone()), [unit.layer])
            model.module(IDS, use_cache=False)
    before, after = outputs
    reset = PositionReset(component, adapter, adapter.untrained_copy(), geometry)
    with attached(model, adapter), edited(model, [edit_units(reset, [unit], geometry)]) as layers, torch.no_grad():
        layers.listen(lambda record: outputs.append(record.z.clone()), [unit.layer])
        model.module(IDS, use_cache=False)
    changed = outputs.pop()
    torch.testing.assert_close(changed[unit.head], after[unit.head], rtol=1e-4, atol=1e-4)
    other_heads = [head for head in range(geometry.heads) if head != unit.head]
    assert torch.equal(changed[other_heads], before[other_heads])
    assert not torch.allclose(before[unit.head], after[unit.head], atol=1e-3)


def by_hand(model: Model, unit: Unit, edit: Callable[[Tensor], Tensor]) -> float:
    """Loss with `edit` on the unit's slice of the input of o_proj, found by its width."""
    projection = next(
        module
        for name, module in model.attention_modules[unit.layer].named_modules()
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in ("o_proj", "dense")
    )
    width = model.geometry.head_dim
    at = unit.head_slice(model.geometry)

    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor]:
        changed = args[0].clone()
        cut = slice(at.start * width, at.stop * width)
        changed[..., cut] = edit(changed[..., cut])
        return (changed,)

    handle = projection.register_forward_pre_hook(hook)
    try:
        return full_pass_loss(model, resolve_schedule(model, "base"))
    finally:
        handle.remove()


def test_zero_and_mean_ablation_equal_editing_the_input_of_o_proj(model: Model) -> None:
    unit, schedule = head_units(model.geometry)[-2], resolve_schedule(model, "base")
    zero, mean, uniform, _ = replay_losses(
        model, schedule, [(kind, [unit]) for kind in (Zero(), DocumentMean(), Uniform())]
    )
    assert zero == pytest.approx(by_hand(model, unit, torch.zeros_like), abs=1e-6)
    assert mean == pytest.approx(by_hand(model, unit, lambda z: z.mean(1, keepdim=True)), abs=1e-6)
    assert abs(uniform - zero) > 1e-4, "uniform attention is not zero ablation"


def test_uniform_queries_average_the_visible_values(model: Model) -> None:
    unit = head_units(model.geometry)[1]
    window = model.geometry.windows[unit.layer]
    records: list[AttentionRecord] = []
    with edited(model, [edit_units(Uniform(), [unit], model.geometry)]) as layers, torch.no_grad():
        layers.listen(records.append, [unit.layer])
        model.module(IDS, use_cache=False)
    (record,) = records
    for i in (0, 5, 47):
        visible_values = record.v[unit.kv_group, max(0, i + 1 - (window or 48)) : i + 1]
        torch.testing.assert_close(record.z[unit.head, i], visible_values.mean(0), rtol=1e-5, atol=1e-5)


def test_user_edit_changes_only_the_tensors_of_its_unit() -> None:
    model = hs.load(families.MEASURABLE["llama-gqa"]())
    shapes = []

    def silent(q: Tensor, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        shapes.append((layer, q.shape[1], k.shape[1], v.shape[1]))
        return q, k, torch.zeros_like(v)

    schedule, group, head = resolve_schedule(model, "base"), Unit(2, 1), Unit(3, 0, 1)
    losses = replay_losses(model, schedule, [(InputsFunction(silent), [unit]) for unit in (group, head)])
    zero = replay_losses(model, schedule, [(Zero(), [unit]) for unit in (group, head)])
    assert shapes == [(2, 2, 1, 1), (3, 1, 1, 1)]
    assert losses == pytest.approx(zero, abs=1e-6)


def test_a_user_edit_of_several_units_gets_each_of_them_alone() -> None:
    model = hs.load(families.MEASURABLE["llama-gqa"]())
    shapes = []

    def doubled(q: Tensor, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        shapes.append((layer, q.shape[1], k.shape[1], v.shape[1]))
        return q, k, 2 * v

    units = [Unit(2, 0), Unit(2, 1), Unit(3, 0, 0), Unit(3, 0, 1), Unit(3, 1, 2)]
    schedule = resolve_schedule(model, "base")
    together, _ = replay_losses(model, schedule, [(InputsFunction(doubled), units)])
    expected, _ = replay_losses(model, schedule, [(Scale(2), units)])
    assert shapes == [(2, 2, 1, 1)] * 2 + [(3, 1, 1, 1)] * 3
    assert together == pytest.approx(expected, abs=1e-6)


def test_a_user_edit_at_some_tokens_keeps_the_others() -> None:
    model = hs.load(families.MEASURABLE["llama-gqa"]())
    records: list[AttentionRecord] = []
    one = edit(model, InputsFunction(lambda q, k, v, layer: (q + 1, k + 1, v + 1)), "L1H2", TokenSet(slice(3, -4)))
    for edits in ((), (one,)):
        with edited(model, edits) as layers, torch.no_grad():
            layers.listen(records.append, [1])
            model.module(IDS, use_cache=False)
    plain, changed = records
    expected = torch.zeros(IDS.shape[1], 1)
    expected[3:-4] = 1
    torch.testing.assert_close(changed.q[2] - plain.q[2], expected.expand_as(plain.q[2]))
    assert torch.equal(changed.q[[0, 1, 3]], plain.q[[0, 1, 3]])
    for name in "kv":
        own, before = getattr(changed, name), getattr(plain, name).repeat_interleave(2, 0)
        torch.testing.assert_close(own[2] - before[2], expected.expand_as(before[2]))
        assert torch.equal(own[[0, 1, 3]], before[[0, 1, 3]])


@pytest.mark.parametrize("target", ["q", "z"])
def test_a_function_of_single_heads_changes_their_vectors(target: str) -> None:
    model = hs.load(families.MEASURABLE["llama-gqa"]())
    records: list[AttentionRecord] = []
    halved = OutputFunction(lambda t: t / 2)
    for edits in ((), (edit(model, halved, "L1H2,L1H3", targets=[target]),)):
        with edited(model, edits) as layers, torch.no_grad():
            layers.listen(records.append, [1])
            model.module(IDS, use_cache=False)
    before, after = (getattr(record, target) for record in records)
    assert torch.equal(after[2:], before[2:] / 2)
    assert torch.equal(after[:2], before[:2])


@pytest.mark.parametrize(("result", "named"), [(None, ("NoneType",)), (torch.zeros(1), ("shape", "(1,)"))])
def test_a_function_of_single_heads_that_returns_no_vectors_is_refused(result: Any, named: tuple[str, ...]) -> None:
    def failing(t: Tensor) -> Any:
        return result

    model = hs.load(families.MEASURABLE["llama-gqa"]())
    with (
        edited(model, [edit(model, OutputFunction(failing), "L1H2")]),
        torch.no_grad(),
        refuses(BadInput, "'failing'", "layer 1", "z", *named),
    ):
        model.module(IDS, use_cache=False)


def test_an_unused_edit_changes_no_bit(model: Model) -> None:
    with torch.no_grad():
        plain = model.module(IDS, use_cache=False).logits
        with capturing(model) as layers:
            layers.edit_output(1, lambda z, call: z)
            assert torch.equal(model.module(IDS, use_cache=False).logits, plain)
        assert torch.equal(model.module(IDS, use_cache=False).logits, plain)


def test_changes_reach_each_sequence_of_a_padded_batch_without_its_padding() -> None:
    model = hs.load(families.MEASURABLE["llama-gqa"]())
    adapter, unit = noisy(model), Unit(1, 0)
    reset = edit_units(
        PositionReset("joint", adapter, adapter.untrained_copy(), model.geometry), [unit], model.geometry
    )
    short = IDS[:, :20]
    batch = torch.cat((IDS, nn.functional.pad(short, (28, 0))))
    mask = torch.cat((torch.ones_like(IDS), nn.functional.pad(torch.ones_like(short), (28, 0))))
    positions = torch.stack((torch.arange(48), torch.arange(48) - 28)).clamp(min=0)
    with attached(model, adapter), torch.no_grad():
        plain = model.module(IDS, use_cache=False).logits[0]
    with attached(model, adapter), edited(model, [reset]), torch.no_grad():
        together = model.module(batch, attention_mask=mask, position_ids=positions, use_cache=False).logits
        alone = [model.module(ids, use_cache=False).logits[0] for ids in (IDS, short)]
    torch.testing.assert_close(together[0], alone[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(together[1, 28:], alone[1], rtol=1e-4, atol=1e-4)
    assert (alone[0] - plain).abs().max() > 0.1


@pytest.mark.model
def test_units_of_the_real_model_equal_brute_force(smollm2: Model, tokens: Tensor) -> None:
    """Every component to every target, in layers from the first to the last."""
    adapter, ids = noisy(smollm2, 0.1), tokens[:, :32]
    layers, targets = (0, 5, 13, 18, 24, 29), ("init", "base", "init", "base", "init", "base")
    cases = [
        (component, Unit(layer, layer % 3), target)
        for layer, component, target in zip(layers, COMPONENTS * 2, targets, strict=True)
    ]
    thens: dict[str, Schedule] = {"init": adapter.untrained_copy(), "base": FixedSchedule.of_checkpoint(smollm2)}
    resets = [(PositionReset(c, adapter, thens[target], smollm2.geometry), [unit]) for c, unit, target in cases]
    *losses, nothing = replay_losses(smollm2, adapter, resets, ids)
    thens["base"] = neutral(smollm2)
    assert nothing == pytest.approx(full_pass_loss(smollm2, adapter, ids), abs=1e-6)
    worst = 0.0
    for (component, unit, target), loss in zip(cases, losses, strict=True):
        expected = full_pass_loss(smollm2, reset_adapter(smollm2, adapter, component, [unit], thens[target]), ids)
        worst = max(worst, abs(loss - expected))
    print(f"worst difference to brute force over {len(cases)} units: {worst:.2e} nats")
    assert worst < 1e-5


# Edits that do not fit ---------------------------------------------------------------------------------------------


def narrower(q: Tensor, k: Tensor, v: Tensor, _: Any) -> Any:
    return q[..., :3], k, v


def fewer_keys(q: Tensor, k: Tensor, v: Tensor, _: Any) -> Any:
    return q, k[:, :, :-1], v


def more_groups(q: Tensor, k: Tensor, v: Tensor, _: Any) -> Any:
    return q, torch.cat([k, k], 1), v


def doubled(q: Tensor, k: Tensor, v: Tensor, _: Any) -> Any:
    return q.double(), k, v


def elsewhere(q: Tensor, k: Tensor, v: Tensor, _: Any) -> Any:
    return q, k, v.to("meta")


def not_finite(q: Tensor, k: Tensor, v: Tensor, _: Any) -> Any:
    return q, k, v / 0


def two_tensors(q: Tensor, k: Tensor, v: Tensor, _: Any) -> Any:
    return q, k


def nothing(q: Tensor, k: Tensor, v: Tensor, _: Any) -> Any:
    return None


BAD_EDITS = {
    narrower: ("q", "shape"),
    fewer_keys: ("k", "shape"),
    more_groups: ("k", "shape"),
    doubled: ("q", "dtype", "torch.float64", "torch.float32"),
    elsewhere: ("v", "device", "meta", "cpu"),
    not_finite: ("v", "finite"),
    two_tensors: ("3 tensors", "(q, k, v)"),
    nothing: ("3 tensors", "(q, k, v)"),
}


@pytest.mark.parametrize(("edit", "named"), BAD_EDITS.items(), ids=lambda value: getattr(value, "__name__", ""))
def test_an_edit_that_does_not_fit_is_refused_by_name_and_layer(
    model: Model, edit: Any, named: tuple[str, ...]
) -> None:
    with capturing(model) as layers, torch.no_grad():
        layers.edit_qkv(1, edit)
        with refuses(BadInput, f"'{edit.__name__}'", "layer 1", *named):
            model.module(IDS, use_cache=False)
    of_unit = edit_units(InputsFunction(edit), [Unit(2, 0, 0)], model.geometry)
    with edited(model, [of_unit]), torch.no_grad(), refuses(BadInput, f"'{edit.__name__}'", "layer 2", *named):
        model.module(IDS, use_cache=False)
