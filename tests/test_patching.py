"""Activation patching: equal to eager attention patched by hand in every kind of model, and its identities."""

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, get_args

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from support import eager_patching, families
from support.prompt_pairs import LENGTH, ioi_pairs, random_pair
from support.refusals import refuses
from torch import Tensor
from transformers import PreTrainedModel

import headscope as hs
from headscope.errors import BadInput
from headscope.forward.capture import capturing
from headscope.interventions.heads import Unit
from headscope.interventions.metrics import Metric, MetricName, PairTokens
from headscope.interventions.pair_runs import GROUP_ACTIVATIONS, Activation, Direction, PairRuns, patched_units
from headscope.positions.model import Model
from headscope.prompts.pairs import TokenPair

FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama-gqa": families.MEASURABLE["llama-gqa"],
    "mistral-sliding": families.MEASURABLE["mistral-sliding"],
    "gemma3": families.MEASURABLE["gemma3"],
    "mixtral": partial(
        families.build, "mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2}
    ),
    "gpt_oss": families.OTHERS["gpt_oss"].build,
    "gemma2": families.OTHERS["gemma2"].build,
    "gpt2": families.OTHERS["gpt2"].build,
    "deepseek_v2": families.OTHERS["deepseek_v2"].build,
    "lfm2": families.OTHERS["lfm2"].build,
}
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)


@cache
def loaded(family: str) -> Model:
    return hs.load(FAMILIES[family]())


def exact(
    model: Model,
    pair: PairTokens,
    activation: Activation,
    direction: Direction = "denoising",
    metric: MetricName = "logit_diff",
    span: range | None = None,
    units: list[Unit] | None = None,
) -> dict[Unit, float]:
    """The metric with one unit patched at a time."""
    chosen = patched_units(model, activation) if units is None else units
    pair_runs = PairRuns(model, pair, metric, memory_bytes=0)
    with pair_runs.capturing():
        runs = [pair_runs.patch(activation, direction, [unit], span) for unit in chosen]
        return dict(zip(chosen, pair_runs.evaluate(direction, runs), strict=True))


def estimates(
    model: Model,
    pair: PairTokens,
    activation: Activation,
    direction: Direction = "denoising",
    metric: Metric = "logit_diff",
    by_position: bool = False,
) -> Tensor:
    """The estimated change of the metric by every unit, [layers, units, spans], float64."""
    spans = [range(at, at + 1) for at in range(pair.aligned)] if by_position else [None]
    pair_runs = PairRuns(model, pair, metric, memory_bytes=1e9)
    with pair_runs.capturing():
        units = patched_units(model, activation)
        runs = [pair_runs.patch(activation, direction, [unit], span) for unit in units for span in spans]
        values = torch.tensor(pair_runs.estimate(direction, runs), dtype=torch.float64)
    return values.view(model.geometry.layers, -1, len(spans))


# Independent references --------------------------------------------------------------------------------------------


def logit_difference(logits: Tensor) -> float:
    return (logits[-1, 7] - logits[-1, 9]).item()


@torch.no_grad()
def by_hand(model: Model, pair: PairTokens, activation: str, unit: Unit, direction: str, positions: slice) -> float:
    """The logit difference of a pair with one-token answers, by patched eager attention over the prompt alone."""
    clean, corrupted = pair.clean[:, :-1], pair.corrupted[:, :-1]
    prompt, source = (corrupted, clean) if direction == "denoising" else (clean, corrupted)
    other = eager_patching.run(model, source)[1][unit.layer]
    heads = unit.head_slice(model.geometry)
    changes = {activation: (heads, positions, other[activation])}
    return logit_difference(eager_patching.run(model, prompt, {unit.layer: changes})[0])


@pytest.mark.exhaustive(sample=12)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_exact_patches_equal_eager_attention_patched_by_hand(family: str, activation: Activation) -> None:
    model, pair = loaded(family), random_pair()
    units = [unit for unit in patched_units(model, activation) if max(unit.head, unit.kv_group) == 1]
    assert len(units) >= model.geometry.layers
    for direction, span in (("denoising", None), ("noising", None), ("denoising", range(9, 10))):
        values = exact(model, pair, activation, direction, span=span, units=units)
        at = slice(None) if span is None else slice(span.start, span.stop)
        unpatched = by_hand(model, pair, "z", units[0], direction, slice(0))
        for unit, value in values.items():
            assert value == pytest.approx(by_hand(model, pair, activation, unit, direction, at), rel=1e-5, abs=2e-5)
        if span is None:
            assert max(abs(value - unpatched) for value in values.values()) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "gpt_oss", "lfm2"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_estimates_are_the_gradient_times_the_exact_change_of_the_heads_output(
    family: str, activation: Activation
) -> None:
    model, pair = loaded(family), random_pair()
    estimate = estimates(model, pair, activation)[..., 0]
    clean, corrupted = pair.clean[:, :-1], pair.corrupted[:, :-1]
    with torch.no_grad():
        source = eager_patching.run(model, clean)[1]
        unpatched = eager_patching.run(model, corrupted)[1]
    offsets = [torch.zeros_like(record["z"], requires_grad=True) for record in unpatched]
    logits, _ = eager_patching.run(model, corrupted, offsets=dict(enumerate(offsets)))
    gradients = torch.autograd.grad(logits[-1, 7] - logits[-1, 9], offsets)
    for layer, gradient in enumerate(gradients):
        replaced = {layer: {activation: (slice(None), slice(None), source[layer][activation])}}
        with torch.no_grad():
            patched = eager_patching.run(model, corrupted, replaced)[1][layer]["z"]
        by_head = ((patched - unpatched[layer]["z"]) * gradient).sum((1, 2))
        by_unit = by_head.view(estimate.shape[1], -1).sum(1)
        torch.testing.assert_close(estimate[layer], by_unit, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama-gqa", "gpt_oss"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_estimate_of_kl_for_noising_is_half_the_fisher_information_of_the_change(
    family: str, activation: Activation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headscope.interventions.pair_runs.CURVATURE_TOKENS", 3)
    model, pair = loaded(family), random_pair()
    estimate = estimates(model, pair, activation, "noising", "kl")[..., 0]
    clean, corrupted = pair.clean[:, :-1], pair.corrupted[:, :-1]
    with torch.no_grad():
        source = eager_patching.run(model, corrupted)[1]
        unpatched = eager_patching.run(model, clean)[1]
    offsets = [torch.zeros_like(record["z"], requires_grad=True) for record in unpatched]
    log_p = eager_patching.run(model, clean, offsets=dict(enumerate(offsets)))[0][-1].double().log_softmax(-1)
    top = log_p.topk(3)
    gradients = [torch.autograd.grad(value, offsets, retain_graph=True) for value in top.values]
    for layer in range(model.geometry.layers):
        replaced = {layer: {activation: (slice(None), slice(None), source[layer][activation])}}
        with torch.no_grad():
            change = eager_patching.run(model, clean, replaced)[1][layer]["z"] - unpatched[layer]["z"]
        expected = torch.zeros(estimate.shape[1], dtype=torch.float64)
        for value, gradient in zip(top.values.detach(), gradients, strict=True):
            by_unit = (change * gradient[layer]).sum((1, 2)).view(estimate.shape[1], -1).sum(1)
            expected += value.exp() * by_unit.square() / 2
        torch.testing.assert_close(estimate[layer], expected, atol=1e-5, rtol=1e-3)


@pytest.mark.model
def test_the_second_order_estimate_of_kl_ranks_the_heads_of_the_real_model(smollm2: Model) -> None:
    """First order is 0. Estimates order the heads as the exact effects do over four pairs, and are closer than 0."""
    estimated, exact_values = [], []
    units = patched_units(smollm2, "z")[180::2]
    for pair in ioi_pairs(smollm2, 4):
        pair_runs = PairRuns(smollm2, pair, "kl", memory_bytes=2**30)
        with pair_runs.capturing():
            runs = [pair_runs.patch("z", "noising", [unit]) for unit in units]
            estimated.append(pair_runs.estimate("noising", runs))
            exact_values.append(pair_runs.evaluate("noising", runs))
    estimate, exact_mean = np.mean(estimated, axis=0), np.mean(exact_values, axis=0)
    assert spearmanr(estimate, exact_mean).statistic > 0.9
    assert np.square(np.array(estimated) - exact_values).sum() < 0.9 * np.square(exact_values).sum()


# Identities --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_patching_a_run_into_itself_changes_nothing(activation: Activation) -> None:
    model, pair = loaded("llama-gqa"), random_pair()
    same = PairTokens(pair.clean, pair.clean, pair.answer, pair.wrong, pair.aligned)
    pair_runs = PairRuns(model, same, "logit_diff", memory_bytes=1e9)
    for value in exact(model, same, activation).values():
        assert value == pytest.approx(pair_runs.clean_value, abs=1e-5)
    assert estimates(model, same, activation).abs().max() <= 1e-5


@torch.no_grad()
def test_patching_embeddings_mlps_and_the_z_of_all_heads_reproduces_the_other_run() -> None:
    model, pair = loaded("llama-gqa"), random_pair()
    backbone = model.module.model
    parts = [backbone.embed_tokens, *(layer.mlp for layer in backbone.layers)]

    def run(ids: Tensor, outputs: list[Tensor] | None) -> tuple[Tensor, list[Tensor]]:
        """Logits, and the outputs of z by layer and of the other parts; `outputs` replace them."""
        recorded: list[Tensor] = [torch.empty(0)] * (model.geometry.layers + len(parts))

        def record_or_replace(number: int, output: Tensor) -> Tensor:
            recorded[number] = output
            return output if outputs is None else outputs[number]

        with capturing(model) as layers:
            for layer in range(model.geometry.layers):
                layers.edit_output(layer, lambda z, call, number=layer: record_or_replace(number, z))
            for number, part in enumerate(parts, start=model.geometry.layers):
                layers.hook(part, lambda m, a, k, output, number=number: record_or_replace(number, output))
            return model.module(ids, use_cache=False).logits, recorded

    clean_logits, clean_outputs = run(pair.clean, None)
    corrupted_logits, _ = run(pair.corrupted, None)
    patched_logits, _ = run(pair.corrupted, clean_outputs)
    assert (corrupted_logits - clean_logits).abs().max() > 0.1
    torch.testing.assert_close(patched_logits, clean_logits, atol=1e-5, rtol=0)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_swapping_clean_and_corrupted_turns_noising_into_denoising(activation: Activation) -> None:
    model, pair = loaded("llama-gqa"), random_pair()
    swapped = PairTokens(pair.corrupted, pair.clean, pair.answer, pair.wrong, pair.aligned)
    noised, denoised = exact(model, pair, activation, "noising"), exact(model, swapped, activation, "denoising")
    assert noised == pytest.approx(denoised, abs=1e-6)
    torch.testing.assert_close(estimates(model, pair, activation, "noising"), estimates(model, swapped, activation))


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding", "gpt2"])
@pytest.mark.parametrize("activation", ["z", "q", "pattern", "v"])
def test_estimates_by_position_of_z_q_pattern_and_v_sum_to_those_of_all_positions(
    family: str, activation: Activation
) -> None:
    at_all, by_position = (
        estimates(loaded(family), random_pair(), activation, by_position=flag) for flag in (False, True)
    )
    assert by_position.shape[-1] == LENGTH
    torch.testing.assert_close(by_position.sum(-1), at_all[..., 0], atol=1e-5, rtol=1e-5)


def test_a_patch_of_all_positions_equals_a_span_over_the_prompt_when_the_answer_is_one_token() -> None:
    model, pair = loaded("gemma3"), random_pair()
    assert exact(model, pair, "k") == pytest.approx(exact(model, pair, "k", span=range(LENGTH)), abs=1e-6)


def test_patching_a_position_where_the_runs_agree_up_to_then_changes_nothing() -> None:
    model, pair = loaded("llama-gqa"), random_pair()
    pair_runs = PairRuns(model, pair, "logit_diff", memory_bytes=1e9)
    for activation in ACTIVATIONS:
        for value in exact(model, pair, activation, span=range(2)).values():
            assert value == pytest.approx(pair_runs.corrupted_value, abs=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama-gqa", "gpt_oss"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_units_patched_together_equal_eager_attention_patched_by_hand(family: str, activation: Activation) -> None:
    """Units of two layers and of one layer, each with the activation of the unchanged source run."""
    model, pair = loaded(family), random_pair()
    units = [unit for unit in patched_units(model, activation) if unit.layer in (0, 2)][1::2]
    spans = [None, range(9, 12)]
    pair_runs = PairRuns(model, pair, "logit_diff", memory_bytes=1e9)
    with pair_runs.capturing():
        runs = [pair_runs.patch(activation, "denoising", units, span) for span in spans]
        values = pair_runs.evaluate("denoising", runs)
        (alone,) = pair_runs.evaluate("denoising", [pair_runs.patch(activation, "denoising", units[:1])])
    source = eager_patching.run(model, pair.clean[:, :-1])[1]
    for span, value in zip(spans, values, strict=True):
        at = slice(None) if span is None else slice(span.start, span.stop)
        changes = {}
        for layer in (0, 2):
            heads = [
                h for u in units if u.layer == layer for h in range(model.geometry.heads)[u.head_slice(model.geometry)]
            ]
            chosen = torch.zeros(model.geometry.heads, dtype=torch.bool)
            chosen[heads] = True
            changes[layer] = {activation: (chosen, at, source[layer][activation])}
        expected = logit_difference(eager_patching.run(model, pair.corrupted[:, :-1], changes)[0])
        assert value == pytest.approx(expected, abs=1e-5)
    assert alone == pytest.approx(exact(model, pair, activation, units=units[:1])[units[0]], abs=1e-5)


# Metrics, alignment, failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("metric", get_args(MetricName))
def test_metrics_equal_their_definitions(metric: MetricName) -> None:
    model, pair = loaded("llama-gqa"), random_pair()
    pair_runs = PairRuns(model, pair, metric, memory_bytes=1e9)
    with torch.no_grad():
        clean, corrupted = (
            model.module(ids[:, :-1], use_cache=False).logits[0, -1].double() for ids in (pair.clean, pair.corrupted)
        )
    log_p, other = clean.log_softmax(-1), corrupted.log_softmax(-1)
    p, other_p = log_p.exp(), other.exp()
    expected = {
        "prob_diff": (p[7] - p[9], other_p[7] - other_p[9]),
        "rank": ((clean > clean[7]).sum(), (corrupted > corrupted[7]).sum()),
        "logit_diff": (clean[7] - clean[9], corrupted[7] - corrupted[9]),
        "logprob": (log_p[7], other[7]),
        "nll": (-log_p[7], -other[7]),
        "kl": (0.0, (log_p.exp() * (log_p - other)).sum()),
    }[metric]
    assert (pair_runs.clean_value, pair_runs.corrupted_value) == pytest.approx(tuple(map(float, expected)), abs=1e-5)


@torch.no_grad()
def test_nll_of_an_answer_of_several_tokens_is_their_mean_loss_after_the_prompt() -> None:
    model, pair = loaded("gemma2"), random_pair(answer=(7, 30, 11))
    pair_runs = PairRuns(model, pair, "nll", memory_bytes=1e9)
    log_p = model.module(pair.clean, use_cache=False).logits[0].double().log_softmax(-1)
    losses = [-log_p[LENGTH - 1 + number, token] for number, token in enumerate((7, 30, 11))]
    assert pair_runs.clean_value == pytest.approx(float(sum(losses)) / 3, abs=1e-5)


def test_estimates_of_a_metric_see_all_logits_of_a_long_answer() -> None:
    """A metric of the first and the last of 150 answer tokens, estimated as the gradient through the whole model."""
    model, generator = loaded("llama-gqa"), torch.Generator().manual_seed(5)
    count = 150
    clean, corrupted, answer = torch.randint(3, families.VOCAB, (3, count), generator=generator).numpy()
    pair = PairTokens.on_device(TokenPair("long", "", clean, corrupted, answer, answer[:0], count), model.device)

    def ends(logits: Tensor, _: PairTokens) -> Tensor:
        assert len(logits) == count
        return logits[0, pair.answer[0]] - logits[-1, pair.answer[-1]]

    with torch.no_grad():
        source, unpatched = (eager_patching.run(model, ids)[1] for ids in (pair.clean, pair.corrupted))
    offset = torch.zeros_like(unpatched[1]["z"], requires_grad=True)
    logits = eager_patching.run(model, pair.corrupted, offsets={1: offset})[0][count - 1 : -1]
    (gradient,) = torch.autograd.grad(ends(logits, pair), offset)
    estimate = estimates(model, pair, "z", metric=ends)[1, :, 0]
    expected = ((source[1]["z"] - unpatched[1]["z"]) * gradient).sum((1, 2))
    torch.testing.assert_close(estimate, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("count", [3, 150])
def test_a_corrupted_answer_follows_the_corrupted_prompt_and_the_answer_is_scored(count: int) -> None:
    """The loss of the second half of A A and of A B: unchanged, patched, and estimated over chunks of logits."""
    model, generator = loaded("llama-gqa"), torch.Generator().manual_seed(3)
    half, answer, other = torch.randint(3, families.VOCAB, (3, count), generator=generator).numpy()
    tokens = TokenPair("halves", "", half, half, answer, answer[:0], count, corrupted_answer=other)
    pair = PairTokens.on_device(tokens, model.device)

    def loss(logits: Tensor) -> Tensor:
        return -logits[count - 1 : -1].double().log_softmax(-1).gather(1, pair.answer[:, None]).mean()

    with torch.no_grad():
        runs = [eager_patching.run(model, ids) for ids in (pair.clean, pair.corrupted)]
        (clean, source), (corrupted, unpatched) = runs
        changes = {1: {"z": (slice(2, 3), slice(None), source[1]["z"])}}
        patched = eager_patching.run(model, pair.corrupted, changes)[0]
    offset = torch.zeros_like(unpatched[1]["z"], requires_grad=True)
    (gradient,) = torch.autograd.grad(loss(eager_patching.run(model, pair.corrupted, offsets={1: offset})[0]), offset)
    pair_runs = PairRuns(model, pair, "nll", memory_bytes=1e9)
    losses = [float(loss(clean)), float(loss(corrupted))]
    assert [pair_runs.clean_value, pair_runs.corrupted_value] == pytest.approx(losses, abs=1e-5)
    (value,) = exact(model, pair, "z", metric="nll", units=[Unit(1, model.geometry.kv_group(1, 2), 2)]).values()
    assert value == pytest.approx(float(loss(patched)), abs=1e-5)
    assert abs(value - pair_runs.corrupted_value) > 1e-3
    estimate = estimates(model, pair, "z", metric="nll")[1, :, 0]
    expected = ((source[1]["z"] - unpatched[1]["z"]) * gradient).sum((1, 2))
    torch.testing.assert_close(estimate, expected, atol=1e-6, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("activation", ["z", "v"])
@pytest.mark.parametrize("answer", [(7,), (7, 30, 11)])
def test_prompts_of_different_lengths_are_patched_at_their_common_suffix_and_the_answer_only(
    answer: tuple[int, ...], activation: Activation
) -> None:
    model, pair, suffix = loaded("llama-gqa"), random_pair(answer), 4
    longer = torch.cat([torch.tensor([[5, 6]]), pair.clean], 1)
    aligned = PairTokens(longer, pair.corrupted, pair.answer, pair.wrong, suffix)
    unit = next(unit for unit in patched_units(model, activation) if unit.layer == 1)
    source = eager_patching.run(model, longer)[1][1][activation][:, 2:]
    changes = {1: {activation: (unit.head_slice(model.geometry), slice(LENGTH - suffix, None), source)}}
    logits = eager_patching.run(model, pair.corrupted, changes)[0][LENGTH - 1 : -1]
    expected = torch.nn.functional.cross_entropy(logits, pair.answer).item()
    assert exact(model, aligned, activation, metric="nll", units=[unit]) == {unit: pytest.approx(expected, abs=1e-5)}


def test_a_model_that_is_first_replayed_inside_a_context_has_its_edits() -> None:
    model, pair = hs.load(FAMILIES["llama-gqa"]()), random_pair()
    with hs.ablated(model, [(1, 2), (2, 0)]):
        pair_runs = PairRuns(model, pair, "logit_diff", memory_bytes=1e9)
        with torch.no_grad():
            expected = [logit_difference(model.module(ids[:, :-1]).logits[0]) for ids in (pair.clean, pair.corrupted)]
    assert [pair_runs.clean_value, pair_runs.corrupted_value] == pytest.approx(expected, abs=1e-5)


def test_a_metric_that_is_not_finite_is_refused() -> None:
    module = FAMILIES["llama-gqa"]()
    with torch.no_grad():
        module.lm_head.weight[7] = 3e38
    model = hs.load(module)
    with refuses(BadInput, "metric", f"'{model.name}'", "--dtype") as refusal:
        PairRuns(model, random_pair(), "logit_diff", memory_bytes=1e9)
    assert re.search(r"\b(inf|nan)\b", str(refusal.value))


def test_kv_groups_are_the_units_of_keys_and_values_and_query_heads_of_the_rest() -> None:
    geometry = loaded("llama-gqa").geometry
    counts: dict[Any, int] = {name: len(patched_units(loaded("llama-gqa"), name)) for name in ACTIVATIONS}
    assert {name for name, count in counts.items() if count == geometry.layers * geometry.kv_groups} == {
        *GROUP_ACTIVATIONS
    }
    assert {count for name, count in counts.items() if name not in GROUP_ACTIVATIONS} == {
        geometry.layers * geometry.heads
    }
