"""Runs the model and listens."""

from collections.abc import Mapping

import torch

from headscope.attention.record import AttentionRecord
from headscope.forward.capture import capturing
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from query_norms import Norms


class NormsSection:
    def __init__(self, config: Norms, materials: StudyContext):
        self.config, self.materials = config, materials

    def cells(self) -> list[Cell]:
        labels, lengths = self.materials.labels, self.config.lengths
        return [Cell(f"{label}: {n} tokens", label, pass_cost(n), n) for label in labels for n in lengths]

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        (document, *_) = self.materials.documents(cell.model, max(self.config.lengths))
        norms: list[float] = []
        with attached(model), capturing(model) as layers, evaluating(model):
            layers.listen(lambda heard: norms.extend(self._norms(heard)))
            model.module(torch.tensor([document.ids[: cell.task]]))
        geometry = model.geometry
        keys = {"model": cell.model, "context_length": cell.task, "doc": document.name}
        places = [(layer, head) for layer in range(geometry.layers) for head in range(geometry.heads)]
        columns = {"layer": [layer for layer, _ in places], "head": [head for _, head in places]}
        groups = [head // geometry.heads_per_group for head in columns["head"]]
        return {"norms": {**keys, **columns, "kv_group": groups, "norm": norms}}

    def _norms(self, heard: AttentionRecord) -> list[float]:
        return (heard.q.float().norm(dim=-1) ** self.config.power).mean(-1).tolist()
