"""Position schemes: what each one does to a model, that transformers agrees, and that nothing stays behind."""

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
from safetensors.torch import save_file
from support import eager_reference, families
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from headscope.attention import backend
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput, Missing, UnsupportedModel
from headscope.forward.capture import capturing
from headscope.models import loading
from headscope.positions import AdaRoPE, attached, parse_scheme, resolve
from headscope.positions.adarope import LEARNED
from headscope.positions.model import Model, load
from headscope.positions.schedule import Schedule
from headscope.positions.schemes import published_slopes
from probes.positions.run import position_tables

MEASURABLE = pytest.mark.parametrize("family", families.MEASURABLE)
SOME = pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "gpt_neox", "phi3", "smollm3", "cohere", "glm"])
LENGTH = 40
IDS = torch.randint(3, families.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def tiny(family: str) -> Model:
    return load(families.MEASURABLE[family]())


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


@torch.no_grad()
def logits(model: Model | PreTrainedModel, ids: Tensor = IDS, scheme: Any = None, **options: Any) -> Tensor:
    """Logits [B, L, V] of a full pass, under `scheme` where one is given."""
    module = model.module if isinstance(model, Model) else model
    options = {"use_cache": False, **options}
    if scheme is None:
        return module(ids, **options).logits
    assert isinstance(model, Model)
    with attached(model, scheme):
        return module(ids, **options).logits


@torch.no_grad()
def learned(model: Model, scheme: str = "yarn:factor=4", reference_length: int = 16) -> AdaRoPE:
    """An adapter with every parameter away from where it started: each group and head its own."""
    generator = torch.Generator().manual_seed(7)
    adapter = AdaRoPE.untrained(model, resolve(model, scheme), reference_length)
    for parameter, size in ((adapter.xi, 0.2), (adapter.tau, 0.1), (adapter.gamma, 0.3)):
        parameter += size * torch.randn(parameter.shape, generator=generator)
    return adapter


# Identities --------------------------------------------------------------------------------------------------------


@MEASURABLE
def test_base_changes_nothing(family: str) -> None:
    model = tiny(family)
    assert difference(logits(model, scheme="base"), logits(model)) == 0.0


@MEASURABLE
def test_an_untrained_adapter_from_base_changes_nothing(family: str) -> None:
    """Its frequencies enter through tables for each group, so this checks the folded rotation too."""
    model = tiny(family)
    adapter = AdaRoPE.untrained(model, resolve(model, "base"))
    windows_round = any(families.SPECS[family].windows)  # cut into blocks of rows instead of masked
    assert difference(logits(model, scheme=adapter), logits(model)) <= (1e-4 if windows_round else 0.0)


SCALED = {
    "yarn:factor=4": {"rope_type": "yarn", "factor": 4.0},
    "yarn:factor=4,attention_factor=1": {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.0},
    "linear:factor=4": {"rope_type": "linear", "factor": 4.0},
    "llama3:factor=8": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
}


def scaled_twin(model: PreTrainedModel, rope: dict[str, Any], dtype: torch.dtype | None = None) -> PreTrainedModel:
    """The same weights in a model that transformers itself built with these rope parameters."""
    config = type(model.config).from_dict(model.config.to_dict())
    own = config.rope_parameters
    original = {"original_max_position_embeddings": config.max_position_embeddings} if rope else {}
    if "full_attention" in own:
        config.rope_parameters = {**own, "full_attention": {**own["full_attention"], **rope, **original}}
    else:
        config.rope_parameters = {**own, **rope, **original}
    twin = AutoModelForCausalLM.from_config(config, dtype=dtype or model.dtype).eval()
    twin.load_state_dict(model.state_dict())
    return twin


@MEASURABLE
@pytest.mark.parametrize("scheme", SCALED)
def test_a_scheme_is_what_transformers_does_with_its_parameters(family: str, scheme: str) -> None:
    model = tiny(family)
    expected = logits(scaled_twin(model.module, SCALED[scheme]))
    assert difference(logits(model, scheme=scheme), expected) == 0.0
    assert difference(logits(model), expected) > 1e-3


@SOME
def test_a_scheme_is_what_transformers_does_in_bfloat16(family: str) -> None:
    model = load(scaled_twin(families.MEASURABLE[family](), {}, torch.bfloat16))
    expected = logits(scaled_twin(model.module, SCALED["yarn:factor=4"]))
    assert difference(logits(model, scheme="yarn:factor=4"), expected) == 0.0


@MEASURABLE
@pytest.mark.parametrize("scheme", ["yarn:factor=4", "llama3:factor=8", "prope:keep=0.5", "nope"])
def test_an_untrained_adapter_is_the_scheme_it_starts_from(family: str, scheme: str) -> None:
    model = tiny(family)
    adapter = AdaRoPE.untrained(model, resolve(model, scheme))
    assert difference(logits(model, scheme=adapter), logits(model, scheme=scheme)) <= 1e-4


@MEASURABLE
@pytest.mark.parametrize(
    "scheme", ["yarn:factor=1", "linear:factor=1", "ntk:factor=1", "llama3:factor=1", "prope:keep=1"]
)
def test_a_scheme_at_its_identity_is_base(family: str, scheme: str) -> None:
    model = tiny(family)
    assert difference(logits(model, scheme=scheme), logits(model)) <= 1e-6


@pytest.mark.model
def test_identities_hold_on_the_real_checkpoint(smollm2: Model, tokens: Tensor) -> None:
    ids = tokens[:, :128]
    plain = logits(smollm2, ids)
    assert difference(logits(smollm2, ids, "base"), plain) == 0.0
    assert difference(logits(smollm2, ids, AdaRoPE.untrained(smollm2, resolve(smollm2, "base"))), plain) == 0.0
    folder, _ = loading.locate("smollm2-135m")
    rope = {"rope_type": "yarn", "rope_theta": 1e5, "factor": 4.0, "original_max_position_embeddings": 8192}
    expected = logits(AutoModelForCausalLM.from_pretrained(folder, rope_parameters=rope), ids)
    yarn = logits(smollm2, ids, "yarn:factor=4")
    assert difference(yarn, expected) == 0.0
    # In float64, since float32 kernels of one processor round by 1e-4 where another's do not.
    double = load(copy.deepcopy(smollm2.module).double())
    untrained = AdaRoPE.untrained(double, resolve(double, "yarn:factor=4"))
    assert difference(logits(double, ids, untrained), logits(double, ids, "yarn:factor=4")) <= 1e-4
    untrained = AdaRoPE.untrained(smollm2, resolve(smollm2, "yarn:factor=4"))
    assert difference(logits(smollm2, ids, untrained), yarn) <= 1e-5 * yarn.abs().max()
    assert difference(yarn, plain) > 1
    assert torch.equal(logits(smollm2, ids), plain)


# Frequencies and scales --------------------------------------------------------------------------------------------


@MEASURABLE
def test_every_group_turns_by_its_own_frequencies_and_every_head_has_its_own_scale(family: str) -> None:
    """Layer 0 heard without rotation, turned and scaled by hand, is layer 0 heard under the adapter."""
    model, spec = tiny(family), families.SPECS[family]
    adapter = learned(model)
    plain, found = (first_layer(model, scheme) for scheme in ("nope", adapter))
    theta, factor = adapter.xi[0].detach().exp().double(), adapter.factor(0)
    n = torch.arange(1, LENGTH + 1, dtype=torch.float64)
    grown = torch.log1p(n.clamp(min=16) / 16)
    scale = grown ** adapter.gamma[0].detach()[:, None] / adapter.tau[0].detach()[:, None]
    assert theta.unique(dim=0).shape[0] == spec.groups
    for head in range(families.HEADS):
        group = head * spec.groups // families.HEADS
        for turned, vectors, multiplier in (
            (found.q[head], plain.q[head], scale[head]),
            (found.k[group], plain.k[group], torch.ones(LENGTH)),
        ):
            expected = by_hand(vectors, theta[group], factor, spec) * multiplier[:, None]
            assert difference(turned.double(), expected) <= 1e-4


@torch.no_grad()
def first_layer(model: Model, scheme: str | AdaRoPE) -> AttentionRecord:
    heard: list[AttentionRecord] = []
    with attached(model, scheme), capturing(model) as layers:
        layers.listen(heard.append, [0])
        model.module(IDS[:1])
    return heard[0]


def by_hand(vectors: Tensor, theta: Tensor, factor: float, spec: families.Family) -> Tensor:
    """Rotate vectors [L, d] at positions 0, 1, ... by complex multiplication."""
    turned = vectors.double().clone()
    planes = eager_reference.planes(spec.head_dim, spec.rotary_dims, spec.layout)
    for plane, angle in zip(planes, theta, strict=False):
        z = torch.view_as_complex(vectors[:, plane].double().contiguous())
        z = z * torch.exp(1j * angle * torch.arange(len(vectors))) * factor
        turned[:, plane] = torch.view_as_real(z)
    return turned


def rope_theta(model: Model, layer: int) -> float:
    parameters = model.module.config.rope_parameters
    return float(parameters.get(model.rotation.layer_types[layer], parameters)["rope_theta"])


def check_effective_base(model: Model, theta: Callable[[int], float], rotates: tuple[bool, ...]) -> None:
    scales = position_tables("x", model)["scales"]
    for layer, base in zip(scales["layer"], scales["effective_base"], strict=True):
        if rotates[layer]:
            assert base == pytest.approx(theta(layer), rel=1e-6)


@MEASURABLE
def test_the_effective_base_of_plain_rotation_is_its_base(family: str) -> None:
    model = tiny(family)
    check_effective_base(model, lambda layer: rope_theta(model, layer), families.SPECS[family].rotates)


@pytest.mark.model
def test_the_effective_base_of_the_real_checkpoint_is_its_base(smollm2: Model) -> None:
    check_effective_base(smollm2, lambda layer: 1e5, (True,) * 30)
    check_effective_base(smollm2.with_scheme("abf:theta=3e6"), lambda layer: 3e6, (True,) * 30)


@MEASURABLE
def test_without_rotation_every_frequency_is_zero_and_no_number_is_nan(family: str) -> None:
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
    """Rotating layers, less those of a window, which schemes for longer contexts leave alone."""
    types = model.rotation.layer_types
    return [n for n, turns in enumerate(model.geometry.layer_rotates) if turns and types[n] != "sliding_attention"]


def test_what_a_checkpoint_was_scaled_by_is_replaced_and_that_is_told(caplog: pytest.LogCaptureFixture) -> None:
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    model = load(families.build("llama", {"rope_parameters": rope}))
    own, plain = resolve(model).theta(0), resolve(model, "linear:factor=1").theta(0)
    assert torch.allclose(plain, 4 * own)
    assert "is scaled already (linear): what a scheme makes of its base takes the place of that" in caplog.text


def test_one_pair_has_no_base() -> None:
    model = load(families.build("llama", {"head_dim": 2}))
    assert torch.as_tensor(position_tables("m", model)["scales"]["effective_base"]).isinf().all()
    with pytest.raises(UnsupportedModel, match="its one rotary pair turns alike under every base"):
        resolve(model, "ntk:factor=2")


@MEASURABLE
def test_schemes_have_their_closed_forms(family: str) -> None:
    model = tiny(family)
    dims = 2 * model.geometry.pairs
    exponent = -torch.arange(dims // 2, dtype=torch.float64) * 2 / dims
    kept = torch.arange(dims // 2) < round(0.75 * dims / 2)
    for layer in range(model.geometry.layers):
        own = model.rotation.theta[layer].double()
        base = rope_theta(model, layer)
        forms = {
            "ntk:factor=4": (base * 4 ** (dims / (dims - 2))) ** exponent,
            "abf:theta=5e6": 5e6**exponent,
            "linear:factor=4": base**exponent / 4,
        }
        for scheme, expected in forms.items():
            found = resolve(model, scheme).theta(layer)[0].double()
            torch.testing.assert_close(found, expected if layer in changed_layers(model) else own, rtol=1e-6, atol=0)
        assert torch.equal(resolve(model, "prope:keep=0.75").theta(layer)[0].double(), own * kept)
        assert torch.equal(resolve(model, "logn").theta(layer)[0].double(), own)


@MEASURABLE
def test_logn_multiplies_queries_beyond_its_length(family: str) -> None:
    model = tiny(family)
    plain, found = first_layer(model, "base"), first_layer(model, "logn:length=10")
    n = torch.arange(1, LENGTH + 1)
    expected = torch.where(n > 10, n.log() / math.log(10), 1.0)
    assert difference(found.q, plain.q * expected[:, None]) <= 1e-5
    assert torch.equal(found.k, plain.k)
    assert resolve(model, "logn").reference_length == 256


def test_the_scale_of_a_head_follows_its_formula() -> None:
    adapter = learned(tiny("llama-gqa"), reference_length=100)
    n = torch.tensor([[1, 100, 101, 5000]])
    scale = adapter.query_scale(2, n)
    for head in range(families.HEADS):
        tau, gamma = adapter.tau[2, head].item(), adapter.gamma[2, head].item()
        expected = [math.log(1 + max(x, 100) / 100) ** gamma / tau for x in n[0].tolist()]
        assert scale[0, head].tolist() == pytest.approx(expected, rel=1e-5)


def test_yarn_hands_its_temperature_to_tau() -> None:
    model = tiny("llama-gqa")
    adapter = AdaRoPE.untrained(model, resolve(model, "yarn:factor=8"))
    m = 0.1 * math.log(8) + 1
    assert (1 / adapter.tau.detach()).flatten().tolist() == pytest.approx([m**2] * 16, rel=1e-6)
    assert not adapter.gamma.any()
    assert adapter.rotary_factor.tolist() == [1.0] * 4
    assert adapter.reference_length == 256


# Attaching and detaching -------------------------------------------------------------------------------------------


def traces(model: Model) -> tuple[Any, ...]:
    """What an attached scheme might leave behind."""
    taps = [backend._hooks_by_module.get(module) for module in model.attention_modules]
    rotate = {type(m).__module__: sys.modules[type(m).__module__] for m in model.attention_modules}
    return (
        [getattr(namespace, "apply_rotary_pos_emb", None) for namespace in rotate.values()],
        model.module.config._attn_implementation,
        sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.module.modules()),
        sum(len(each.qkv_edits) + len(each.listeners) for each in taps if each is not None),
    )


@MEASURABLE
@pytest.mark.parametrize("scheme", ["yarn:factor=4", "logn:length=4", "adapter"])
def test_detaching_restores_the_model_bit_for_bit(family: str, scheme: str) -> None:
    model = tiny(family)
    before, expected = traces(model), logits(model)
    with attached(model, learned(model) if scheme == "adapter" else scheme), torch.no_grad():
        assert not torch.equal(model.module(IDS).logits, expected)
        assert traces(model) != before
    assert traces(model) == before
    assert torch.equal(logits(model), expected)


@SOME
def test_an_exception_inside_detaches_too(family: str) -> None:
    model = tiny(family)
    before, expected = traces(model), logits(model)
    with pytest.raises(RuntimeError, match="inside"), attached(model, learned(model)):
        raise RuntimeError("inside")
    assert traces(model) == before
    assert torch.equal(logits(model), expected)


@SOME
def test_of_nested_schemes_the_inner_frequencies_hold_until_it_ends(family: str) -> None:
    model = tiny(family)
    adapter = learned(model)
    for outer, inner in (("yarn:factor=4", "nope"), ("nope", adapter), (learned(model, "base"), "yarn:factor=4")):
        alone = logits(model, scheme=outer)
        with attached(model, outer):
            if isinstance(outer, str):
                assert difference(logits(model, scheme=inner), logits(tiny(family), scheme=inner)) <= 1e-4
            with attached(model, inner):
                pass
            assert torch.equal(logits(model), alone)


def test_a_model_runs_under_the_scheme_of_its_own_spec() -> None:
    model = tiny("llama-gqa")
    with attached(model.with_scheme("nope")) as schedule, torch.no_grad():
        found = model.module(IDS, use_cache=False).logits
    assert not schedule.theta(0).any()
    assert torch.equal(found, logits(model, scheme="nope"))


def test_a_model_reads_its_adapter_once(tmp_path: Path) -> None:
    model = tiny("llama-gqa")
    path = learned(model).save(tmp_path / "adapter.safetensors")
    adapted = model.with_scheme(f"adarope:adapter={path}")
    with attached(adapted) as schedule:
        expected = logits(adapted)
    path.unlink()
    assert resolve(adapted) is schedule
    with attached(adapted):
        assert torch.equal(logits(adapted), expected)


@pytest.mark.parametrize("scheme", ["base", "yarn:factor=4", "logn", "prope"])
def test_a_model_that_is_let_go_lets_its_checkpoint_go(scheme: str) -> None:
    """At once, without the garbage collector: the next checkpoint needs the memory."""
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


# Slopes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("heads", "exponents"),
    [
        (4, [2, 4, 6, 8]),
        (8, [1, 2, 3, 4, 5, 6, 7, 8]),
        (12, [1, 2, 3, 4, 5, 6, 7, 8, 0.5, 1.5, 2.5, 3.5]),
        (1, [8]),
    ],
)
def test_alibi_has_the_published_slopes(heads: int, exponents: list[float]) -> None:
    assert torch.allclose(published_slopes(heads), torch.tensor([2.0**-exponent for exponent in exponents]))


@pytest.mark.parametrize("family", ["llama-gqa", "llama-mqa", "mistral-sliding", "qwen3", "granite"])
def test_under_alibi_logits_fall_by_the_slope_of_the_head(family: str) -> None:
    model = tiny(family)
    heard: dict[str, AttentionRecord] = {}
    for scheme in ("nope", "alibi"):
        with attached(model, scheme), capturing(model) as layers, torch.no_grad():
            layers.listen(lambda each, scheme=scheme: heard.__setitem__(scheme, each), [0])
            model.module(IDS[:1], use_cache=False)
    plain, fallen = heard["nope"], heard["alibi"]
    heads, groups = model.geometry.heads, model.geometry.kv_groups
    slope = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])[:, None, None]
    i, j = torch.arange(LENGTH)[:, None], torch.arange(LENGTH)
    hidden = (j > i) | (i - j >= (plain.window or LENGTH))
    keys = plain.k.repeat_interleave(heads // groups, 0)
    expected = (plain.scaling * plain.q @ keys.mT - slope * (i - j)).masked_fill(hidden, -torch.inf)
    again = fallen.scaling * fallen.q @ fallen.k.repeat_interleave(heads // groups, 0).mT
    again = again.masked_fill(hidden, -torch.inf)
    assert difference(expected.softmax(-1), (again - fallen.lse[..., None]).exp()) <= 1e-5
    assert difference(expected.logsumexp(-1), fallen.lse) <= 1e-5
    values = plain.v.repeat_interleave(heads // groups, 0)
    assert difference(expected.softmax(-1) @ values, fallen.z) <= 1e-5


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding"])
def test_alibi_decodes_and_pads_as_it_reads_whole(family: str) -> None:
    model = tiny(family)
    cache = DynamicCache(config=model.module.config)
    with attached(model, "alibi"), torch.no_grad():
        split = IDS.split([20, 13] + [1] * 7, dim=1)
        parts = [model.module(part, past_key_values=cache, use_cache=True).logits for part in split]
    assert difference(torch.cat(parts, 1), logits(model, scheme="alibi")) <= 1e-4
    check_generation(model, "alibi", [IDS[0], IDS[1, :23]])


@pytest.mark.parametrize(("family", "why"), [("gpt_neox", "a part of each head"), ("gemma2", "caps its logits")])
def test_alibi_is_refused_where_it_would_be_wrong(family: str, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        logits(load(families.FAMILIES[family]()), scheme="alibi")


def test_alibi_needs_float32() -> None:
    model = load(families.MEASURABLE["llama-gqa"]().to(torch.bfloat16))
    with pytest.raises(UnsupportedModel, match="--dtype fp32"):
        logits(model, scheme="alibi")


# What a checkpoint was trained under -------------------------------------------------------------------------------


def trained_under(told: Any, folder: Path) -> Path:
    """A checkpoint folder whose config tells of its positions."""
    model = tiny("llama-gqa")
    model.module.save_pretrained(folder)
    learned(model, "base").save(folder / "adarope.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "headscope_positions": told}))
    return folder


@torch.no_grad()
def opened_alone(folder: Path) -> Model:
    return load(AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize(("told", "written"), [("nope", "nope"), ("alibi", "alibi"), ("adarope", "adarope:adapter=")])
def test_a_checkpoint_runs_under_the_positions_it_was_trained_under(told: str, written: str, tmp_path: Path) -> None:
    model = opened_alone(trained_under(told, tmp_path))
    plain = tiny("llama-gqa")
    expected = logits(plain, scheme=learned(plain, "base") if told == "adarope" else told)
    assert model.scheme.startswith(written)
    assert torch.equal(logits(model, scheme=model.schedule), expected)
    assert torch.equal(logits(model, scheme="base"), expected)
    assert torch.equal(logits(model.with_scheme("base"), scheme="base"), expected)
    assert torch.equal(logits(model, scheme="yarn:factor=4"), logits(plain, scheme="yarn:factor=4"))


@pytest.mark.parametrize(("told", "why"), [("nopee", "unknown position scheme"), (["nope"], "must be a position scheme")])
def test_positions_that_no_scheme_has_are_refused(told: Any, why: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=why):
        opened_alone(trained_under(told, tmp_path))


def test_a_checkpoint_whose_learned_positions_are_gone_is_refused(tmp_path: Path) -> None:
    (trained_under("adarope", tmp_path) / "adarope.safetensors").unlink()
    with pytest.raises(Missing, match="no adapter"):
        opened_alone(tmp_path)


# Caches, batches, precision ----------------------------------------------------------------------------------------


def schemes(model: Model) -> list[str | AdaRoPE]:
    return ["yarn:factor=4", "logn:length=4", learned(model)]


@MEASURABLE
def test_cached_decoding_is_the_full_pass(family: str) -> None:
    model = tiny(family)
    for scheme in schemes(model):
        expected = logits(model, IDS, scheme)
        cache = DynamicCache(config=model.module.config)
        with attached(model, scheme), torch.no_grad():
            split = IDS.split([20, 13] + [1] * 7, dim=1)
            parts = [model.module(part, past_key_values=cache, use_cache=True).logits for part in split]
        assert difference(torch.cat(parts, 1), expected) <= 1e-3


@MEASURABLE
def test_generation_with_left_padding_is_generation_alone(family: str) -> None:
    model = tiny(family)
    for scheme in schemes(model) if family in ("llama-gqa", "gemma3") else [learned(model)]:
        check_generation(model, scheme, [IDS[0], IDS[1, :23]])


@pytest.mark.model
def test_generation_on_the_real_checkpoint_with_left_padding_is_generation_alone(
    smollm2: Model, tokens: Tensor
) -> None:
    check_generation(smollm2, learned(smollm2, reference_length=16), [tokens[0, :40], tokens[0, 100:125]])


def check_generation(model: Model, scheme: str | AdaRoPE, prompts: list[Tensor]) -> None:
    """Logits of every generated step: of a left-padded batch, of each prompt alone, and of a full pass."""
    width = max(map(len, prompts))
    batch = torch.stack([torch.nn.functional.pad(p, (width - len(p), 0)) for p in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(p) for p in prompts]).long()
    with attached(model, scheme), torch.no_grad():
        together, ids = generate(model, batch, mask)
        for n, prompt in enumerate(prompts):
            alone, own_ids = generate(model, prompt[None], torch.ones(1, len(prompt), dtype=torch.long))
            whole = model.module(own_ids, use_cache=False).logits[:, len(prompt) - 1 : -1]
            assert difference(alone, whole) <= 1e-3
            assert torch.equal(ids[n, width:], own_ids[0, len(prompt) :])
            assert difference(together[n], alone[0]) <= 1e-3


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
@pytest.mark.parametrize("left", [True, False])
def test_temperatures_of_a_padded_batch_do_not_count_padding(family: str, left: bool, tmp_path: Path) -> None:
    """Without position ids transformers counts padding, too; what it does to rotation no weight sees."""
    model, alone, pads = tiny(family), IDS[1, :12], 7
    grown = AdaRoPE.untrained(model, resolve(model, "base"), reference_length=4)
    with torch.no_grad():
        grown.gamma.fill_(1.0)
    spec = f"adarope:adapter={grown.save(tmp_path / 'x.safetensors')}"
    sides = (pads, 0) if left else (0, pads)
    batch, mask = (torch.nn.functional.pad(t, sides)[None] for t in (alone, torch.ones_like(alone)))
    real = slice(pads, None) if left else slice(len(alone))
    for scheme in ("logn:length=4", spec, f"{spec},length=sequence"):
        with attached(model, scheme), torch.no_grad():
            expected = model.module(alone[None], use_cache=False).logits
            found = model.module(batch, attention_mask=mask, use_cache=False).logits[:, real]
        assert difference(found, expected) <= 1e-3, scheme


def generate(model: Model, ids: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    steps: dict[str, Any] = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    out = model.module.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **steps)
    return torch.stack(out.logits, 1), out.sequences


@SOME
def test_a_bfloat16_model_keeps_float32_parameters_and_its_own_bits(family: str) -> None:
    model = load(families.MEASURABLE[family]().bfloat16())
    plain = logits(model)
    assert difference(logits(model, scheme="base"), plain) == 0.0
    adapter = learned(model)
    assert {parameter.dtype for parameter in adapter.parameters()} == {torch.float32}
    found = logits(model, scheme=adapter)
    assert found.dtype == torch.bfloat16
    assert found.isfinite().all()
    assert torch.equal(logits(model), plain)


# Learning ----------------------------------------------------------------------------------------------------------


STEPS = {"xi": 1e-4, "tau": 1e-3, "gamma": 1e-3}
"""Of the finite differences: frequencies bend the loss soonest."""


def gradients(model: Model, adapter: AdaRoPE) -> list[Tensor]:
    adapter.zero_grad()
    with attached(model, adapter):
        found = model.module(IDS[:1], use_cache=False).logits[0, :-1]
        torch.nn.functional.cross_entropy(found, IDS[0, 1:]).backward()
    return [parameter.grad.clone() for parameter in adapter.parameters() if parameter.grad is not None]


@SOME
def test_gradient_checkpointing_changes_no_gradient(family: str) -> None:
    model = tiny(family)
    model.module.requires_grad_(False).train()
    adapter = learned(model)
    plain = gradients(model, adapter)
    model.module.activation_checkpointing_enable({"use_reentrant": False})
    assert model.module.is_activation_checkpointing
    checkpointed = gradients(model, adapter)
    assert len(plain) == len(checkpointed) == 3
    for a, b in zip(plain, checkpointed, strict=True):
        assert a.abs().max() > 1e-4
        assert difference(a, b) <= 1e-6


class Float64(TorchFunctionMode):
    """Keeps float64 tensors as they are where transformers asks for float32, in norms."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        narrowing = func is Tensor.float or (func is Tensor.to and torch.float32 in args)
        if narrowing and args[0].dtype == torch.float64:
            return args[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "family",
    ["llama", "llama-gqa", "llama-mqa", "mistral-sliding", "gemma3", "gpt_neox", "phi3", "smollm3", "cohere", "glm"],
)
def test_gradients_are_the_slope_of_the_loss(family: str) -> None:
    """Five-point differences along the gradient of each parameter, everything in float64."""
    model = load(families.MEASURABLE[family]().double())
    model.module.requires_grad_(False)
    adapter = learned(model).double()
    with Float64():
        found = gradients(model, adapter)
    for name, gradient in zip(LEARNED, found, strict=True):
        parameter = getattr(adapter, name)
        start = parameter.detach().clone()
        direction = gradient / gradient.norm()
        losses = {}
        for reach in (-2, -1, 1, 2):
            parameter.data = start + reach * STEPS[name] * direction
            with Float64(), torch.no_grad():
                predicted = logits(model, scheme=adapter)[0, :-1]
            losses[reach] = torch.nn.functional.cross_entropy(predicted, IDS[0, 1:]).item()
        parameter.data = start
        slope = (8 * (losses[1] - losses[-1]) - (losses[2] - losses[-2])) / (12 * STEPS[name])
        moving = direction.isfinite() & start.isfinite()  # the log of a frequency of 0 is -inf and stays
        assert slope == pytest.approx((gradient * direction)[moving].sum().item(), rel=1e-4)


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "cohere"])
def test_schemes_and_lora_do_not_see_each_other(family: str) -> None:
    """Wrapped before attaching or after, LoRA gives the same logits; at its start it changes none."""
    for scheme in ("yarn:factor=4", "adapter"):
        plain = tiny(family)
        expected = logits(plain, scheme=learned(plain) if scheme == "adapter" else scheme)
        found = []
        for wrap_first in (True, False):
            module = families.MEASURABLE[family]()
            model = load(with_lora(module)) if wrap_first else load(module)
            with attached(model, learned(model) if scheme == "adapter" else scheme):
                if not wrap_first:
                    with_lora(module)
                assert difference(logits(model), expected) == 0.0
                for name, parameter in module.named_parameters():
                    if "lora_B" in name:
                        parameter.data.fill_(0.05)
                found.append(logits(model))
        assert difference(*found) == 0.0
        assert difference(found[0], expected) > 1e-2


def with_lora(module: PreTrainedModel) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return get_peft_model(module, LoraConfig(target_modules=["q_proj", "k_proj"]))


# Adapter files -----------------------------------------------------------------------------------------------------


@SOME
def test_an_adapter_survives_its_file(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    adapter = learned(model)
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


def test_an_adapter_of_another_shape_is_refused(tmp_path: Path) -> None:
    path = learned(tiny("llama-gqa")).save(tmp_path / "adapter.safetensors")
    with pytest.raises(BadInput, match=r"does not fit 'in-memory llama': its xi is \(4, 2, 8\), .* needs \(4, 4, 8\)"):
        AdaRoPE.load(path, tiny("llama"))


def test_a_file_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    model, path = tiny("llama"), tmp_path / "x.safetensors"
    path.write_text("not safetensors")
    with pytest.raises(BadInput, match="not a readable safetensors file"):
        AdaRoPE.load(path, model)
    save_file({"xi": torch.zeros(4, 4, 8)}, path)
    with pytest.raises(BadInput, match="not an AdaRoPE adapter"):
        AdaRoPE.load(path, model)
    save_file({"xi": torch.zeros(4, 4, 8)}, path, {"headscope": '{"format": "headscope-adarope/1"}'})
    with pytest.raises(BadInput, match="lacks gamma, gamma_init, rotary_factor"):
        AdaRoPE.load(path, model)
    whole = learned(model)
    save_file({**whole.state_dict(), "bias": torch.zeros(1)}, path, {"headscope": '{"format": "headscope-adarope/1"}'})
    with pytest.raises(BadInput, match="holds bias, which no adapter has"):
        AdaRoPE.load(path, model)
    with pytest.raises(Missing, match="no adapter at"):
        AdaRoPE.load(tmp_path / "none.safetensors", model)
    with pytest.raises(Missing, match="no adapter at"):
        parse_scheme(f"adarope:adapter={tmp_path / 'none.safetensors'}")


def test_lambda_by_sequence_gives_every_query_the_length_of_the_whole(tmp_path: Path) -> None:
    model = tiny("llama")
    learned = AdaRoPE.untrained(model, resolve(model, "base"), reference_length=4)
    with torch.no_grad():
        learned.gamma.fill_(0.5)
    path = learned.save(tmp_path / "x.safetensors")
    visible = torch.arange(1, 21)[None]
    whole = resolve(model, f"adarope:adapter={path},length=sequence").query_scale(0, visible)
    each = resolve(model, f"adarope:adapter={path}").query_scale(0, visible)
    assert torch.equal(whole, each[..., -1:].expand_as(whole))
    assert (each[..., 0] < each[..., -1]).all()
    with pytest.raises(BadInput, match="expected visible or sequence"):
        resolve(model, f"adarope:adapter={path},length=all")


# Spec strings ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("yarm:factor=4", "did you mean 'yarn'"),
        ("yarn", "needs factor="),
        ("yarn:factr=4", "did you mean 'factor'"),
        ("yarn:4", "Write key=value"),
        ("yarn:factor=x", "'x' is not a number"),
        ("yarn:factor=0", "at least 1"),
        ("yarn:factor=nan", "at least 1"),
        ("yarn:factor=inf", "at least 1"),
        ("yarn:factor=4,attention_factor=0", "above 0"),
        ("llama3:factor=8,low_freq_factor=4", "above 4"),
        ("base:factor=2", "takes no keys"),
        ("abf:theta=1", "above 1"),
        ("logn:length=1", "at least 2"),
        ("logn:length=8.5", "not a number"),
        ("prope:keep=2", "between 0 and 1"),
        ("prope:keep=nan", "between 0 and 1"),
        ("adarope", "needs adapter="),
        ("", "unknown position scheme"),
    ],
)
def test_a_mistake_in_a_scheme_is_named(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said) as raised:
        parse_scheme(text)
    assert "\n" not in str(raised.value)


def test_a_spec_string_gives_its_scheme(tmp_path: Path) -> None:
    scheme = parse_scheme("yarn:factor=8,attention_factor=1")
    assert replace(scheme, factor=2) == parse_scheme("yarn:factor=2,attention_factor=1")  # type: ignore[type-var]
    path = tmp_path / "b=c.safetensors"
    path.touch()
    assert parse_scheme(f"adarope:adapter={path}").adapter == str(path)  # type: ignore[attr-defined]


def test_a_resolved_schedule_is_taken_as_it_is() -> None:
    model = tiny("llama")
    schedule: Schedule = resolve(model, "yarn:factor=2")
    assert resolve(model, schedule) is schedule  # type: ignore[arg-type]
