"""The references are themselves checked: against transformers' own eager attention and against closed forms."""

import math
from typing import Any

import pytest
import torch
from support import eager_reference, families
from transformers import PreTrainedModel

MEASURABLE = pytest.mark.parametrize("family", families.MEASURABLE)
IDS = torch.randint(3, families.VOCAB, (1, 48), generator=torch.Generator().manual_seed(0))


def rotary_theta(model: PreTrainedModel, rotary_dims: int, layer_type: str) -> torch.Tensor:
    """Return base^(-2f / r), [P], with the base found in the config."""
    parameters = model.config.rope_parameters
    base = parameters.get(layer_type, parameters)["rope_theta"]
    return base ** (-2 * torch.arange(rotary_dims // 2, dtype=torch.float64) / rotary_dims)


@MEASURABLE
def test_softmax_of_captured_q_and_k_equals_eager_attention(family: str) -> None:
    model, spec = families.MEASURABLE[family](), families.SPECS[family]
    logits, layers = eager_reference.eager_qk(model, IDS)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        expected = model(IDS, output_attentions=True)
    torch.testing.assert_close(logits, expected.logits, rtol=1e-4, atol=1e-4)
    assert len(layers) == families.LAYERS
    for layer, window, alpha in zip(layers, spec.windows, expected.attentions, strict=True):
        assert torch.equal(layer.mask, eager_reference.visible(IDS.shape[1], window))
        actual = eager_reference.weights(layer.q, layer.k, layer.scaling, window)
        torch.testing.assert_close(actual, alpha[0].double(), rtol=1e-4, atol=1e-5)


@MEASURABLE
def test_capturing_leaves_the_model_as_it_was(family: str) -> None:
    model = families.MEASURABLE[family]()
    before, implementation = model(IDS).logits, model.config._attn_implementation
    eager_reference.eager_qk(model, IDS)
    assert model.config._attn_implementation == implementation
    assert torch.equal(model(IDS).logits, before)


@MEASURABLE
def test_declared_rotary_dimensions_are_those_that_rotate(family: str) -> None:
    """A repeated token has equal unrotated q and k in layer 0, so pair f of q_i can only turn, by theta_f a step."""
    model, spec = families.MEASURABLE[family](), families.SPECS[family]
    _, layers = eager_reference.eager_qk(model, torch.full((1, 12), 7))
    layer = layers[0]
    assert layer.q.shape == (families.HEADS, 12, spec.head_dim)
    assert layer.k.shape == (spec.groups, 12, spec.head_dim)
    layer_type = "full_attention" if spec.windows[0] is None else "sliding_attention"
    theta = rotary_theta(model, spec.rotary_dims, layer_type)
    theta = torch.cat([theta, theta.new_zeros((spec.head_dim - spec.rotary_dims) // 2)])
    for vectors in (layer.q, layer.k):
        for f, plane in enumerate(eager_reference.planes(spec.head_dim, spec.rotary_dims, spec.layout)):
            z = torch.view_as_complex(vectors[..., plane].double().contiguous())
            turned = z[:, :1] * torch.exp(1j * theta[f] * torch.arange(12))
            torch.testing.assert_close(z, turned, rtol=1e-4, atol=1e-4)


@MEASURABLE
def test_layers_declared_without_rotation_do_not_rotate(family: str) -> None:
    """Shifting every position leaves q unchanged only where nothing rotates."""
    model, spec = families.MEASURABLE[family](), families.SPECS[family]
    position_ids = torch.arange(IDS.shape[1])[None]
    runs = []
    model.set_attn_implementation(eager_reference.NAME)
    for shift in (0, 3):
        eager_reference._layers.clear()
        with torch.no_grad():
            model(IDS, position_ids=position_ids + shift, use_cache=False)
        runs.append([layer.q for layer in eager_reference._layers])
    moved = [not torch.allclose(a, b, rtol=1e-3, atol=1e-3) for a, b in zip(*runs, strict=True)]
    assert tuple(moved) == spec.rotates


@MEASURABLE
def test_attention_of_the_tiny_models_is_far_from_uniform(family: str) -> None:
    _, layers = eager_reference.eager_qk(families.MEASURABLE[family](), IDS)
    for layer, window in zip(layers, families.SPECS[family].windows, strict=True):
        ess2 = eager_reference.row_statistics(eager_reference.weights(layer.q, layer.k, layer.scaling, window))["ess2"]
        assert ess2[:, -1].mean() < 0.7 * (window or IDS.shape[1])


@pytest.mark.parametrize("name", families.REFUSED)
def test_every_refused_model_runs_under_transformers(name: str) -> None:
    with torch.no_grad():
        logits = families.REFUSED[name]()(IDS, attention_mask=torch.ones_like(IDS)).logits
    assert logits.isfinite().all()


def test_families_are_seeded() -> None:
    first, again, other = (families.SPECS["qwen3"].build(seed) for seed in (0, 0, 1))
    assert torch.equal(first(IDS).logits, again(IDS).logits)
    assert not torch.allclose(first(IDS).logits, other(IDS).logits)


@pytest.mark.parametrize("height", [0.0, 1.0, 5.0, 20.0])
def test_ess_of_one_hot_logits_has_the_closed_form_of_the_paper(height: float) -> None:
    length = 40
    s = torch.zeros(1, 1, length, dtype=torch.float64)
    s[..., 7] = height
    actual = eager_reference.row_statistics(s.softmax(-1).expand(1, length, length))
    expected = (math.exp(height) + length - 1) ** 2 / (math.exp(2 * height) + length - 1)
    torch.testing.assert_close(actual["ess2"], torch.full((1, length), expected, dtype=torch.float64))
    z = math.exp(height) + length - 1
    entropy = math.log(z) - height * math.exp(height) / z
    torch.testing.assert_close(actual["ess1"], torch.full((1, length), math.exp(entropy), dtype=torch.float64))


@pytest.mark.parametrize("window", [None, 8])
def test_uniform_rows_have_the_statistics_of_counting(window: int | None) -> None:
    length = 50
    q, k = torch.zeros(2, length, 4), torch.ones(1, length, 4)
    actual = eager_reference.row_statistics(eager_reference.weights(q, k, 0.5, window))
    i = torch.arange(length, dtype=torch.float64)
    n = (i + 1).clamp(max=window or length)
    expected = {
        "ess2": n,
        "log_ess2": n.log(),
        "ess1": n,
        "max_weight": 1 / n,
        "sink_mass": torch.where(i < n, 1 / n, 0),
        "local_mass": n.clamp(max=32) / n,
        "mean_distance": (n - 1) / 2,
    }
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value.expand(2, length), msg=name)


def test_a_one_hot_row_attends_to_one_token() -> None:
    alpha = torch.eye(5, dtype=torch.float64)[None]
    actual = eager_reference.row_statistics(alpha)
    for name in actual.keys() - {"sink_mass"}:
        value = 0 if name in ("log_ess2", "mean_distance") else 1
        assert torch.equal(actual[name], torch.full((1, 5), value, dtype=torch.float64)), name


@pytest.mark.parametrize("layout", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dims", [8, 4, 0])
def test_contributions_of_all_pairs_sum_to_the_logits(layout: str, rotary_dims: int) -> None:
    generator = torch.Generator().manual_seed(1)
    q, k = torch.randn(4, 10, 8, generator=generator), torch.randn(2, 10, 8, generator=generator)
    c = eager_reference.contributions(q, k, 0.3, rotary_dims, layout)
    assert c.shape == (4, 10, 10, 4)
    visible_mask = eager_reference.visible(10)
    torch.testing.assert_close(c.sum(-1)[:, visible_mask], eager_reference.logits(q, k, 0.3)[:, visible_mask])
    statistics = eager_reference.pair_statistics(q, k, -0.3, rotary_dims, layout, window=4)
    assert (statistics["mean_signed"].abs() <= statistics["mean_abs"] + 1e-12).all()
    assert (statistics["mean_abs"] <= statistics["rms"] + 1e-12).all()
    assert (statistics["mean_abs"] <= statistics["norm_product"] + 1e-12).all()


def test_distance_profiles_average_to_the_signed_mean() -> None:
    generator = torch.Generator().manual_seed(2)
    q, k = torch.randn(2, 9, 6, generator=generator), torch.randn(1, 9, 6, generator=generator)
    total = sum((9 - d) * eager_reference.distance_profile(q, k, 0.5, 4, "half", d) for d in range(9))
    torch.testing.assert_close(total / 45, eager_reference.pair_statistics(q, k, 0.5, 4, "half")["mean_signed"])


def test_reference_pairs_follow_both_rotary_layouts() -> None:
    assert eager_reference.planes(10, 6, "half") == [(0, 3), (1, 4), (2, 5), (6, 8), (7, 9)]
    assert eager_reference.planes(10, 6, "interleaved") == [(0, 1), (2, 3), (4, 5), (6, 7), (8, 9)]


def counts(bins: dict[int, dict[str, Any]]) -> dict[int, int]:
    return {edge: values["rows"] for edge, values in bins.items()}


def test_rows_are_binned_by_visible_keys_under_the_upper_edge() -> None:
    rows = torch.arange(1, 41, dtype=torch.float64)[None]
    assert counts(eager_reference.binned({"n": rows})) == {16: 16, 19: 3, 23: 4, 27: 4, 32: 5, 38: 6, 45: 2}
    assert eager_reference.binned({"n": rows})[19]["n"].tolist() == [18.0]
    assert counts(eager_reference.binned({"n": rows}, window=20)) == {16: 16, 19: 3, 23: 21}


def test_reference_loss_is_cross_entropy() -> None:
    model = families.FAMILIES["llama-gqa"]()
    expected = model(IDS, labels=IDS).loss
    torch.testing.assert_close(eager_reference.nll_reference(model, IDS).mean().float(), expected)
