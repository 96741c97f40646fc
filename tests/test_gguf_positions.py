"""GGUF files: rotation, windows and temperature as the file states them, equal to the model that it was made from."""

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import positions_page
import pytest
import torch
from gguf import MODEL_ARCH_NAMES
from hypothesis import given, settings
from hypothesis import strategies as st
from support.gguf_cases import CASES, MEANINGS, REFUSED, VARIANTS, build
from support.gguf_files import gguf_name, write_gguf, write_model
from support.refusals import assert_names, refuses
from transformers import PreTrainedModel
from transformers.integrations.gguf import GGUF_CONFIG_ARCHS
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

import headscope
from headscope.errors import BadInput, UnsupportedModel
from headscope.models.conversion import DIGESTS_FILE
from headscope.models.gguf_check import check_model, expected_rotation
from headscope.models.gguf_config import ARCHITECTURES, POSITION_KEYS, gguf_config, softmax_scale
from headscope.models.gguf_file import ROPE_TENSORS, read_gguf
from headscope.models.inspection import inspect_model

TOLERANCE = 1e-5
TOKENS = torch.randint(3, 300, (1, 100), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(TOKENS).logits


@pytest.mark.exhaustive(sample=7)
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_gguf_gives_the_logits_of_its_model(cache: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    model = case.build()
    file = write_model(tmp_path / "tiny.gguf", model, case.settings)
    opened = headscope.load(str(file), device="cpu").module
    assert (logits(opened) - logits(model)).abs().max() <= TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_another_way_to_state_positions_gives_the_same_configuration(tmp_path: Path, name: str) -> None:
    case = VARIANTS[name]
    model = case.build()
    file = read_gguf(write_model(tmp_path / "tiny.gguf", model, case.settings))
    copy = type(model)(gguf_config(file)).eval()
    copy.load_state_dict(model.state_dict())
    check_model(copy, file, [])
    assert (logits(copy) - logits(model)).abs().max() <= TOLERANCE


def test_every_architecture_that_transformers_reads_is_compared_or_refused() -> None:
    """Of the architectures that the gguf package names."""
    renamed = {"qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss", "minimax_m2": "minimax-m2"}
    readable = {renamed.get(name, name) for name in (*GGUF_SUPPORTED_ARCHITECTURES, *GGUF_CONFIG_ARCHS)}
    named = readable & {*MODEL_ARCH_NAMES.values()}
    compared = {gguf_name(case.model_type) for case in CASES.values()}
    assert compared == {*ARCHITECTURES}
    assert named - compared == {"deci", "gpt-oss", "mamba", "t5"}


@pytest.mark.parametrize("architecture", ["deci", "gpt-oss", "mamba", "t5", "unheard-of"])
def test_other_architectures_are_refused_by_name(cache: Path, tmp_path: Path, architecture: str) -> None:
    write_gguf(tmp_path / "tiny.gguf", 2, architecture=architecture)
    with refuses(UnsupportedModel, tmp_path / "tiny.gguf", f"'{architecture}'"):
        headscope.load(str(tmp_path / "tiny.gguf"), device="cpu")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("key", REFUSED)
def test_a_setting_that_transformers_cannot_express_is_refused_by_name(cache: Path, tmp_path: Path, key: str) -> None:
    name, added = REFUSED[key]
    file = write_model(tmp_path / "tiny.gguf", CASES[name].build(), {**CASES[name].settings, **added})
    with refuses(UnsupportedModel, file, f"'{gguf_name(CASES[name].model_type)}.{key}'") as refusal:
        headscope.load(str(file), device="cpu")
    assert "\n" not in str(refusal.value)
    assert list(cache.iterdir()) == []


def test_a_part_of_a_file_is_refused_with_the_command_that_merges_it(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny-00001-of-00002.gguf", 1, parts=2)
    with refuses(BadInput, file, "2 parts", "llama-gguf-split --merge"):
        headscope.load(str(file), device="cpu")


def other_value(value: Any) -> Any:
    """A valid value of the same type."""
    if isinstance(value, str):
        return "none"
    if isinstance(value, list):
        return [1, 2, 1, 0]
    return type(value)(value * 2)


CHECKED_KEYS = [(name, key) for name, case in (CASES | VARIANTS).items() for key in case.keys]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "key"), CHECKED_KEYS)
def test_every_setting_of_positions_reaches_the_configuration(tmp_path: Path, name: str, key: str) -> None:
    """Another value gives another configuration, or is refused."""
    case = (CASES | VARIANTS)[name]
    model = case.build()
    file = read_gguf(write_model(tmp_path / "tiny.gguf", model, case.settings))
    own = gguf_config(file).to_dict()
    if key in ROPE_TENSORS:
        changed = replace(file, divisors={**file.divisors, key: 1.5 * file.divisors[key]})
    else:
        other = {key: other_value(file.settings[key])}
        if key.startswith("attention.key_length"):
            other[key.replace("key", "value")] = other[key]
        if key == "attention.key_length_swa":  # Gemma 4 rotates whole heads
            other["rope.dimension_count_swa"] = other[key]
        changed = read_gguf(write_model(tmp_path / "other.gguf", model, {**case.settings, **other}))
    try:
        other_config = gguf_config(changed).to_dict()
    except UnsupportedModel as refusal:
        other_config = {"refusal": str(refusal)}
    assert other_config != own
    assert key in other_config.get("refusal", key)


@pytest.mark.slow
def test_a_model_with_other_positions_than_its_file_is_refused_by_name(tmp_path: Path) -> None:
    """The comparison after opening would find a setting that transformers lost."""
    lost = {
        "Llama 3.1": ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, "rope.scaling.type"),
        "Llama, linear 4": ("rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, "rope.scaling.type"),
        "Phi-3, window": ("sliding_window", 16, "attention.sliding_window"),
        "Gemma 2": ("attn_logit_softcapping", 50.0, "attn_logit_softcapping"),
        "Gemma 3": ("query_pre_attn_scalar", 256, "attention.scale"),
        "Qwen2": ("rms_norm_eps", 1e-4, "attention.layer_norm_rms_epsilon"),
    }
    for name, (attribute, value, key) in lost.items():
        case = CASES[name]
        model = case.build()
        file = read_gguf(write_model(tmp_path / "tiny.gguf", model, case.settings))
        check_model(model, file, [])
        other = build(case.model_type, {**case.options, attribute: value})
        with refuses(UnsupportedModel, key):
            check_model(other, file, [])


def test_a_file_named_mistral_has_no_window_of_its_own(tmp_path: Path) -> None:
    """transformers opens it as Mistral, whose class has a window of 4,096 tokens."""
    file = read_gguf(write_model(tmp_path / "tiny.gguf", CASES["Mistral"].build(), name="mistral"))
    assert gguf_config(file).model_type == "llama"


def test_a_tensor_that_transformers_drops_is_refused_by_name(tmp_path: Path) -> None:
    file = read_gguf(write_model(tmp_path / "tiny.gguf", CASES["Llama"].build()))
    model = CASES["Llama"].build()
    more = replace(file, tensor_names=file.tensor_names | {"blk.1.attn_sinks.weight"})
    with refuses(UnsupportedModel, "'blk.1.attn_sinks.weight'", 1):
        check_model(model, more, [])


@pytest.mark.parametrize(("name", "layers"), [("Gemma 2", 46), ("Gemma 3", 62)])
def test_the_27b_sizes_of_gemma_scale_logits_by_their_width(tmp_path: Path, name: str, layers: int) -> None:
    """llama.cpp knows them by the number of layers; their files do not state the scale."""
    file = read_gguf(write_model(tmp_path / "tiny.gguf", CASES[name].build()))
    width = {"embedding_length": 96, "attention.head_count": 4}  # 24 dimensions, where a head has 16
    large = replace(file, settings={**file.settings, **width, "block_count": layers})
    assert (softmax_scale(file), softmax_scale(large)) == (16**-0.5, 24**-0.5)


# Random settings ---------------------------------------------------------------------------------------------------


@st.composite
def rope_settings(draw: st.DrawFn) -> dict[str, Any]:
    """`rope_parameters` of a tiny Llama with 8 pairs, of every type that GGUF can hold."""
    kind = draw(st.sampled_from(["default", "linear", "yarn", "llama3", "divisors"]))
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": draw(st.floats(100, 1e7, width=32))}
    factor = draw(st.floats(1.5, 64, width=32))
    if kind == "linear":
        rope["factor"] = factor
    if kind == "yarn":
        rope |= {"factor": factor, "original_max_position_embeddings": draw(st.integers(16, 4096))}
        for name, values in (
            ("attention_factor", st.floats(0.5, 2, width=32)),
            ("beta_fast", st.floats(8, 64, width=32)),
            ("beta_slow", st.floats(0.5, 4, width=32)),
        ):
            if draw(st.booleans()):
                rope[name] = draw(values)
    if kind == "llama3":
        low = draw(st.floats(0.5, 2, width=32))
        rope |= {"factor": factor, "low_freq_factor": low, "high_freq_factor": low * draw(st.floats(1.5, 8, width=32))}
        rope["original_max_position_embeddings"] = draw(st.integers(16, 16384))
    if kind == "divisors":
        divisors = draw(st.lists(st.floats(1, 50, width=32), min_size=8, max_size=8))
        rope |= {"rope_type": "longrope", "short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
        rope["original_max_position_embeddings"] = 32
    return rope


@given(rope=rope_settings())
@settings(max_examples=15, deadline=None)
def test_random_rope_settings_give_the_frequencies_of_the_model(tmp_path_factory: Any, rope: dict[str, Any]) -> None:
    """Read back as configuration and computed by llama.cpp's rules, they equal the model's within float32."""
    model = build("llama", {"rope_parameters": dict(rope), "num_hidden_layers": 1, "vocab_size": 257})
    folder = tmp_path_factory.mktemp("gguf")
    file = read_gguf(write_model(folder / "tiny.gguf", model))
    own = inspect_model(model).rotation
    theta, factor = expected_rotation(file)
    torch.testing.assert_close(theta.float(), own.theta[0], rtol=TOLERANCE, atol=0)
    assert factor == pytest.approx(own.factors[0], rel=1e-6)
    reread = inspect_model(type(model)(gguf_config(file)).eval()).rotation
    torch.testing.assert_close(reread.theta[0], own.theta[0], rtol=TOLERANCE, atol=0)
    assert reread.factors[0] == pytest.approx(own.factors[0], rel=1e-6)


# The cache ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["zeros in the weights", "other configuration", "no digests"])
def test_a_damaged_conversion_is_made_again(
    cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    file = write_model(tmp_path / "tiny.gguf", CASES["Llama"].build())
    before = logits(headscope.load(str(file), device="cpu").module)
    (folder,) = cache.iterdir()
    if damage == "zeros in the weights":
        with (folder / "model.safetensors").open("r+b") as stream:
            stream.seek(-2_000, os.SEEK_END)
            stream.write(bytes(1_000))
    elif damage == "other configuration":
        config = (folder / "config.json").read_text()
        (folder / "config.json").write_text(config.replace("500000.0", "10000.0"))
    else:
        (folder / DIGESTS_FILE).unlink()
    with caplog.at_level(logging.WARNING, "headscope"):
        again = logits(headscope.load(str(file), device="cpu").module)
    assert torch.equal(again, before)
    assert_names(caplog.text, "tiny.gguf")
    caplog.clear()
    headscope.load(str(file), device="cpu")
    assert "tiny.gguf" not in caplog.text


# The table of docs/positions.md ------------------------------------------------------------------------------------


def test_every_setting_that_headscope_reads_is_in_the_table() -> None:
    assert {*POSITION_KEYS, *ROPE_TENSORS} <= {*MEANINGS}
    assert {key for _, key in CHECKED_KEYS} <= {*MEANINGS}
    unchecked = {*MEANINGS} - {key for _, key in CHECKED_KEYS} - {*REFUSED}
    assert unchecked == {"rope.scaling.finetuned", "block_count"}  # the number of layers has a test of its own
    assert positions_page.PAGE.read_text(encoding="utf-8") == positions_page.page()
