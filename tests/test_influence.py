"""Head influence: sweeps, estimates and sets, stored, resumed, and refused where they would mean nothing."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import families
from support.adapters import noisy
from support.refusals import assert_names, refuses
from torch import Tensor

import headscope as hs
from headscope.errors import BadInput, BadOption, Interrupted, UnsupportedModel
from headscope.forward.stream_store import ResidualStreamStore
from headscope.interventions.edits import edit
from headscope.interventions.kinds import OutputFunction
from headscope.interventions.replay import Replay
from headscope.positions import AdaRoPE, resolve_schedule
from headscope.positions.model import Model
from headscope.prompts.texts import TokenDocument
from headscope.results.effects.comparison import agreements
from headscope.results.effects.results import effect_text
from headscope.results.effects.sweep import effects_table
from headscope.runs.aggregation import adjust_p_values
from headscope.runs.run import Run
from headscope.runs.run_tables import validate
from headscope.study import context, runner
from headscope.study.config import build_study
from probes.influence.analysis import add_damped_estimates, set_sweeps, unit_sweeps
from probes.influence.declaration import EFFECTS
from probes.influence.run import head_influence
from probes.influence.sweep import Sweep, text_loss

LENGTH, DOCS = 40, 3


@pytest.fixture(autouse=True, scope="module")
def texts() -> Iterator[None]:
    """Random tokens for models that have no tokenizer."""

    def random_documents(source: str, tokenizer: Any, docs: int, length: int, seed: int = 0) -> list[TokenDocument]:
        generators = [torch.Generator().manual_seed(n) for n in range(docs)]
        return [
            TokenDocument(f"random/{n}", torch.randint(3, families.VOCAB, (length,), generator=g).tolist())
            for n, g in enumerate(generators)
        ]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context, "load_token_documents", random_documents)
        patch.setattr(context.StudyContext, "tokenizer", lambda self, label: None)
        yield


@cache
def loaded(family: str) -> Model:
    """Shared: leave it as you found it."""
    return hs.load(families.MEASURABLE[family]())


def adapted_model(
    tmp_path: Path, size: float = 0.05, family: str = "llama-gqa", adapter: AdaRoPE | None = None
) -> Model:
    model = loaded(family)
    file = (adapter or noisy(model, size)).save(tmp_path / "adapter.safetensors")
    return model.with_scheme(f"adarope:adapter={file}")


def run_sweep(model: Model, out: Path, resume: bool = False, docs: int = DOCS, **section: Any) -> Run:
    plan = {"models": {"learned": "tiny"}, "texts": {"docs": docs}, "influence": {"lengths": [LENGTH], **section}}
    return runner.run_study(build_study(plan), out, in_memory_models={"learned": model}, resume=resume)


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """A model with an adapter, shared: leave it as you found it."""
    return adapted_model(tmp_path_factory.mktemp("learned"))


@pytest.fixture(scope="module")
def exact(learned: Model, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_sweep(learned, tmp_path_factory.mktemp("runs"), method="exact")


def test_sweep_has_a_labelled_row_per_unit_component_and_document(exact: Run) -> None:
    assert validate(exact) == []
    rows = exact.influence
    counts = rows.groupby("component", observed=True).size().to_dict()
    assert counts == {"joint": 8 * DOCS, "freq": 8 * DOCS, "scale": 16 * DOCS}
    assert set(rows.loc[rows["component"] != "scale", "head"]) == {-1}
    assert set(rows.loc[rows["component"] == "scale", "head"]) == {0, 1, 2, 3}
    assert set(rows["target"]) == {"init"}
    assert set(rows["method"]) == {"exact"}
    assert {"positions", "scales"} <= set(exact.tables)


def test_study_and_head_influence_function_agree(exact: Run, learned: Model) -> None:
    scripted = head_influence(learned, docs=DOCS, length=LENGTH, method="exact")
    keys = ["doc", "component", "layer", "kv_group", "head"]
    merged = exact.influence.astype({"doc": "str", "component": "str"}).merge(scripted, on=keys)
    assert len(merged) == len(scripted) == len(exact.influence)
    np.testing.assert_allclose(merged["delta_nll_x"], merged["delta_nll_y"], atol=1e-9)


def test_only_the_trained_kv_group_has_influence(tmp_path: Path) -> None:
    model = loaded("llama-gqa")
    planted, noise = AdaRoPE.from_schedule(model, resolve_schedule(model, "yarn:factor=8")), noisy(model, 0.3)
    with torch.no_grad():
        planted.xi[2, 1] = noise.xi[2, 1]
        planted.tau[2, 2:] = noise.tau[2, 2:]
    rows = head_influence(adapted_model(tmp_path, adapter=planted), docs=1, length=LENGTH, method="exact")
    is_trained_group = (rows["layer"] == 2) & (rows["kv_group"] == 1)
    assert (rows.loc[~is_trained_group, "delta_nll"] == 0).all()
    assert (rows.loc[is_trained_group & (rows["component"] != "scale"), "delta_nll"].abs() > 1e-4).all()
    (effects,) = unit_sweeps(rows[rows["component"] == "joint"].assign(model="m"), ["m"])
    assert int((effects.units["effect"] != 0).sum()) == 1


def test_gradient_estimate_equals_the_derivative_of_the_loss(tmp_path: Path) -> None:
    model = loaded("llama-gqa")
    adapter = noisy(model)
    ids = torch.randint(3, families.VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(3))
    replay = Replay(model, adapter, ids, memory_bytes=0)
    direction = torch.randn(1, model.geometry.heads, LENGTH, 16, generator=torch.Generator().manual_seed(4)) / 10
    slopes: dict[int, float] = {}

    def on_layer(layer: int, z: Tensor, call: Any, gradients: list[Tensor]) -> None:
        slopes[layer] = float((gradients[0] * direction).sum())

    with replay.capturing():
        replay.record_streams()
        replay.backpropagate([text_loss], on_layer)
        step = 2e-3
        for layer in range(model.geometry.layers):
            heads = ",".join(f"L{layer}H{head}" for head in range(model.geometry.heads))
            moved = [OutputFunction(lambda z, by=by: z + by * direction[0]) for by in (step, -step)]
            losses = dict(replay.losses([[edit(model, kind, heads)] for kind in moved]))
            up, down = (float(losses[number].double().sum()) for number in range(2))
            assert slopes[layer] == pytest.approx((up - down) / (2 * step), rel=0.02, abs=5e-3)


@pytest.mark.slow
@pytest.mark.parametrize("family", families.MEASURABLE)
@pytest.mark.parametrize(("component", "size"), [("freq", 3e-5), ("scale", 3e-3)])
def test_small_resets_are_estimated_closely_in_every_family(
    family: str, component: str, size: float, tmp_path: Path
) -> None:
    """Random weights make frequencies far steeper than scales, so each has its own small size above rounding."""
    model = adapted_model(tmp_path, size, family)
    options: dict[str, Any] = {"docs": 1, "length": LENGTH, "components": [component]}
    methods: list[dict[str, Any]] = [{"method": "exact"}, {"method": "estimate", "estimate_order": 1}]
    rows = [head_influence(model, **method, **options) for method in methods]
    (effects,) = unit_sweeps(pd.concat(rows).assign(model="m"), ["m"])
    (agreement,) = agreements(effects)
    assert agreement.pearson > 0.98, agreement


def test_second_order_term_is_positive_where_the_gradient_vanishes(tmp_path: Path) -> None:
    """At targets drawn from the model itself the mean slope is zero, and what is left is the curvature."""
    model = adapted_model(tmp_path, 0.02)
    rows = head_influence(model, docs=4, length=LENGTH, method="estimate", estimate_order=2, components=["scale"])
    means = rows.pivot_table(index=["layer", "head"], columns="method", values="delta_nll")
    added = means["second-order"] - means["estimate"]
    assert (added > 0).all(), "a Fisher form is positive"


def test_damping_leaves_small_second_order_terms_and_bounds_large_ones() -> None:
    keys = {"doc": "d", "component": "freq", "target": "init", "kv_group": 0, "head": -1}
    first = np.array([1e-3, -1e-3, 2e-3, 0.0])
    added = np.array([1e-7, 5e-4, 1.0, 0.0])
    frames = [
        pd.DataFrame({**keys, "layer": range(4), "method": method, "delta_nll": values})
        for method, values in (("estimate", first), ("second-order", first + added))
    ]
    rows = add_damped_estimates(pd.concat(frames)).query("method == 'damped'").sort_values("layer")
    scale = 2 * np.abs(first).mean()
    np.testing.assert_allclose(rows["delta_nll"], first + added / (1 + added / scale), rtol=1e-12)
    assert rows["delta_nll"].iloc[0] == pytest.approx(first[0] + added[0], rel=1e-6)
    assert rows["delta_nll"].iloc[2] < first[2] + scale
    assert len(add_damped_estimates(frames[0])) == 4, "without a second order nothing is added"
    zero_effects = [frame.assign(delta_nll=0.0) for frame in frames]
    assert (add_damped_estimates(pd.concat(zero_effects))["delta_nll"] == 0).all(), (
        "what moves nothing has no influence"
    )


def test_verify_evaluates_top_estimated_and_random_units_exactly(exact: Run, learned: Model, tmp_path: Path) -> None:
    run = run_sweep(learned, tmp_path, method="verify", verify_top=3, verify_random=2, estimate_order=2, curve=False)
    assert validate(run) == []
    rows = run.influence.astype({"component": "str", "method": "str"})
    for component in ("joint", "freq", "scale"):
        swept_component = rows[rows["component"] == component]
        unit_columns = ["layer", "kv_group", "head"]
        estimates = add_damped_estimates(swept_component)
        damped = estimates[estimates["method"] == "damped"].assign(square=lambda f: f["delta_nll"] ** 2)
        squares = damped.groupby(unit_columns)["square"].mean()
        evaluated = set(swept_component[swept_component["method"] == "exact"].set_index(unit_columns).index)
        assert len(evaluated) == 5
        assert set(squares.nlargest(3).index) <= evaluated
    keys = ["doc", "component", "layer", "kv_group", "head"]
    exact_rows = rows[rows["method"] == "exact"].merge(exact.influence.astype({"component": "str"}), on=keys)
    assert len(exact_rows) == 5 * 3 * DOCS
    np.testing.assert_allclose(exact_rows["delta_nll_x"], exact_rows["delta_nll_y"], atol=1e-7)
    agreement = [one for effects in unit_sweeps(run.influence, run.models) for one in agreements(effects)]
    assert {one.method for one in agreement} == {"estimate", "second-order", "damped"}
    assert {one.compared for one in agreement} == {5}


def test_sets_grow_from_the_top_unit_to_all_and_random_ones_match_their_layers(exact: Run) -> None:
    sets = effects_table(set_sweeps(exact))
    mean_effects = sets.set_index(["intervention", "choice", "size"])["effect"]
    for component, count in (("joint", 8), ("freq", 8), ("scale", 16)):
        (single,) = unit_sweeps(exact.influence[exact.influence["component"] == component], exact.models)
        largest = single.units["effect"].max()
        assert mean_effects[component, "top", 1] == pytest.approx(largest, abs=1e-7)
        assert (component, "top", count) in mean_effects.index
        assert (component, "random", count) not in mean_effects.index


def test_residual_streams_on_disk_change_no_result(exact: Run, learned: Model) -> None:
    spilled = head_influence(learned, docs=1, length=LENGTH, method="exact", memory=0, components=["joint"])
    first = exact.influence.query("doc == 'random/0' and component == 'joint'")
    assert np.array_equal(spilled["delta_nll"].astype("float32"), first["delta_nll"])
    store = ResidualStreamStore(1000)
    first, second = torch.randn(2, 1, 10, 20, generator=torch.Generator().manual_seed(0))
    for stream in (first, second):
        store.append(stream)
    assert store.bytes_in_memory == 800
    assert torch.equal(store.load(1), second)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["exact", "verify"])
def test_an_interrupted_sweep_resumes_to_the_same_bytes(
    learned: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    model = learned
    section: dict[str, Any] = {"method": method, "components": ["joint"], "draws": 1, "docs": 2}
    section |= {"verify_top": 2, "verify_random": 1} if method == "verify" else {}
    uninterrupted = run_sweep(model, tmp_path / "whole", **section)
    calls, real = [], Sweep.evaluate_units

    def stopping(self: Sweep, *arguments: Any) -> Iterator[Any]:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(self, *arguments)

    monkeypatch.setattr(Sweep, "evaluate_units", stopping)
    with pytest.raises(Interrupted):
        run_sweep(model, tmp_path / "cut", **section)
    monkeypatch.setattr(Sweep, "evaluate_units", real)
    resumed = run_sweep(model, tmp_path / "cut", resume=True, **section)
    for table in ("influence", "influence_sets"):
        expected_bytes = (uninterrupted.path / f"{table}.parquet").read_bytes()
        assert (resumed.path / f"{table}.parquet").read_bytes() == expected_bytes


def test_user_edit_is_swept_like_a_component() -> None:
    model = loaded("llama-gqa")

    def quiet(q: Tensor, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        return q, k, v * 0

    options: dict[str, Any] = {"docs": 1, "length": LENGTH, "unit": "head", "method": "exact"}
    edited = head_influence(model, components=[], edits={"quiet": quiet}, **options)
    ablated = head_influence(model, components=["zero"], **options)
    assert set(edited["component"]) == {"quiet"}
    np.testing.assert_allclose(edited["delta_nll"], ablated["delta_nll"], atol=1e-6)


def refusal_of(model: Model, out: Path, **section: Any) -> str:
    with pytest.raises(BadInput) as refusal:
        run_sweep(model, out, **section)
    assert not out.exists(), "something was left behind"
    assert "\n" not in str(refusal.value)
    return str(refusal.value)


def test_a_model_without_adapter_is_refused_but_can_be_ablated(tmp_path: Path) -> None:
    model = loaded("llama-gqa")
    for scheme in ("base", "yarn:factor=8"):
        for unit in ("auto", "head"):
            message = refusal_of(model.with_scheme(scheme), tmp_path / "runs", unit=unit, components=["joint"])
            assert_names(message, "'learned'", "'joint'", "adarope:adapter=PATH")
    message = refusal_of(model, tmp_path / "runs", reset_to=["base"])
    assert_names(message, "'learned'", "'joint'", "adarope:adapter=PATH")


def test_default_components_are_resets_of_an_adapter_and_zero_ablation_of_other_models(
    learned: Model, tmp_path: Path
) -> None:
    """So that the command runs without options: the default model has no adapter."""
    for model, components in ((loaded("llama-gqa"), {"zero"}), (learned, {"joint", "freq", "scale"})):
        run = run_sweep(model, tmp_path / min(components), method="estimate", curve=False)
        assert {*run.influence["component"]} == components


def test_heads_of_layers_that_share_keys_have_an_influence(tmp_path: Path) -> None:
    """`test_unequal_layers` compares the replay with the whole model."""
    options = families.OTHERS["gemma3n"].options | {"num_kv_shared_layers": 2}
    model = hs.load(families.build("gemma3n_text", options))
    rows = run_sweep(model, tmp_path, components=["zero"], method="exact", curve=False).influence
    units = rows.groupby(["layer", "head"])
    assert len(units) == model.geometry.layers * model.geometry.heads
    assert (units["delta_nll"].first().abs() > 1e-4).all()


def test_a_reset_to_base_is_refused_where_the_frequencies_of_base_change(tmp_path: Path) -> None:
    model = hs.load(families.DYNAMIC["llama-dynamic"]())
    adapted = model.with_scheme(f"adarope:adapter={noisy(model, 0.1).save(tmp_path / 'adapter.safetensors')}")
    limit = model.rotation.frequency_change_length
    assert limit is not None
    with refuses(UnsupportedModel, "'learned'", f"{limit} tokens", "joint", "--lengths", "--reset-to init"):
        run_sweep(adapted, tmp_path / "runs", reset_to=["base"], lengths=[limit + 8])


def test_reset_to_base_is_refused_if_the_adapter_started_from_base(tmp_path: Path) -> None:
    model = loaded("llama-gqa")
    adapted = adapted_model(tmp_path, adapter=noisy(model, 0.1, start="base"))
    assert_names(refusal_of(adapted, tmp_path / "runs", reset_to=["base"]), "'learned'", "base", "--reset-to init")


def test_verify_evaluates_all_units_of_a_model_with_fewer_than_it_selects(learned: Model, tmp_path: Path) -> None:
    """The defaults select 20 units; the tiny model has 8 KV groups."""
    run = run_sweep(learned, tmp_path / "runs", docs=1, components=["freq"], curve=False)
    assert set(effects_table(unit_sweeps(run.influence, run.models))["method"]) == {"exact"}


def test_sweep_without_components_is_refused(learned: Model, tmp_path: Path) -> None:
    assert_names(refusal_of(learned, tmp_path / "runs", components=[]), "influence", "components")


def test_unknown_model_of_the_study_is_named(learned: Model, tmp_path: Path) -> None:
    assert_names(refusal_of(learned, tmp_path / "r", models=["other"]), "influence", "'other'", "learned")


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"components": ["frequency"]}, ("influence.components.0", "'frequency'")),
        ({"reset_to": []}, ("influence.reset_to",)),
        ({"lengths": [1]}, ("influence.lengths.0", 1)),
        ({"method": "quick"}, ("influence.method", "'quick'")),
        ({"draw": 3}, ("'influence.draw'", "'draws'")),
    ],
)
def test_invalid_influence_options_are_named(section: dict[str, Any], named: tuple[str | int, ...]) -> None:
    with refuses(BadOption, *named):
        build_study({"influence": section})


def test_adjusted_p_values_are_those_of_benjamini_and_hochberg() -> None:
    p = pd.Series([0.01, 0.04, 0.03, 0.8])
    assert adjust_p_values(p).to_list() == pytest.approx([0.04, 0.04 * 4 / 3, 0.04 * 4 / 3, 0.8])
    with_estimate = adjust_p_values(pd.Series([0.1, np.nan]))
    assert with_estimate.to_list() == pytest.approx([0.2, np.nan], nan_ok=True), "an estimate counts as a test"


@pytest.mark.parametrize("documents", [1, 2])
def test_one_or_two_documents_give_no_interval_and_no_significance(documents: int) -> None:
    rows = pd.DataFrame({"delta_nll": [0.1, 0.3][:documents], "doc": ["a", "b"][:documents]}).assign(
        model="m", context_length=8, component="freq", target="init", method="exact", layer=0, kv_group=0, head=-1
    )
    (effects,) = unit_sweeps(rows, ["m"])
    (unit,) = effects.units.to_dict("records")
    assert np.isnan([unit["low"], unit["high"], unit["p"], unit["p_adjusted"]]).all()
    expected = {1: "+0.1 nats/token (1 document gives no", 2: "+0.2 nats/token (2 documents give no"}[documents]
    assert effect_text(effects, effects.units.iloc[0], EFFECTS["text"]) == f"{expected} interval)"
    by_document = dict(list({"a": 0.1, "b": 0.3}.items())[:documents])
    assert effects.by_sample(effects.units.iloc[0]) == pytest.approx(by_document)


def test_units_are_paired_by_document_with_intervals_and_p_values() -> None:
    deltas = {0: [0.1, 0.11, 0.09, 0.1], 1: [0.2, -0.2, 0.1, -0.1], 2: [0.0] * 4}
    rows = [
        {"model": "m", "context_length": 8, "component": "freq", "target": "init", "method": "exact"}
        | {"layer": 0, "kv_group": group, "head": -1, "doc": f"d{doc}", "nll_before": 1.0, "delta_nll": delta}
        for group, effects in deltas.items()
        for doc, delta in enumerate(effects)
    ]
    (sweep,) = unit_sweeps(pd.DataFrame(rows), ["m"])
    effects = sweep.units.set_index("kv_group")
    assert effects.loc[0, "effect"] == pytest.approx(0.1)
    assert 0.08 < effects.loc[0, "low"] < 0.1
    assert effects.loc[0, "p_adjusted"] < 0.01 < effects.loc[1, "p_adjusted"]
    assert effects.loc[2, "p"] == 1


def test_estimates_inside_inference_mode_are_those_outside_it(learned: Model, tmp_path: Path) -> None:
    outside = run_sweep(learned, tmp_path / "outside", method="estimate", docs=1)
    with torch.inference_mode():
        inside = run_sweep(learned, tmp_path / "inside", method="estimate", docs=1)
    pd.testing.assert_frame_equal(inside.influence, outside.influence)
