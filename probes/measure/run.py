"""The `measure` section: attention, pairs, distance and loss of every model on every document and length."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.record import Attention
from headscope.errors import BadInput
from headscope.forward import logits
from headscope.forward.capture import capturing
from headscope.forward.chunked_pass import chunk_size, hidden_in_chunks
from headscope.forward.logits import finite_hidden
from headscope.measures import AttentionRows, DistanceProfile, LearnedSink, RotaryPairs
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.positions.rope_scaling import own_at
from headscope.positions.schedule import Schedule
from headscope.positions.tables import all_theta
from headscope.prompts.texts import TokenDocument
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import Materials
from probes.measure.options import Measure


class Accumulator(Protocol):
    """A measure that listens to the layers of a forward pass; `name` is the table it fills."""

    @property
    def name(self) -> str: ...

    def update(self, heard: Attention) -> None: ...

    def compute(self) -> Mapping[str, np.ndarray]: ...


ACCUMULATORS: Mapping[str, Callable[[Geometry, int, int | None, int], Accumulator]] = {
    "attention": AttentionRows,
    "pairs": RotaryPairs,
    "distance": lambda geometry, length, rows, seed: DistanceProfile(geometry, length),  # every row, always
}
"""Table -> its measure, called with (geometry, length, rows or None for all, seed)."""
OF_PAIRS = ("pairs", "distance")
"""Tables that a model without rotation has no rows in."""


@dataclass(frozen=True)
class _Task:
    length: int
    doc: int


class MeasureSection:
    """Cells: each (model, context length, document)."""

    def __init__(self, config: Measure, materials: Materials):
        self.config, self.materials = config, materials

    def cells(self) -> list[Cell]:
        return [
            Cell(f"{label}: {length} tokens, document {doc}", label, pass_cost(length), _Task(length, doc))
            for label in self.materials.labels
            for length in self.config.lengths
            for doc in range(len(self._documents(label)))
        ]

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        length, document = cell.task.length, self._documents(cell.model)[cell.task.doc]
        rows = None if self.config.rows == "exact" else self.config.rows
        ids = torch.tensor(document.ids[:length])
        asked = (others(cell.model, document.ids[:length], model) for others in self.materials.beside)
        beside = [update for update in asked if update is not None]
        measured = measure_tokens(model, ids, self.config.tables, rows, self.materials.seed + cell.task.doc, beside)
        keys = {"model": cell.model, "context_length": length}
        per_document = {**keys, "doc": document.name}
        return {
            name: {**(keys if name == "distance" else per_document), **columns} for name, columns in measured.items()
        }

    def _documents(self, label: str) -> list[TokenDocument]:
        """The documents of every length, as long as the longest."""
        return self.materials.documents(label, max(self.config.lengths))


def measure_tokens(
    model: Model,
    ids: Tensor,
    tables: Sequence[str],
    rows: int | None,
    seed: int = 0,
    beside: Sequence[Callable[[Attention], None]] = (),
) -> dict[str, dict[str, np.ndarray]]:
    """Measure one document, ids [L], under the model's scheme: table name -> columns (without the study's keys).

    `rows` is None for every query row, else how many are sampled with `seed`. Whoever is `beside` listens to the same
    pass. A long document is read in chunks: then each layer is heard several times, once for each chunk of queries.
    """
    length = len(ids)
    if not model.geometry.pairs:
        tables = _without_pairs(model, tables)
    listeners = [ACCUMULATORS[name](model.geometry, length, rows, seed) for name in tables if name in ACCUMULATORS]
    if "attention" in tables:
        listeners.append(LearnedSink(model.geometry, length, rows, seed))
    with attached(model) as schedule, capturing(model) as layers, evaluating(model):
        ids = ids.to(model.device)[None]
        size = chunk_size(model, ids)
        for update in (*(listener.update for listener in listeners), *beside):
            layers.listen(update)
        hidden = finite_hidden(model, ids) if size is None else hidden_in_chunks(model, ids, size)
        columns: dict[str, dict[str, Any]] = {listener.name: dict(listener.compute()) for listener in listeners}
        if "learned_sink" in columns and not len(columns["learned_sink"]["share"]):
            del columns["learned_sink"]  # as in most families
        if "nll" in tables:
            at_once = logits.CHUNK if size is None else logits.FEW
            columns["nll"] = dict(logits.loss_by_position(model, ids, hidden, at_once).compute())
    if "pairs" in columns:
        turned_by = schedule if schedule.rotates else own_at(model, length)
        columns["pairs"]["theta"] = _theta_column(model, turned_by, columns["pairs"])
    return columns


def _without_pairs(model: Model, tables: Sequence[str]) -> list[str]:
    """The tables that a model without rotation can fill. Raises BadInput if none is left."""
    left = [name for name in tables if name not in OF_PAIRS]
    if not left:
        wanted = " or ".join(tables)
        raise BadInput(f"'{model.name}' has no {wanted} to measure: {model.rotation.why}; measure attention or nll")
    return left


def _theta_column(model: Model, schedule: Schedule, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    layer = np.searchsorted(model.geometry.numbers, columns["layer"])
    theta: np.ndarray = all_theta(model, schedule).numpy()[layer, columns["kv_group"], columns["pair"]]
    return theta
