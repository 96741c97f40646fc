"""Published layouts whose layers differ in heads, KV groups, head_dim or rotary pairs, or share keys.

Every measure of Gemma 3n, Gemma 4, MiMo-V2-Flash and Laguna is compared with the family's own eager attention.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.adapters import noisy, reset_adapter
from support.refusals import refuses
from support.tiny_studies import save_texts, tokenizer
from support.whole_model import loss_without_head, output_projection, total_loss
from torch import Tensor, nn
from transformers import PreTrainedModel
from zoo import checks, decoding_and_bf16, gemma
from zoo.build import tiny
from zoo.eager import eager, tokens

import headscope as hs
from headscope.attention.edits import TokenSet
from headscope.attention.masks import UnsupportedMask
from headscope.decomposition.logit_attribution import attribute_logits
from headscope.errors import UnsupportedModel
from headscope.forward.carried_state import ARGUMENT, CarriedState
from headscope.interventions.edits import Edit, edit_units
from headscope.interventions.heads import head_units, kv_group_units
from headscope.interventions.kinds import Zero
from headscope.interventions.position_kinds import PairUnrotation, PairZeroAblation, PositionReset
from headscope.interventions.replay import Replay
from headscope.models import checkpoint
from headscope.plots.head_matrices import plot_matrix
from headscope.positions import AdaRoPE
from headscope.positions.model import Model
from headscope.runs.aggregation import group_members
from headscope.runs.run_tables import validate
from headscope.study.executor import describe_geometry
from probes.influence.bands import expand_bands
from probes.measure import run as measure_run
from probes.measure.run import measure_tokens
from probes.positions.run import position_tables

pytestmark = pytest.mark.slow  # many models

TOLERANCE = 2e-5
SHARING = ("gemma-4-E2B", "gemma-4-E4B", "gemma-3n-E2B", "gemma-3n-E4B")
UNEQUAL = ("gemma-4-26B-A4B", "gemma-4-12B", "MiMo-V2-Flash", "Laguna-XS.2")
"""Layouts without shared keys, each with another kind of difference between layers."""


@cache
def loaded(layout: str) -> Model:
    """Shared by the tests: leave it as you found it."""
    return hs.load(gemma.LAYOUTS[layout]())


def short_text(model: Model) -> Tensor:
    return tokens(model.module)[:, :24]


# Measures ----------------------------------------------------------------------------------------------------------


@pytest.mark.exhaustive(sample=3)
@pytest.mark.parametrize("layout", gemma.LAYOUTS)
def test_a_published_layout_is_measured_like_its_eager_attention(layout: str) -> None:
    """Attention, loss, rotary pairs, frequencies and YaRN."""
    verdict = checks.check_model(gemma.LAYOUTS[layout])
    assert verdict.kind == "right", verdict
    assert max(verdict.errors.values()) <= TOLERANCE, verdict.errors
    assert max(verdict.errors[name] for name in ("logits", "loss", "yarn logits")) <= 1e-5


@pytest.mark.parametrize("layout", ["gemma-4-E2B", "gemma-4-12B", "MiMo-V2-Flash", "Laguna-XS.2"])
def test_a_published_layout_decodes_with_a_cache_like_one_eager_pass(layout: str) -> None:
    module = gemma.LAYOUTS[layout]()
    ids = tokens(module)
    truth = eager(module, ids)
    errors = decoding_and_bf16.decoding_errors(hs.load(module), ids, truth)
    assert max(errors.values()) <= TOLERANCE, errors


SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "gemma-4-E2B": {"heads": (8, 8), "kv_groups": (1, 1), "head_dims": (16, 32), "pairs": (8, 16)},
    "gemma-4-26B-A4B": {"heads": (16, 16), "kv_groups": (8, 2), "head_dims": (16, 32), "pairs": (8, 16)},
    "gemma-4-12B": {"heads": (16, 16), "kv_groups": (8, 1), "head_dims": (16, 32), "pairs": (8, 16)},
    "MiMo-V2-Flash": {"heads": (64, 64), "kv_groups": (8, 4), "head_dims": (24, 24), "pairs": (4, 4)},
    "Laguna-XS.2": {"heads": (64, 48), "kv_groups": (8, 8), "head_dims": (16, 16), "pairs": (8, 4)},
}
"""Shape of local and of global layers."""


@pytest.mark.parametrize("layout", SHAPES)
def test_every_layer_has_its_own_shape_in_geometry_and_tables(layout: str) -> None:
    model = loaded(layout)
    types = model.module.config.get_text_config().layer_types
    stored = describe_geometry(model)
    for name, (local, of_global) in SHAPES[layout].items():
        expected = tuple(local if layer_type == gemma.LOCAL else of_global for layer_type in types)
        assert getattr(model.geometry, f"layer_{name}") == expected
        assert stored.get(f"layer_{name}") == (None if local == of_global else expected)
    measured = measure_tokens(model, short_text(model)[0], ["pairs", "distance", "attention"], 4)
    for name in ("pairs", "distance", "attention"):
        rows = {name: column.tolist() for name, column in measured[name].items()}
        for layer, heads in enumerate(model.geometry.layer_heads):
            of_layer = [at for at, number in enumerate(rows["layer"]) if number == layer]
            assert {rows["head"][at] for at in of_layer} == {*range(heads)}
            groups = {rows["kv_group"][at] for at in of_layer}
            assert groups == {*range(model.geometry.layer_kv_groups[layer])}
            if name != "attention":
                pairs = {rows["pair"][at] for at in of_layer}
                assert pairs == {*range(model.geometry.layer_head_dims[layer] // 2)}


@pytest.mark.parametrize("layout", UNEQUAL)
def test_position_tables_have_the_groups_pairs_and_heads_of_each_layer(layout: str) -> None:
    model = loaded(layout)
    geometry = model.geometry
    tables = position_tables("m", model.with_schedule(noisy(model), "adarope"))
    positions, scales = tables["positions"], tables["scales"]
    for layer in range(geometry.layers):
        count = geometry.layer_kv_groups[layer] * (geometry.layer_head_dims[layer] // 2)
        assert (positions["layer"] == layer).sum() == count
        assert scales["head"][scales["layer"] == layer].tolist() == [*range(geometry.layer_heads[layer])]
    assert np.isfinite(scales["logit_scale"]).all()


def test_a_stored_run_and_its_matrix_have_the_heads_of_each_layer(tmp_path: Path) -> None:
    model = hs.load(gemma.laguna(), tokenizer=tokenizer())
    heads_by_layer = model.geometry.layer_heads
    run = hs.measure({"m": model}, text=save_texts(tmp_path / "texts"), docs=1, lengths=[24], out=tmp_path, quiet=True)
    assert validate(run) == []
    assert run.heads.groupby("layer").size().tolist() == [*heads_by_layer]
    figure = plot_matrix(run.heads, "max_weight", "m")
    matrix = next(trace for trace in figure.data if trace.type == "heatmap")
    is_drawn = np.isfinite(np.array(matrix.z, dtype=float))
    assert sorted(is_drawn.sum(axis=1)) == sorted(heads_by_layer)
    members = group_members(run.manifest["models"]).groupby(["layer", "kv_group"]).size().unstack()
    assert members.to_numpy().tolist() == [[heads // 8] * 8 for heads in heads_by_layer]


# A model in memory ---------------------------------------------------------------------------------------------------


def state(module: nn.Module) -> tuple[dict[str, Tensor], list[Any]]:
    """Copies of all parameters and buffers, and every part's configuration and attention implementation."""
    tensors = {name: t.clone() for name, t in (*module.named_parameters(), *module.named_buffers())}
    parts = [part for part in module.modules() if isinstance(part, PreTrainedModel)]
    configs = [
        (part.config.to_json_string(use_diff=False), part.config._attn_implementation_internal) for part in parts
    ]
    return tensors, [*configs, [submodule.training for submodule in module.modules()]]


def assert_same_state(before: tuple[dict[str, Tensor], list[Any]], module: nn.Module) -> None:
    tensors, configs = state(module)
    assert configs == before[1]
    assert tensors.keys() == before[0].keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == before[0][name].dtype, name
        assert torch.equal(*(t.reshape(-1).view(torch.uint8) for t in (tensor, before[0][name]))), name


@pytest.mark.exhaustive(sample=3)
@pytest.mark.parametrize("layout", gemma.LAYOUTS)
def test_a_model_in_memory_is_left_bit_for_bit_as_it_came(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = gemma.LAYOUTS[layout]().train()
    before = state(module)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "check_against_eager", _raise_interrupt)
        with pytest.raises(KeyboardInterrupt):
            hs.load(module)
    assert_same_state(before, module)
    model = hs.load(module)
    assert_same_state(before, module)
    measure_tokens(model, short_text(model)[0], ["attention", "pairs", "nll"], 4)
    measure_tokens(model.with_scheme("yarn:factor=4"), short_text(model)[0], ["attention"], 4)
    assert_same_state(before, module)
    with pytest.raises(KeyboardInterrupt):
        interrupt_first_layer(model)
    assert_same_state(before, module)


def interrupt_first_layer(model: Model) -> None:
    with hs.attached(model, "linear:factor=2"), hs.capturing(model) as layers:
        layers.listen(_raise_interrupt)
        model.module(input_ids=short_text(model))


@pytest.mark.exhaustive(sample=3)
@pytest.mark.parametrize("layout", gemma.LAYOUTS)
def test_a_published_layout_opens_from_a_folder_as_it_is_in_memory(layout: str, tmp_path: Path) -> None:
    """The audio tower of Gemma 4 E2B and E4B supports no sdpa attention."""
    in_memory = loaded(layout)
    in_memory.module.save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    opened, ids = hs.load(str(tmp_path)), short_text(in_memory)
    assert opened.geometry == in_memory.geometry
    assert opened.weights_sha256 == in_memory.weights_sha256
    with torch.no_grad():
        expected = in_memory.module(ids, use_cache=False).logits
        assert checks.relative(opened.module(ids, use_cache=False).logits, expected) <= 1e-5


def _raise_interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def test_an_image_in_gemma_4_12b_is_refused_and_text_is_not() -> None:
    """Its mask shows the tokens of an image to each other. Text leaves that mask causal."""
    model = loaded("gemma-4-12B")
    ids = short_text(model)
    image_tokens = torch.zeros_like(ids)
    image_tokens[0, 3:7] = 1
    with hs.capturing(model), torch.no_grad():
        model.module(input_ids=ids, mm_token_type_ids=torch.zeros_like(ids), use_cache=False)
        with refuses(UnsupportedMask, "mask"):
            model.module(input_ids=ids, mm_token_type_ids=image_tokens, use_cache=False)


# Ablation, patching and gradients ------------------------------------------------------------------------------------


def replay_of(model: Model, ids: Tensor) -> Replay:
    return Replay(model, model.schedule, ids, memory_bytes=1e9)


def ablation_errors(model: Model, ids: Tensor) -> list[float]:
    """Relative differences of the loss without a head, replayed and by a hook in the whole model."""
    replay, units = replay_of(model, ids), head_units(model.geometry)
    chosen = units[5 :: len(units) // 9]
    with replay.capturing():
        replay.record_streams()
        losses = dict(replay.losses([*([edit_units(Zero(), [unit], model.geometry)] for unit in chosen), ()]))
    expected = [loss_without_head(model, unit, ids) for unit in chosen]
    with torch.no_grad():
        expected.append(float(total_loss(model, ids)))
    return [abs(float(losses[number].double().sum()) / loss - 1) for number, loss in enumerate(expected)]


@pytest.mark.exhaustive(sample=3)
@pytest.mark.parametrize("layout", gemma.LAYOUTS)
def test_replayed_ablation_equals_ablation_in_the_whole_model(layout: str) -> None:
    model = loaded(layout)
    assert max(ablation_errors(model, short_text(model))) <= 1e-6


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits, targets, reduction="sum")


def one_logit(logits: Tensor, targets: Tensor) -> Tensor:
    return logits[-3, 5]


@pytest.mark.parametrize("layout", [*SHARING, "gemma-4-26B-A4B", "MiMo-V2-Flash"])
def test_gradients_of_the_replay_equal_those_of_the_whole_model(layout: str) -> None:
    """Shared keys carry gradients back to the layer that wrote them."""
    model = loaded(layout)
    ids, replay = short_text(model), replay_of(model, short_text(model))
    replayed: dict[int, list[Tensor]] = {}
    with replay.capturing():
        replay.record_streams()
        replay.backpropagate([summed_loss, one_logit], lambda layer, z, call, slopes: replayed.update({layer: slopes}))
    for number, objective in enumerate((summed_loss, one_logit)):
        for layer, expected in whole_model_gradients(model, ids, objective).items():
            assert checks.relative(replayed[layer][number], expected) <= 3e-5, layer


def whole_model_gradients(model: Model, ids: Tensor, objective: Any) -> dict[int, Tensor]:
    """Gradients with respect to the inputs [1, H, L, dv] of every layer's output projection, by torch's autograd."""
    inputs: dict[int, Tensor] = {}

    def keep_input(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            args[0].retain_grad()
            inputs[layer] = args[0]

        return hook

    with ExitStack() as stack:
        for layer in range(model.geometry.layers):
            handle = output_projection(model, layer).register_forward_pre_hook(keep_input(layer))
            stack.callback(handle.remove)
        objective(model.module(ids, use_cache=False).logits[0, :-1].float(), ids[0, 1:]).backward()
    model.module.zero_grad(set_to_none=True)
    heads = model.geometry.layer_heads
    gradients = {layer: tensor.grad for layer, tensor in inputs.items()}
    return {n: t.unflatten(-1, (heads[n], -1)).transpose(1, 2) for n, t in gradients.items() if t is not None}


Activations = dict[nn.Module, dict[str, Tensor]]
"""q, k and v of attention modules, after rotation and norms."""


def eager_activations(model: Model, ids: Tensor) -> Activations:
    recorded: Activations = {}
    with torch.no_grad(), eager_attention(model, recorded, {}):
        model.module(ids, use_cache=False)
    return recorded


@contextmanager
def eager_attention(model: Model, recorded: Activations, replaced: Activations) -> Iterator[None]:
    """Record q, k and v of the family's own eager attention, and replace some of them in some modules."""
    namespace = sys.modules[type(model.attention_modules[0]).__module__]
    original = namespace.eager_attention_forward

    def forward(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        recorded[module] = {"q": q, "k": k, "v": v}
        new = recorded[module] | replaced.get(module, {})
        return original(module, new["q"], new["k"], new["v"], *args, **kwargs)

    namespace.eager_attention_forward = forward
    try:
        yield
    finally:
        namespace.eager_attention_forward = original


@pytest.mark.exhaustive(sample=3)
@pytest.mark.parametrize("activation", ["q", "k", "v"])
@pytest.mark.parametrize("layout", [*SHARING[::2], "gemma-4-12B", "Laguna-XS.2"])
def test_patched_activations_equal_eager_attention_patched_by_hand(layout: str, activation: Any) -> None:
    model = loaded(layout)
    geometry, ids = model.geometry, short_text(model)
    other = ids.flip(1)
    runs = [replay_of(model, text) for text in (ids, other)]
    tested_layers, logits = (0, geometry.layers // 2 - 3, geometry.layers - 1), {}
    with runs[0].capturing():
        for run in runs:
            run.record_streams()
        for layer in tested_layers:
            heads = tuple((layer, head) for head in range(geometry.layer_heads[layer]))
            patch = Edit(runs[1].source(activation), heads, (activation,), TokenSet(slice(4, 20)))
            logits[layer] = runs[0].target_logits([patch])
    own, source = (eager_activations(model, text) for text in (ids, other))
    for layer in tested_layers:
        module = model.attention_modules[layer]
        patched = own[module][activation].clone()
        patched[:, :, 4:20] = source[module][activation][:, :, 4:20]
        with torch.no_grad(), eager_attention(model, {}, {module: {activation: patched}}):
            expected = model.module(ids, use_cache=False).logits[0, :-1]
        assert checks.relative(logits[layer], expected) <= 1e-5, layer


def test_a_model_whose_resumed_passes_read_other_keys_than_full_ones_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A planted fault: the layers that a resumed pass leaves out hand on keys that are 10 % too large."""
    outputs = CarriedState.outputs

    def with_larger_keys(self: CarriedState, layer: int, stream: Tensor, copies: int, kwargs: dict[str, Any]) -> Any:
        returned = outputs(self, layer, stream, copies, kwargs)
        kwargs[ARGUMENT].update({kind: (1.1 * k, v) for kind, (k, v) in kwargs[ARGUMENT].items()})
        return returned

    monkeypatch.setattr(CarriedState, "outputs", with_larger_keys)
    model = hs.load(gemma.LAYOUTS["gemma-4-E2B"]())
    named = (model.name, model.module.config.model_type, "resumed")
    with replay_of(model, short_text(model)).capturing(), refuses(UnsupportedModel, *named):
        replay_of(model, short_text(model)).record_streams()


def test_the_checks_notice_frequencies_of_another_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: all layers are said to rotate like the first."""
    frequencies = measure_run.frequencies_by_layer
    monkeypatch.setattr(measure_run, "frequencies_by_layer", lambda *args: frequencies(*args)[:1].expand(48, -1, -1))
    model = loaded("MiMo-V2-Flash")
    ids = tokens(model.module)
    assert checks._check_shift_rotation(model, ids, checks.eager(model.module, ids))["theta"] > 1e-2


# Position schemes ----------------------------------------------------------------------------------------------------


def test_yarn_for_an_odd_number_of_rotary_dimensions_is_refused_by_name() -> None:
    """A third of 16 dimensions: transformers pairs 5 of them, and its YaRN fails."""
    model = hs.load(tiny("mimo_v2_flash", {"head_dim": 16}))
    with refuses(UnsupportedModel, "yarn", f"'{model.name}'", "mimo_v2_flash", 5):
        model.with_scheme("yarn:factor=4").schedule  # noqa: B018
    even = hs.load(tiny("mimo_v2_flash", {"head_dim": 24}))
    assert even.with_scheme("yarn:factor=4").schedule.theta(0).shape == (1, 4)


@contextmanager
def rotated_by_hand(model: Model, adapter: AdaRoPE, length: int) -> Iterator[None]:
    """The family's eager attention with each head rotated by its group's frequencies, and queries scaled by 1 / tau."""
    namespace = sys.modules[type(model.attention_modules[0]).__module__]
    index_of = {module: layer for layer, module in enumerate(model.attention_modules)}
    rotate, attend = namespace.apply_rotary_pos_emb, namespace.eager_attention_forward
    entered_layers: list[int] = []

    def rotated(x: Tensor, layer: int, axis: int) -> Tensor:
        theta = adapter.theta(layer).detach()
        heads = x if axis == 1 else x.transpose(1, 2)
        pairs, per_group = theta.shape[1], heads.shape[1] // len(theta)
        out = heads.clone()
        for head in range(heads.shape[1]):
            angles = torch.arange(length)[:, None].float() * theta[head // per_group]
            a, b = heads[:, head, :, :pairs], heads[:, head, :, pairs : 2 * pairs]
            out[:, head, :, :pairs] = a * angles.cos() - b * angles.sin()
            out[:, head, :, pairs : 2 * pairs] = b * angles.cos() + a * angles.sin()
        out[..., : 2 * pairs] *= adapter.attention_factor(layer)
        return out if axis == 1 else out.transpose(1, 2)

    def apply_rotary_pos_emb(*args: Any, unsqueeze_dim: int = 1, **kwargs: Any) -> Any:
        vectors = [t for t in args if t.dim() == 4]
        results = tuple(rotated(t, entered_layers[-1], unsqueeze_dim) for t in vectors)
        return results if len(results) > 1 else results[0]

    def eager_attention_forward(module: nn.Module, q: Tensor, *args: Any, **kwargs: Any) -> Any:
        heads = q.shape[1]
        tau, gamma = (t[index_of[module], :heads].detach() for t in (adapter.tau, adapter.gamma))
        visible = torch.arange(1, length + 1).clamp(min=adapter.reference_length)
        growth = torch.log1p(visible / adapter.reference_length)
        return attend(module, q * (growth ** gamma[:, None] / tau[:, None])[None, ..., None], *args, **kwargs)

    with ExitStack() as stack:
        for module, layer in index_of.items():
            handle = module.register_forward_pre_hook(lambda *_, layer=layer: entered_layers.append(layer))
            stack.callback(handle.remove)
        for name, function in (("apply_rotary_pos_emb", rotate), ("eager_attention_forward", attend)):
            stack.callback(setattr, namespace, name, function)
            setattr(namespace, name, locals()[name])
        yield


@pytest.mark.parametrize("layout", ["gemma-4-26B-A4B", "MiMo-V2-Flash", "Laguna-XS.2"])
def test_an_adapter_rotates_and_scales_every_head_of_unequal_layers(layout: str, tmp_path: Path) -> None:
    model = loaded(layout)
    ids, adapter = short_text(model), noisy(model)
    with torch.no_grad(), rotated_by_hand(model, adapter, ids.shape[1]):
        expected = model.module(ids, use_cache=False).logits
    stored = AdaRoPE.load(adapter.save(tmp_path / "adapter.safetensors"), model)
    for schedule in (adapter, stored):
        with torch.no_grad(), hs.attached(model, schedule):
            assert checks.relative(model.module(ids, use_cache=False).logits, expected) <= TOLERANCE
    with torch.no_grad():
        assert checks.relative(model.module(ids, use_cache=False).logits, expected) > 1e-3


@pytest.mark.parametrize("layout", ["gemma-4-12B", "Laguna-XS.2"])
def test_a_reset_unit_of_unequal_layers_equals_an_adapter_with_reset_parameters(layout: str) -> None:
    model = loaded(layout)
    adapter, ids = noisy(model), short_text(model)
    initial, replay = adapter.untrained_copy(), Replay(model, adapter, ids, memory_bytes=1e9)
    cases = list(zip(kv_group_units(model.geometry)[2::41], cycle(("freq", "scale", "joint"))))
    with replay.capturing():
        replay.record_streams()
        resets = [PositionReset(component, adapter, initial, model.geometry) for _, component in cases]  # type: ignore[arg-type]
        runs = [[edit_units(reset, [unit], model.geometry)] for reset, (unit, _) in zip(resets, cases, strict=True)]
        replayed = dict(replay.losses(runs))
    for number, (unit, component) in enumerate(cases):
        loss = float(replayed[number].double().sum())
        rewritten = reset_adapter(model, adapter, component, [unit], initial)  # type: ignore[arg-type]
        with torch.no_grad(), hs.attached(model, rewritten):
            assert loss == pytest.approx(float(total_loss(model, ids)), rel=1e-6), (unit, component)


def test_bands_of_pairs_leave_out_pairs_that_a_layer_does_not_have() -> None:
    model = loaded("gemma-4-26B-A4B")
    theta = model.rotation.theta.numpy().copy()
    theta[[layer for layer, pairs in enumerate(model.rotation.layer_pairs) if pairs == 8], 8:] = np.nan
    for band in ("8-15", "long"):
        ((_, pairs),) = expand_bands(f"pairs-zero:{band}", theta, model.geometry.native_context)
        assert not pairs[:5, 8:].any()
    mask, ids = torch.from_numpy(pairs), short_text(model)
    replay = replay_of(model, ids)
    with replay.capturing():
        replay.record_streams()
        for kind in (PairZeroAblation(mask, model.geometry), PairUnrotation(mask, model.schedule, model.geometry)):
            units = head_units(model.geometry)[::60]
            for _, losses in replay.losses([[edit_units(kind, [unit], model.geometry)] for unit in units]):
                assert torch.isfinite(losses).all()


def test_schemes_are_refused_with_a_reason_where_they_do_not_apply() -> None:
    for layout, scheme, cause in (("Laguna-XS.2", "alibi", "part"), ("gemma-4-E2B", "adarope", "keys")):
        model = loaded(layout)
        with refuses(UnsupportedModel, scheme, f"'{model.name}'", cause):
            AdaRoPE.from_schedule(model, model.schedule) if scheme == "adarope" else model.with_scheme(scheme).schedule


@pytest.mark.parametrize("layout", ["Laguna-XS.2", "gemma-4-12B"])
def test_ntk_uses_the_rotary_dimensions_of_the_layers_that_it_changes(layout: str) -> None:
    model = loaded(layout)
    schedule = model.with_scheme("ntk:factor=4").schedule
    layer = model.rotation.layer_types.index(gemma.GLOBAL)
    rope = model.module.config.get_text_config().rope_parameters[gemma.GLOBAL]
    pairs = model.geometry.layer_pairs[layer]
    base = rope["rope_theta"] * 4 ** (2 * pairs / (2 * pairs - 2))
    expected = base ** (-torch.arange(pairs) / pairs) * (model.rotation.layer_theta(layer) != 0)
    torch.testing.assert_close(schedule.theta(layer)[0], expected, rtol=1e-5, atol=0)


# Direct logit attribution --------------------------------------------------------------------------------------------


@pytest.mark.exhaustive(sample=2)
@pytest.mark.parametrize("layout", [*SHARING[:2], *UNEQUAL])
def test_terms_add_up_to_the_capped_logit_and_equal_explicit_ones(layout: str) -> None:
    model = loaded(layout)
    ids = short_text(model)[0]
    terms = attribute_logits(model, ids)
    with torch.no_grad():
        logits = model.module(ids[None], use_cache=False).logits[0, :-1].double()
    logit = logits.gather(1, ids[1:, None])[:, 0] - logits.mean(-1)
    parts = [part for (name, _), part in terms.part_terms.items() if name != "logit"]
    scale = float(logit.abs().max())
    assert float((sum(parts) - logit).abs().max()) <= 1e-5 * scale
    assert ("cap" in {name for name, _ in terms.part_terms}) == layout.startswith("gemma")
    if layout.startswith("gemma"):
        layer = model.geometry.layers // 2
        explicit = explicit_head_terms(model, ids, layer)
        assert float((terms.head_terms[layer, : len(explicit)] - explicit).abs().max()) <= 1e-5 * scale


def test_bfloat16_gives_nearly_the_same_terms_of_a_capped_logit() -> None:
    exact = attribute_logits(loaded("gemma-4-E2B"), short_text(loaded("gemma-4-E2B"))[0])
    model = hs.load(gemma.gemma4("gemma-4-E2B").bfloat16())
    coarse = attribute_logits(model, short_text(model)[0])
    assert (coarse.decomposition.logit_factor, coarse.decomposition.soft_cap) == (1, 30)
    scale = float(exact.part_terms["logit", 0].abs().max())
    assert float((coarse.head_terms - exact.head_terms).abs().max()) <= 0.01 * scale


def explicit_head_terms(model: Model, ids: Tensor, layer: int) -> Tensor:
    """Terms [H, L - 1] of one layer's heads in Gemma 4, one head at a time, from the inputs of named modules.

    The direction is torch's gradient of the capped logit with respect to the output of the final norm.
    """
    text = model.module.model.language_model
    decoder, inputs = text.layers[layer], {}
    norms = {"after": decoder.post_attention_layernorm, "o": decoder.self_attn.o_proj, "final": text.norm}
    with ExitStack() as stack, torch.no_grad():
        for name, module in norms.items():
            handle = module.register_forward_hook(lambda _, args, out, name=name: inputs.update({name: (args[0], out)}))
            stack.callback(handle.remove)
        model.module(ids[None], use_cache=False)
    hidden = inputs["final"][1][0, :-1].double().requires_grad_()
    cap = model.module.config.get_text_config().final_logit_softcapping
    logits = cap * torch.tanh(hidden @ model.module.lm_head.weight.double().T / cap)
    (logits.gather(1, ids[1:, None])[:, 0] - logits.mean(-1)).sum().backward()
    assert hidden.grad is not None

    def scale(name: str) -> Tensor:
        states = inputs[name][0][0, :-1].double()
        return (states.square().mean(-1, keepdim=True) + norms[name].eps).sqrt()

    later = torch.stack([module.layer_scalar.double() for module in text.layers[layer:]]).prod()
    z, weight = inputs["o"][0][0, :-1].double(), decoder.self_attn.o_proj.weight.double()
    dim, terms = decoder.self_attn.head_dim, []
    for head in range(z.shape[1] // dim):
        dims = slice(head * dim, (head + 1) * dim)
        added = later * z[:, dims] @ weight[:, dims].T * norms["after"].weight.double() / scale("after")
        terms.append((added * text.norm.weight.double() / scale("final") * hidden.grad).sum(-1))
    return torch.stack(terms).detach()


def test_gemma_3n_has_four_streams_and_is_refused() -> None:
    model = loaded("gemma-3n-E2B")
    with refuses(UnsupportedModel, model.name, "residual stream"):
        attribute_logits(model, short_text(model)[0])
