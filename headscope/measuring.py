"""The `measure` section: attention, pairs, distance and loss of every model on every document and length."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from headscope.attention import Attention
from headscope.capture import capturing
from headscope.config import Study
from headscope.geometry import Geometry
from headscope.measures import AttentionRows, DistanceProfile, LossByPosition, RotaryPairs
from headscope.models import Model
from headscope.positions import attached, resolve
from headscope.positions.schedule import Fixed, Schedule
from headscope.replay import evaluating, head_logits
from headscope.study import Cell, Library
from headscope.tables import Rows


class Accumulator(Protocol):
    """A measure that listens to the layers of a forward pass; `name` is the table it fills."""

    @property
    def name(self) -> str: ...

    def update(self, heard: Attention) -> None: ...

    def compute(self) -> Mapping[str, np.ndarray]: ...


ACCUMULATORS: Mapping[str, Callable[[Geometry, int, int | None, int], Accumulator]] = {
    "attention": AttentionRows,
    "pairs": RotaryPairs,
    "distance": DistanceProfile,
}
"""Table -> its measure, called with (geometry, length, rows or None for all, seed)."""

LOGIT_CHUNK = 512
"""Positions whose logits are held at once: memory O(LOGIT_CHUNK x vocabulary)."""


@dataclass(frozen=True)
class _Task:
    length: int
    doc: int


class MeasureSection:
    """Cells: the positions of each model, then each (model, context length, document)."""

    def __init__(self, study: Study, library: Library):
        assert study.measure is not None
        self.study, self.config, self.library = study, study.measure, library

    def cells(self) -> list[Cell]:
        cells = []
        for label in self.study.models:
            docs = self.library.documents(label, max(self.config.lengths))
            cells.append(Cell(f"{label}: positions", label, 0.0))
            for length in self.config.lengths:
                # A forward pass costs a part per token and a part per pair of tokens, about equal at 4k tokens.
                cost = length * (1 + length / 4096)
                cells += [
                    Cell(f"{label}: {length} tokens, document {doc}", label, cost, _Task(length, doc))
                    for doc in range(len(docs))
                ]
        return cells

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        if cell.task is None:
            return position_tables(cell.model, model)
        length, document = cell.task.length, self.library.documents(cell.model, max(self.config.lengths))[cell.task.doc]
        rows = None if self.config.rows == "exact" else int(self.config.rows)
        ids = torch.tensor(document.ids[:length])
        found = measure_tokens(model, ids, list(self.config.tables), rows, self.study.seed + cell.task.doc)
        keys = {"model": cell.model, "context_length": length}
        per_document = {**keys, "doc": document.name}
        return {name: {**(keys if name == "distance" else per_document), **columns} for name, columns in found.items()}


def measure_tokens(
    model: Model, ids: Tensor, tables: list[str], rows: int | None, seed: int = 0
) -> dict[str, dict[str, np.ndarray]]:
    """Measure one document, ids [L], under the model's scheme: table name -> columns (without the study's keys).

    `rows` is None for every query row, else how many are sampled with `seed`.
    """
    length = len(ids)
    listeners = [ACCUMULATORS[name](model.geometry, length, rows, seed) for name in tables if name in ACCUMULATORS]
    with attached(model) as schedule, capturing(model) as layers, evaluating(model):
        for listener in listeners:
            layers.listen(listener.update)
        ids = ids.to(model.device)[None]
        hidden = model.module.base_model(ids, use_cache=False).last_hidden_state
        found: dict[str, dict[str, Any]] = {listener.name: dict(listener.compute()) for listener in listeners}
        if "nll" in tables:
            found["nll"] = dict(_loss(model, ids, hidden).compute())
    if "pairs" in found:
        found["pairs"]["theta"] = _theta_column(model, schedule, found["pairs"])
    return found


def position_tables(label: str, model: Model) -> dict[str, Rows]:
    """The `positions` and `scales` tables of one model: its frequencies and temperatures, no forward pass."""
    schedule = resolve(model, None)
    with torch.no_grad():
        found = {"positions": _positions(model, schedule), "scales": _scales(model, schedule)}
    return {
        table: {"model": label, **{name: column.reshape(-1).numpy() for name, column in columns.items()}}
        for table, columns in found.items()
    }


def _positions(model: Model, schedule: Schedule) -> dict[str, Tensor]:
    theta = all_theta(model, schedule)
    layer, group, pair = _grid(*theta.shape)
    inits = [schedule.log_theta_init(layer).exp() for layer in range(model.geometry.layers)]
    return {
        "layer": layer,
        "kv_group": group,
        "pair": pair,
        "theta": theta,
        "log_theta": theta.log(),
        "log_theta_init": _padded(model, inits).log(),
        "log_theta_base": all_theta(model, Fixed.own(model)).log(),
    }


def _scales(model: Model, schedule: Schedule) -> dict[str, Tensor]:
    geometry, own = model.geometry, Fixed.own(model)
    layers = range(geometry.layers)
    layer, head = _grid(geometry.layers, geometry.heads)
    group = head // geometry.heads_per_group
    tau, gamma = (t.detach().cpu() for t in schedule.temperatures())
    # float64: a product of many frequencies loses the base's last digits in float32.
    mean_log = all_theta(model, schedule)[..., : geometry.pairs].double().log().mean(-1)
    base = torch.exp(-4 * geometry.pairs / (2 * geometry.pairs - 2) * mean_log)
    logit_scale = torch.tensor([schedule.factor(n) / own.factor(n) for n in layers])[:, None].expand_as(tau) ** 2
    if schedule.scales_queries:
        at_reference = torch.full((1, 1), schedule.reference_length)
        scales = [schedule.query_scale(n, at_reference)[0, :, 0].cpu().expand(geometry.heads) for n in layers]
        logit_scale = logit_scale * torch.stack(scales)
    return {
        "layer": layer,
        "head": head,
        "kv_group": group,
        "tau": tau,
        "gamma": gamma,
        "reference_length": torch.full_like(layer, schedule.reference_length),
        "logit_scale": logit_scale,
        "effective_base": base[layer, group],
        "mean_log_theta": mean_log[layer, group],
    }


def all_theta(model: Model, schedule: Schedule) -> Tensor:
    """Frequencies of every pair, unrotated ones as 0: [layers, G, d/2], float32, cpu."""
    return _padded(model, [schedule.theta(layer).detach() for layer in range(model.geometry.layers)])


def _padded(model: Model, thetas: list[Tensor]) -> Tensor:
    geometry = model.geometry
    full = torch.zeros(geometry.layers, geometry.kv_groups, geometry.all_pairs)
    for layer, theta in enumerate(thetas):
        full[layer, :, : geometry.pairs] = theta.cpu()
    return full


def _theta_column(model: Model, schedule: Schedule, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    theta: np.ndarray = all_theta(model, schedule).numpy()[columns["layer"], columns["kv_group"], columns["pair"]]
    return theta


def _loss(model: Model, ids: Tensor, hidden: Tensor) -> LossByPosition:
    """Loss of ids [1, L] from the backbone's last hidden states, chunk by chunk through the model's own head."""
    length = ids.shape[1]
    loss = LossByPosition(length)
    for start in range(0, length - 1, LOGIT_CHUNK):
        stop = min(start + LOGIT_CHUNK, length - 1)
        logits = head_logits(model, ids[:, start:stop], hidden[:, start:stop])
        loss.update(logits, ids[0, start + 1 : stop + 1], start + 1)
    return loss


def _grid(*sizes: int) -> tuple[Tensor, ...]:
    return torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
