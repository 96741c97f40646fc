"""Published layouts: every measure is right on them or refused with the reason, and faults in them are seen.

`python -m tests.zoo --layouts` runs every measure on every layout; here each layout has one of them in turn.
"""

import json
from contextlib import ExitStack
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from support.model_state import model_state
from support.refusals import refuses
from torch import Tensor, nn
from zoo import checkpoint_page, checks, layout_checks, layouts
from zoo.eager import eager, tokens

import headscope as hs
from headscope.attention import backend, listeners
from headscope.attention.kernel import AttentionVariant
from headscope.errors import UnsupportedModel
from headscope.positions.model import Model
from probes.measure import run as cells
from probes.measure.run import measure_tokens

NAMES = tuple(layouts.layouts())
PAGE = Path(__file__).parents[1] / "docs" / "checkpoints.md"
MIN_LAYOUTS, MIN_CHECKPOINTS = 80, 300
NOT_OPENED = {"DeepSeek-V4", "Mamba"}
LONG_WINDOW = {"GPT-Neo"}
"""Its window is a buffer of the model and not shortened when it is opened: longer texts show it."""
OPENED = tuple(name for name in NAMES if name not in NOT_OPENED)
FAMILIES = tuple({layouts.layouts()[name].type: name for name in reversed(OPENED)}.values())[::-1]
"""The first layout of each model type."""
ROTATIONS = (
    *("Llama 3.1", "Llama 4 Scout", "Qwen3-Next", "Qwen 3-VL", "Gemma 3 4B to 27B", "GPT-OSS", "Phi 4 mini", "GPT-J"),
    *("DeepSeek-V3, R1", "GLM-4.5-Air", "OLMo 3", "Granite 4 micro", "Pythia, GPT-NeoX", "Command R7B", "ERNIE 4.5"),
)
"""One layout of each kind of rope scaling, order of pairs and share of rotating dimensions."""
SIZES = {
    "vocab_size",
    "image_token_id",
    "image_token_index",
    "boi_token_id",
    "eoi_token_id",
    "transformers_version",
    "is_decoder",
}
SCALED = {"attention_multiplier", "query_pre_attn_scalar"}
"""Numbers that belong to head_dim."""


def small(name: str) -> Any:
    return layouts.small_config(layouts.layouts()[name], {}).get_text_config()


def page_row(name: str) -> str:
    """The result of a layout on the page of checkpoints."""
    return next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith(f"| {name} | "))


# The list ----------------------------------------------------------------------------------------------------------


def test_the_list_has_many_layouts_and_checkpoints_and_names_each_once() -> None:
    checkpoints = [checkpoint for layout in layouts.layouts().values() for checkpoint in layout.checkpoints]
    assert len(NAMES) >= MIN_LAYOUTS
    assert len(checkpoints) == len(set(checkpoints)) >= MIN_CHECKPOINTS


def test_listed_checkpoints_have_the_architecture_of_their_layout_in_the_registry() -> None:
    registry = files("transformer_lens") / "tools/model_registry/data/supported_models.json"
    models = json.loads(registry.read_text(encoding="utf-8"))["models"]
    architectures = {model["model_id"]: model["architecture_id"] for model in models}
    checkpoint_count = 0
    for layout in layouts.layouts().values():
        family = layout.type.removesuffix("_text").replace("_", "")
        for checkpoint in layout.checkpoints:
            if checkpoint in architectures:
                checkpoint_count += 1
                name = architectures[checkpoint].lower().removesuffix("lmheadmodel").partition("for")[0]
                assert sorted(name.replace("_", "")) == sorted(family), checkpoint  # HunYuanDenseV1: hunyuan_v1_dense
    assert checkpoint_count >= MIN_CHECKPOINTS


@pytest.mark.parametrize("name", NAMES)
def test_a_small_model_keeps_the_published_structure(name: str) -> None:
    layout = layouts.layouts()[name]
    published, scaled = layouts.full_text_config(layout).to_dict(), small(name).to_dict()
    for field, value in published.items():
        if field in SIZES | SCALED | set(layout.small) or field.startswith("_") or field.endswith("_token_id"):
            continue
        if value is None or isinstance(value, bool | str | float):
            assert scaled[field] == value, field
    heads, groups = (name for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(published.get(groups), int) and published[groups] > 1:
        assert published[heads] / published[groups] == scaled[heads] / scaled[groups]
    if kinds := published.get("layer_types"):
        kept = range(layout.layers) if isinstance(layout.layers, int) else layout.layers
        assert scaled["layer_types"] == [kinds[layer] for layer in kept]
        assert set(scaled["layer_types"]) == set(kinds)
    ropes = [config.get("rope_parameters") or {} for config in (published, scaled)]
    for field, value in ropes[0].items():
        if isinstance(value, float | str | bool):
            assert ropes[1][field] == value, field


# Measures ----------------------------------------------------------------------------------------------------------


def measures_of(name: str) -> tuple[str, ...]:
    """The measures that are checked here, in turn over the layouts."""
    measures = [*layout_checks.MEASURES]
    return (measures[NAMES.index(name) % len(measures)],)


@pytest.mark.exhaustive(sample=26)
@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_layout_is_measured_like_its_eager_attention_or_refused_as_the_page_says(name: str) -> None:
    verdict = layout_checks.check_layout(lambda: layouts.build_layout(name), measures_of(name))
    assert verdict.kind in ("right", "right without pairs", "refused"), verdict
    row = page_row(name)
    assert (verdict.kind == "refused") == (name in NOT_OPENED) == ("| refused: " in row)
    assert verdict.reason in row
    assert not [reason for reason in verdict.refused.values() if layout_checks.shared_reason(reason) not in row], row
    passed = [measure for measure in measures_of(name) if measure not in verdict.refused]
    assert name in NOT_OPENED or not any(measure in row for measure in passed), row


def test_the_page_lists_every_layout_and_checkpoint() -> None:
    page = PAGE.read_text(encoding="utf-8")
    for name, layout in layouts.layouts().items():
        row = f"| {name} | {layout.type} | {checkpoint_page.describe_attention(layout)} | "
        assert row in page, "run `make docs`"
        assert all(f"| {checkpoint} | {name} | " in page for checkpoint in layout.checkpoints), "run `make docs`"


@pytest.mark.exhaustive(sample=17)
@pytest.mark.slow
@pytest.mark.parametrize("name", [*FAMILIES, "Phi 4 mini"])
def test_a_model_in_memory_is_bit_for_bit_what_it_was(name: str) -> None:
    """After opening, measuring, and an exception in the middle of a pass under YaRN."""
    module = layouts.build_layout(name)
    ids = tokens(module)
    before = model_state(module)
    model = hs.load(module)
    assert model_state(module) == before
    measure_tokens(model, ids[0], ["attention", "nll", *(["pairs"] if model.geometry.pairs else [])], None)
    assert model_state(module) == before
    with pytest.raises(ZeroDivisionError):
        fail_in_the_last_layer(model, ids)
    assert model_state(module) == before


def fail_in_the_last_layer(model: Model, ids: Tensor) -> None:
    with hs.attached(model, checks.YARN if model.geometry.pairs else None), hs.capturing(model) as layers:
        layers.listen(lambda record: 1 // 0, [model.geometry.layers - 1])
        model.module(ids, use_cache=False)


# Planted faults ----------------------------------------------------------------------------------------------------


def faults(model: Model) -> list[str]:
    """The faults that a layout can show: in what its layers add to plain causal attention, else in its scaling."""
    variants = observed_variants(model)
    fields = ("sink", "softcap", "chunk_size", "window")
    used_fields = [field for field in fields if any(getattr(variant, field) is not None for variant in variants)]
    used_fields += ["key_bias"] if "ALiBi" in model.rotation.no_pairs_reason else []
    return used_fields or ["scaling"]


def observed_variants(model: Model) -> list[AttentionVariant]:
    variants: list[AttentionVariant] = []

    def record(z: Tensor, call: backend.AttentionCall) -> Tensor:
        variants.append(call.variant)
        return z

    with ExitStack() as stack:
        stack.enter_context(hs.capturing(model))
        for module in model.attention_modules:
            stack.enter_context(backend.editing_output(module, record))
        model.module(tokens(model.module)[:, :3], use_cache=False)
    return variants


def plant(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows and chunks one key too long, no sink, half the soft cap, no ALiBi, a scaling 5 % too large."""
    if fault == "key_bias":
        monkeypatch.setattr(backend, "append_key_bias", lambda q, k, bias, scaling: (q, k))
        return
    changed = {
        "window": lambda value: value + 1,
        "chunk_size": lambda value: value + 1,
        "softcap": lambda value: value / 20,
        "sink": lambda value: None,
        "scaling": lambda value: 1.05 * value,
    }[fault]
    original = listeners.attend

    def attend(q: Tensor, k: Tensor, v: Tensor, module: nn.Module, variant: AttentionVariant, *rest: Any) -> Any:
        value = getattr(variant, fault)
        wrong = variant if value is None else replace(variant, **{fault: changed(value)})
        return original(q, k, v, module, wrong, *rest)

    monkeypatch.setattr(listeners, "attend", attend)


@pytest.mark.exhaustive(sample=25)
@pytest.mark.slow
@pytest.mark.parametrize("name", OPENED)
def test_a_layout_with_a_planted_fault_is_refused_when_opened(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = layouts.build_layout(name)
    for fault in faults(hs.load(module)):
        with monkeypatch.context() as context:
            plant(fault, context)
            if name in LONG_WINDOW and fault == "window":
                assert checks.check_model(lambda: layouts.build_layout(name)).kind == "WRONG"
                continue
            with refuses(UnsupportedModel, module.config.model_type, "eager"):
                hs.load(module)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROTATIONS)
def test_wrong_frequencies_of_a_layout_are_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = layouts.build_layout(name)
    model, ids = hs.load(module), tokens(module)
    frequencies = cells.frequencies_by_layer
    monkeypatch.setattr(cells, "frequencies_by_layer", lambda *arguments: 1.01 * frequencies(*arguments))
    errors = checks.CHECKS["theta"](model, ids, eager(module, ids))
    assert errors["theta"] > checks.MAX_EAGER_ERROR
