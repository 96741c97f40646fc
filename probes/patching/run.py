"""Runner of the patching probe: estimates and exact patches of one prompt pair of one model per cell."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from headscope.errors import BadInput
from headscope.forward.backbone import decoder_layers
from headscope.forward.layer_parts import LayerParts
from headscope.interventions.heads import Unit, heads_by_layer
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import Activation, PairRuns, patched_units
from headscope.interventions.parts import PartName, inspect_layer_parts
from headscope.positions.model import Model
from headscope.prompts.pair_sets import PairSet
from headscope.prompts.pairs import PAIR_OPTIONS, TokenPair
from headscope.results.effects.prompts import subset_names
from headscope.results.effects.ranking import select_units
from headscope.results.effects.sweep import UNIT_KEYS
from headscope.runs.aggregation import plain_types
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell
from headscope.study.context import StudyContext
from headscope.study.named_heads import NamedHeads
from probes.patching.declaration import (
    ACTIVATIONS,
    ALL_POSITIONS,
    LAYER_ACTIVATIONS,
    MAX_ENTRY_TOKENS,
    PATCHING,
    PATCHING_ENTRIES,
    PATCHING_LAYERS,
    PATCHING_SETS,
    PATCHING_SPANS,
    PATCHING_TOKENS,
    PatchingOptions,
)
from probes.patching.pair_cells import (
    RESIDUAL_STREAM_MEMORY_BYTES,
    PairCell,
    PatchedSpan,
    SetCost,
    cells_of_sets,
    counts_pair,
    entry_rows,
    estimate_rows,
    layer_rows,
    open_pair_sets,
    refuse_swapped_answers,
    result_columns,
    token_rows,
    unit_columns,
)


class PatchingRunner:
    """Cells: every pair of every set and model; for verify, the estimates of all pairs come before the exact patches.

    The units to verify are selected by the estimates of the first `SELECTION_PAIRS` pairs of the set, the same units
    for every pair, so an interrupted study resumes with the same selection. Each pair or group (`subset_names`) has a
    few more units of its own.
    """

    def __init__(self, options: PatchingOptions, context: StudyContext):
        self.options, self.context = options, context
        changeable = ["metric"] if self._position_dependent else PAIR_OPTIONS
        self.sets = open_pair_sets(context, options, self._check_pair, changeable)
        self._named_heads = NamedHeads(context, options.heads, options.weights) if options.are_heads_named else None
        self._selections: dict[tuple[str, str], _Selection] = {}
        self._checked_sets: set[tuple[str, str]] = set()
        self._layer_parts: dict[str, LayerParts] = {}

    def cells(self) -> list[Cell]:
        for label in self.context.labels:  # reports mistakes in prompts before any model is opened
            self._check_lengths(self.sets.of_model(label))
        costs = []
        for label in self.context.labels:
            model = self.context.model(label)
            if self._named_heads is not None:
                self._named_heads.check(model, label)
            costs += [self._cost(label, source, model) for source in self.sets.sources]
        return [*cells_of_sets(costs, self.options)]

    def compute_rows(self, cell: PairCell, model: Model) -> Mapping[str, Rows]:
        work = cell.work
        pairs = self.sets.open(cell.model, work.prompts)
        if (cell.model, work.prompts) not in self._checked_sets:
            refuse_swapped_answers(model, pairs, work.prompts, self.options)
            self._checked_sets.add((cell.model, work.prompts))
        pair = pairs.build(work.index)
        tokens = PairTokens.on_device(pair, model.device)
        parts = self._parts(model, cell.model, tokens.clean)
        replay = PairRuns(model, tokens, self.options.metric, RESIDUAL_STREAM_MEMORY_BYTES, parts)
        keys = {"model": cell.model, "prompts": pairs.name, "pair": pair.name}
        is_counted = counts_pair(replay, pair, self.options)
        rows: dict[str, Rows] = {}
        for activations, compute in (
            (self._activations, self._head_tables),
            (self._layer_activations, self._layer_table),
            (self.options.pattern_entries and not work.prerequisites, self._entry_table),
        ):
            for name, table in (compute(replay, model, cell, pair) if activations else {}).items():
                is_pair_counted = table["is_counted"] & is_counted
                rows[name] = table.assign(**keys, group=pair.group, is_counted=is_pair_counted)
        if (self.options.by_position or self.options.pattern_entries) and not work.prerequisites:
            rows[PATCHING_TOKENS.name] = token_rows(self.context.tokenizer(cell.model), pair).assign(**keys)
        return rows

    def _head_tables(self, replay: PairRuns, model: Model, cell: PairCell, pair: TokenPair) -> dict[str, pd.DataFrame]:
        """Rows of heads and KV groups: all and single positions, and named spans."""
        with replay.capturing():
            if cell.work.step == "estimate":
                table = pd.concat(self._estimates(replay, model, pair), ignore_index=True)
            else:
                table = pd.DataFrame(self._exact_patches(replay, model, cell, pair))
            sets = pd.DataFrame(self._set_rows(replay, model, pair) if cell.work.step == "exact" else [])
        is_span = table["span"] != ""
        tables = {PATCHING.name: table[~is_span].drop(columns=["span", "first", "last"])}
        if self.options.span_names:
            tables[PATCHING_SPANS.name] = table[is_span].drop(columns="position")
        if len(sets):
            tables[PATCHING_SETS.name] = sets
        return tables

    def _set_rows(self, replay: PairRuns, model: Model, pair: TokenPair) -> Iterator[dict[str, Any]]:
        """Rows of the named heads patched together, at all positions and in named spans."""
        if not self.options.are_heads_named:
            return
        spans = self._spans(pair, with_positions=False)
        for direction, activation in product(self.options.directions, self._activations):
            units = self._units(model, activation)
            runs = [replay.patch(activation, direction, units, span.positions) for span in spans]
            for span, value in zip(spans, replay.evaluate(direction, runs), strict=True):
                columns = result_columns(replay, activation, direction, value)
                yield {**columns, "span": span.name, "size": len(units)}

    def _units(self, model: Model, activation: Activation) -> list[Unit]:
        """The units to patch one at a time: all, or the named heads or their KV groups."""
        units = patched_units(model, activation)
        if self._named_heads is None:
            return units
        named = heads_by_layer(model, self._named_heads.identifiers)
        return [unit for unit in units if {*named.get(unit.layer, ())} & {*_heads_of(model, unit)}]

    def _layer_table(self, replay: PairRuns, model: Model, cell: PairCell, pair: TokenPair) -> dict[str, pd.DataFrame]:
        """Rows of layers, all of which are patched exactly for verify."""
        spans = self._spans(pair, with_positions=self.options.by_position and not cell.prerequisites)
        with replay.capturing():
            blocks = [
                block
                for direction in self.options.directions
                for block in layer_rows(replay, cell.work.step, self._layer_activations, direction, spans)
            ]
        return {PATCHING_LAYERS.name: pd.concat(blocks, ignore_index=True)} if blocks else {}

    def _parts(self, model: Model, label: str, ids: Tensor) -> LayerParts:
        """The modules of the layers whose outputs are patched, found in the first pair of a model."""
        if label not in self._layer_parts and not {*self._layer_activations} <= {"resid_pre"}:
            self._layer_parts[label] = inspect_layer_parts(model, ids)
        return self._layer_parts.get(label, ())

    def _entry_table(self, replay: PairRuns, model: Model, cell: PairCell, pair: TokenPair) -> dict[str, pd.DataFrame]:
        """Rows of the entries of the patterns."""
        units = self._units(model, "pattern")
        first = len(pair.clean) - pair.aligned
        with replay.capturing():
            blocks = [
                block
                for direction in self.options.directions
                for block in entry_rows(replay, units, model, cell.work.step, direction, first)
            ]
        return {PATCHING_ENTRIES.name: pd.concat(blocks, ignore_index=True)}

    def _cost(self, label: str, source: str, model: Model) -> SetCost:
        pairs, options = self.sets.open(label, source), self.options
        units = sum(len(self._units(model, activation)) for activation in self._activations)
        layers = len(self._layer_activations) * len(decoder_layers(model))
        length, directions, spans = len(pairs.build(0).clean), len(options.directions), 1 + len(options.span_names)
        places = spans + (length if options.by_position else 0) + length**2 // 2 * options.pattern_entries
        verified = (2 * options.verify_top + options.verify_random) * len(self._activations)
        return SetCost(
            *(label, source, pairs, model),
            all_exact=2 + 0.5 * (units + layers) * directions * places,
            estimate=2 + 2.5 * directions,
            verified=2 + 0.5 * (verified + layers) * directions * spans,
        )

    @property
    def _activations(self) -> list[Activation]:
        """The activations of heads and KV groups to patch."""
        return [name for name in ACTIVATIONS if name in self.options.activations]

    @property
    def _position_dependent(self) -> list[Activation]:
        """The activations to patch that carry absolute positions."""
        return [name for name in self._activations if name in ("q", "k", "pattern")]

    @property
    def _layer_activations(self) -> list[PartName]:
        """The activations of layers to patch."""
        return [name for name in LAYER_ACTIVATIONS if name in self.options.activations]

    def _estimates(self, replay: PairRuns, model: Model, pair: TokenPair) -> Iterator[pd.DataFrame]:
        """Rows of the estimates of every unit at all positions and, if requested, at each and in named spans."""
        spans = self._spans(pair, with_positions=self.options.by_position)
        for direction in self.options.directions:
            units = {activation: self._units(model, activation) for activation in self._activations}
            yield from estimate_rows(replay, model, units, direction, spans)

    def _exact_patches(
        self, replay: PairRuns, model: Model, cell: PairCell, pair: TokenPair
    ) -> Iterator[dict[str, Any]]:
        """Rows of the exact patches of all units or, for verify, of the selected ones, without single positions."""
        selection = self._selection(cell, model).units_of(pair) if cell.prerequisites else None
        spans: dict[range | None, list[PatchedSpan]] = {}  # spans of equal positions are patched once
        for span in self._spans(pair, with_positions=self.options.by_position and selection is None):
            spans.setdefault(span.positions, []).append(span)
        sweep_count = len(self.options.directions) * len(self._activations)
        for direction in self.options.directions:
            for activation in self._activations:
                units = selection[activation, direction] if selection else self._units(model, activation)
                places = [(unit, positions) for unit in units for positions in spans]
                runs = [replay.patch(activation, direction, [unit], positions) for unit, positions in places]
                share = cell.cost / (sweep_count * len(places) + 1)
                values = replay.evaluate(direction, runs, partial(self._advance, share))
                for (unit, positions), value in zip(places, values, strict=True):
                    columns = unit_columns(model, unit) | result_columns(replay, activation, direction, value)
                    for span in spans[positions]:
                        yield {**columns, **span.columns, "method": "exact"}

    def _advance(self, share: float, runs: int) -> None:
        self.context.advance(share * runs)

    def _spans(self, pair: TokenPair, with_positions: bool) -> list["PatchedSpan"]:
        """All positions of a pair together, each position if requested, and the named spans."""
        first = len(pair.clean) - pair.aligned
        spans = [PatchedSpan(None, first)]
        if with_positions:
            spans += [PatchedSpan(range(at, at + 1), first) for at in range(pair.aligned)]
        return spans + [PatchedSpan(pair.aligned_span(name), first, name) for name in self.options.span_names]

    def _selection(self, cell: PairCell, model: Model) -> "_Selection":
        """The units that method verify patches exactly, from the stored estimates of the pairs that count."""
        label, work = str(cell.model), cell.work
        if (label, work.prompts) not in self._selections:
            stored = pd.concat([self._read_estimates(cell) for cell in work.prerequisites], ignore_index=True)
            stored["layer"] = np.searchsorted(model.geometry.layer_numbers, stored["layer"])
            stored["subset"] = subset_names(stored)
            counted = stored[stored["is_counted"]]
            stored = counted if len(counted) else stored
            self._selections[label, work.prompts] = _Selection(stored, self.options, self.context.seed)
        return self._selections[label, work.prompts]

    def _read_estimates(self, cell_id: str) -> pd.DataFrame:
        """The stored estimates of a cell at all positions."""
        rows = plain_types(self.context.read_stored(f"patching/{cell_id}", PATCHING.name))
        return rows[rows["position"] == ALL_POSITIONS]

    def _check_pair(self, label: str, pair: TokenPair) -> None:
        """Refuse a pair that lacks a span, and one that is too long for pattern entries."""
        self._spans(pair, with_positions=False)
        if self.options.pattern_entries and len(pair.clean) > MAX_ENTRY_TOKENS:
            raise BadInput(
                f"{pair.location or pair.name}: {len(pair.clean)} tokens have too many pattern entries. Use prompts of "
                f"at most {MAX_ENTRY_TOKENS} tokens, or remove --pattern-entries"
            )

    def _check_lengths(self, sets: Sequence[PairSet]) -> None:
        """Refuse activations that carry positions for pairs of different lengths, which only files have."""
        if not self._position_dependent or self.options.align == "equal":
            return
        for pair in (pairs.build(number) for pairs in sets for number in range(len(pairs))):
            if not pair.has_equal_lengths:
                raise BadInput(
                    f"the prompts of pair '{pair.name}' have different lengths, so "
                    f"{self._position_dependent[0]} cannot be patched: it depends on absolute positions. Patch z or v"
                )


class _Selection:
    """The units that verify patches exactly, by the estimates of several pairs; `layer` is the layer's index."""

    def __init__(self, estimates: pd.DataFrame, options: PatchingOptions, seed: int):
        change = estimates["effect"] * (estimates["metric_clean"] - estimates["metric_corrupted"]).abs()
        estimates = estimates.assign(change=change)
        self._shared: dict[tuple[str, str], list[Unit]] = {}
        self._own: dict[tuple[str, str, str], list[Unit]] = {}
        groups: Any = estimates.groupby(["activation", "direction"])
        for (activation, direction), rows in groups:
            seeds = [seed, ACTIVATIONS.index(activation), int(direction == "noising")]
            self._shared[activation, direction] = select_verified(rows, options, seeds)
            for subset, own_rows in rows.groupby("subset"):
                if subset:
                    self._own[subset, activation, direction] = extreme_units(own_rows, options.verify_top)

    def units_of(self, pair: TokenPair) -> dict[tuple[str, str], list[Unit]]:
        """The units of a pair by activation and direction: those of all pairs, then those of the pair or its group."""
        own = {key: self._own.get((pair.name, *key)) or self._own.get((pair.group, *key)) or [] for key in self._shared}
        return {key: [*dict.fromkeys([*units, *own[key]])] for key, units in self._shared.items()}


def select_verified(estimates: pd.DataFrame, options: PatchingOptions, seed: Sequence[int]) -> list[Unit]:
    """The units that verify patches exactly, by the `change` of the metric; `layer` is the layer's index."""
    squares = estimates["change"].pow(2).groupby([estimates[name] for name in UNIT_KEYS]).mean()
    return _units(squares.index[select_units(squares, options.verify_top, options.verify_random, seed)])


def extreme_units(estimates: pd.DataFrame, count: int) -> list[Unit]:
    """The units with the highest and with the lowest mean `change`, half of `count` each."""
    means = estimates.groupby([*UNIT_KEYS])["change"].mean().sort_values(kind="stable").index
    return _units([*means[::-1][: (count + 1) // 2], *means[: count // 2]])


def _units(keys: Iterable[tuple[int, int, int]]) -> list[Unit]:
    """Units of the values of UNIT_KEYS, each once."""
    return [*dict.fromkeys(Unit(*map(int, key)) for key in keys)]


def _heads_of(model: Model, unit: Unit) -> range:
    """The query heads of a unit."""
    heads = unit.head_slice(model.geometry)
    return range(heads.start, heads.stop)
