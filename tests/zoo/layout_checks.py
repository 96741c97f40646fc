"""Every measure on one published layout, against the family's own eager attention or an explicit computation.

A measure that refuses a layout is recorded with its reason; everything else that differs is wrong.
"""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.decomposition.logit_attribution import attribute_logits
from headscope.errors import BadInput, UnsupportedModel
from headscope.interventions.edits import edit_units
from headscope.interventions.heads import Unit, head_units
from headscope.interventions.kinds import Zero
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import PairRuns
from headscope.interventions.replay import Replay
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import resolve_schedule
from headscope.positions.model import Model
from probes.influence.sweep import estimate_effects
from probes.patterns.run import collect_top_keys

from . import checks, explicit_attribution
from .checks import YARN, Verdict, relative
from .decoding_and_bf16 import decoded_logits, decoding_errors
from .eager import Truth, eager
from .edited_heads import HeadsEdit, edited_heads
from .yarn import yarn_by_hand

MAX_ERROR = 3e-4
"""Largest relative error of values that accumulate over the layers of a float32 pass."""
KEYS = 4
"""Top keys per row."""
TEXT_LENGTH = 20

Errors = dict[str, float]


def check_layout(make: Callable[[], PreTrainedModel], measures: tuple[str, ...] | None = None) -> Verdict:
    """The verdict on a layout: the zoo's checks, then these measures (all by default)."""
    return check_measures(make, {name: MEASURES[name] for name in (MEASURES if measures is None else measures)})


def check_measures(make: Callable[[], PreTrainedModel], measures: "Mapping[str, Measure]") -> Verdict:
    """The verdict on a model: the zoo's checks, then these measures. A refusal is recorded with its reason."""
    opened = checks.open_model(make)
    if isinstance(opened, Verdict):
        return opened
    verdict = checks.check_opened(*opened)
    if not verdict.kind.startswith("right"):
        return verdict
    model, ids, truth = opened
    if not model.geometry.pairs:
        verdict.refused["rotary pairs"] = model.rotation.no_pairs_reason
    for name, measure in measures.items():
        try:
            errors = measure(model, ids, truth)
        except (UnsupportedModel, BadInput) as error:
            verdict.refused[name] = checks.short_reason(error)
            continue
        except Exception as error:
            return Verdict("TRACEBACK", f"{name}: {checks._error_location(error)}", verdict.errors, verdict.refused)
        verdict.errors |= errors
        wrong = [f"{what} {error:.1e}" for what, error in errors.items() if not error <= MAX_ERROR]
        if wrong:
            return Verdict("WRONG", f"{name}: {', '.join(wrong)}", verdict.errors, verdict.refused)
    return verdict


def shared_reason(reason: str) -> str:
    """The reason of a refusal in the words that measures share."""
    return reason.removesuffix(", so it has no frequencies to change")


# Schemes -----------------------------------------------------------------------------------------------------------


def _schemes(model: Model, ids: Tensor, truth: Truth) -> Errors:
    """The zoo's checks have compared YaRN; here only a refusal counts."""
    resolve_schedule(model, YARN)
    return {}


def _adarope(model: Model, ids: Tensor, truth: Truth) -> Errors:
    """AdaRoPE from YaRN is YaRN written by hand; each KV group is rotated by frequencies of its own."""
    adapter = AdaRoPE.from_schedule(model, resolve_schedule(model, YARN))
    with yarn_by_hand(model.module):
        expected = eager(model.module, ids).logits
    errors = {"adarope from yarn": relative(_logits(model, adapter, ids), expected)}
    adapter = AdaRoPE.from_schedule(model, resolve_schedule(model, "base"))
    with torch.no_grad():
        adapter.xi += 0.3 * torch.randn(adapter.xi.shape, generator=torch.Generator().manual_seed(7))
    return errors | _group_rotation(model, adapter, ids, truth)


def _logits(model: Model, scheme: Any, ids: Tensor) -> Tensor:
    with hs.attached(model, scheme), hs.capturing(model), torch.no_grad():
        logits: Tensor = model.module(input_ids=ids, use_cache=False).logits.float()
    return logits


def _group_rotation(model: Model, adapter: AdaRoPE, ids: Tensor, truth: Truth) -> Errors:
    """q and k of the first layer that rotates: those of eager attention, rotated further by the change of angle."""
    layer = model.geometry.layer_rotates.index(True)
    if model.rotation.frequency_change_length:  # longer texts have other frequencies
        ids = ids[:, : model.rotation.frequency_change_length]
        truth = eager(model.module, ids)
    records: list[AttentionRecord] = []
    with hs.attached(model, adapter), hs.capturing(model) as layers, torch.no_grad():
        layers.listen(records.append, [layer])
        model.module(input_ids=ids, use_cache=False)
    calls = checks.by_layer(model, truth)
    assert calls is not None
    call = [*calls.values()][layer]
    pairs_of_layer = model.geometry.layer_pairs[layer]
    index = torch.tensor(checks._planes(model, layer)[:pairs_of_layer])
    base = model.rotation.theta[layer, :pairs_of_layer].double()
    change = (adapter.theta(layer).detach().double() - base) * model.geometry.rotation_direction
    factor = adapter.attention_factor(layer) / model.rotation.factors[layer]
    errors = {}
    for name, own, measured in (("q", call.q, records[0].q), ("k", call.k, records[0].k)):
        angles = torch.arange(own.shape[1])[:, None] * change.repeat_interleave(len(own) // len(change), 0)[:, None]
        pairs = torch.view_as_complex(own.double()[..., index].contiguous())
        expected = torch.view_as_real(pairs * torch.polar(torch.full_like(angles, factor), angles))
        errors[f"adarope {name}"] = relative(measured.double()[..., index], expected)
    return errors


# Attention patterns, decoding, attribution -------------------------------------------------------------------------


def _patterns(model: Model, ids: Tensor, truth: Truth) -> Errors:
    """The top keys of every row against the eager weights."""
    top = collect_top_keys(model, ids[0], torch.arange(ids.shape[1]), KEYS).compute()
    columns = {name: torch.from_numpy(column) for name, column in top.items()}
    calls = checks.by_layer(model, truth)
    assert calls is not None
    worst = 0.0
    for number, call in calls.items():
        of_layer = columns["layer"] == number
        head, query, rank, key, weight = (columns[n][of_layer] for n in ("head", "query", "rank", "key", "weight"))
        ranked = call.alpha.topk(KEYS, -1).values
        at_key, largest = call.alpha[head, query, key], ranked[head, query, rank]
        rows = int(call.visible[0].sum(-1).clamp(max=KEYS).sum())
        if len(weight) != rows * len(call.q):
            return {"pattern rows": float("inf")}
        worst = max(worst, *(float((weight - expected).abs().max()) for expected in (at_key, largest)))
    return {"pattern weights": worst}


def _decoding(model: Model, ids: Tensor, truth: Truth) -> Errors:
    """Decoding with a cache against one eager pass, or against the family's own decoding where that differs from it."""
    errors = {f"decoded {name}": error for name, error in decoding_errors(model, ids, truth).items()}
    if max(errors.values()) <= MAX_ERROR:
        return errors
    own = decoded_logits(model.module, ids)
    if relative(own, truth.logits[0]) <= MAX_ERROR:
        return _decoding_in_float64(model, ids)
    with hs.attached(model), hs.capturing(model):  # the recurrent layers of Nemotron-H
        return {"decoded logits": relative(decoded_logits(model.module, ids), own)}


def _decoding_in_float64(model: Model, ids: Tensor) -> Errors:
    """The same errors without the rounding of recurrent states in float32, which rows of attention amplify."""
    module = copy.deepcopy(model.module).double()
    module.set_experts_implementation("eager")  # the grouped one has no float64
    errors = decoding_errors(hs.load(module, device="cpu"), ids, eager(module, ids))
    return {f"decoded {name}": error for name, error in errors.items()}


def _attribution(model: Model, ids: Tensor, truth: Truth) -> Errors:
    """The terms of every head against an explicit sum; all terms add up to the model's own logits."""
    ids = ids[0, :TEXT_LENGTH]
    terms = attribute_logits(model, ids)
    expected, largest = explicit_attribution.head_terms(model, ids)
    error = float((terms.head_terms.double() - expected).abs().max() / largest)
    return {"attribution sum": terms.relative_error, "attribution of heads": error}


# Ablation, patching ------------------------------------------------------------------------------------------------


def _influence(model: Model, ids: Tensor, truth: Truth) -> Errors:
    """Zero ablation of single heads, and its estimate for every head, in the untouched model."""
    ids = ids[:, :TEXT_LENGTH]
    replay = Replay(model, model.schedule, ids, memory_bytes=1e9)
    units, heads = _sample_units(model), head_units(model.geometry)
    ablations = {unit: [edit_units(Zero(), [unit], model.geometry)] for unit in heads}
    with replay.capturing():
        replay.record_streams()
        losses = dict(replay.losses([ablations[unit] for unit in units]))
        estimates = estimate_effects(replay, [*ablations.values()], draws=0, seed=0)
    with torch.no_grad():
        expected = [float(_eager_loss(model, ids, {unit.layer: partial(_zero, unit)})) for unit in units]
    factors = [torch.ones(model.geometry.heads, requires_grad=True) for _ in model.attention_modules]
    scaled = {layer: partial(_scale, factor) for layer, factor in enumerate(factors)}
    slopes = torch.stack(torch.autograd.grad(_eager_loss(model, ids, scaled), factors)) / (TEXT_LENGTH - 1)
    estimated = torch.tensor([estimate.first_order for estimate in estimates]).view_as(slopes)
    return {
        "ablation": max(abs(float(losses[n].double().sum()) / own - 1) for n, own in enumerate(expected)),
        "estimate": relative(estimated, -slopes),
    }


def _patching(model: Model, ids: Tensor, truth: Truth) -> Errors:
    """z of single heads taken from another prompt, in the untouched model."""
    clean = ids[:, :TEXT_LENGTH]
    corrupted = clean.clone()
    corrupted[0, [2, 9, 15]] = ids[0, TEXT_LENGTH : TEXT_LENGTH + 3]
    answer, wrong = torch.tensor([7]), torch.tensor([9])
    pair = PairTokens(*(torch.cat([prompt, answer[None]], 1) for prompt in (clean, corrupted)), answer, wrong, 20)
    runs, units = PairRuns(model, pair, "logit_diff", memory_bytes=1e9), _sample_units(model)
    with runs.capturing():
        values = runs.evaluate("denoising", [runs.patch("z", "denoising", [unit]) for unit in units])
    sources: dict[int, Tensor] = {}
    errors = []
    with torch.no_grad():
        _eager_logits(model, clean, {unit.layer: partial(_record, sources, unit.layer) for unit in units})
        for unit, value in zip(units, values, strict=True):
            logits = _eager_logits(model, corrupted, {unit.layer: partial(_replace, unit, sources[unit.layer])})
            errors.append(abs(value - float(logits[-1, 7] - logits[-1, 9])) / float(logits[-1].abs().max()))
    return {"patched z": max(errors)}


def _sample_units(model: Model) -> list[Unit]:
    """The first and the last head, and every head of the middle layer: these are one batch, in layer order."""
    units, middle = head_units(model.geometry), model.geometry.layers // 2
    return sorted({units[0], *(unit for unit in units if unit.layer == middle), units[-1]})


def _eager_logits(model: Model, ids: Tensor, edits: dict[int, HeadsEdit]) -> Tensor:
    """Logits [L, V] of the family's own eager attention with edited head outputs, by attention layer."""
    modules = {model.attention_modules[layer]: edit for layer, edit in edits.items()}
    with edited_heads(model.module, model.geometry.heads, modules):
        logits: Tensor = model.module(ids, use_cache=False).logits[0].float()
    return logits


def _eager_loss(model: Model, ids: Tensor, edits: dict[int, HeadsEdit]) -> Tensor:
    return nn.functional.cross_entropy(_eager_logits(model, ids, edits)[:-1], ids[0, 1:], reduction="sum")


def _zero(unit: Unit, z: Tensor) -> Tensor:
    return z * (torch.arange(len(z)) != unit.head)[:, None, None]


def _scale(factor: Tensor, z: Tensor) -> Tensor:
    return z * factor[:, None, None]


def _record(sources: dict[int, Tensor], layer: int, z: Tensor) -> Tensor:
    sources[layer] = z
    return z


def _replace(unit: Unit, source: Tensor, z: Tensor) -> Tensor:
    return torch.where((torch.arange(len(z)) == unit.head)[:, None, None], source, z)


Measure = Callable[[Model, Tensor, Truth], Errors]
MEASURES: dict[str, Measure] = {
    "position schemes": _schemes,
    "AdaRoPE": _adarope,
    "patterns": _patterns,
    "cached decoding": _decoding,
    "direct logit attribution": _attribution,
    "influence": _influence,
    "patching": _patching,
}
