"""A sweep of interventions over the units of one model: each alone, all estimated at once, or sets of them together.

Knows what a section asks for and one document at a time; which units are worth evaluating is not its affair.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from headscope import user_input
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.interventions import (
    ABLATIONS,
    QKV,
    WHOLE_GROUP,
    Component,
    Intervention,
    PositionReset,
    Unit,
    head_units,
    kv_group_units,
    layer_output_edit,
    qkv_intervention,
)
from headscope.forward.pair_ablation import PairsUnrotated, PairsZeroed
from headscope.forward.replay import Replay
from headscope.positions.adarope import AdaRoPE
from headscope.positions.model import Model
from headscope.positions.schedule import Fixed, Schedule
from probes.influence import bands
from probes.influence.gradient_estimate import CURVATURE_DRAWS, estimate_effects
from probes.influence.options import InfluenceOptions
from probes.influence.tables import NAMED_SET_PREFIX

ComponentKey = tuple[str, str]
"""(component, target), as the tables name them."""
Row = dict[str, Any]
QKVEdit = Callable[[Tensor, Tensor, Tensor, int], QKV]
NO_TARGET = "none"


@dataclass(frozen=True, eq=False)
class Sweep:
    """What is done to which units of one model: interventions and units by (component, target)."""

    model: Model
    schedule: Any
    interventions: Mapping[ComponentKey, Intervention]
    units: Mapping[ComponentKey, list[Unit]]
    named_sets: Mapping[str, list[Unit]] = field(default_factory=dict)
    """Sets of heads that the user named."""

    def evaluate_units(
        self, replay: "TextReplay", units_by_key: Mapping[ComponentKey, Sequence[Unit]]
    ) -> Iterator[Row]:
        """Evaluate each chosen unit by itself."""
        for key, units in units_by_key.items():
            for unit in units:
                yield self._unit_row(key, unit, "exact", replay, replay.loss_change(self.interventions[key], [unit]))

    def estimate(self, replay: "TextReplay", order: int, seed: int) -> Iterator[Row]:
        """Estimate every unit, in first order and, where `order` is 2, in second."""
        estimates = estimate_effects(replay.replay, self.interventions, CURVATURE_DRAWS if order == 2 else 0, seed)
        for key, units in self.units.items():
            for unit in units:
                at = unit.head_slice(self.model.geometry)
                yield self._unit_row(key, unit, "estimate", replay, estimates[key].first_order(unit, at))
                if order == 2:
                    yield self._unit_row(key, unit, "curved", replay, estimates[key].second_order(unit, at))

    def evaluate_ranked_sets(
        self, replay: "TextReplay", ranked_units: Mapping[ComponentKey, list[Unit]], draws: int, seed: int
    ) -> Iterator[Row]:
        """Evaluate the first 1, 2, 4, ..., all ranked units together, and as many random ones of the same layers.

        Of bands of pairs, all units alone.
        """
        for at, (key, units) in enumerate(ranked_units.items()):
            for size in set_sizes(key, len(units)):
                chosen = [("top", 0, units[:size])]
                for draw in range(draws if size < len(units) else 0):
                    rng = np.random.default_rng([seed, at, size, draw])
                    chosen.append(("random", draw, random_units_by_layer(units[:size], units, rng)))
                for choice, draw, members in chosen:
                    yield self._set_row(key, choice, draw, replay, members)

    def evaluate_named_sets(self, replay: "TextReplay") -> Iterator[Row]:
        """Evaluate each set that has a name, its heads together."""
        for key in self.units:
            for name, members in self.named_sets.items():
                yield self._set_row(key, f"{NAMED_SET_PREFIX}{name}", 0, replay, members)

    def _set_row(self, key: ComponentKey, choice: str, draw: int, replay: "TextReplay", members: Sequence[Unit]) -> Row:
        return {
            **_key_columns(key),
            "unit": "group" if members[0].head == WHOLE_GROUP else "head",
            "choice": choice,
            "size": len(members),
            "draw": draw,
            "nll_before": replay.baseline_loss,
            "delta_nll": replay.loss_change(self.interventions[key], members),
        }

    def _unit_row(self, key: ComponentKey, unit: Unit, method: str, replay: "TextReplay", delta: float) -> Row:
        place = {"layer": self.model.geometry.layer_numbers[unit.layer], "head": unit.head, "kv_group": unit.kv_group}
        return {**place, **_key_columns(key), "method": method, "nll_before": replay.baseline_loss, "delta_nll": delta}


class TextReplay:
    """One text of a sweep after its one full pass: `before` is the mean loss of its tokens from `first` on with nothing
    changed."""

    def __init__(self, sweep: Sweep, ids: Tensor, memory: float, first_scored: int = 1):
        self.replay = Replay(sweep.model, sweep.schedule, ids, memory, first_scored)
        with self.replay.running():
            self.replay.record_streams()
            self._baseline_losses = self.replay.losses({}).double()
        self.baseline_loss = float(self._baseline_losses.mean())

    @property
    def top1_accuracy(self) -> float:
        """Share of these tokens that the model, with nothing changed, finds likeliest; inside `replay.ready`."""
        return self.replay.accuracy()

    def loss_change(self, intervention: Intervention, units: Sequence[Unit]) -> float:
        """Mean loss with these units changed together, minus `before`; inside `replay.ready`."""
        geometry = self.replay.model.geometry
        layers = sorted({unit.layer for unit in units})
        by_layer = {layer: [unit for unit in units if unit.layer == layer] for layer in layers}
        changes = {layer: layer_output_edit(intervention, there, geometry) for layer, there in by_layer.items()}
        return float((self.replay.losses(changes).double() - self._baseline_losses).mean())


def plan_sweep(
    label: str, model: Model, options: InfluenceOptions, edits: Mapping[str, QKVEdit] | None = None
) -> Sweep:
    """The sweep that a section asks for. Raises BadInput for what this model does not have."""
    schedule = model.schedule
    interventions: dict[ComponentKey, Intervention] = {
        (name, NO_TARGET): qkv_intervention(edit) for name, edit in (edits or {}).items()
    }
    for component in options.components:
        if component in ABLATIONS:
            interventions[component, NO_TARGET] = ABLATIONS[component]
            continue
        if bands.is_band(component):
            knocked = _pair_ablations(label, model, component, max(options.lengths))
            interventions |= {(name, NO_TARGET): intervention for name, intervention in knocked}
            continue
        for target in options.reset_to:
            then = _reset_schedule(label, model, schedule, component, target, max(options.lengths))
            interventions[component, target] = PositionReset(cast(Component, component), schedule, then, model.geometry)
    if not interventions:
        raise BadInput("influence: nothing to do to the units; give components")
    named = {name: _resolve_head_set(label, model, name, told) for name, told in (options.heads or {}).items()}
    units = {key: _list_units(model, key[0], "head" if named else options.unit) for key in interventions}
    if named:
        wanted = sorted({unit for heads in named.values() for unit in heads})
        for (component, _), every in units.items():
            if still := [unit for unit in wanted if unit not in every]:
                layer = model.geometry.layer_numbers[still[0].layer]
                raise BadInput(f"influence: layer {layer} of model '{label}' does not rotate, as {component} asks")
        units = {key: wanted if options.method == "exact" else every for key, every in units.items()}
    fewest = min(map(len, units.values()))
    if options.method == "verify" and options.top + options.random > fewest:
        raise BadInput(
            f"top {options.top} and random {options.random} are more than the {fewest} units of model '{label}': "
            "ask for fewer with --top and --random, or --method exact"
        )
    return Sweep(model, schedule, interventions, units, named)


def _resolve_head_set(label: str, model: Model, set_name: str, head_names: Sequence[str]) -> list[Unit]:
    """The heads of one set. Raises BadInput for one that the model does not have."""
    geometry, found = model.geometry, []
    for each in head_names:
        layer, head, _ = user_input.unit(each)
        if layer not in geometry.layer_numbers or head >= geometry.heads:
            raise BadInput(
                f"influence: model '{label}' has no head {each}, which heads names in '{set_name}': its layers are "
                f"{', '.join(map(str, geometry.layer_numbers))}, of {geometry.heads} heads each, from 0"
            )
        found.append(Unit(geometry.layer_numbers.index(layer), head // geometry.heads_per_group, head))
    return found


def _reset_schedule(
    label: str, model: Model, schedule: Schedule, component: str, target: str, max_length: int
) -> Schedule:
    """What the parameters of the model go back to."""
    if not isinstance(schedule, AdaRoPE):
        raise BadInput(
            f"model '{label}' has no adapter, so there is no {component} to reset: give "
            f"CHECKPOINT@adarope:adapter=PATH, or components that need none ({', '.join(ABLATIONS)})"
        )
    initial, own = schedule.initial(), Fixed.own(model)
    if target == "init":
        return initial
    _require_fixed_frequencies(
        label, model, max_length, f"{component} cannot be reset to base", "reset it to init (--reset-to init)"
    )
    layers = range(model.geometry.layers)
    moved = any(
        not torch.equal(initial.theta(n), own.theta(n).expand_as(initial.theta(n)).to(initial.xi)) for n in layers
    )
    if not moved and all(initial.factor(n) == own.factor(n) for n in layers) and bool((initial.tau == 1).all()):
        raise BadInput(
            f"model '{label}' has no base to reset to: its adapter started from the checkpoint's own positions, so "
            "use --reset-to init"
        )
    return own


def _require_fixed_frequencies(label: str, model: Model, max_length: int, operation: str, advice: str) -> None:
    """Refuse what takes the checkpoint's own frequencies for those of every text."""
    until = model.rotation.frequency_change_length
    if until is not None and max_length > until:
        raise UnsupportedModel(
            f"model '{label}' turns by other frequencies in a text of more than {until} tokens, where {operation}: "
            f"give shorter --lengths, or {advice}"
        )


def _pair_ablations(label: str, model: Model, component: str, max_length: int) -> Iterator[tuple[str, Intervention]]:
    """The knock-outs that a component stands for, by name."""
    geometry, rotation, schedule = model.geometry, model.rotation, model.schedule
    if not geometry.pairs:
        raise UnsupportedModel(f"cannot knock out pairs of model '{label}': {rotation.no_pairs_reason}, so it has none")
    still, theta = component.startswith("pairs-unrotated"), rotation.theta.numpy()
    if still and not schedule.rotates:
        _require_fixed_frequencies(
            label, model, max_length, f"{component} cannot turn it back", "put a scheme on it (@yarn:factor=4)"
        )
    try:
        for name, pairs in bands.expand_bands(component, theta, geometry.native_context):
            chosen = torch.from_numpy(pairs)
            yield name, PairsUnrotated(chosen, schedule, geometry) if still else PairsZeroed(chosen, geometry)
    except BadInput as error:
        raise BadInput(f"model '{label}': {error}") from error


def _list_units(model: Model, component: str, unit: str) -> list[Unit]:
    """`auto` is who owns the parameters: KV groups for frequencies, query heads for the rest. Pairs are knocked out
    where they turn."""
    whole = unit == "group" or (unit == "auto" and component in ("freq", "joint"))
    units = kv_group_units(model.geometry) if whole else head_units(model.geometry)
    return [unit for unit in units if model.geometry.layer_rotates[unit.layer] or not bands.is_band(component)]


def random_units_by_layer(chosen: Sequence[Unit], units: Sequence[Unit], rng: np.random.Generator) -> list[Unit]:
    """As many random units of each layer as `chosen` has there."""
    drawn: list[Unit] = []
    for layer in sorted({unit.layer for unit in chosen}):
        there = sorted(unit for unit in units if unit.layer == layer)
        count = sum(unit.layer == layer for unit in chosen)
        drawn += [there[at] for at in rng.permutation(len(there))[:count]]
    return drawn


def set_sizes(key: ComponentKey, count: int) -> list[int]:
    """1, 2, 4, ... and all units; of a band of pairs all alone."""
    alone = [] if bands.is_band(key[0]) else [2**power for power in range((count - 1).bit_length())]
    return [*alone, count]


def _key_columns(key: ComponentKey) -> Row:
    return {"component": key[0], "target": key[1]}
