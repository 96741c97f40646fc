"""Position schemes: agreement with transformers and closed forms, attach and detach, adapter files, spec strings."""

import copy
import gc
import json
import math
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors import SafetensorError
from safetensors.torch import save_file
from support import eager_reference, families
from support.refusals import assert_names, refuses
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from headscope.attention import backend
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput, ResourceMissing, UnsupportedModel
from headscope.forward.capture import capturing
from headscope.models import loading
from headscope.positions import AdaRoPE, attached, parse_scheme, resolve_schedule
from headscope.positions.adarope import LEARNED_PARAMETERS
from headscope.positions.model import Model, load
from headscope.positions.schedule import Schedule
from headscope.positions.schemes import alibi_slopes
from probes.positions.run import position_tables

MEASURABLE = pytest.mark.parametrize("family", families.MEASURABLE)
SOME_FAMILIES = pytest.mark.parametrize(
    "family", ["llama-gqa", "gemma3", "gpt_neox", "phi3", "smollm3", "cohere", "glm"]
)
LENGTH = 40
IDS = torch.randint(3, families.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def tiny(family: str) -> Model:
    return load(families.MEASURABLE[family]())


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


@torch.no_grad()
def logits(model: Model | PreTrainedModel, ids: Tensor = IDS, scheme: Any = None, **options: Any) -> Tensor:
    """Logits [B, L, V] of a full pass, under `scheme` if it is not None."""
    module = model.module if isinstance(model, Model) else model
    options = {"use_cache": False, **options}
    if scheme is None:
        return module(ids, **options).logits
    assert isinstance(model, Model)
    with attached(model, scheme):
        return module(ids, **options).logits


@torch.no_grad()
def perturbed_adapter(model: Model, scheme: str = "yarn:factor=4", reference_length: int = 16) -> AdaRoPE:
    """An adapter whose parameters differ from their initial values, and between groups and heads."""
    generator = torch.Generator().manual_seed(7)
    adapter = AdaRoPE.from_schedule(model, resolve_schedule(model, scheme), reference_length)
    for parameter, size in ((adapter.xi, 0.2), (adapter.tau, 0.1), (adapter.gamma, 0.3)):
        parameter += size * torch.randn(parameter.shape, generator=generator)
    return adapter


# Identities --------------------------------------------------------------------------------------------------------


@MEASURABLE
def test_base_scheme_leaves_the_logits_unchanged(family: str) -> None:
    model = tiny(family)
    assert difference(logits(model, scheme="base"), logits(model)) == 0.0


@MEASURABLE
def test_untrained_adapter_of_base_leaves_the_logits_unchanged(family: str) -> None:
    """The adapter has one cos and sin table per KV group, so this also checks the folded rotation."""
    model = tiny(family)
    adapter = AdaRoPE.from_schedule(model, resolve_schedule(model, "base"))
    has_windows = any(families.SPECS[family].windows)  # which are cut into blocks of rows instead of masked
    assert difference(logits(model, scheme=adapter), logits(model)) <= (1e-4 if has_windows else 0.0)


ROPE_PARAMETERS = {
    "yarn:factor=4": {"rope_type": "yarn", "factor": 4.0},
    "yarn:factor=4,attention_factor=1": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0},
    "linear:factor=4": {"rope_type": "linear", "factor": 4.0},
    "llama3:factor=8": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def scaled_twin(model: PreTrainedModel, rope: dict[str, Any], dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The same weights in a model that transformers builds with these RoPE parameters."""
    config = type(model.config).from_dict(model.config.to_dict())
    rope_parameters = config.rope_parameters
    original = {"original_max_position_embeddings": config.max_position_embeddings} if rope else {}
    if "full_attention" in rope_parameters:
        config.rope_parameters = {
            **rope_parameters,
            "full_attention": {**rope_parameters["full_attention"], **rope, **original},
        }
    else:
        config.rope_parameters = {**rope_parameters, **rope, **original}
    twin = AutoModelForCausalLM.from_config(config, dtype=dtype or model.dtype).eval()
    twin.load_state_dict(model.state_dict())
    return twin


@MEASURABLE
@pytest.mark.parametrize("scheme", ROPE_PARAMETERS)
def test_schemes_match_transformers_with_the_same_rope_parameters(family: str, scheme: str) -> None:
    model = tiny(family)
    expected = logits(scaled_twin(model.module, ROPE_PARAMETERS[scheme]))
    assert difference(logits(model, scheme=scheme), expected) == 0.0
    assert difference(logits(model), expected) > 1e-3


@pytest.mark.exhaustive(sample=18)
@MEASURABLE
@pytest.mark.parametrize("own", ROPE_PARAMETERS)
def test_unscaled_equals_the_weights_without_the_scaling_that_base_keeps(family: str, own: str) -> None:
    plain = tiny(family)
    scaled = load(scaled_twin(plain.module, ROPE_PARAMETERS[own]))
    assert difference(logits(scaled, scheme="unscaled"), logits(plain)) == 0.0
    assert difference(logits(scaled, scheme="base"), logits(plain)) > 1e-3
    assert difference(logits(plain, scheme="unscaled"), logits(plain)) == 0.0


@SOME_FAMILIES
def test_yarn_matches_transformers_in_bfloat16(family: str) -> None:
    model = load(scaled_twin(families.MEASURABLE[family](), {}, torch.bfloat16))
    expected = logits(scaled_twin(model.module, ROPE_PARAMETERS["yarn:factor=4"]))
    assert difference(logits(model, scheme="yarn:factor=4"), expected) == 0.0


@pytest.mark.exhaustive(sample=18)
@MEASURABLE
@pytest.mark.parametrize("scheme", ["yarn:factor=4", "llama3:factor=8", "prope:keep=0.5", "nope"])
def test_untrained_adapter_matches_its_starting_scheme(family: str, scheme: str) -> None:
    model = tiny(family)
    adapter = AdaRoPE.from_schedule(model, resolve_schedule(model, scheme))
    assert difference(logits(model, scheme=adapter), logits(model, scheme=scheme)) <= 1e-4


@pytest.mark.exhaustive(sample=23)
@MEASURABLE
@pytest.mark.parametrize(
    "scheme", ["yarn:factor=1", "linear:factor=1", "ntk:factor=1", "llama3:factor=1", "prope:keep=1"]
)
def test_schemes_with_identity_options_match_base(family: str, scheme: str) -> None:
    model = tiny(family)
    assert difference(logits(model, scheme=scheme), logits(model)) <= 1e-6


@pytest.mark.model
def test_identities_hold_on_smollm2(smollm2: Model, tokens: Tensor) -> None:
    ids = tokens[:, :32]
    plain = logits(smollm2, ids)
    assert difference(logits(smollm2, ids, "base"), plain) == 0.0
    assert (
        difference(logits(smollm2, ids, AdaRoPE.from_schedule(smollm2, resolve_schedule(smollm2, "base"))), plain)
        == 0.0
    )
    folder, _ = loading.locate("smollm2-135m")
    rope = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 8192}
    expected = logits(AutoModelForCausalLM.from_pretrained(folder, rope_parameters=rope), ids)
    yarn = logits(smollm2, ids, "yarn:factor=4")
    assert difference(yarn, expected) == 0.0
    # In float64, because float32 kernels of some processors round by 1e-4.
    double = load(copy.deepcopy(smollm2.module).double())
    untrained = AdaRoPE.from_schedule(double, resolve_schedule(double, "yarn:factor=4"))
    assert difference(logits(double, ids, untrained), logits(double, ids, "yarn:factor=4")) <= 1e-4
    untrained = AdaRoPE.from_schedule(smollm2, resolve_schedule(smollm2, "yarn:factor=4"))
    assert difference(logits(smollm2, ids, untrained), yarn) <= 1e-5 * yarn.abs().max()
    assert difference(yarn, plain) > 1
    assert torch.equal(logits(smollm2, ids), plain)


# Frequencies and scales --------------------------------------------------------------------------------------------


@MEASURABLE
def test_adapter_rotates_each_kv_group_and_scales_each_head_separately(family: str) -> None:
    """Layer 0 recorded without rotation, then rotated and scaled in the test, equals layer 0 under the adapter."""
    model, spec = tiny(family), families.SPECS[family]
    adapter = perturbed_adapter(model)
    unrotated, rotated = (record_first_layer(model, scheme) for scheme in ("nope", adapter))
    theta, factor = adapter.xi[0].detach().exp().double(), adapter.attention_factor(0)
    n = torch.arange(1, LENGTH + 1, dtype=torch.float64)
    growth = torch.log1p(n.clamp(min=16) / 16)
    scale = growth ** adapter.gamma[0].detach()[:, None] / adapter.tau[0].detach()[:, None]
    assert theta.unique(dim=0).shape[0] == spec.groups
    for head in range(families.HEADS):
        group = head * spec.groups // families.HEADS
        for actual, vectors, multiplier in (
            (rotated.q[head], unrotated.q[head], scale[head]),
            (rotated.k[group], unrotated.k[group], torch.ones(LENGTH)),
        ):
            expected = rotate(vectors, theta[group], factor, spec) * multiplier[:, None]
            assert difference(actual.double(), expected) <= 1e-4


@torch.no_grad()
def record_first_layer(model: Model, scheme: str | AdaRoPE) -> AttentionRecord:
    records: list[AttentionRecord] = []
    with attached(model, scheme), capturing(model) as layers:
        layers.listen(records.append, [0])
        model.module(IDS[:1], use_cache=False)
    return records[0]


def rotate(vectors: Tensor, theta: Tensor, factor: float, spec: families.Family) -> Tensor:
    """Rotate vectors [L, d] at positions 0, 1, ... by complex multiplication."""
    rotated = vectors.double().clone()
    planes = eager_reference.planes(spec.head_dim, spec.rotary_dims, spec.layout)
    for plane, angle in zip(planes, theta, strict=False):
        z = torch.view_as_complex(vectors[:, plane].double().contiguous())
        z = z * torch.exp(1j * angle * torch.arange(len(vectors))) * factor
        rotated[:, plane] = torch.view_as_real(z)
    return rotated


def rope_theta(model: Model, layer: int) -> float:
    parameters = model.module.config.rope_parameters
    return float(parameters.get(model.rotation.layer_types[layer], parameters)["rope_theta"])


def check_effective_base(model: Model, theta: Callable[[int], float], rotates: tuple[bool, ...]) -> None:
    scales = position_tables("x", model)["scales"]
    for layer, base in zip(scales["layer"], scales["effective_base"], strict=True):
        if rotates[layer]:
            assert base == pytest.approx(theta(layer), rel=1e-6)


@MEASURABLE
def test_effective_base_of_plain_rope_is_its_base(family: str) -> None:
    model = tiny(family)
    check_effective_base(model, lambda layer: rope_theta(model, layer), families.SPECS[family].rotates)


@pytest.mark.model
def test_effective_base_of_smollm2_is_its_base(smollm2: Model) -> None:
    check_effective_base(smollm2, lambda layer: 1e5, (True,) * 30)
    check_effective_base(smollm2.with_scheme("abf:theta=3e6"), lambda layer: 3e6, (True,) * 30)


@MEASURABLE
def test_nope_has_zero_frequencies_and_no_nan(family: str) -> None:
    model = tiny(family)
    tables = position_tables("x", model.with_scheme("nope"))
    assert not tables["positions"]["theta"].any()
    assert (tables["positions"]["log_theta"] == -math.inf).all()
    for table in tables.values():
        for name, column in table.items():
            assert name == "model" or not torch.as_tensor(column).isnan().any(), name
    shifted = torch.arange(LENGTH)[None] + 100
    assert difference(logits(model, scheme="nope", position_ids=shifted), logits(model, scheme="nope")) == 0.0


def changed_layers(model: Model) -> list[int]:
    """Rotating layers without a sliding window, which schemes for longer contexts leave unchanged."""
    types = model.rotation.layer_types
    rotates = model.geometry.layer_rotates
    return [layer for layer in range(len(rotates)) if rotates[layer] and types[layer] != "sliding_attention"]


def test_scheme_replaces_existing_rope_scaling_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    module = families.build("llama", {"rope_parameters": rope})
    module.config.name_or_path = "with-linear-scaling"  # the warning comes once for each name
    model = load(module)
    checkpoint_theta, plain = resolve_schedule(model).theta(0), resolve_schedule(model, "linear:factor=1").theta(0)
    assert torch.allclose(plain, 4 * checkpoint_theta)
    assert_names(caplog.text, f"'{model.name}'", "(linear)")


def test_single_rotary_pair_has_no_finite_base() -> None:
    model = load(families.build("llama", {"head_dim": 2}))
    assert torch.as_tensor(position_tables("m", model)["scales"]["effective_base"]).isinf().all()
    with refuses(UnsupportedModel, "ntk", f"'{model.name}'", "one"):
        resolve_schedule(model, "ntk:factor=2")


@MEASURABLE
def test_frequencies_match_their_closed_forms(family: str) -> None:
    model = tiny(family)
    dims = 2 * model.geometry.pairs
    exponent = -torch.arange(dims // 2, dtype=torch.float64) * 2 / dims
    is_kept = torch.arange(dims // 2) < round(0.75 * dims / 2)
    for layer in range(model.geometry.layers):
        checkpoint_theta = model.rotation.theta[layer].double()
        base = rope_theta(model, layer)
        closed_forms = {
            "ntk:factor=4": (base * 4 ** (dims / (dims - 2))) ** exponent,
            "abf:theta=5e6": 5e6**exponent,
            "linear:factor=4": base**exponent / 4,
        }
        for scheme, expected in closed_forms.items():
            theta = resolve_schedule(model, scheme).theta(layer)[0].double()
            torch.testing.assert_close(
                theta, expected if layer in changed_layers(model) else checkpoint_theta, rtol=1e-6, atol=0
            )
        assert torch.equal(
            resolve_schedule(model, "prope:keep=0.75").theta(layer)[0].double(), checkpoint_theta * is_kept
        )
        assert torch.equal(resolve_schedule(model, "logn").theta(layer)[0].double(), checkpoint_theta)


@MEASURABLE
def test_logn_scales_queries_beyond_its_length(family: str) -> None:
    model = tiny(family)
    plain, scaled = record_first_layer(model, "base"), record_first_layer(model, "logn:length=10")
    n = torch.arange(1, LENGTH + 1)
    expected = torch.where(n > 10, n.log() / math.log(10), 1.0)
    assert difference(scaled.q, plain.q * expected[:, None]) <= 1e-5
    assert torch.equal(scaled.k, plain.k)
    assert resolve_schedule(model, "logn").reference_length == 256


def test_query_scale_matches_the_adascale_equation() -> None:
    adapter = perturbed_adapter(tiny("llama-gqa"), reference_length=100)
    n = torch.tensor([[1, 100, 101, 5000]])
    scale = adapter.query_scale(2, n)
    for head in range(families.HEADS):
        tau, gamma = adapter.tau[2, head].item(), adapter.gamma[2, head].item()
        expected = [math.log(1 + max(x, 100) / 100) ** gamma / tau for x in n[0].tolist()]
        assert scale[0, head].tolist() == pytest.approx(expected, rel=1e-5)


def test_untrained_tau_equals_the_temperature_of_yarn() -> None:
    model = tiny("llama-gqa")
    adapter = AdaRoPE.from_schedule(model, resolve_schedule(model, "yarn:factor=8"))
    m = 0.1 * math.log(8) + 1
    assert (1 / adapter.tau.detach()).flatten().tolist() == pytest.approx([m**2] * 16, rel=1e-6)
    assert not adapter.gamma.any()
    assert adapter.rotary_factor.tolist() == [1.0] * 4
    assert adapter.reference_length == 256


# Attaching and detaching -------------------------------------------------------------------------------------------


def attachment_state(model: Model) -> tuple[Any, ...]:
    """Everything that an attached scheme changes and must restore."""
    hooks = [backend._hooks_by_module.get(module) for module in model.attention_modules]
    namespaces = {type(m).__module__: sys.modules[type(m).__module__] for m in model.attention_modules}
    return (
        [getattr(namespace, "apply_rotary_pos_emb", None) for namespace in namespaces.values()],
        model.module.config._attn_implementation,
        sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.module.modules()),
        sum(len(module_hooks.qkv_edits) + len(module_hooks.listeners) for module_hooks in hooks if module_hooks),
    )


@MEASURABLE
@pytest.mark.parametrize("scheme", ["yarn:factor=4", "logn:length=4", "adapter"])
def test_detaching_restores_the_model_bit_for_bit(family: str, scheme: str) -> None:
    model = tiny(family)
    before, expected = attachment_state(model), logits(model)
    with attached(model, perturbed_adapter(model) if scheme == "adapter" else scheme), torch.no_grad():
        assert not torch.equal(model.module(IDS).logits, expected)
        assert attachment_state(model) != before
    assert attachment_state(model) == before
    assert torch.equal(logits(model), expected)


@SOME_FAMILIES
def test_exception_detaches_the_scheme(family: str) -> None:
    model = tiny(family)
    before, expected = attachment_state(model), logits(model)
    with pytest.raises(RuntimeError, match="inside"), attached(model, perturbed_adapter(model)):
        raise RuntimeError("inside")
    assert attachment_state(model) == before
    assert torch.equal(logits(model), expected)


@SOME_FAMILIES
def test_inner_of_nested_schemes_applies_until_it_is_detached(family: str) -> None:
    model = tiny(family)
    adapter = perturbed_adapter(model)
    for outer, inner in (
        ("yarn:factor=4", "nope"),
        ("nope", adapter),
        (perturbed_adapter(model, "base"), "yarn:factor=4"),
    ):
        outer_logits = logits(model, scheme=outer)
        with attached(model, outer):
            if isinstance(outer, str):
                assert difference(logits(model, scheme=inner), logits(tiny(family), scheme=inner)) <= 1e-4
            with attached(model, inner):
                pass
            assert torch.equal(logits(model), outer_logits)


def test_model_runs_under_the_scheme_of_its_spec() -> None:
    model = tiny("llama-gqa")
    with attached(model.with_scheme("nope")) as schedule, torch.no_grad():
        actual = model.module(IDS, use_cache=False).logits
    assert not schedule.theta(0).any()
    assert torch.equal(actual, logits(model, scheme="nope"))


def test_model_loads_its_adapter_once(tmp_path: Path) -> None:
    model = tiny("llama-gqa")
    path = perturbed_adapter(model).save(tmp_path / "adapter.safetensors")
    adapted = model.with_scheme(f"adarope:adapter={path}")
    with attached(adapted) as schedule:
        expected = logits(adapted)
    path.unlink()
    assert resolve_schedule(adapted) is schedule
    with attached(adapted):
        assert torch.equal(logits(adapted), expected)


@pytest.mark.parametrize("scheme", ["base", "yarn:factor=4", "logn", "prope"])
def test_deleting_a_model_frees_its_checkpoint(scheme: str) -> None:
    """Immediately, without the garbage collector: the next checkpoint needs the memory."""
    model = tiny("llama-gqa").with_scheme(scheme)
    checkpoint = weakref.ref(model.checkpoint)
    with attached(model):
        pass
    gc.disable()
    try:
        del model
        assert checkpoint() is None
    finally:
        gc.enable()


# ALiBi -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (4, [2, 4, 6, 8]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (1, [8]),
    ],
)
def test_alibi_slopes_match_the_publication(heads: int, exponents: list[float]) -> None:
    assert torch.allclose(alibi_slopes(heads), torch.tensor([2.0**-exponent for exponent in exponents]))


@pytest.mark.parametrize("family", ["llama-gqa", "llama-mqa", "mistral-sliding", "qwen3", "granite"])
def test_alibi_logits_decrease_by_the_slope_per_token(family: str) -> None:
    model = tiny(family)
    plain, sloped = record_first_layer(model, "nope"), record_first_layer(model, "alibi")
    heads, groups = model.geometry.heads, model.geometry.kv_groups
    slope = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])[:, None, None]
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    is_masked = (j > i) | (i - j >= (plain.window or LENGTH))
    keys = plain.k.repeat_interleave(heads // groups, 0)
    expected = (plain.scaling * plain.q @ keys.mT - slope * (i - j)).masked_fill(is_masked, -torch.inf)
    recorded = sloped.scaling * sloped.q @ sloped.k.repeat_interleave(heads // groups, 0).mT
    recorded = recorded.masked_fill(is_masked, -torch.inf)
    assert difference(expected.softmax(-1), (recorded - sloped.lse[..., None]).exp()) <= 1e-5
    assert difference(expected.logsumexp(-1), sloped.lse) <= 1e-5
    values = plain.v.repeat_interleave(heads // groups, 0)
    assert difference(expected.softmax(-1) @ values, sloped.z) <= 1e-5


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding"])
def test_alibi_decoding_and_padding_match_a_full_pass(family: str) -> None:
    model = tiny(family)
    cache = DynamicCache(config=model.module.config)
    with attached(model, "alibi"), torch.no_grad():
        split = IDS.split([20, 13] + [1] * 7, dim=1)
        parts = [model.module(part, past_key_values=cache, use_cache=True).logits for part in split]
    assert difference(torch.cat(parts, 1), logits(model, scheme="alibi")) <= 1e-4
    check_generation(model, "alibi", [IDS[0], IDS[1, :23]])


@pytest.mark.parametrize(("family", "reason"), [("gpt_neox", "rotates"), ("gemma2", "caps")])
def test_alibi_is_refused_for_partial_rotation_and_capped_logits(family: str, reason: str) -> None:
    with refuses(UnsupportedModel, "alibi", f"({family})", reason):
        logits(load(families.FAMILIES[family]()), scheme="alibi")


def test_alibi_needs_float32() -> None:
    model = load(families.MEASURABLE["llama-gqa"]().to(torch.bfloat16))
    with refuses(UnsupportedModel, f"'{model.name}'", "bfloat16", "--dtype fp32"):
        logits(model, scheme="alibi")


# Training schemes of checkpoints --------------------------------------------------------------------------------------


def save_checkpoint_with_positions(positions: Any, folder: Path) -> Path:
    """A checkpoint folder whose config has the entry `headscope_positions`."""
    model = tiny("llama-gqa")
    model.module.save_pretrained(folder)
    perturbed_adapter(model, "base").save(folder / "adarope.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "headscope_positions": positions}))
    return folder


@torch.no_grad()
def load_in_memory(folder: Path) -> Model:
    return load(AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize(
    ("positions", "scheme"), [("nope", "nope"), ("alibi", "alibi"), ("adarope", "adarope:adapter=")]
)
def test_checkpoint_runs_under_its_training_scheme(positions: str, scheme: str, tmp_path: Path) -> None:
    model = load_in_memory(save_checkpoint_with_positions(positions, tmp_path))
    plain = tiny("llama-gqa")
    expected = logits(plain, scheme=perturbed_adapter(plain, "base") if positions == "adarope" else positions)
    assert model.scheme.startswith(scheme)
    assert torch.equal(logits(model, scheme=model.schedule), expected)
    assert torch.equal(logits(model, scheme="base"), expected)
    assert torch.equal(logits(model.with_scheme("base"), scheme="base"), expected)
    assert torch.equal(logits(model, scheme="yarn:factor=4"), logits(plain, scheme="yarn:factor=4"))


@pytest.mark.parametrize(
    ("positions", "named"), [("nopee", ("'nopee'", "'nope'")), (["nope"], ("headscope_positions", "['nope']"))]
)
def test_invalid_training_scheme_is_refused(positions: Any, named: tuple[str, ...], tmp_path: Path) -> None:
    folder = save_checkpoint_with_positions(positions, tmp_path)
    with refuses(BadInput, *named):
        load_in_memory(folder)


def test_checkpoint_without_its_adapter_file_is_refused(tmp_path: Path) -> None:
    (save_checkpoint_with_positions("adarope", tmp_path) / "adarope.safetensors").unlink()
    with refuses(ResourceMissing, tmp_path / "adarope.safetensors"):
        load_in_memory(tmp_path)


# Caches, batches, precision ----------------------------------------------------------------------------------------


def schemes(model: Model) -> list[str | AdaRoPE]:
    return ["yarn:factor=4", "logn:length=4", perturbed_adapter(model)]


@MEASURABLE
def test_cached_decoding_matches_a_full_pass(family: str) -> None:
    model = tiny(family)
    for scheme in schemes(model):
        expected = logits(model, IDS, scheme)
        cache = DynamicCache(config=model.module.config)
        with attached(model, scheme), torch.no_grad():
            split = IDS.split([20, 13] + [1] * 7, dim=1)
            parts = [model.module(part, past_key_values=cache, use_cache=True).logits for part in split]
        assert difference(torch.cat(parts, 1), expected) <= 1e-3


@MEASURABLE
def test_left_padding_does_not_change_generation(family: str) -> None:
    model = tiny(family)
    for scheme in schemes(model) if family in ("llama-gqa", "gemma3") else [perturbed_adapter(model)]:
        check_generation(model, scheme, [IDS[0], IDS[1, :23]])


@pytest.mark.model
def test_left_padding_does_not_change_generation_of_smollm2(smollm2: Model, tokens: Tensor) -> None:
    check_generation(smollm2, perturbed_adapter(smollm2, reference_length=16), [tokens[0, :40], tokens[0, 100:125]])


def check_generation(model: Model, scheme: str | AdaRoPE, prompts: list[Tensor]) -> None:
    """Compare the logits of generated steps: in a left-padded batch, without a batch, and in a full pass."""
    width = max(map(len, prompts))
    batch = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(p) for p in prompts]).long()
    with attached(model, scheme), torch.no_grad():
        batch_logits, ids = generate(model, batch, mask)
        for n, prompt in enumerate(prompts):
            single_logits, own_ids = generate(model, prompt[None], torch.ones(1, len(prompt), dtype=torch.long))
            full_logits = model.module(own_ids, use_cache=False).logits[:, len(prompt) - 1 : -1]
            assert difference(single_logits, full_logits) <= 1e-3
            assert torch.equal(ids[n, width:], own_ids[0, len(prompt) :])
            assert difference(batch_logits[n], single_logits[0]) <= 1e-3


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("left", [True, False])
def test_query_scale_ignores_padding(family: str, left: bool, tmp_path: Path) -> None:
    """transformers counts padding if it has no position ids; rotation is relative, so only the scale could change."""
    model, text, pads = tiny(family), IDS[1, :12], 7
    adapter = AdaRoPE.from_schedule(model, resolve_schedule(model, "base"), reference_length=4)
    with torch.no_grad():
        adapter.gamma.fill_(1.0)
    spec = f"adarope:adapter={adapter.save(tmp_path / 'x.safetensors')}"
    sides = (pads, 0) if left else (0, pads)
    batch, mask = (torch.nn.functional.pad(t, sides)[None] for t in (text, torch.ones_like(text)))
    unpadded = slice(pads, None) if left else slice(len(text))
    for scheme in ("logn:length=4", spec, f"{spec},length=sequence"):
        with attached(model, scheme), torch.no_grad():
            expected = model.module(text[None], use_cache=False).logits
            actual = model.module(batch, attention_mask=mask, use_cache=False).logits[:, unpadded]
        assert difference(actual, expected) <= 1e-3, scheme


def generate(model: Model, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    options: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    out = model.module.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)
    return torch.stack(out.logits, 1), out.sequences


@SOME_FAMILIES
def test_adapter_of_a_bfloat16_model_has_float32_parameters(family: str) -> None:
    model = load(families.MEASURABLE[family]().bfloat16())
    plain = logits(model)
    assert difference(logits(model, scheme="base"), plain) == 0.0
    adapter = perturbed_adapter(model)
    assert {parameter.dtype for parameter in adapter.parameters()} == {torch.float32}
    actual = logits(model, scheme=adapter)
    assert actual.dtype == torch.bfloat16
    assert actual.isfinite().all()
    assert torch.equal(logits(model), plain)


# Training ----------------------------------------------------------------------------------------------------------


STEP_SIZES = {"xi": 1e-4, "tau": 1e-3, "gamma": 1e-3}
"""Step sizes of the finite differences; the loss is most curved in the frequencies."""


def gradients(model: Model, adapter: AdaRoPE) -> list[Tensor]:
    adapter.zero_grad()
    with attached(model, adapter):
        predicted = model.module(IDS[:1], use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(predicted, IDS[0, 1:]).backward()
    return [parameter.grad.clone() for parameter in adapter.parameters() if parameter.grad is not None]


@SOME_FAMILIES
def test_gradient_checkpointing_does_not_change_gradients(family: str) -> None:
    model = tiny(family)
    model.module.requires_grad_(False).train()
    adapter = perturbed_adapter(model)
    plain = gradients(model, adapter)
    model.module.activation_checkpointing_enable({"use_reentrant": False})
    assert model.module.is_activation_checkpointing
    checkpointed = gradients(model, adapter)
    assert len(plain) == len(checkpointed) == 3
    for a, b in zip(plain, checkpointed, strict=True):
        assert a.abs().max() > 1e-4
        assert difference(a, b) <= 1e-6


class Float64(TorchFunctionMode):
    """Mode that keeps float64 tensors in float64 where transformers casts to float32, in norms."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        casts_to_float32 = func is Tensor.float or (func is Tensor.to and torch.float32 in args)
        if casts_to_float32 and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "family",
    ["llama", "llama-gqa", "llama-mqa", "mistral-sliding", "gemma3", "gpt_neox", "phi3", "smollm3", "cohere", "glm"],
)
def test_gradients_match_finite_differences(family: str) -> None:
    """Five-point differences along the gradient of each parameter, everything in float64."""
    model = load(families.MEASURABLE[family]().double())
    model.module.requires_grad_(False)
    adapter = perturbed_adapter(model).double()
    with Float64():
        computed = gradients(model, adapter)
    for name, gradient in zip(LEARNED_PARAMETERS, computed, strict=True):
        parameter = getattr(adapter, name)
        start = parameter.detach().clone()
        direction = gradient / gradient.norm()
        losses = {}
        for multiple in (-2, -1, 1, 2):
            parameter.data = start + multiple * STEP_SIZES[name] * direction
            with Float64(), torch.no_grad():
                predicted = logits(model, scheme=adapter)[0, :-1]
            losses[multiple] = torch.nn.functional.cross_entropy(predicted, IDS[0, 1:]).item()
        parameter.data = start
        slope = (8 * (losses[1] - losses[-1]) - (losses[2] - losses[-2])) / (12 * STEP_SIZES[name])
        is_trained = direction.isfinite() & start.isfinite()  # the log of a frequency of 0 is -inf and stays
        assert slope == pytest.approx((gradient * direction)[is_trained].sum().item(), rel=1e-4)


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "cohere"])
def test_schemes_and_lora_combine_in_either_order(family: str) -> None:
    """LoRA applied before or after attaching gives the same logits; an untrained one changes none."""
    for scheme in ("yarn:factor=4", "adapter"):
        plain = tiny(family)
        expected = logits(plain, scheme=perturbed_adapter(plain) if scheme == "adapter" else scheme)
        results = []
        for wrap_first in (True, False):
            module = families.MEASURABLE[family]()
            model = load(with_lora(module)) if wrap_first else load(module)
            with attached(model, perturbed_adapter(model) if scheme == "adapter" else scheme):
                if not wrap_first:
                    with_lora(module)
                assert difference(logits(model), expected) == 0.0
                for name, parameter in module.named_parameters():
                    if "lora_B" in name:
                        parameter.data.fill_(0.05)
                results.append(logits(model))
        assert difference(*results) == 0.0
        assert difference(results[0], expected) > 1e-2


def with_lora(module: PreTrainedModel) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(module, LoraConfig(target_modules=["q_proj", "k_proj"]))


# Adapter files -----------------------------------------------------------------------------------------------------


@SOME_FAMILIES
def test_adapter_round_trips_through_its_file(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    adapter = perturbed_adapter(model)
    path = adapter.save(tmp_path / "adapter.safetensors", note={"steps": 3})
    opened = AdaRoPE.load(path, model)
    assert opened.sha256 == adapter.sha256
    assert opened.reference_length == 16
    assert (opened.metadata["checkpoint"], opened.metadata["note"]) == (model.name, {"steps": 3})
    assert opened.metadata["weights_sha256"] == model.weights_sha256
    assert torch.equal(opened.xi_init, adapter.xi_init)
    assert torch.equal(logits(model, scheme=f"adarope:adapter={path}"), logits(model, scheme=adapter))
    again = opened.save(tmp_path / "again.safetensors")
    assert AdaRoPE.load(again, model).metadata == opened.metadata


def test_adapter_of_another_geometry_is_refused(tmp_path: Path) -> None:
    path = perturbed_adapter(tiny("llama-gqa")).save(tmp_path / "adapter.safetensors")
    with refuses(BadInput, path, "'in-memory llama'", "xi", (4, 2, 8), (4, 4, 8)):
        AdaRoPE.load(path, tiny("llama"))


def test_invalid_adapter_files_are_refused(tmp_path: Path) -> None:
    model, path = tiny("llama"), tmp_path / "x.safetensors"
    path.write_text("not safetensors")
    with refuses(BadInput, path) as refusal:
        AdaRoPE.load(path, model)
    assert isinstance(refusal.value.__cause__, SafetensorError)
    save_file({"xi": torch.zeros(4, 4, 8)}, path)
    with refuses(BadInput, path, "headscope-adarope/1"):
        AdaRoPE.load(path, model)
    save_file({"xi": torch.zeros(4, 4, 8)}, path, {"headscope": '{"format": "headscope-adarope/1"}'})
    with refuses(BadInput, path, "gamma, gamma_init, rotary_factor"):
        AdaRoPE.load(path, model)
    adapter = perturbed_adapter(model)
    save_file(
        {**adapter.state_dict(), "bias": torch.zeros(1)}, path, {"headscope": '{"format": "headscope-adarope/1"}'}
    )
    with refuses(BadInput, path, "bias"):
        AdaRoPE.load(path, model)
    missing = tmp_path / "none.safetensors"
    with refuses(ResourceMissing, missing):
        AdaRoPE.load(missing, model)
    with refuses(ResourceMissing, missing):
        parse_scheme(f"adarope:adapter={missing}")


def test_length_sequence_uses_the_whole_length_for_every_query(tmp_path: Path) -> None:
    model = tiny("llama")
    adapter = AdaRoPE.from_schedule(model, resolve_schedule(model, "base"), reference_length=4)
    with torch.no_grad():
        adapter.gamma.fill_(0.5)
    path = adapter.save(tmp_path / "x.safetensors")
    visible = torch.arange(1, 21)[None]
    by_sequence = resolve_schedule(model, f"adarope:adapter={path},length=sequence").query_scale(0, visible)
    by_query = resolve_schedule(model, f"adarope:adapter={path}").query_scale(0, visible)
    assert torch.equal(by_sequence, by_query[..., -1:].expand_as(by_sequence))
    assert (by_query[..., 0] < by_query[..., -1]).all()
    with refuses(BadInput, "length=all", "length=visible", "length=sequence"):
        resolve_schedule(model, f"adarope:adapter={path},length=all")


# Spec strings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("yarm:factor=4", ("'yarm'", "'yarn'")),
        ("yarn", ("'yarn'", "factor=")),
        ("yarn:factr=4", ("'factr'", "'factor'")),
        ("yarn:4", ("'4'", "key=value")),
        ("yarn:factor=x", ("'x'", "factor")),
        ("yarn:factor=0", (": factor=0", 1)),  # after the whole spec
        ("yarn:factor=nan", (": factor=nan", 1)),
        ("yarn:factor=inf", (": factor=inf", 1)),
        ("yarn:factor=4,attention_factor=0", (": attention_factor=0", 0)),
        ("llama3:factor=8,low_freq_factor=4", (": high_freq_factor=4", 4)),
        ("base:factor=2", ("'base'", "'factor'")),
        ("abf:theta=1", (": theta=1", 1)),
        ("logn:length=1", (": length=1", 2)),
        ("logn:length=8.5", ("'8.5'", "length")),
        ("prope:keep=2", (": keep=2", 0, 1)),
        ("prope:keep=nan", (": keep=nan", 0, 1)),
        ("adarope", ("'adarope'", "adapter=")),
        ("", ("''", "yarn")),
    ],
)
def test_invalid_scheme_specs_are_refused_with_the_reason(text: str, named: tuple[object, ...]) -> None:
    with refuses(BadInput, *named) as raised:
        parse_scheme(text)
    assert "\n" not in str(raised.value)


def test_spec_string_is_parsed_into_its_scheme(tmp_path: Path) -> None:
    scheme = parse_scheme("yarn:factor=8,attention_factor=1")
    assert replace(scheme, factor=2) == parse_scheme("yarn:factor=2,attention_factor=1")  # type: ignore[type-var]
    path = tmp_path / "b=c.safetensors"
    path.touch()
    assert parse_scheme(f"adarope:adapter={path}").adapter == str(path)  # type: ignore[attr-defined]


def test_resolving_a_schedule_returns_it_unchanged() -> None:
    model = tiny("llama")
    schedule: Schedule = resolve_schedule(model, "yarn:factor=2")
    assert resolve_schedule(model, schedule) is schedule  # type: ignore[arg-type]
