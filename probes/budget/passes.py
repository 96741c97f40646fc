"""Forward passes of the budget probe: scores of heads, losses and answers while some KV groups stream."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from headscope.forward import logits
from headscope.forward.capture import CapturedLayers, capturing
from headscope.forward.observe import FinishedPass, observe
from headscope.measures.far_mass import StreamingScores
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts.pairs import TokenPair
from headscope.streaming import StreamingWindow

GroupsByLayer = Mapping[int, Sequence[int]]
"""Streaming KV groups by layer number."""


def losses(model: Model, ids: Sequence[int], groups: GroupsByLayer, window: StreamingWindow) -> dict[str, np.ndarray]:
    """Loss by position of ids [L] while these KV groups stream: the columns position, nll, tokens."""
    (tables,) = observe(model, torch.tensor(ids), [partial(_StreamingPass, model, groups, window)])
    return dict(tables["nll"])


def scores_and_losses(
    model: Model, ids: Sequence[int], window: StreamingWindow, rows: int | None, seed: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Scores of every head on ids [L], the columns of `StreamingScores`, and loss by position.

    `rows` is the number of query rows that are sampled with `seed`, None for all.
    """
    (tables,) = observe(model, torch.tensor(ids), [partial(_ScoringPass, model, window, rows, seed)])
    return dict(tables["scores"]), dict(tables["nll"])


def score_answer(model: Model, pair: TokenPair, groups: GroupsByLayer, window: StreamingWindow) -> tuple[float, bool]:
    """Mean loss of the right answer's tokens after the clean prompt, and whether greedy decoding gives them all."""
    with streaming(model, groups, window):
        return logits.score_answer(model, pair.clean, pair.answer)


@contextmanager
def streaming(model: Model, groups: GroupsByLayer, window: StreamingWindow) -> Iterator[None]:
    """Let these KV groups stream, with the position scheme and without gradients; leaving restores the model."""
    with attached(model), evaluating(model), capturing(model) as layers, torch.no_grad():
        _stream(model, layers, groups, window)
        yield


@contextmanager
def recording_input_lengths(model: Model) -> Iterator[list[int]]:
    """Yield a list that receives the number of input tokens of every forward pass."""
    lengths: list[int] = []

    def record(_: Any, args: Any, kwargs: dict[str, Any]) -> None:
        lengths.append((kwargs["input_ids"] if "input_ids" in kwargs else args[0]).shape[1])

    hook = model.module.register_forward_pre_hook(record, with_kwargs=True)
    try:
        yield lengths
    finally:
        hook.remove()


def _stream(model: Model, layers: CapturedLayers, groups: GroupsByLayer, window: StreamingWindow) -> None:
    for number, kv_groups in groups.items():
        layers.stream(model.geometry.layer_numbers.index(number), kv_groups, window)


class _StreamingPass:
    """Observes the loss of a pass in which some KV groups stream."""

    needs_whole_text = False

    def __init__(self, model: Model, groups: GroupsByLayer, window: StreamingWindow, ids: torch.Tensor):
        self.model, self.groups, self.window = model, groups, window

    def listen(self, layers: CapturedLayers) -> None:
        _stream(self.model, layers, self.groups, self.window)

    def tables(self, finished_pass: FinishedPass) -> dict[str, Any]:
        return {"nll": finished_pass.loss_by_position()}


class _ScoringPass:
    """Observes the scores of all heads and the loss of a pass in which no KV group streams."""

    needs_whole_text = False

    def __init__(self, model: Model, window: StreamingWindow, rows: int | None, seed: int, ids: torch.Tensor):
        self.scores = StreamingScores(model.geometry, ids.shape[1], rows, seed, window)
        self.needs_row_sums = rows is None

    def listen(self, layers: CapturedLayers) -> None:
        layers.listen(self.scores.update, needs_row_sums=self.needs_row_sums)

    def tables(self, finished_pass: FinishedPass) -> dict[str, Any]:
        return {"scores": dict(self.scores.compute()), "nll": finished_pass.loss_by_position()}
