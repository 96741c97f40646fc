"""Rope settings of config.json: frequencies and temperatures equal those of transformers, also under a scheme.

The references are transformers' own rotary and attention modules, built from a config with the same settings.
"""

import math
import re
from pathlib import Path
from typing import Any, get_type_hints

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from support import families, rope_settings, tiny_studies
from support.refusals import assert_names, refuses
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_rope_utils import RopeParameters
from zoo import build as zoo_build

import headscope as hs
from headscope.errors import BadInput, UnsupportedModel
from headscope.models.rope_settings import native_context, original_context, refuse_rope_settings
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import attached
from headscope.positions.model import Model, load
from headscope.positions.rope_scaling import own_softmax_factors, schedule_at_length
from headscope.positions.schedule import Schedule
from headscope.rendering.assembly import head_blocks
from headscope.rendering.blocks import Chart
from probes.positions.run import position_tables

SCHEMES = ("yarn:factor=4", "yarn:factor=3,attention_factor=1.2", "linear:factor=4", "ntk:factor=4", "abf:theta=5e6")
SCHEMES += ("llama3:factor=8", "unscaled")
IDS = torch.randint(3, families.VOCAB, (1, 40), generator=torch.Generator().manual_seed(5))


def one_layer(family: str, rope: dict[str, Any], **changes: Any) -> PreTrainedModel:
    """A family's tiny model with few layers and these rope settings."""
    spec = (families.SPECS | families.OTHERS)[family]
    options = spec.options | {"num_hidden_layers": 2, "rope_parameters": rope} | changes
    if "layer_types" in options:
        options["layer_types"] = families.ALTERNATING[:2]
    return families.build(spec.model_type, options)


def with_rope(config: Any, rope: dict[str, Any]) -> Any:
    return type(config).from_dict({**config.to_dict(), "rope_parameters": rope})


def tables_of_transformers(model: Model, config: Any, layer: int, length: int) -> tuple[Tensor, float]:
    """Frequencies and factor on cos and sin that a new rotary module has after a text of `length` tokens."""
    rotary = type(model.rotation.rotary_modules[0])(config)
    kind = model.rotation.layer_types[layer]
    rotary(torch.zeros(1, 1, 1), torch.arange(length)[None], **({"layer_type": kind} if kind else {}))
    prefix = f"{kind}_" if kind else ""
    return getattr(rotary, f"{prefix}inv_freq"), float(getattr(rotary, f"{prefix}attention_scaling"))


def softmax_scale(model: Model, config: Any, layer: int) -> float:
    module: Any = model.attention_modules[layer]
    return float(type(module)(config, layer_idx=layer).scaling)


def check(schedule: Schedule, layer: int, expected: tuple[Tensor, float]) -> None:
    torch.testing.assert_close(schedule.theta(layer)[0], expected[0], rtol=1e-6, atol=0)
    assert schedule.attention_factor(layer) == pytest.approx(expected[1], rel=1e-6)


def config_with_scheme(own: dict[str, Any], scheme: str, maximum: int) -> dict[str, Any]:
    """The rope settings that a user would write for a scheme, from the checkpoint's own."""
    name, _, text = scheme.partition(":")
    options = {key: float(value) for key, value in (item.split("=") for item in text.split(",") if item)}
    original = own.get("original_max_position_embeddings")
    if original is None:
        original = int(maximum / own["factor"]) if own["rope_type"] == "linear" else maximum
    rope = {"rope_theta": own["rope_theta"], "original_max_position_embeddings": original}
    if "partial_rotary_factor" in own:
        rope["partial_rotary_factor"] = own["partial_rotary_factor"]
    if name == "unscaled":
        return rope | {"rope_type": "default"}
    if name == "abf":
        return rope | {"rope_type": "linear", "factor": 1.0, "rope_theta": options["theta"]}
    if name == "llama3":
        return rope | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0} | options
    if name == "yarn" and own["rope_type"] == "yarn":
        kept = ["beta_fast", "beta_slow", "truncate"]
        kept += [] if "attention_factor" in options else ["mscale", "mscale_all_dim"]
        rope |= {key: own[key] for key in kept if key in own}
    return rope | {"rope_type": name} | options


@st.composite
def cases(draw: st.DrawFn) -> tuple[PreTrainedModel, dict[str, Any], int]:
    """A model, the settings of its full-attention layers, and its declared length."""
    family = draw(st.sampled_from(["llama", "gpt_neox", "glm", "gemma3", "deepseek_v3"]))
    maximum = draw(st.sampled_from(rope_settings.VALUES["max_position_embeddings"]))
    dims = (families.SPECS | families.OTHERS)[family].head_dim
    share = draw(st.sampled_from(rope_settings.VALUES["partial_rotary_factor"])) if family in ("gpt_neox", "glm") else 1
    pairs = 4 if family == "deepseek_v3" else int(dims * share) // 2
    rope = draw(rope_settings.rope_parameters(pairs, latent=family == "deepseek_v3"))
    if share != 1:
        rope["partial_rotary_factor"] = share
    stored = rope
    if family == "gemma3":
        local = {"rope_type": "default", "rope_theta": 1e4}
        stored = {"full_attention": rope, "sliding_attention": local}
    return one_layer(family, stored, max_position_embeddings=maximum), rope, maximum


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases())
def test_own_frequencies_and_temperatures(case: tuple[PreTrainedModel, dict[str, Any], int]) -> None:
    """Of random valid settings, for texts on both sides of every length that they name."""
    module, rope, maximum = case
    model = load(module)
    own = model.schedule
    for length in sorted({8, maximum + 5, rope.get("original_max_position_embeddings", 8) + 3}):
        schedule = schedule_at_length(model, own, length)
        for layer in range(2):
            check(schedule, layer, tables_of_transformers(model, module.config, layer, length))
    for layer, factor in enumerate(own_softmax_factors(model)):
        scale = softmax_scale(model, module.config, layer)
        plain = with_rope(module.config, {"rope_type": "default", "rope_theta": 1e4})
        if module.config.model_type == "deepseek_v3":
            assert factor == pytest.approx(scale / softmax_scale(model, plain, layer), rel=1e-6)
        else:
            assert factor == 1


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cases(), st.sampled_from(SCHEMES))
def test_schemes_equal_the_config_with_that_scheme(
    case: tuple[PreTrainedModel, dict[str, Any], int], scheme: str
) -> None:
    module, own, maximum = case
    model = load(module)
    schedule = model.with_scheme(scheme).schedule
    if scheme.startswith("ntk"):  # transformers has no such type: a greater base
        dims = 2 * model.geometry.pairs
        scheme = f"abf:theta={own['rope_theta'] * 4 ** (dims / (dims - 2))!r}"
    rope = config_with_scheme(own, scheme, maximum)
    is_nested = module.config.model_type == "gemma3_text"
    config = with_rope(module.config, {**module.config.rope_parameters, "full_attention": rope} if is_nested else rope)
    for layer in range(2):
        check(schedule, layer, tables_of_transformers(model, config, layer, 8))
        if module.config.model_type == "deepseek_v3":
            ratio = softmax_scale(model, config, layer) / softmax_scale(model, module.config, layer)
            assert schedule.softmax_ratio(layer) == pytest.approx(ratio, rel=1e-6)


# Factors on all logits ---------------------------------------------------------------------------------------------


def families_with_softmax_factors() -> list[str]:
    """Model types whose modeling file uses `mscale_all_dim`, which no rotary module applies."""
    folder = Path(transformers.__file__).parent / "models"
    return [file.parent.name for file in sorted(folder.glob("*/modeling_*.py")) if "mscale_all_dim" in file.read_text()]


NOT_MEASURABLE = {"longcat_flash", "mistral_large4"}
"""Refused for other reasons."""


@torch.no_grad()
def logits(model: Model | PreTrainedModel, scheme: str | None = None) -> Tensor:
    if isinstance(model, PreTrainedModel):
        return model(IDS, use_cache=False).logits
    with attached(model, scheme):
        return model.module(IDS, use_cache=False).logits


def rebuilt(module: PreTrainedModel, rope: dict[str, Any]) -> PreTrainedModel:
    """The same weights with other rope settings."""
    config = with_rope(module.config, rope)
    reference = type(module)._from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    reference.load_state_dict(module.state_dict())
    return reference


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*families_with_softmax_factors()} - NOT_MEASURABLE))
def test_schemes_replace_the_softmax_factor_of_each_family(name: str) -> None:
    own = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 32}
    own |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    kept = {"llama_4_scaling_beta": 0.1, "partial_rotary_factor": 8 / 24} if name == "mistral4" else {}
    heads = {"head_dim": 24} if name == "mistral4" else {}
    module = zoo_build.tiny(name, {"rope_parameters": own | kept, "max_position_embeddings": 1280} | heads)
    model = load(module)
    assert own_softmax_factors(model)[0] == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    unchanged = logits(model)
    size = unchanged.abs().max()
    assert (logits(model, "yarn:factor=40") - unchanged).abs().max() <= 1e-5 * size
    plain = {key: own[key] for key in ("rope_theta", "original_max_position_embeddings")} | kept
    for scheme, rope in (
        ("yarn:factor=4", own | kept | {"factor": 4.0}),
        ("linear:factor=4", plain | {"rope_type": "linear", "factor": 4.0}),
    ):
        expected = logits(rebuilt(module, rope))
        assert (logits(model, scheme) - expected).abs().max() <= 1e-5 * size
        assert (unchanged - expected).abs().max() > 1e-3 * size


def test_every_family_with_a_softmax_factor_computes_it_in_the_known_function() -> None:
    folder = Path(transformers.__file__).parent / "models"
    for name in families_with_softmax_factors():
        texts = [file.read_text() for file in folder.glob(f"{name}/modeling_*.py")]
        assert any(re.search(r"self\.scaling = yarn_apply_mscale\(", text) for text in texts), name


def test_the_warning_says_what_a_scheme_does_to_the_temperature(caplog: pytest.LogCaptureFixture) -> None:
    own = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 32}
    _ = (
        load(one_layer("deepseek_v3", own | {"mscale": 1.0, "mscale_all_dim": 1.0}))
        .with_scheme("yarn:factor=5")
        .schedule
    )
    ratio = ((0.1 * math.log(5) + 1) / (0.1 * math.log(40) + 1)) ** 2
    assert_names(caplog.text, "softmax", f"{ratio:.4g}")
    caplog.clear()
    _ = load(one_layer("llama", own)).with_scheme("linear:factor=5").schedule
    assert_names(caplog.text, "cos", "sin", f"{1 / (0.1 * math.log(40) + 1):.4g}")


def test_an_adapter_starts_from_the_softmax_factor_of_its_scheme() -> None:
    own = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 32}
    module = one_layer("deepseek_v3", own | {"mscale": 1.0, "mscale_all_dim": 1.0})
    model = load(module)
    adapter = AdaRoPE.from_schedule(model, model.with_scheme("yarn:factor=4").schedule)
    with attached(model, adapter), torch.no_grad():
        from_adapter = module(IDS, use_cache=False).logits
    assert (from_adapter - logits(model, "yarn:factor=4")).abs().max() <= 1e-4


# What is stored ----------------------------------------------------------------------------------------------------


def test_scales_hold_absolute_factors_and_say_what_is_scaled() -> None:
    """A factor on cos and sin scales all logits only if the whole head rotates."""
    factor = 0.1 * math.log(4) + 1
    for family, logit_scale in (("llama", factor**2), ("gpt_neox", 1.0), ("deepseek_v3", 1.0)):
        model = load((families.SPECS | families.OTHERS)[family].build())
        scales = position_tables("m", model.with_scheme("yarn:factor=4"))["scales"]
        assert scales["attention_factor"] == pytest.approx(factor)
        assert scales["softmax_factor"] == pytest.approx(1)
        assert scales["logit_scale"] == pytest.approx(logit_scale)
        assert scales["tau"] == pytest.approx(1 / logit_scale)
    own = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 40.0, "original_max_position_embeddings": 32}
    latent = load(one_layer("deepseek_v3", own | {"mscale": 1.0, "mscale_all_dim": 1.0}))
    before, after = (position_tables("m", model)["scales"] for model in (latent, latent.with_scheme("yarn:factor=4")))
    assert before["softmax_factor"] == pytest.approx((0.1 * math.log(40) + 1) ** 2)
    assert after["softmax_factor"] == pytest.approx(factor**2)
    assert after["logit_scale"] == pytest.approx((factor / (0.1 * math.log(40) + 1)) ** 2)


@pytest.mark.parametrize("name", families.DYNAMIC)
def test_positions_have_a_row_for_each_length_on_which_frequencies_depend(name: str) -> None:
    module = families.DYNAMIC[name]()
    model = load(module)
    limit = model.rotation.frequency_change_length
    assert limit is not None
    tables = position_tables("m", model, (limit - 8, limit + 40, limit + 80))
    positions = tables["positions"]
    for length in (limit - 8, limit + 40, limit + 80):
        rows = (positions["context_length"] == length) & (positions["layer"] == 0) & (positions["kv_group"] == 0)
        expected, factor = tables_of_transformers(model, module.config, 0, length)
        assert positions["theta"][rows][: len(expected)] == pytest.approx(expected.numpy(), rel=1e-6)
        assert tables["scales"]["attention_factor"][0] == pytest.approx(factor)
    fixed = position_tables("m", model.with_scheme("yarn:factor=4"), (limit - 8, limit + 40))["positions"]
    assert set(fixed["context_length"]) == {0}


def test_stored_positions_agree_with_the_pairs_of_a_long_text(tmp_path: Path) -> None:
    model = load(families.DYNAMIC["phi3-longrope"](), tokenizer=tiny_studies.tokenizer())
    prompt = " ".join(f"w{n}" for n in range(100))
    run = hs.measure({"m": model}, prompt=prompt, tables=["attention", "pairs"], out=tmp_path, quiet=True)
    (length,) = set(run.positions["context_length"])
    assert length == run.attention["context_length"].max() > 64
    keys = ["layer", "kv_group", "pair"]
    rows = run.pairs.drop_duplicates(keys).merge(run.positions, on=keys, suffixes=("", " of positions"))
    assert len(rows) == families.LAYERS * 2 * 8
    assert (rows["theta"] == rows["theta of positions"]).all()
    assert run.heads["mean_log_theta"].notna().all()


def test_frequencies_of_a_head_are_drawn_at_the_longest_length_only(tmp_path: Path) -> None:
    model = load(families.DYNAMIC["phi3-longrope"](), tokenizer=tiny_studies.tokenizer())
    text = tmp_path / "text.txt"
    text.write_text(" ".join(f"w{n % 120}" for n in range(120)))
    options = {"text": f"file:{text}", "docs": 1, "tables": ["attention"], "quiet": True}
    run = hs.measure({"m": model}, lengths=[32, 96], out=tmp_path, **options)
    assert set(run.positions["context_length"]) == {32, 96}
    figures = [block.figure for block in head_blocks(run, "m", 0, 0) if isinstance(block, Chart)]
    (figure,) = [figure for figure in figures if str(figure.layout.title.text).startswith("Frequencies of layer 0")]
    for trace in figure.data:
        assert [*trace.x] == sorted(set(trace.x))


# Lengths -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rope", "maximum", "native", "original"),
    [
        ({"rope_type": "default"}, 8192, 8192, 8192),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192}, 131072, 131072, 8192),
        ({"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}, 131072, 131072, 8192),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}, 32768, 131072, 32768),
        ({"rope_type": "linear", "factor": 8.0}, 131072, 131072, 16384),
        ({"rope_type": "linear", "factor": 4.0}, (4096, 16384), 16384, 4096),  # Vicuna 16k
        ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 48}, 96, 96, 48),
        ({"rope_type": "dynamic", "factor": 4.0, "original_max_position_embeddings": 96}, 48, 96, 96),
        ({"rope_type": "longrope", "original_max_position_embeddings": 4096}, 131072, 131072, 4096),
    ],
)
def test_native_and_original_context_are_different_lengths(
    rope: dict[str, Any], maximum: int | tuple[int, int], native: int, original: int
) -> None:
    declared = maximum if isinstance(maximum, tuple) else (maximum, None)

    class Config:
        rope_parameters, max_position_embeddings, max_sequence_length = rope, *declared

        def get_text_config(self) -> Any:
            return self

    assert (native_context(Config()), original_context(Config())) == (native, original)


LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


@pytest.mark.parametrize(
    ("rope", "original", "maximum", "limit"),
    [(DYNAMIC, 48, 96, 96), (DYNAMIC, 96, 48, 48), (LONGROPE, 48, 96, 48), (LONGROPE, 96, 48, 96)],
)
def test_cached_decoding_equals_the_full_pass_up_to_the_change_of_frequencies(
    rope: dict[str, Any], original: int, maximum: int, limit: int
) -> None:
    """Beyond it cached keys have other frequencies, which is refused."""
    rope = rope | {"original_max_position_embeddings": original}
    module = one_layer("llama", rope, max_position_embeddings=maximum)
    model = load(module)
    assert model.rotation.frequency_change_length == limit
    ids = torch.randint(3, families.VOCAB, (1, limit + 1), generator=torch.Generator().manual_seed(5))
    cache = transformers.DynamicCache(config=module.config)
    with torch.no_grad(), attached(model):
        expected = module(ids[:, :limit], use_cache=False).logits
        parts = ids[:, :limit].split([limit - 4, 1, 1, 1, 1], 1)
        decoded = torch.cat([module(part, past_key_values=cache, use_cache=True).logits for part in parts], 1)
        assert (decoded - expected).abs().max() <= 1e-3
        with refuses(UnsupportedModel, f"'{model.name}'", f"{limit} tokens"):
            module(ids[:, limit:], past_key_values=cache, use_cache=True)


# Settings that give no frequencies ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ('{"rope_type": "yarn", "rope_theta": 10000.0}', ("'yarn'", "factor")),
        ('{"type": "llama3", "factor": 8.0}', ("'llama3'", "low_freq_factor", "high_freq_factor")),
        ('{"rope_type": "longrope", "short_factor": [1.0]}', ("'longrope'", "long_factor")),
        (
            '{"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]}',
            ("short_factor", "long_factor"),
        ),
        ('{"rope_type": "linear", "factor": "4"}', ("factor", "'4'")),
        ('{"rope_type": "linear", "factor": 0}', ("factor", 0)),
        ('{"rope_type": "yarn", "factor": 4.0, "rope_theta": 1}', ("rope_theta", 1, "YaRN")),
        ('{"full_attention": {"rope_type": "dynamic"}}', ("'dynamic'", "factor")),
    ],
)
def test_settings_without_frequencies_are_refused_by_name(
    tmp_path: Path, rope: str, named: tuple[str | int, ...]
) -> None:
    for text in (f'{{"rope_parameters": {rope}}}', f'{{"text_config": {{"rope_scaling": {rope}}}}}'):
        (tmp_path / "config.json").write_text(text)
        with refuses(BadInput, "'x'", *named, "config.json"):
            refuse_rope_settings(tmp_path, "x")


def test_yarn_on_a_base_of_1_is_refused() -> None:
    model = load(one_layer("llama", {"rope_type": "default", "rope_theta": 1.0}))
    with refuses(UnsupportedModel, "yarn", "rope_theta", 1):
        _ = model.with_scheme("yarn:factor=4").schedule


def test_schemes_on_hunyuan_alpha_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0}
    model = load(families.build("hunyuan_v1_dense", {"head_dim": 16, "rope_parameters": rope, "num_hidden_layers": 2}))
    with refuses(UnsupportedModel, "yarn", "hunyuan_v1_dense"):
        _ = model.with_scheme("yarn:factor=4").schedule


# The page ----------------------------------------------------------------------------------------------------------


def test_the_page_lists_every_setting_of_transformers() -> None:
    keys = {key for setting in rope_settings.SETTINGS for key in setting.key.split(", ")}
    assert {*get_type_hints(RopeParameters)} <= keys
    page = rope_settings.PAGE.read_text(encoding="utf-8")
    assert page == rope_settings.page_with_table(page), "run python -m tests.support.rope_settings"
