"""Runner of probes whose score of a head is a function of the attention record of its layer."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import Field
from torch import Tensor

from headscope.attention.record import AttentionRecord
from headscope.base import plugins
from headscope.base.declaration import Declaration
from headscope.errors import BadInput
from headscope.forward.capture import CapturedLayers
from headscope.forward.observe import FinishedPass
from headscope.positions.model import Model
from headscope.prompts.texts import TokenDocument
from headscope.runs.arrow import Rows
from headscope.runs.column_metadata import ROUNDING
from headscope.study.cells import ObservingRunner, PassCell, TextPass, document_of, pass_cost
from headscope.study.config import Lengths, Options
from headscope.study.context import StudyContext


@dataclass(frozen=True)
class ScoreFunction:
    """The function of a probe that computes the scores of the heads of a layer, its source and the range of a score."""

    probe: Declaration
    head_scores: Callable[[AttentionRecord], Tensor]
    limits: tuple[float, float]
    source: str
    """The text of its module, so that a resumed run does not mix the scores of two functions."""

    def compute(self, record: AttentionRecord) -> list[float]:
        """The score of every head. Raises BrokenProbe if the function fails, BadInput for what it may not return."""
        scores = plugins.call_guarded(self.probe, "head_scores", self.head_scores, record)
        place, (heads, *_) = f"probe '{self.probe.name}', layer {record.layer}", record.q.shape
        if not isinstance(scores, Tensor) or scores.shape != (heads,):
            kind = f"shape {[*scores.shape]}" if isinstance(scores, Tensor) else type(scores).__name__
            raise BadInput(
                f"{place}: 'head_scores' returns {kind}. Return one number for each query head, a tensor of shape "
                f"[{heads}]"
            )
        low, high = self.limits
        for head, score in enumerate(values := scores.float().tolist()):
            if not (math.isfinite(score) and low - ROUNDING <= score <= high + ROUNDING):
                raise BadInput(
                    f"{place}: the score of head {head} is {score:g}. Return a finite number from {low:g} to {high:g} "
                    "for every head, or change 'limits'"
                )
        return [min(max(score, low), high) for score in values]


class AttentionScoreOptions(Options):
    """Context lengths at which the score of heads is computed."""

    lengths: Lengths = Field(default=[256], description="context lengths in tokens")


class AttentionScoreRunner(ObservingRunner):
    """Cells: each document of each model at each context length. It only observes, so its passes are shared."""

    def __init__(self, options: AttentionScoreOptions, context: StudyContext, function: ScoreFunction):
        self.options, self.context, self.function = options, context, function
        context.record_input(f"the function of '{function.probe.name}'", [function.source])

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
        return AttentionScoreObserver(self.function, keys)

    def _documents(self, label: str) -> Sequence[TokenDocument]:
        return self.context.documents(label, max(self.options.lengths))


class AttentionScoreObserver:
    """Collects the scores of the heads of every layer during one pass."""

    needs_whole_text = True
    """Whether a pass must not be split: the function sees all rows at once."""

    def __init__(self, function: ScoreFunction, keys: Mapping[str, Any]):
        self.function, self.keys = function, keys
        self._scores: dict[int, list[float]] = {}

    def listen(self, layers: CapturedLayers) -> None:
        layers.listen(lambda record: self._scores.update({record.layer: self.function.compute(record)}))

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
        return {self.function.probe.name: {**self.keys, **columns}}
