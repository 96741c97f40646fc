"""A sweep of interventions over the units of one model, on one text at a time: each unit alone, all estimated at once,
or sets of units together."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from headscope.base.ablation_names import MEAN_OF_TEXT
from headscope.base.heads import parse_head
from headscope.errors import BadInput, UnsupportedModel
from headscope.interventions.ablation import parse_ablation
from headscope.interventions.edits import Run, edit_units
from headscope.interventions.heads import WHOLE_GROUP, Unit, head_unit, head_units, kv_group_units
from headscope.interventions.kinds import InputsFunction, Replace
from headscope.interventions.position_kinds import (
    QUANTIZATION_BITS,
    Component,
    KVQuantization,
    PairUnrotation,
    PairZeroAblation,
    PositionReset,
)
from headscope.interventions.replay import Objective, Replay
from headscope.positions.adarope import AdaRoPE
from headscope.positions.model import Model
from headscope.positions.schedule import FixedSchedule, Schedule
from headscope.results.effects.groups import missing_control, random_controls
from probes.influence import bands
from probes.influence.declaration import NAMED_SET_PREFIX, InfluenceOptions

CURVATURE_DRAWS = 2
"""Draws of tokens for a second-order term; each costs a backward pass."""


@dataclass(frozen=True)
class EffectEstimate:
    """Estimates of one run's effect on the mean loss, nats per token; equal without draws for the second order."""

    first_order: float
    second_order: float


def estimate_effects(replay: Replay, runs: Sequence[Run], draws: int, seed: int) -> list[EffectEstimate]:
    """The estimates of every run of one recorded text. Call inside `replay.capturing`.

    Costs a recomputation of the pass, 1 + `draws` backward passes, and an attention pass for each kind of edit.
    """
    tokens = replay.target_count

    def combine(products: Tensor) -> EffectEstimate:
        slope, *sampled = products
        first = float(slope.sum()) / tokens
        curvature = sum(float(products.square().sum()) for products in sampled) / (2 * max(1, draws) * tokens)
        return EffectEstimate(first, first + curvature)

    objectives = [text_loss, *(sampled_loss(seed * CURVATURE_DRAWS + number) for number in range(draws))]
    return replay.estimate(runs, objectives, combine)


def text_loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Sum of the losses of the text's own tokens."""
    return nn.functional.cross_entropy(logits, tokens, reduction="sum")


def sampled_loss(seed: int) -> Objective:
    """Sum of the losses of tokens sampled from the model's own predictions."""
    generator = torch.Generator().manual_seed(seed)

    def objective(logits: Tensor, tokens: Tensor) -> Tensor:
        cumulative = logits.detach().softmax(-1).cumsum(-1)
        level = torch.rand(len(logits), 1, generator=generator).to(logits.device) * cumulative[:, -1:]
        sampled = torch.searchsorted(cumulative, level)[:, 0].clamp(max=logits.shape[-1] - 1)
        return nn.functional.cross_entropy(logits, sampled, reduction="sum")

    return objective


ComponentKey = tuple[str, str]
"""(component, target) as in the tables."""
Row = dict[str, Any]
QKVEdit = Callable[[Tensor, Tensor, Tensor, int], tuple[Tensor, Tensor, Tensor]]
RESETS = ("joint", "freq", "scale")
"""Default components of a model with an AdaRoPE adapter; of other models, zero ablation."""
NO_TARGET = "none"


@dataclass(frozen=True, eq=False)
class Sweep:
    """Interventions on one model and the units they apply to, by (component, target)."""

    model: Model
    schedule: Any
    interventions: Mapping[ComponentKey, Any]
    units: Mapping[ComponentKey, list[Unit]]
    named_sets: Mapping[str, list[Unit]] = field(default_factory=dict)
    """Named sets of heads."""

    def with_mean_of_text(self, read: Callable[[], Replace]) -> "Sweep":
        """The sweep with the means of mean:text, which `read` gives; the same sweep if it has no such component."""
        key = (MEAN_OF_TEXT, NO_TARGET)
        if key not in self.interventions or self.interventions[key] is not None:
            return self
        return replace(self, interventions={**self.interventions, key: read()})

    def evaluate_units(
        self, replay: "TextReplay", units_by_key: Mapping[ComponentKey, Sequence[Unit]]
    ) -> Iterator[Row]:
        """Change each of these units alone and evaluate the loss."""
        changed = [(key, unit) for key, units in units_by_key.items() for unit in units]
        for number, change in replay.loss_changes([(self.interventions[key], [unit]) for key, unit in changed]):
            yield self._unit_row(*changed[number], "exact", replay, change)

    def estimate(self, replay: "TextReplay", order: int, seed: int) -> Iterator[Row]:
        """Estimate the effect on every unit: in first order and, if `order` is 2, also in second order."""
        changed = [(key, unit) for key, units in self.units.items() for unit in units]
        runs = [[edit_units(self.interventions[key], [unit], self.model.geometry)] for key, unit in changed]
        estimates = estimate_effects(replay.replay, runs, CURVATURE_DRAWS if order == 2 else 0, seed)
        for (key, unit), estimate in zip(changed, estimates, strict=True):
            yield self._unit_row(key, unit, "estimate", replay, estimate.first_order)
            if order == 2:
                yield self._unit_row(key, unit, "second-order", replay, estimate.second_order)

    def evaluate_ranked_sets(
        self, replay: "TextReplay", ranked_units: Mapping[ComponentKey, list[Unit]], draws: int, seed: int
    ) -> Iterator[Row]:
        """Change the first 1, 2, 4, ..., all ranked units together, and as many random others of the same layers.

        A set without enough others in a layer has no random sets. For bands of pairs, only all units together.
        """
        sets: list[UnitSet] = []
        for number, (key, units) in enumerate(ranked_units.items()):
            for size in set_sizes(key, len(units)):
                sets.append(UnitSet(key, "top", units[:size]))
                if size < len(units):
                    seeds = [[seed, number, size, draw] for draw in range(draws)]
                    controls = random_controls([*map(astuple, units[:size])], [*map(astuple, units)], seeds)
                    sets += [
                        UnitSet(key, "random", [Unit(*unit) for unit in control], draw)
                        for draw, control in enumerate(controls)
                    ]
        return self._evaluate_sets(replay, sets)

    def explain_missing_controls(self, ranked_units: Mapping[ComponentKey, list[Unit]]) -> Iterator[str]:
        """A sentence for each component on its smallest set that has no random control: larger ones have none either.

        The set of all units never has one.
        """
        for key, units in ranked_units.items():
            candidates, numbers = [*map(astuple, units)], self.model.geometry.layer_numbers
            for size in set_sizes(key, len(units))[:-1]:
                if reason := missing_control(candidates[:size], candidates, numbers):
                    noun = "KV groups" if units[0].head == WHOLE_GROUP else "heads"
                    yield f"the top {size} {noun} by influence ({key[0]}) have no random control: {reason}"
                    break

    def evaluate_named_sets(self, replay: "TextReplay") -> Iterator[Row]:
        """Change the heads of each named set together."""
        named_sets = self.named_sets.items()
        sets = [UnitSet(key, f"{NAMED_SET_PREFIX}{name}", units) for key in self.units for name, units in named_sets]
        return self._evaluate_sets(replay, sets)

    def _evaluate_sets(self, replay: "TextReplay", sets: Sequence["UnitSet"]) -> Iterator[Row]:
        """The rows of sets, in their order."""
        changed = [(self.interventions[unit_set.key], unit_set.units) for unit_set in sets]
        changes = dict(replay.loss_changes(changed))
        for number, unit_set in enumerate(sets):
            change = changes[number]
            yield {
                **_key_columns(unit_set.key),
                "unit": "group" if unit_set.units[0].head == WHOLE_GROUP else "head",
                "choice": unit_set.choice,
                "size": len(unit_set.units),
                "draw": unit_set.draw,
                "nll_before": replay.baseline_loss,
                "delta_nll": change,
            }

    def _unit_row(self, key: ComponentKey, unit: Unit, method: str, replay: "TextReplay", delta: float) -> Row:
        identity = {
            "layer": self.model.geometry.layer_numbers[unit.layer],
            "head": unit.head,
            "kv_group": unit.kv_group,
        }
        return {
            **identity,
            **_key_columns(key),
            "method": method,
            "nll_before": replay.baseline_loss,
            "delta_nll": delta,
        }


@dataclass(frozen=True)
class UnitSet:
    """Units that are changed together, and the columns of their row."""

    key: ComponentKey
    choice: str
    units: Sequence[Unit]
    draw: int = 0


class TextReplay:
    """One text of a sweep after one full pass. `baseline_loss` is the unchanged model's mean loss from token
    `first_scored` on."""

    def __init__(self, sweep: Sweep, ids: Tensor, memory: float, first_scored: int = 1):
        self.replay = Replay(sweep.model, sweep.schedule, ids, memory, first_scored)
        with self.replay.capturing():
            self.replay.record_streams()
            ((_, losses),) = self.replay.losses([()])
        self._baseline_losses = losses.double()
        self.baseline_loss = float(self._baseline_losses.mean())

    @property
    def top1_accuracy(self) -> float:
        """Share of these tokens that are the unchanged model's top prediction. Call inside `replay.capturing`."""
        return self.replay.accuracy()

    def loss_changes(self, changes: Sequence[tuple[Any, Sequence[Unit]]]) -> Iterator[tuple[int, float]]:
        """The number of every change of units together, and the mean loss with it minus `baseline_loss`.

        In ascending order of the lowest layers. Call inside `replay.capturing`.
        """
        geometry = self.replay.model.geometry
        runs = [[edit_units(intervention, units, geometry)] for intervention, units in changes]
        for number, losses in self.replay.losses(runs):
            yield number, float((losses.double() - self._baseline_losses).mean())


def plan_sweep(
    label: str,
    model: Model,
    options: InfluenceOptions,
    edits: Mapping[str, QKVEdit] | None = None,
    seed: int = 0,
) -> Sweep:
    """The sweep that the options request, without the means of mean:text, see `Sweep.with_mean_of_text`.

    `seed` is that of noise. Raises BadInput for components or heads that this model does not have.
    """
    schedule = model.schedule
    interventions: dict[ComponentKey, Any] = {
        (name, NO_TARGET): InputsFunction(edit) for name, edit in (edits or {}).items()
    }
    has_resets = isinstance(schedule, AdaRoPE) or "reset_to" in options.model_fields_set
    default_components = RESETS if has_resets else ("zero",)
    for component in default_components if options.components is None else options.components:
        if bands.is_ablation(component):
            interventions[component, NO_TARGET] = parse_ablation(component, seed)
            continue
        if component in QUANTIZATION_BITS:
            interventions[component, NO_TARGET] = KVQuantization(QUANTIZATION_BITS[component])
            continue
        if bands.is_band(component):
            ablations = _pair_ablations(label, model, component, max(options.lengths))
            interventions |= {(name, NO_TARGET): intervention for name, intervention in ablations}
            continue
        for target in options.reset_to:
            reset = _reset_schedule(label, model, schedule, component, target, max(options.lengths))
            interventions[component, target] = PositionReset(
                cast(Component, component), schedule, reset, model.geometry
            )
    if not interventions:
        raise BadInput("influence: no components. Give at least one")
    named_sets = {name: _resolve_head_set(label, model, name, heads) for name, heads in (options.heads or {}).items()}
    units = {
        key: _list_units(model, key[0], intervention, "head" if named_sets else options.unit)
        for key, intervention in interventions.items()
    }
    if named_sets:
        named_units = sorted({unit for heads in named_sets.values() for unit in heads})
        for (component, _), candidates in units.items():
            if unrotated := [unit for unit in named_units if unit not in candidates]:
                layer = model.geometry.layer_numbers[unrotated[0].layer]
                raise BadInput(
                    f"influence: layer {layer} of model '{label}' has no rotation, which {component} ablates. "
                    "Remove its heads from the set"
                )
        units = {key: named_units if options.method == "exact" else candidates for key, candidates in units.items()}
    return Sweep(model, schedule, interventions, units, named_sets)


def _resolve_head_set(label: str, model: Model, set_name: str, head_names: Sequence[str]) -> list[Unit]:
    """The heads of one set as units. Raises BadInput for a head that the model does not have."""
    geometry, units = model.geometry, []
    for name in head_names:
        layer, head = parse_head(name)
        if not geometry.has_head(layer, head):
            raise BadInput(
                f"influence: model '{label}' has no head {name} of set '{set_name}'. {geometry.suggest_heads(layer)}"
            )
        units.append(head_unit(geometry, geometry.layer_numbers.index(layer), head))
    return units


def _reset_schedule(
    label: str, model: Model, schedule: Schedule, component: str, target: str, max_length: int
) -> Schedule:
    """The schedule that the parameters are reset to."""
    if not isinstance(schedule, AdaRoPE):
        raise BadInput(
            f"model '{label}' has no AdaRoPE adapter, so '{component}' cannot be reset. Use "
            f"CHECKPOINT@adarope:adapter=PATH, or --components that need no adapter, such as zero"
        )
    initial, checkpoint_schedule = schedule.untrained_copy(), FixedSchedule.of_checkpoint(model)
    if target == "init":
        return initial
    _require_fixed_frequencies(label, model, max_length, f"{component} cannot be reset to base", "use --reset-to init")
    layers = range(model.geometry.layers)
    frequencies_differ = any(
        not torch.equal(initial.theta(n), checkpoint_schedule.theta(n).expand_as(initial.theta(n)).to(initial.xi))
        for n in layers
    )
    if (
        not frequencies_differ
        and all(initial.attention_factor(n) == checkpoint_schedule.attention_factor(n) for n in layers)
        and bool((initial.tau == 1).all())
    ):
        raise BadInput(
            f"model '{label}' cannot be reset to base: its adapter started from the checkpoint's own positions. Use "
            "--reset-to init"
        )
    return checkpoint_schedule


def _require_fixed_frequencies(label: str, model: Model, max_length: int, operation: str, advice: str) -> None:
    """Refuse texts so long that the checkpoint changes its own frequencies."""
    limit = model.rotation.frequency_change_length
    if limit is not None and max_length > limit:
        raise UnsupportedModel(
            f"model '{label}' changes its rotary frequencies above {limit} tokens, where {operation}. Use shorter "
            f"--lengths, or {advice}"
        )


def _pair_ablations(label: str, model: Model, component: str, max_length: int) -> Iterator[tuple[str, Any]]:
    """The pair ablations that a component stands for, by name."""
    geometry, rotation, schedule = model.geometry, model.rotation, model.schedule
    if not geometry.pairs:
        raise UnsupportedModel(f"cannot ablate rotary pairs of model '{label}': {rotation.no_pairs_reason}")
    unrotates, theta = component.startswith("pairs-unrotated"), rotation.theta.numpy().copy()
    for layer, count in enumerate(rotation.layer_pairs):
        theta[layer, count:] = np.nan
    if unrotates and not schedule.replaces_rotation:
        _require_fixed_frequencies(
            label, model, max_length, f"{component} cannot undo the rotation", "add a position scheme (@yarn:factor=4)"
        )
    try:
        for name, pairs in bands.expand_bands(component, theta, geometry.native_context):
            mask = torch.from_numpy(pairs)
            yield name, PairUnrotation(mask, schedule, geometry) if unrotates else PairZeroAblation(mask, geometry)
    except BadInput as error:
        raise BadInput(f"model '{label}': {error}") from error


def _list_units(model: Model, component: str, intervention: Any, unit: str) -> list[Unit]:
    """All units of a model. `auto`: KV groups for frequencies, keys and values, query heads for other components.

    Bands of pairs apply only to layers that rotate and have such pairs.
    """
    use_groups = unit == "group" or (unit == "auto" and component in ("freq", "joint", *QUANTIZATION_BITS))
    units = kv_group_units(model.geometry) if use_groups else head_units(model.geometry)
    if not isinstance(intervention, PairUnrotation | PairZeroAblation):
        return units
    return [unit for unit in units if bool(intervention.pairs[unit.layer].any())]


def set_sizes(key: ComponentKey, count: int) -> list[int]:
    """1, 2, 4, ..., and all units; for a band of pairs only all units."""
    powers = [] if bands.is_band(key[0]) else [2**power for power in range((count - 1).bit_length())]
    return [*powers, count]


def _key_columns(key: ComponentKey) -> Row:
    return {"component": key[0], "target": key[1]}
