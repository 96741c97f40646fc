"""Runner of the patching probe: estimates and exact patches of one prompt pair of one model per cell."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.errors import BadInput
from headscope.forward.interventions import Unit
from headscope.forward.patching import Activation, Direction, PairTokens, PatchingReplay, patched_units
from headscope.positions.model import Model
from headscope.prompts.haystack import Haystack, decode_tokens
from headscope.prompts.pair_sets import GENERATED_SETS, PairSet, check_set_names, load_pair_set
from headscope.prompts.pairs import TokenPair
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from probes.patching.schema import (
    ACTIVATIONS,
    ALL_POSITIONS,
    PATCHING,
    PATCHING_TOKENS,
    PatchingOptions,
    effect_columns,
)

SELECTION_PAIRS = 100
"""Most pairs whose estimates select the units that verify patches exactly [ours]."""
STREAM_MEMORY_BYTES = 2**30
"""Memory for the residual streams of a pair; the rest is on disk."""


@dataclass(frozen=True)
class _PatchingTask:
    step: Literal["estimate", "exact"]
    prompts: str
    index: int
    prerequisites: tuple[str, ...] = field(default=(), compare=False)
    """Cells whose stored estimates select the units of this one."""


class PatchingRunner:
    """Cells: every pair of every set and model; for verify, the estimates of all pairs come before the exact patches.

    The units to verify are selected by the estimates of the first `SELECTION_PAIRS` pairs of the set, the same units
    for every pair, so an interrupted study resumes with the same selection.
    """

    def __init__(self, options: PatchingOptions, context: StudyContext):
        self.options, self.context = options, context
        self._pair_sets: dict[tuple[str, str], PairSet] = {}
        self._selections: dict[tuple[str, str], dict[tuple[str, str], list[Unit]]] = {}

    def cells(self) -> list[Cell]:
        cells: list[Cell] = []
        for label in self.context.labels:  # reports mistakes in prompts before any model is opened
            check_set_names([self._pair_set(label, source) for source in self.options.pairs])
        for label in self.context.labels:
            model = self.context.model(label)
            units = {activation: patched_units(model, activation) for activation in self._activations}
            if self.options.method == "verify":
                self._check_selection_size(label, min(map(len, units.values())))
            for source in self.options.pairs:
                cells += self._set_cells(label, source, sum(map(len, units.values())))
        return cells

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        task: _PatchingTask = cell.task
        pair = self._pair_set(cell.model, task.prompts).build(task.index)
        tokens = pair_tokens(pair, model.device)
        replay = PatchingReplay(model, tokens, self.options.metric, STREAM_MEMORY_BYTES)
        with replay.running():
            if task.step == "estimate":
                blocks = [*self._estimates(replay, model)]
            else:
                blocks = [pd.DataFrame(self._exact_patches(replay, model, cell.model, task))]
        keys = {"model": cell.model, "prompts": self._pair_set(cell.model, task.prompts).name, "pair": pair.name}
        rows = {PATCHING.name: pd.concat(blocks, ignore_index=True).assign(**keys, group=pair.group)}
        if self.options.positions == "each" and not task.prerequisites:
            rows[PATCHING_TOKENS.name] = _token_rows(self.context.tokenizer(cell.model), pair).assign(**keys)
        return rows

    def _set_cells(self, label: str, source: str, unit_count: int) -> Iterator[Cell]:
        """Cells of one model and one set. Costs are in forward passes over a prompt."""
        pairs, options = self._pair_set(label, source), self.options
        patches = unit_count * len(options.directions)
        if options.method == "verify":
            patches = (options.top + options.random) * len(self._activations) * len(options.directions)
        length = options.length if source in ("induction", "needle") else 32
        passes = length if options.positions == "each" and options.method == "exact" else 1
        costs = {"estimate": 2 + 2.5 * len(options.directions), "exact": 2 + 0.5 * patches * passes}
        steps: list[Any] = ["estimate", "exact"] if options.method == "verify" else [options.method]
        prerequisites: tuple[str, ...] = ()
        for step in steps:
            cells = [
                Cell(
                    f"{label}: {pairs.name}, pair {name}, {step}",
                    label,
                    costs[step] * pass_cost(length),
                    _PatchingTask(step, source, index, prerequisites),
                )
                for index, name in enumerate(pairs.pair_names)
            ]
            prerequisites = tuple(cell.id for cell in cells[:SELECTION_PAIRS])
            yield from cells

    @property
    def _activations(self) -> list[Activation]:
        return [name for name in ACTIVATIONS if name in self.options.activations]

    def _estimates(self, replay: PatchingReplay, model: Model) -> Iterator[pd.DataFrame]:
        """Rows of the estimates of every unit, at all positions and, if requested, at each."""
        for direction in self.options.directions:
            for by_position in (False, True) if self.options.positions == "each" else (False,):
                for activation, changes in replay.estimate(self._activations, direction, by_position).items():
                    first = replay.pair.aligned_positions(replay.clean.ids).start if by_position else ALL_POSITIONS
                    yield _estimate_rows(replay, model, activation, direction, changes, first)

    def _exact_patches(
        self, replay: PatchingReplay, model: Model, label: str, task: _PatchingTask
    ) -> Iterator[dict[str, Any]]:
        """Rows of the exact patches of all units or, for verify, of the selected ones at all positions."""
        selection = self._selection(label, model, task) if task.prerequisites else None
        spans: list[range | None] = [None]
        if self.options.positions == "each" and selection is None:
            spans += [range(at, at + 1) for at in range(replay.pair.aligned)]
        first = replay.pair.aligned_positions(replay.clean.ids).start
        for direction in self.options.directions:
            for activation in self._activations:
                units = selection[activation, direction] if selection else patched_units(model, activation)
                for unit, span, value in replay.patch(activation, direction, units, spans):
                    position = ALL_POSITIONS if span is None else first + span.start
                    columns = _unit_columns(model, unit) | _result_columns(replay, activation, direction, value)
                    yield {**columns, "position": position, "method": "exact"}

    def _selection(self, label: str, model: Model, task: _PatchingTask) -> dict[tuple[str, str], list[Unit]]:
        """By activation and direction: the `top` units of largest |mean estimate|, and `random` seeded others."""
        if (label, task.prompts) not in self._selections:
            stored = pd.concat([self._read_estimates(cell) for cell in task.prerequisites])
            stored["layer"] = np.searchsorted(model.geometry.layer_numbers, stored["layer"])
            self._selections[label, task.prompts] = {
                (activation, direction): select_units(
                    stored[(stored["activation"] == activation) & (stored["direction"] == direction)],
                    self.options,
                    [self.context.seed, ACTIVATIONS.index(activation), int(direction == "noising")],
                )
                for activation in self._activations
                for direction in self.options.directions
            }
        return self._selections[label, task.prompts]

    def _read_estimates(self, cell_id: str) -> pd.DataFrame:
        """The stored estimates of a cell at all positions."""
        rows = self.context.read_stored(f"patching/{cell_id}", PATCHING.name)
        return rows[rows["position"] == ALL_POSITIONS].astype({"effect": "float64"})

    def _check_selection_size(self, label: str, unit_count: int) -> None:
        top, random = self.options.top, self.options.random
        if top + random > unit_count:
            raise BadInput(
                f"top {top} and random {random} exceed the {unit_count} units of model '{label}'. Use a smaller --top "
                "or --random, or --method exact"
            )

    def _pair_set(self, label: str, source: str) -> PairSet:
        """A set of pairs in the tokens of a model."""
        if (label, source) not in self._pair_sets:
            options = self.options
            pairs = load_pair_set(
                source,
                self.context.tokenizer(label),
                partial(self._haystacks, label),
                count=options.count,
                length=options.length,
                seed=self.context.seed,
                alignment=options.align,
                metric=options.metric,
            )
            if source not in GENERATED_SETS:
                self._check_lengths(pairs)
            self.context.record_input(f"prompt pairs '{source}'", [pairs.digest.encode()])
            self._pair_sets[label, source] = pairs
        return self._pair_sets[label, source]

    def _haystacks(self, label: str) -> list[Haystack]:
        """The documents of the study as texts for needles."""
        tokenizer = self.context.tokenizer(label)
        documents = self.context.documents(label, self.options.length)
        return [Haystack(document.name, document.ids, tokenizer) for document in documents]

    def _check_lengths(self, pairs: PairSet) -> None:
        """Refuse activations that carry positions for pairs of different lengths."""
        position_dependent = [name for name in self._activations if name in ("q", "k", "pattern")]
        unequal_pairs = (pairs.pair_names[n] for n in range(len(pairs)) if not pairs.build(n).has_equal_lengths)
        if position_dependent and (name := next(unequal_pairs, None)) is not None:
            raise BadInput(
                f"the prompts of pair '{name}' have different lengths, so {position_dependent[0]} cannot be "
                "patched: it depends on absolute positions. Patch z or v"
            )


def select_units(estimates: pd.DataFrame, options: PatchingOptions, seed: Sequence[int]) -> list[Unit]:
    """The `top` units of largest |mean effect| over pairs, and `random` seeded others. `layer` is the layer's index."""
    means = estimates.groupby(["layer", "kv_group", "head"])["effect"].mean()
    order = means.abs().sort_values(ascending=False, kind="stable").index.to_list()
    random_indices = np.random.default_rng(seed).permutation(len(order) - options.top)[: options.random] + options.top
    return [Unit(*map(int, order[index])) for index in [*range(options.top), *sorted(random_indices)]]


def pair_tokens(pair: TokenPair, device: Any) -> PairTokens:
    """The pair as tensors, each prompt followed by the answer."""

    def tensor(ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64)).to(device)

    clean, corrupted = (tensor(np.concatenate([ids, pair.answer]))[None] for ids in (pair.clean, pair.corrupted))
    return PairTokens(clean, corrupted, tensor(pair.answer), tensor(pair.wrong), pair.aligned)


def _estimate_rows(
    replay: PatchingReplay, model: Model, activation: Activation, direction: Direction, changes: Tensor, first: int
) -> pd.DataFrame:
    """Rows of the estimates of one activation; `changes` are those of `PatchingReplay.estimate`.

    `first` is the position of the first estimate, or -1 for estimates of all positions.
    """
    unpatched = replay.corrupted_value if direction == "denoising" else replay.clean_value
    blocks = []
    for unit in patched_units(model, activation):
        number = unit.kv_group if activation in ("k", "v") else unit.head
        change = np.atleast_1d(changes[unit.layer, number].numpy())
        columns = _unit_columns(model, unit) | _result_columns(replay, activation, direction, unpatched + change)
        positions = first + np.arange(len(change))
        blocks.append(pd.DataFrame({**columns, "position": positions, "method": "estimate"}))
    return pd.concat(blocks, ignore_index=True)


def _unit_columns(model: Model, unit: Unit) -> dict[str, Any]:
    return {"layer": model.geometry.layer_numbers[unit.layer], "head": unit.head, "kv_group": unit.kv_group}


def _result_columns(replay: PatchingReplay, activation: str, direction: str, patched: Any) -> dict[str, Any]:
    keys = {"activation": activation, "direction": direction, "metric": replay.metric_name}
    return keys | effect_columns(patched, replay.clean_value, replay.corrupted_value, direction)


def _token_rows(tokenizer: Any, pair: TokenPair) -> pd.DataFrame:
    """The aligned tokens of both prompts."""
    clean, corrupted = (
        [decode_tokens(tokenizer, ids[at : at + 1]) for at in range(len(ids) - pair.aligned, len(ids))]
        for ids in (pair.clean, pair.corrupted)
    )
    first = len(pair.clean) - pair.aligned
    return pd.DataFrame({"position": first + np.arange(pair.aligned), "clean": clean, "corrupted": corrupted})
