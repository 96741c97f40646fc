"""`measure_tokens` against eager L x L references, on every tiny model family and on SmolLM2."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support import eager_reference, families
from support.measure_laws import geometry_of
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM

import headscope
from headscope.attention.geometry import Geometry
from headscope.measures.attention_rows import ROW_STATISTICS
from headscope.models.loading import locate
from headscope.positions.model import Model
from headscope.runs.arrow import to_arrow
from headscope.runs.columns import all_tables
from probes.measure.run import measure_tokens
from probes.positions.run import position_tables

EAGER = 1e-4
IDS = torch.randint(3, families.VOCAB, (48,), generator=torch.Generator().manual_seed(0))
LENGTH, SHORT = 600, 256
"""Lengths for SmolLM2; they cross the block sizes of rows, keys and losses, 64 and 512."""


@cache
def tiny(family: str) -> Model:
    """A model of the family. Tests share it and must not change it."""
    return headscope.load(families.MEASURABLE[family](), device="cpu")


def of_layer(columns: dict[str, np.ndarray], layer: int) -> dict[str, np.ndarray]:
    mask = columns["layer"] == layer
    return {name: column[mask] for name, column in columns.items()}


def row_errors(
    columns: dict[str, np.ndarray], layer: int, captured_layer: eager_reference.Layer, window: int | None
) -> Iterator[float]:
    """Relative errors of one layer's attention table; absolute ones where a mean distance or ln ESS is below 1."""
    rows = of_layer(columns, layer)
    alpha = eager_reference.weights(captured_layer.q, captured_layer.k, captured_layer.scaling, window)
    expected = eager_reference.binned(eager_reference.row_statistics(alpha), window)
    assert sorted(set(rows["visible"].tolist())) == sorted(expected)
    for edge, values in expected.items():
        mask = rows["visible"] == edge
        assert (rows["rows"][mask] == values["rows"]).all()
        for name in ROW_STATISTICS:
            value = values[name].numpy()
            assert rows["head"][mask].tolist() == list(range(len(value)))
            floor = {"mean_distance": 1.0, "log_ess2": 1.0}.get(name, 1e-3)
            yield float((np.abs(rows[name][mask] - value) / np.maximum(np.abs(value), floor)).max())


def pair_errors(
    columns: dict[str, np.ndarray],
    layer: int,
    captured_layer: eager_reference.Layer,
    geometry: Geometry,
    names: Sequence[str],
    heads: Iterable[int] | None = None,
) -> Iterator[tuple[str, float]]:
    """Errors of one layer's pairs table, of some `heads` or all, relative to the rms of the head."""
    rows = of_layer(columns, layer)
    for head in range(geometry.heads) if heads is None else heads:
        group = head // geometry.heads_per_group(0)
        q, k = captured_layer.q[head : head + 1], captured_layer.k[group : group + 1]
        expected = tiled_pair_statistics(q, k, captured_layer.scaling, geometry, geometry.windows[layer])
        mask = rows["head"] == head
        assert rows["pair"][mask].tolist() == list(range(geometry.all_pairs))
        rms = float(expected["rms"].square().sum().sqrt())
        for name in names:
            yield name, float(np.abs(rows[name][mask] - expected[name].numpy()).max()) / rms


def tiled_pair_statistics(
    q: Tensor, k: Tensor, scaling: float, geometry: Any, window: int | None, tile: int = 64
) -> dict[str, Tensor]:
    """`pair_statistics` [P] of one head, q and k [1, L, d]: the same L x L formula, `tile` rows at a time."""
    pairs = eager_reference.planes(q.shape[-1], 2 * geometry.pairs, geometry.rotary_layout)
    qf, kf = (t[0].double()[:, pairs].transpose(0, 1).contiguous() for t in (q, k))  # [P, L, 2]
    visible_mask = eager_reference.visible(q.shape[1], window)
    total = {name: torch.zeros(len(pairs), dtype=torch.float64) for name in ("mean_abs", "mean_signed", "rms", "norms")}
    for start in range(0, q.shape[1], tile):
        rows, keys = slice(start, start + tile), slice(0, start + tile)
        mask = visible_mask[rows, keys].double()
        c = (scaling * qf[:, rows] @ kf[:, keys].mT).mul_(mask).flatten(1)  # [P, rows x keys]
        total["mean_signed"] += c.sum(1)
        total["mean_abs"] += torch.linalg.vector_norm(c, 1, dim=1)
        total["rms"] += torch.linalg.vecdot(c, c)
        norms = qf[:, rows].norm(dim=-1)[:, None] @ mask @ kf[:, keys].norm(dim=-1)[..., None]
        total["norms"] += abs(scaling) * norms[:, 0, 0]
    means = {name: value / visible_mask.sum() for name, value in total.items()}
    return {**means, "rms": means["rms"].sqrt(), "norm_product": means.pop("norms")}


def test_the_tiled_reference_equals_the_reference() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 40, 8, generator=generator), torch.randn(1, 40, 8, generator=generator)
    geometry = geometry_of(1, 1, 8, 3, "interleaved")
    for window in (None, 9):
        expected = eager_reference.pair_statistics(q, k, -0.3, 6, "interleaved", window)
        columns = tiled_pair_statistics(q, k, -0.3, geometry, window, tile=7)
        for name, values in expected.items():
            torch.testing.assert_close(columns[name], values[0], msg=name)


# Tiny families -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("family", families.MEASURABLE)
def test_tables_of_every_family_equal_those_of_its_eager_attention(family: str) -> None:
    model = tiny(family)
    columns = measure_tokens(model, IDS, ["attention", "pairs"], None)
    _, layers = eager_reference.eager_qk(model.module, IDS[None])
    for layer, captured_layer in enumerate(layers):
        assert max(row_errors(columns["attention"], layer, captured_layer, model.geometry.windows[layer])) <= EAGER
        assert_largest_logits(of_layer(columns["max_logit"], layer), captured_layer)
        names = ("mean_abs", "mean_signed", "rms", "norm_product")
        assert max(e for _, e in pair_errors(columns["pairs"], layer, captured_layer, model.geometry, names)) <= EAGER


def assert_largest_logits(rows: dict[str, np.ndarray], captured_layer: eager_reference.Layer) -> None:
    """The largest eager logit of every head, [H, L, L], and a pair that has it."""
    repeats = len(captured_layer.q) // len(captured_layer.k)
    keys = captured_layer.k.double().repeat_interleave(repeats, 0)
    logits = captured_layer.scaling * captured_layer.q.double() @ keys.mT
    if captured_layer.softcap is not None:
        logits = captured_layer.softcap * torch.tanh(logits / captured_layer.softcap)
    logits = logits.masked_fill(~captured_layer.mask, -torch.inf)
    assert rows["head"].tolist() == list(range(len(logits)))
    np.testing.assert_allclose(rows["max_logit"], logits.amax((1, 2)), rtol=EAGER)
    np.testing.assert_allclose(rows["max_logit"], logits[rows["head"], rows["query"], rows["key"]], rtol=EAGER)


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_the_largest_logit_is_exact_with_windows_soft_caps_and_sinks(family: str) -> None:
    model = headscope.load(families.OTHERS[family].build(0), device="cpu")
    columns = measure_tokens(model, IDS, ["attention"], None)["max_logit"]
    for layer, captured_layer in enumerate(eager_reference.eager_qk(model.module, IDS[None])[1]):
        assert_largest_logits(of_layer(columns, layer), captured_layer)


def test_sampled_rows_give_no_largest_logit() -> None:
    assert "max_logit" not in measure_tokens(tiny("llama-gqa"), IDS, ["attention"], 8)


@pytest.mark.parametrize("family", families.MEASURABLE)
def test_every_family_has_the_loss_of_its_full_logits(family: str) -> None:
    model = tiny(family)
    assert_loss(model, IDS)


def assert_loss(model: Model, ids: Tensor) -> None:
    columns = measure_tokens(model, ids, ["nll"], None)["nll"]
    losses = eager_reference.nll_reference(model.module, ids[None]).numpy()
    starts = [0, *columns["position"][:-1]]
    for first, last, nll, tokens in zip(starts, columns["position"], columns["nll"], columns["tokens"], strict=True):
        assert tokens == last - first
        # Float32 logits of 20 to 30 differ by 5e-5 from one processor's kernels to another's.
        assert nll == pytest.approx(losses[first:last].mean(), rel=1e-5, abs=5e-5)


SCHEMES = ["base", "yarn:factor=4", "nope", "prope:keep=0.5", "logn:length=16", "linear:factor=2", "ntk:factor=2"]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("family", ["llama-gqa", "phi", "smollm3", "gemma3"])
def test_tables_under_every_scheme_can_be_stored(family: str, scheme: str) -> None:
    model = tiny(family).with_scheme(scheme)
    tables = measure_tokens(model, IDS, ["attention", "pairs", "distance", "nll"], 8)
    keys: dict[str, Any] = {"model": "m", "context_length": len(IDS)}
    stored = {name: to_arrow(all_tables()[name], with_keys(name, columns, keys)) for name, columns in tables.items()}
    stored |= {name: to_arrow(all_tables()[name], columns) for name, columns in position_tables("m", model).items()}
    assert stored.keys() == {"attention", "pairs", "distance", "nll", "positions", "scales"}
    for name, table in stored.items():
        assert table.num_rows > 0, name
        for column in all_tables()[name].columns:
            logarithm = "log_theta" in column.name or column.name == "effective_base"  # infinite where theta is 0
            if column.kind == "value" and not logarithm:
                assert np.isfinite(table[column.name].to_numpy()).all(), f"{name}.{column.name}"


def with_keys(name: str, columns: Any, keys: dict[str, Any]) -> dict[str, Any]:
    return {**keys, **({} if name == "distance" else {"doc": "d"}), **columns}


def test_measuring_leaves_the_model_as_it_was() -> None:
    model = tiny("llama-gqa").with_scheme("yarn:factor=4")
    with torch.no_grad():
        before = model.module(IDS[None]).logits
        model.module.train()
        measure_tokens(model, IDS, ["attention", "pairs", "distance", "nll"], 8)
        assert model.module.training
        model.module.eval()
        assert torch.equal(model.module(IDS[None]).logits, before)
    assert "forward" not in vars(model.module.base_model)


def test_effective_base_of_plain_rope_is_the_base() -> None:
    model = tiny("llama-gqa")
    columns = position_tables("m", model)["scales"]
    assert np.allclose(columns["effective_base"], model.module.config.rope_parameters["rope_theta"], rtol=1e-5)


# SmolLM2 -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def captured(smollm2: Model, tokens: Tensor) -> list[eager_reference.Layer]:
    return eager_reference.eager_qk(smollm2.module, tokens[:, :LENGTH])[1]


@pytest.fixture(scope="module")
def exact(smollm2: Model, tokens: Tensor) -> dict[str, dict[str, np.ndarray]]:
    return measure_tokens(smollm2, tokens[0, :LENGTH], ["attention", "pairs"], None)


@pytest.mark.model
def test_smollm2_rows_equal_eager_in_every_head(exact: Any, captured: Any, report: Callable[..., None]) -> None:
    errors = [
        max(row_errors(exact["attention"], layer, captured_layer, None))
        for layer, captured_layer in enumerate(captured)
    ]
    report("rows: largest relative error", max(errors))
    assert len(errors) == 30
    assert max(errors) <= EAGER


@pytest.mark.model
def test_smollm2_pair_moments_equal_the_l_by_l_formula_in_every_head(
    smollm2: Model, tokens: Tensor, exact: Any, captured: Any, report: Callable[..., None]
) -> None:
    """All heads at a few hundred tokens, since the formula has L x L terms per pair; one head per layer at all."""
    names = ("mean_signed", "rms", "norm_product", "mean_abs")
    largest = dict.fromkeys(names, 0.0)
    short = measure_tokens(smollm2, tokens[0, :SHORT], ["pairs"], None)["pairs"]
    for layer, captured_layer in enumerate(captured):
        first = replace(
            captured_layer, q=captured_layer.q[:, :SHORT], k=captured_layer.k[:, :SHORT]
        )  # later tokens change nothing before them
        for name, error in (
            *pair_errors(short, layer, first, smollm2.geometry, names),
            *pair_errors(
                exact["pairs"], layer, captured_layer, smollm2.geometry, names, [layer % smollm2.geometry.heads]
            ),
        ):
            largest[name] = max(largest[name], error)
    report("pairs: largest error relative to the head's rms", largest)
    assert max(largest.values()) <= 1e-5


@pytest.mark.model
def test_smollm2_sampled_usage_is_within_its_standard_error(
    smollm2: Model, tokens: Tensor, exact: Any, report: Callable[..., None]
) -> None:
    sampled = measure_tokens(smollm2, tokens[0, :LENGTH], ["pairs"], 64, seed=1)["pairs"]
    assert (sampled["mean_abs_se"] > 0).all()
    scores = (sampled["mean_abs"] - exact["pairs"]["mean_abs"]) / sampled["mean_abs_se"]
    within = float((np.abs(scores) <= 4).mean())
    relative = np.median(sampled["mean_abs_se"] / sampled["mean_abs"])
    report("sampled usage: share within 4 SE, spread in SE, median SE", (within, scores.std(), relative))
    assert within >= 0.99


@pytest.mark.model
def test_smollm2_has_the_loss_of_its_full_logits(smollm2: Model, tokens: Tensor) -> None:
    assert_loss(smollm2, tokens[0, :LENGTH])  # not a multiple of the chunk


@pytest.mark.model
def test_smollm2_rows_equal_the_patterns_of_transformer_lens(
    smollm2: Model, tokens: Tensor, report: Callable[..., None]
) -> None:
    fresh = AutoModelForCausalLM.from_pretrained(locate("smollm2-135m")[0], dtype=torch.float32)
    lens = TransformerBridge.boot_transformers("any", hf_model=fresh, tokenizer=smollm2.tokenizer)
    ids = tokens[:, :256]
    with torch.no_grad():
        _, cache = lens.run_with_cache(ids, names_filter=lambda name: name.endswith("hook_pattern"))
    columns = measure_tokens(smollm2, ids[0], ["attention"], None)["attention"]
    errors = []
    for layer in range(smollm2.geometry.layers):
        pattern = cache[f"blocks.{layer}.attn.hook_pattern"][0]
        rows = of_layer(columns, layer)
        for edge, values in eager_reference.binned(eager_reference.row_statistics(pattern)).items():
            ess2 = rows["ess2"][rows["visible"] == edge]
            errors.append(float(np.abs(ess2 / values["ess2"].numpy() - 1).max()))
    report("ESS against transformer-lens: largest relative error", max(errors))
    assert max(errors) <= 1e-3


@pytest.fixture
def report(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """Print a measured value (visible with -s) and store it in the junit report."""

    def print_value(name: str, value: object) -> None:
        print(f"\n{name}: {value}")
        record_property(name, str(value))

    return print_value
