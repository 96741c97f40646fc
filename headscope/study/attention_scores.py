"""Runs a score of heads that is a function of the attention record of a layer."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pydantic import Field
from torch import Tensor

from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput
from headscope.forward.capture import CapturedLayers
from headscope.forward.observe import FinishedPass
from headscope.positions.model import Model
from headscope.prompts.texts import TokenDocument
from headscope.runs.arrow import Rows
from headscope.study.cells import ObservingRunner, PassCell, TextPass, document_of, pass_cost
from headscope.study.config import Lengths, Options
from headscope.study.context import StudyContext

HeadScores = Callable[[AttentionRecord], Tensor]


class AttentionScoreOptions(Options):
    """Where to measure the score of heads."""

    lengths: Lengths = Field(default=[256], description="context lengths in tokens")


class AttentionScoreRunner(ObservingRunner):
    """Cells: each document of each model at each context length. It only observes, so its passes are shared."""

    def __init__(self, options: AttentionScoreOptions, context: StudyContext, probe: str, head_scores: HeadScores):
        self.options, self.context, self.probe, self.head_scores = options, context, probe, head_scores

    def cells(self) -> list[PassCell]:
        return [
            PassCell(
                f"{label}: {length} tokens, {document.name}",
                label,
                pass_cost(length),
                text_pass=TextPass.over(document.ids[:length], number),
            )
            for label in self.context.labels
            for length in self.options.lengths
            for number, document in enumerate(self._documents(label))
        ]

    def token_ids(self, cell: PassCell) -> Sequence[int]:
        document, length = document_of(cell, self._documents)
        return document.ids[:length]

    def observer(self, cell: PassCell, model: Model, ids: Tensor) -> "AttentionScoreObserver":
        document, length = document_of(cell, self._documents)
        keys = {"model": cell.model, "context_length": length, "doc": document.name}
        return AttentionScoreObserver(self.probe, self.head_scores, keys)

    def _documents(self, label: str) -> Sequence[TokenDocument]:
        return self.context.documents(label, max(self.options.lengths))


class AttentionScoreObserver:
    """Collects the scores of the heads of every layer during one pass."""

    needs_whole_text = True
    """A function of a record sees all rows of the text at once."""

    def __init__(self, probe: str, head_scores: HeadScores, keys: Mapping[str, Any]):
        self.probe, self.head_scores, self.keys = probe, head_scores, keys
        self._scores: dict[int, list[float]] = {}

    def listen(self, layers: CapturedLayers) -> None:
        layers.listen(self._collect)

    def _collect(self, record: AttentionRecord) -> None:
        scores = self.head_scores(record)
        if scores.shape != (heads := record.q.shape[:1]):
            raise BadInput(
                f"probe '{self.probe}': 'head_scores' returns shape {[*scores.shape]} for layer {record.layer}. Return "
                f"one number for each query head: shape {[*heads]}"
            )
        if not scores.isfinite().all():
            head = int((~scores.isfinite()).nonzero()[0])
            raise BadInput(
                f"probe '{self.probe}': the score of head {head} of layer {record.layer} is {scores[head].item()}. "
                "Return a finite number for every head"
            )
        self._scores[record.layer] = scores.float().tolist()

    def tables(self, finished_pass: FinishedPass) -> dict[str, Rows]:
        """The rows of all heads."""
        geometry = finished_pass.model.geometry
        rows = [(layer, head, value) for layer, values in self._scores.items() for head, value in enumerate(values)]
        columns = {
            "layer": [geometry.layer_numbers[layer] for layer, _, _ in rows],
            "head": [head for _, head, _ in rows],
            "kv_group": [geometry.kv_group(layer, head) for layer, head, _ in rows],
            "value": [value for _, _, value in rows],
        }
        return {self.probe: {**self.keys, **columns}}
