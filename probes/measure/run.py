"""Measures attention, rotary pairs, distances and loss of a model on every document and context length."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput
from headscope.forward.capture import CapturedLayers
from headscope.forward.observe import FinishedPass, observe
from headscope.measures import AttentionRows, DistanceProfile, LearnedSink, MaxLogit, RotaryPairs
from headscope.measures.attention_rows import with_row_sums
from headscope.positions.model import Model
from headscope.positions.rope_scaling import schedule_at_length
from headscope.positions.schedule import Schedule, frequencies_by_layer
from headscope.study.cells import Cell, PassCell, TextPass, document_of, pass_cost
from headscope.study.context import StudyContext
from headscope.study.prompts import ProbeTexts
from probes.measure.declaration import MeasureOptions


class Accumulator(Protocol):
    """A measure that listens to the layers of a forward pass; `name` is the table it fills."""

    @property
    def name(self) -> str: ...

    def update(self, record: AttentionRecord) -> None: ...

    def compute(self) -> Mapping[str, np.ndarray]: ...


ACCUMULATORS: Mapping[str, Callable[[Geometry, int, int | None, int], Accumulator]] = {
    "attention": AttentionRows,
    "pairs": RotaryPairs,
    "distance": lambda geometry, length, rows, seed: DistanceProfile(geometry, length),  # always of every row
}
"""Accumulator class by table, called with (geometry, length, number of rows or None for all, seed)."""
PAIR_TABLES = ("pairs", "distance")
"""Tables that stay empty for a model without rotation."""


class MeasureRunner:
    """Cells: each (model, context length, document). It only observes, so its passes are shared with other probes."""

    def __init__(self, options: MeasureOptions, context: StudyContext):
        self.options, self.context = options, context
        self.texts = ProbeTexts(options, options.lengths, context)

    def cells(self) -> list[Cell]:
        return [
            PassCell(
                f"{label}: {length} tokens, document {number}",
                label,
                pass_cost(length),
                text_pass=TextPass.over(document.ids[:length], number),
            )
            for label in self.context.labels
            for length in self.texts.lengths(label)
            for number, document in enumerate(self.texts.documents(label))
        ]

    def token_ids(self, cell: PassCell) -> Sequence[int]:
        document, length = document_of(cell, self.texts.documents)
        return document.ids[:length]

    def observer(self, cell: PassCell, model: Model, ids: Tensor) -> "MeasureObserver":
        document, length = document_of(cell, self.texts.documents)
        rows = None if self.options.rows == "exact" or self.texts.is_prompt else self.options.rows
        seed = self.context.seed + cell.text_pass.document
        keys = {"model": cell.model, "context_length": length}
        return MeasureObserver(model, ids, self.options.tables, rows, seed, keys, document.name)


class MeasureObserver:
    """Collects the requested tables of one pass over ids [1, L].

    `rows` is the number of query rows sampled with `seed`, None for all. `keys` and `document` become key columns.
    """

    needs_whole_text = False

    def __init__(
        self,
        model: Model,
        ids: Tensor,
        tables: Sequence[str],
        rows: int | None,
        seed: int,
        keys: Mapping[str, Any],
        document: str | None = None,
    ):
        self.requested = _without_pairs(model, tables) if not model.geometry.pairs else tables
        sizes = (model.geometry, ids.shape[1], rows, seed)
        self.accumulators = [ACCUMULATORS[name](*sizes) for name in self.requested if name in ACCUMULATORS]
        if "attention" in self.requested:
            self.accumulators.append(LearnedSink(*sizes))
        self.needs_row_sums = rows is None and "attention" in self.requested
        if self.needs_row_sums:
            self.accumulators.append(MaxLogit(model.geometry))
        self.keys, self.document = keys, {} if document is None else {"doc": document}

    def listen(self, layers: CapturedLayers) -> None:
        layers.listen(self._update, needs_row_sums=self.needs_row_sums)

    def _update(self, record: AttentionRecord) -> None:
        if self.needs_row_sums:
            record = with_row_sums(record)
        for accumulator in self.accumulators:
            accumulator.update(record)

    def tables(self, finished_pass: FinishedPass) -> dict[str, dict[str, Any]]:
        columns = {accumulator.name: dict(accumulator.compute()) for accumulator in self.accumulators}
        if "learned_sink" in columns and not len(columns["learned_sink"]["share"]):
            del columns["learned_sink"]  # most families learn no sink
        if "nll" in self.requested:
            columns["nll"] = finished_pass.loss_by_position()
        if "pairs" in columns:
            model = finished_pass.model
            schedule = schedule_at_length(model, finished_pass.schedule, finished_pass.ids.shape[1])
            columns["pairs"]["theta"] = _theta_column(model, schedule, columns["pairs"])
        of_document = {**self.keys, **self.document}
        return {
            name: {**(self.keys if name == "distance" else of_document), **table_columns}
            for name, table_columns in columns.items()
        }


def measure_tokens(
    model: Model, ids: Tensor, tables: Sequence[str], rows: int | None, seed: int = 0
) -> dict[str, dict[str, np.ndarray]]:
    """Measure one document, ids [L], under the model's scheme: columns by table, without the key columns of a study.

    `rows` is the number of query rows sampled with `seed`, None for all. Raises BadInput for a model without rotation
    if only tables of rotary pairs are requested.
    """
    factory = partial(_plain_observer, model, tables, rows, seed)
    (columns,) = observe(model, ids, [factory])
    return {name: dict(table_columns) for name, table_columns in columns.items()}


def _plain_observer(model: Model, tables: Sequence[str], rows: int | None, seed: int, ids: Tensor) -> MeasureObserver:
    return MeasureObserver(model, ids, tables, rows, seed, {})


def _without_pairs(model: Model, tables: Sequence[str]) -> list[str]:
    """The tables that a model without rotation can fill. Raises BadInput if none is left."""
    remaining = [name for name in tables if name not in PAIR_TABLES]
    if not remaining:
        raise BadInput(
            f"cannot measure {' or '.join(tables)} of '{model.name}': {model.rotation.no_pairs_reason}. "
            "Measure attention or nll"
        )
    return remaining


def _theta_column(model: Model, schedule: Schedule, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    layer = np.searchsorted(model.geometry.layer_numbers, columns["layer"])
    theta: np.ndarray = frequencies_by_layer(model, schedule).numpy()[layer, columns["kv_group"], columns["pair"]]
    return theta
