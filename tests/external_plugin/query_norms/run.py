"""Measure query norms. The probe only observes: headscope runs the forward passes and shares them between probes."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from headscope.plugin_api import (
    AttentionRecord,
    CapturedLayers,
    FinishedPass,
    Model,
    ObservingRunner,
    PassCell,
    StudyContext,
    TextPass,
    TokenDocument,
    pass_cost,
)
from query_norms import NormOptions


class NormRunner(ObservingRunner):
    """Cells: each document of each model at each context length."""

    def __init__(self, options: NormOptions, context: StudyContext) -> None:
        self.options, self.context = options, context

    def cells(self) -> list[PassCell]:
        return [
            self._cell(label, length, number, document)
            for label in self.context.labels
            for length in self.options.lengths
            for number, document in enumerate(self.context.documents(label, max(self.options.lengths)))
        ]

    def token_ids(self, cell: PassCell) -> Sequence[int]:
        ids: Sequence[int] = cell.work[1]
        return ids

    def observer(self, cell: PassCell, model: Model, ids: Tensor) -> "NormObserver":
        name, _ = cell.work
        return NormObserver(self.options.power, {"model": cell.model, "context_length": ids.numel(), "doc": name})

    def _cell(self, label: str, length: int, number: int, document: TokenDocument) -> PassCell:
        ids = document.ids[:length]
        name = f"{label}: {length} tokens, {document.name}"
        return PassCell(name, label, pass_cost(length), (document.name, ids), text_pass=TextPass.over(ids, number))


class NormObserver:
    """Collects the mean query norm of every head during one pass."""

    needs_whole_text = True  # else long texts come in parts, and _collect would have to add them up

    def __init__(self, power: float, keys: dict[str, Any]) -> None:
        self.power, self.keys = power, keys
        self.norms: dict[int, list[float]] = {}

    def listen(self, layers: CapturedLayers) -> None:
        layers.listen(self._collect)

    def _collect(self, record: AttentionRecord) -> None:
        self.norms[record.layer] = (record.q.float().norm(dim=-1) ** self.power).mean(-1).tolist()

    def tables(self, finished_pass: FinishedPass) -> dict[str, dict[str, Any]]:
        geometry = finished_pass.model.geometry
        numbers = geometry.layer_numbers  # the layers that attend need not be numbered 0, 1, 2, ...
        rows = [(layer, head, norm) for layer, norms in self.norms.items() for head, norm in enumerate(norms)]
        layers, heads, norms = zip(*rows, strict=True)
        groups = [geometry.kv_group(layer, head) for layer, head, _ in rows]
        columns = {"layer": [numbers[layer] for layer in layers], "head": heads, "kv_group": groups, "norm": norms}
        return {"norms": self.keys | columns}
