"""Ablated pairs equal an eager attention edited by hand, and a model that does not rotate them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import edited_attention, families
from support.adapters import noisy
from support.refusals import refuses
from support.replayed_losses import IDS, full_pass_loss, replay_losses
from support.tiny_studies import content, save_checkpoint, save_texts
from torch import Tensor

import headscope as hs
from headscope.errors import BadInput, BadOption, UnsupportedModel
from headscope.interventions.edits import edit_units
from headscope.interventions.heads import Unit, head_units, kv_group_units
from headscope.interventions.replay import Replay
from headscope.positions import resolve_schedule
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents
from headscope.runs.run_tables import validate
from headscope.study import runner
from headscope.study.config import build_study
from probes.influence import bands
from probes.influence.analysis import all_sweeps
from probes.influence.sweep import plan_sweep

FIVE = ("llama-gqa", "gemma3", "phi", "cohere", "glm")
"""Shared keys; windows with frequencies of their own; partial rotary; interleaved; both."""


def pair_interventions(model: Model, *components: str, **section: Any) -> Mapping[str, Any]:
    """The kinds of edit that these components stand for, by the names they are stored under."""
    config = build_study({"influence": {"components": components, "method": "estimate", **section}}).probe_options[
        "influence"
    ]
    return {name: change for (name, _), change in plan_sweep("tiny", model, config).interventions.items()}


@pytest.mark.parametrize("family", FIVE)
def test_ablating_pairs_of_one_unit_equals_an_eager_attention_without_them(family: str) -> None:
    model, shape = hs.load(families.SPECS[family].build()), families.SPECS[family]
    units, most = [Unit(1, 1), Unit(2, 0, 1)], shape.rotary_dims // 2 - 1
    edits, ablations = [], []
    for first, last in ((0, 0), (1, most)):
        names = f"pairs-zero:{first}-{last}", f"pairs-unrotated:{first}-{last}"
        interventions = pair_interventions(model, *names)
        for unit in units:
            theta = edited_attention.frequencies(model.module, unit.layer)
            by_hand = (
                edited_attention.zero(shape, first, last),
                edited_attention.unrotate_pairs(shape, first, last, theta),
            )
            for name, edit in zip(names, by_hand, strict=True):
                ablations.append((interventions[name], [unit]))
                edits.append({unit.layer: (unit.head_slice(model.geometry), edit)})
    *losses, plain = replay_losses(model, resolve_schedule(model, "base"), ablations)
    assert plain == pytest.approx(edited_attention.losses(model, IDS, {}).mean().item(), abs=1e-5)
    expected = [edited_attention.losses(model, IDS, edit).mean().item() for edit in edits]
    assert losses == pytest.approx(expected, abs=1e-5)
    assert min(abs(loss - plain) for loss in losses) > 1e-5, "each is felt"


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "phi", "cohere", "smollm3"])
def test_unrotated_pairs_of_every_unit_equal_a_model_with_those_frequencies_zero(family: str) -> None:
    """By its own frequencies set to zero; where a layer does not rotate, nothing is knocked out."""
    model = hs.load(families.SPECS[family].build())
    most = families.SPECS[family].rotary_dims // 2 - 1
    (unrotation,) = pair_interventions(model, f"pairs-unrotated:1-{most}").values()
    turning = [unit for unit in head_units(model.geometry) if model.geometry.layer_rotates[unit.layer]]
    by_head, by_group, _ = replay_losses(
        model, resolve_schedule(model, "base"), [(unrotation, turning), (unrotation, kv_group_units(model.geometry))]
    )
    module = families.SPECS[family].build()
    for name, buffer in module.named_buffers():
        if name.endswith("inv_freq"):
            buffer[1:] = 0
    unturned = edited_attention.losses(hs.load(module), IDS, {}).mean().item()
    assert by_head == pytest.approx(unturned, abs=1e-5)
    assert by_group == pytest.approx(by_head, abs=1e-5)


def test_pairs_of_a_learned_schedule_are_unrotated_with_their_own_group_frequencies() -> None:
    model = hs.load(families.SPECS["llama-gqa"].build())
    adapter = noisy(model)
    unit = Unit(2, 1)
    unrotation = pair_interventions(model, "pairs-unrotated:2-5")["pairs-unrotated:2-5"]
    adapter_intervention = type(unrotation)(unrotation.pairs, adapter, model.geometry)
    loss, _ = replay_losses(model, adapter, [(adapter_intervention, [unit])])
    with torch.no_grad():
        adapter.xi[2, 1, 2:6] = -80
    assert loss == pytest.approx(full_pass_loss(model, adapter), abs=1e-5)


@pytest.mark.model
def test_pair_ablation_of_the_real_model_equals_an_edited_eager_attention(smollm2: Model, tokens: Tensor) -> None:
    ids, shape = tokens[:, :128], families.Family("llama", {}, head_dim=64, rotary_dims=64)
    head, group = Unit(22, 1, 4), Unit(25, 2)
    interventions = pair_interventions(smollm2, "pairs-zero:20-31", "pairs-unrotated:0-15")
    schedule, geometry = resolve_schedule(smollm2, "base"), smollm2.geometry
    replay = Replay(smollm2, schedule, ids, memory_bytes=1e9)
    with replay.capturing():
        replay.record_streams()
        run = [
            edit_units(interventions["pairs-zero:20-31"], [head], geometry),
            edit_units(interventions["pairs-unrotated:0-15"], [group], geometry),
        ]
        ((_, losses),) = replay.losses([run])
        losses = losses.double()
    theta = edited_attention.frequencies(smollm2.module, group.layer)
    by_hand = {
        head.layer: (head.head_slice(geometry), edited_attention.zero(shape, 20, 31)),
        group.layer: (group.head_slice(geometry), edited_attention.unrotate_pairs(shape, 0, 15, theta)),
    }
    expected = edited_attention.losses(smollm2, ids, by_hand)
    assert losses.mean().item() == pytest.approx(expected.mean().item(), abs=1e-5)
    assert (losses - expected).abs().max() < 1e-3


# Bands -------------------------------------------------------------------------------------------------------------


def band_pairs(component: str, theta: Any, native: int = 1024) -> dict[str, list[list[int]]]:
    """The pairs of each band, by layer."""
    by_band = bands.expand_bands(component, np.asarray(theta, dtype=np.float32), native)
    return {name: [np.flatnonzero(layer).tolist() for layer in pairs] for name, pairs in by_band}


def test_eighths_are_equal_parts_and_wavelength_bands_follow_the_native_context() -> None:
    theta = [[1.0] * 32, [0.5] * 32, [0.0] * 32]
    eighths = band_pairs("pairs-zero:eighths", theta)
    assert list(eighths) == [f"pairs-zero:{at}-{at + 3}" for at in range(0, 32, 4)]
    assert eighths["pairs-zero:4-7"] == [[4, 5, 6, 7], [4, 5, 6, 7], []], "a layer that does not rotate has no pairs"
    assert list(band_pairs("pairs-unrotated:eighths", theta[0][:5] and [[1.0] * 5])) == [
        f"pairs-unrotated:{n}-{n}" for n in range(5)
    ]
    turns = np.array([[100.0, 8.1, 7.9, 1.1, 0.9, 0.0], [20.0, 9.0, 8.5, 8.2, 8.1, 8.05]])
    waves = band_pairs("pairs-unrotated:wavelengths", 2 * np.pi * turns / 1024)
    assert waves == {
        "pairs-unrotated:short": [[0, 1], [0, 1, 2, 3, 4, 5]],
        "pairs-unrotated:middle": [[2, 3], []],
        "pairs-unrotated:long": [[4, 5], []],
    }
    assert list(band_pairs("pairs-zero:wavelengths", 2 * np.pi * turns[1:] / 1024)) == ["pairs-zero:short"]
    assert sorted(
        ["pairs-zero:long", "pairs-zero:8-9", "pairs-unrotated:0-1", "pairs-zero:10-11"], key=bands.band_sort_key
    ) == [*("pairs-zero:8-9", "pairs-zero:10-11", "pairs-zero:long", "pairs-unrotated:0-1")]


@pytest.mark.parametrize(
    ("component", "named"),
    [
        ("pairs-zero:0-8", ("0 to 7", "A-B")),
        ("pairs-unrotated:5-2", ("0 to 7", "A-B")),
        ("pairs-unrotated:long", ("wavelength", 100_000)),
    ],
)
def test_pairs_that_a_model_lacks_are_refused_in_one_line(component: str, named: tuple[object, ...]) -> None:
    with refuses(BadInput, component, *named) as refusal:
        band_pairs(component, [[1.0] * 8], 100_000)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("component", "named"),
    [
        ("pairs-zero", ("'pairs-zero'", "pairs-zero:BAND")),
        ("pairs-zero:", ("'pairs-zero:'", "pairs-zero:BAND")),
        ("pairs-zero:3", ("'3'", "A-B")),
        ("pairs-half:0-1", ("'pairs-half:0-1'", "pairs-zero:BAND")),
        ("pairs-unrotated:a-b", ("'a-b'", "A-B")),
    ],
)
def test_an_invalid_band_is_refused_with_the_valid_forms(component: str, named: tuple[str, ...]) -> None:
    with refuses(BadOption, "influence.components.0", *named) as refusal:
        build_study({"influence": {"components": [component]}})
    assert "\n" not in str(refusal.value)


def test_a_model_without_pairs_is_refused_by_name() -> None:
    with refuses(UnsupportedModel, "'tiny'", "rotate"):
        pair_interventions(hs.load(families.OTHERS["gpt2"].build()), "pairs-zero:0-1")


def test_a_text_with_length_dependent_frequencies_cannot_be_unrotated() -> None:
    (name, build), *_ = families.DYNAMIC.items()
    model = hs.load(build())
    until = model.rotation.frequency_change_length
    assert until is not None, name
    assert pair_interventions(model, "pairs-unrotated:0-1", lengths=[until])
    assert pair_interventions(model, "pairs-zero:0-1", lengths=[until + 1])
    with refuses(UnsupportedModel, until, "--lengths"):
        pair_interventions(model, "pairs-unrotated:0-1", lengths=[until + 1])


# A sweep of bands --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def study_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    study_folder = tmp_path_factory.mktemp("bands")
    save_checkpoint(study_folder / "tiny")
    save_texts(study_folder / "texts")
    return study_folder


@pytest.mark.slow
def test_band_run_stores_every_head_and_all_heads_together(study_folder: Path) -> None:
    section = {"components": ["pairs-zero:eighths", "pairs-unrotated:0-3"], "lengths": [24], "method": "estimate"}
    plan = content(study_folder, measure=None, models={"base": str(study_folder / "tiny")})
    run = runner.run_study(build_study({**plan, "influence": {**section, "curve": False}}), study_folder / "runs")
    assert validate(run) == []
    names = [*(f"pairs-zero:{n}-{n}" for n in range(8)), "pairs-unrotated:0-3"]
    counts = run.influence.groupby("component", observed=True).size().to_dict()
    assert counts == dict.fromkeys(names, 2 * 2 * 16)
    sets = run.influence_sets
    assert set(sets["size"]) == {16}
    assert set(sets["choice"]) == {"top"}
    model = hs.load(str(study_folder / "tiny"))
    document, _ = load_token_documents(plan["texts"]["source"], model.tokenizer, 2, 24)
    ids = torch.tensor([document.ids])
    plain = edited_attention.losses(model, ids, {}).mean()
    shape = families.SPECS["llama-gqa"]
    everywhere = edited_attention.losses(
        model, ids, {layer: (slice(None), edited_attention.zero(shape, 2, 2)) for layer in range(4)}
    )
    row = sets[(sets["component"] == "pairs-zero:2-2") & (sets["doc"] == document.name)].iloc[0]
    assert row["delta_nll"] == pytest.approx((everywhere.mean() - plain).item(), abs=1e-5)
    assert row["nll_before"] == pytest.approx(plain.item(), abs=1e-5)
    assert sum(len(effects.units) for effects in all_sweeps(run)) == 9 * 16
    assert not [name for name in run.heads if "pairs" in name], "bands have figures of their own"
