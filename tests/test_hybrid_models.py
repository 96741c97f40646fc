"""Hybrid models, whose decoder layers attend only here and there: influence equals ablation in the whole model."""

from functools import cache, partial

import pytest
import torch
from support.refusals import refuses
from support.tokenizers import tokenizer
from support.whole_model import loss_without_head, output_projection, total_loss
from torch import Tensor, nn
from zoo.build import tiny

import headscope as hs
from headscope.decomposition.logit_attribution import attribute_logits
from headscope.errors import UnsupportedModel
from headscope.interventions.edits import edit_units
from headscope.interventions.heads import head_units
from headscope.interventions.kinds import Zero
from headscope.interventions.replay import Replay
from headscope.positions.model import Model
from probes.influence.run import head_influence
from probes.influence.sweep import estimate_effects

pytestmark = pytest.mark.slow  # many models

HYBRIDS = (
    *("qwen3_next", "qwen3_5_text", "jamba", "bamba", "granitemoehybrid", "nemotron_h"),
    *("falcon_h1", "lfm2", "olmo_hybrid", "kimi_linear", "zamba2"),
)
IDS = torch.randint(3, 60, (1, 20), generator=torch.Generator().manual_seed(0))


@cache
def loaded(model_type: str) -> Model:
    return hs.load(tiny(model_type))


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_replayed_ablation_of_a_hybrid_equals_ablation_in_the_whole_model(model_type: str) -> None:
    model = loaded(model_type)
    replay = Replay(model, model.schedule, IDS, memory_bytes=1e9)
    units = head_units(model.geometry)
    with replay.capturing():
        replay.record_streams()
        chosen = (units[0], units[len(units) // 2], units[-1])
        replayed = dict(replay.losses([[edit_units(Zero(), [unit], model.geometry)] for unit in chosen]))
    for number, unit in enumerate(chosen):
        loss = float(replayed[number].double().sum())
        assert loss == pytest.approx(loss_without_head(model, unit, IDS), rel=1e-5)


@pytest.mark.parametrize("model_type", ["jamba", "zamba2"])
def test_head_influence_with_its_default_method_evaluates_heads_of_a_hybrid(model_type: str) -> None:
    """Attention layers are numbered as in the model, and none of these hybrids attends in its first layer."""
    model = hs.load(loaded(model_type).module, tokenizer=tokenizer("characters"))
    options = {"docs": 1, "length": 32, "components": ["zero"]}
    rows = head_influence(model, verify_top=2, verify_random=1, **options)
    exact = head_influence(model, method="exact", **options).set_index(["layer", "head"])["delta_nll"]
    evaluated = rows[rows["method"] == "exact"].set_index(["layer", "head"])["delta_nll"]
    assert len(evaluated) == 3
    assert {layer for layer, _ in exact.index} == set(model.geometry.layer_numbers) != {*range(model.geometry.layers)}
    for head, delta in evaluated.items():
        assert delta == pytest.approx(exact[head], abs=1e-6)


@pytest.mark.parametrize("model_type", ["qwen3_next", "jamba", "bamba", "falcon_h1", "lfm2"])
def test_the_estimate_of_a_hybrid_is_the_slope_of_the_whole_model(model_type: str) -> None:
    """The derivative of the loss by a factor of a head's output is minus the estimate of its zero ablation."""
    model = loaded(model_type)
    replay = Replay(model, model.schedule, IDS, memory_bytes=1e9)
    with replay.capturing():
        replay.record_streams()
        runs = [[edit_units(Zero(), [unit], model.geometry)] for unit in head_units(model.geometry)]
        estimates = estimate_effects(replay, runs, draws=0, seed=0)
    factors = [torch.ones(model.geometry.heads, requires_grad=True) for _ in model.attention_modules]

    def scale_heads(factor: Tensor, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        heads = args[0].unflatten(-1, (len(factor), -1))
        return ((heads * factor[:, None]).flatten(-2), *args[1:])

    hooks = [
        output_projection(model, layer).register_forward_pre_hook(partial(scale_heads, factor))
        for layer, factor in enumerate(factors)
    ]
    slopes = torch.stack(torch.autograd.grad(total_loss(model, IDS), factors)) / (IDS.shape[1] - 1)
    for hook in hooks:
        hook.remove()
    estimated = torch.tensor([estimate.first_order for estimate in estimates]).view_as(slopes)
    torch.testing.assert_close(estimated, -slopes, rtol=1e-4, atol=1e-5)


def test_a_model_whose_layers_are_not_one_list_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = loaded("jamba")
    layers = model.module.model.layers
    monkeypatch.setattr(model.module.model, "layers", nn.Sequential(*layers))
    with refuses(UnsupportedModel, model.name, "decoder"):
        Replay(model, model.schedule, IDS, memory_bytes=1e9)


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_text"])
def test_attribution_of_gated_heads_counts_the_gate_with_its_value(model_type: str) -> None:
    """Each head: the gated input of its slice of the output projection, through the final norm at its scale."""
    model = loaded(model_type)
    terms = attribute_logits(model, IDS[0])
    assert terms.relative_error < 1e-5
    inputs: dict[int, Tensor] = {}
    hooks = [
        output_projection(model, layer).register_forward_pre_hook(
            lambda _, args, at=layer: inputs.update({at: args[0]})
        )
        for layer in range(model.geometry.layers)
    ]
    final_norm, states = model.module.model.norm, []
    hooks.append(final_norm.register_forward_hook(lambda _, args, output: states.append((args[0], output))))
    with torch.no_grad():
        model.module(IDS, use_cache=False)
    for hook in hooks:
        hook.remove()
    ((before, after),) = states
    gain = (after / before)[0, :-1]  # the norm as a factor of each number
    unembedding = model.module.lm_head.weight
    directions = gain * (unembedding[IDS[0, 1:]] - unembedding.mean(0))
    for layer, gated in inputs.items():
        heads = gated[0, :-1].unflatten(-1, (model.geometry.heads, -1))
        weights = output_projection(model, layer).weight.unflatten(-1, (model.geometry.heads, -1))
        expected = torch.einsum("thd,ohd,to->ht", heads, weights, directions)
        torch.testing.assert_close(terms.head_terms[layer], expected, rtol=1e-3, atol=1e-4)


def test_attention_that_norms_its_heads_before_the_projection_is_refused_by_name() -> None:
    with refuses(UnsupportedModel, "attribution", "projection", "gate"):
        attribute_logits(hs.load(tiny("bitnet")), IDS[0])
