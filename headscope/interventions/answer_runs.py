"""Runs of one prompt with its answer: a metric of the answer under edits of heads."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from headscope.interventions.edits import Run
from headscope.interventions.metrics import Metric, PairTokens, finite_metric, metric_function
from headscope.interventions.replay import Replay
from headscope.positions.model import Model
from headscope.prompts.pairs import TokenPair


class AnswerRuns:
    """The clean prompt of a pair and its answer after a full pass, under the model's scheme.

    `unchanged` is the metric of the unchanged model.
    """

    def __init__(self, model: Model, pair: TokenPair, metric: Metric, memory_bytes: float):
        tokens = PairTokens.on_device(pair, model.device)
        schedule: Any = model.schedule
        self.model, self._answer = model, tokens.answer
        self._replay = Replay(model, schedule, tokens.clean, memory_bytes, len(pair.clean))
        with self.capturing():
            self._replay.record_streams()
            logits = self._replay.target_logits()
        self._metric = metric_function(metric, tokens, logits)
        self.unchanged = self._value(logits)

    def capturing(self) -> AbstractContextManager[Any]:
        """Attach the position scheme and capture the model's layers."""
        return self._replay.capturing()

    def values(self, runs: Sequence[Run], on_progress: Callable[[int], None] | None = None) -> list[float]:
        """The metric of every run. `on_progress` gets the number of runs after every batch."""
        with self.capturing(), torch.no_grad():
            return self._replay.evaluate(runs, self._value, on_progress)

    def _value(self, logits: Tensor) -> float:
        return finite_metric(self.model, self._metric, logits, self._answer)
