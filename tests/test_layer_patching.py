"""Patching of layers equals hooks written by hand in every kind of model.

The comparison with TransformerLens is in test_patching_transformer_lens.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from itertools import product
from typing import Any, get_args

import pytest
import torch
from support import families
from support.prompt_pairs import LENGTH, random_pair
from torch import Tensor, nn
from transformers import PreTrainedModel

import headscope as hs
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import Direction, PairRuns
from headscope.interventions.parts import PART_NAMES, PartName, inspect_layer_parts, layers_with
from headscope.positions.model import Model

MOE = {"num_local_experts": 4, "num_experts_per_tok": 2, "initializer_range": 0.2}
FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], tuple[str, str]]] = {
    "llama-gqa": (families.MEASURABLE["llama-gqa"], ("self_attn", "mlp")),
    "mistral-sliding": (families.MEASURABLE["mistral-sliding"], ("self_attn", "mlp")),
    "gemma3": (families.MEASURABLE["gemma3"], ("post_attention_layernorm", "post_feedforward_layernorm")),
    "gemma2": (families.OTHERS["gemma2"].build, ("post_attention_layernorm", "post_feedforward_layernorm")),
    "gpt_oss": (families.OTHERS["gpt_oss"].build, ("self_attn", "mlp")),
    "gpt_neox": (families.MEASURABLE["gpt_neox"], ("attention", "mlp")),
    "gpt2": (families.OTHERS["gpt2"].build, ("attn", "mlp")),
    "mixtral": (partial(families.build, "mixtral", MOE), ("self_attn", "mlp")),
    "deepseek_v2": (families.OTHERS["deepseek_v2"].build, ("self_attn", "mlp")),
    "lfm2": (families.OTHERS["lfm2"].build, ("self_attn", "feed_forward")),
}
"""Families, and the modules of their layers whose outputs are added to the residual stream."""
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)
SPANS = (None, range(9, 10), range(2, 6))


@cache
def loaded(family: str) -> Model:
    return hs.load(FAMILIES[family][0]())


def runs_of(model: Model, pair: PairTokens, metric: Any = "logit_diff") -> PairRuns:
    return PairRuns(model, pair, metric, 1e9, inspect_layer_parts(model, pair.clean))


def layers_of(pair_runs: PairRuns, part: PartName) -> list[int]:
    return layers_with(part, len(pair_runs.clean.layers), pair_runs.clean.parts)


def exact(
    pair_runs: PairRuns, part: PartName, direction: Direction, places: Iterable[tuple[int, range | None]]
) -> list[float]:
    """The metric with the part of one layer patched at a time, at a span."""
    with pair_runs.capturing():
        runs = [pair_runs.patch_part(part, direction, layer, span) for layer, span in places]
        return pair_runs.evaluate(direction, runs)


def estimates(
    pair_runs: PairRuns, part: PartName, direction: Direction, spans: Sequence[range | None]
) -> dict[int, list[float]]:
    """The estimated changes of the metric at every span, by layer."""
    layers = layers_of(pair_runs, part)
    with pair_runs.capturing():
        runs = [pair_runs.patch_part(part, direction, layer, span) for layer in layers for span in spans]
        values = iter(pair_runs.estimate(direction, runs))
        return {layer: [next(values) for _ in spans] for layer in layers}


def decoder_layers_of(model: Model) -> nn.ModuleList:
    inner = model.module.get_decoder() if hasattr(model.module, "get_decoder") else model.module.base_model
    return next(getattr(inner, name) for name in ("layers", "h") if hasattr(inner, name))


def place_of(model: Model, family: str, activation: str, layer: int) -> nn.Module | None:
    """The module whose input (resid_pre) or output is the activation."""
    module = decoder_layers_of(model)[layer]
    if activation == "resid_pre":
        return module
    return getattr(module, FAMILIES[family][1][activation == "mlp_out"], None)


def run_with_hook(
    model: Model, ids: Tensor, module: nn.Module, edit: Callable[[Tensor], Tensor], of_input: bool
) -> Tensor:
    """Logits [L, vocabulary] with the input or output of a module edited."""

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (edit(args[0]), *args[1:]), kwargs

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return edit(output) if isinstance(output, Tensor) else (edit(output[0]), *output[1:])

    handle = (
        module.register_forward_pre_hook(before, with_kwargs=True) if of_input else module.register_forward_hook(after)
    )
    try:
        return model.module(ids, use_cache=False).logits[0]
    finally:
        handle.remove()


def by_hand(
    model: Model, pair: PairTokens, module: nn.Module, of_input: bool, direction: str, span: range | None
) -> float:
    """The logit difference of the prompt alone with an activation of the other prompt."""
    clean, corrupted = pair.clean[:, :-1], pair.corrupted[:, :-1]
    prompt, source = (corrupted, clean) if direction == "denoising" else (clean, corrupted)
    recorded: list[Tensor] = []
    run_with_hook(model, source, module, lambda t: recorded.append(t.clone()) or t, of_input)
    rows = slice(None) if span is None else slice(span.start, span.stop)

    def edit(hidden: Tensor) -> Tensor:
        patched = hidden.clone()
        patched[..., rows, :] = recorded[0][..., rows, :]
        return patched

    logits = run_with_hook(model, prompt, module, edit, of_input)
    return float(logits[-1, 7] - logits[-1, 9])


@pytest.mark.exhaustive(sample=8)
@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("activation", PART_NAMES)
def test_exact_patches_equal_hooks_written_by_hand(family: str, activation: PartName) -> None:
    model, pair = loaded(family), random_pair()
    pair_runs = runs_of(model, pair)
    layers = layers_of(pair_runs, activation)
    places = [place_of(model, family, activation, layer) for layer in range(len(decoder_layers_of(model)))]
    assert layers == [layer for layer, module in enumerate(places) if module is not None]
    difference = abs(pair_runs.clean_value - pair_runs.corrupted_value)
    for direction in DIRECTIONS:
        patched = [*product(layers, SPANS)]
        for (layer, span), value in zip(patched, exact(pair_runs, activation, direction, patched), strict=True):
            module = places[layer]
            assert module is not None
            expected = by_hand(model, pair, module, activation == "resid_pre", direction, span)
            # Processors round differently: up to 1.4e-5 with the sinks and experts of gpt_oss.
            assert value == pytest.approx(expected, abs=2e-5 * max(1, difference))


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3", "gpt_oss", "lfm2"])
@pytest.mark.parametrize("activation", PART_NAMES)
def test_estimates_are_the_gradient_times_the_change_of_the_activation(family: str, activation: PartName) -> None:
    model, pair = loaded(family), random_pair()
    by_layer = estimates(runs_of(model, pair), activation, "denoising", SPANS)
    clean, corrupted = pair.clean[:, :-1], pair.corrupted[:, :-1]
    for layer in range(len(decoder_layers_of(model))):
        module = place_of(model, family, activation, layer)
        if module is None:
            assert layer not in by_layer
            continue
        new: list[Tensor] = []
        old: list[Tensor] = []
        offsets: list[Tensor] = []

        def add_offset(hidden: Tensor, old: list[Tensor] = old, offsets: list[Tensor] = offsets) -> Tensor:
            old.append(hidden.detach().clone())
            offsets.append(torch.zeros_like(hidden, requires_grad=True))
            return hidden + offsets[0]

        with torch.no_grad():
            run_with_hook(
                model, clean, module, lambda t, new=new: new.append(t.clone()) or t, activation == "resid_pre"
            )
        logits = run_with_hook(model, corrupted, module, add_offset, activation == "resid_pre")
        (gradient,) = torch.autograd.grad(logits[-1, 7] - logits[-1, 9], offsets)
        by_position = ((new[0] - old[0]) * gradient).sum(-1).flatten()
        expected = [by_position[slice(None) if s is None else slice(s.start, s.stop)].sum().item() for s in SPANS]
        assert by_layer[layer] == pytest.approx(expected, abs=1e-5, rel=1e-4)


def test_the_residual_stream_of_all_positions_is_the_other_run() -> None:
    pair_runs = runs_of(loaded("gemma3"), random_pair())
    places = [(layer, None) for layer in layers_of(pair_runs, "resid_pre")]
    values = exact(pair_runs, "resid_pre", "denoising", places)
    assert values == pytest.approx([pair_runs.clean_value] * len(places), abs=1e-5)


def test_estimates_by_position_sum_to_those_of_all_positions_and_batches_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair_runs = runs_of(loaded("llama-gqa"), random_pair())
    spans = [range(at, at + 1) for at in range(LENGTH)]
    for part in PART_NAMES:
        by_position = estimates(pair_runs, part, "noising", spans)
        for layer, (at_all,) in estimates(pair_runs, part, "noising", [None]).items():
            assert sum(by_position[layer]) == pytest.approx(at_all, abs=1e-5, rel=1e-5)
    places = [(1, span) for span in spans]
    together = exact(pair_runs, "mlp_out", "noising", places)
    monkeypatch.setattr("headscope.interventions.replay.runs_per_batch", lambda *_: 1)
    assert exact(pair_runs, "mlp_out", "noising", places) == pytest.approx(together, abs=1e-5)


def test_the_estimate_of_kl_for_noising_is_of_second_order_and_not_negative() -> None:
    pair_runs = runs_of(loaded("llama-gqa"), random_pair(), "kl")
    for part in PART_NAMES:
        values = [value for (value,) in estimates(pair_runs, part, "noising", [None]).values()]
        assert min(values) >= 0
        assert max(values) > 0


@torch.no_grad()
@pytest.mark.parametrize("answer", [(7,), (7, 30, 11)])
def test_prompts_of_different_lengths_are_patched_at_their_common_suffix_and_the_answer_only(
    answer: tuple[int, ...],
) -> None:
    model, pair, suffix = loaded("llama-gqa"), random_pair(answer), 4
    longer = torch.cat([torch.tensor([[5, 6]]), pair.clean], 1)
    pair_runs = runs_of(model, PairTokens(longer, pair.corrupted, pair.answer, pair.wrong, suffix), "nll")
    module = place_of(model, "llama-gqa", "mlp_out", 1)
    assert module is not None
    recorded: list[Tensor] = []
    run_with_hook(model, longer, module, lambda t: recorded.append(t.clone()) or t, False)
    patched = suffix + len(answer)

    def edit(hidden: Tensor) -> Tensor:
        return torch.cat([hidden[:, :-patched], recorded[0][:, -patched:]], 1)

    logits = run_with_hook(model, pair.corrupted, module, edit, False)[LENGTH - 1 : -1]
    (value,) = exact(pair_runs, "mlp_out", "denoising", [(1, None)])
    assert value == pytest.approx(torch.nn.functional.cross_entropy(logits, pair.answer).item(), abs=1e-5)
