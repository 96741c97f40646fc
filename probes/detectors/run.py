"""Detectors: a forward pass over random tokens that come twice, heard by `measures.detectors`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.forward.capture import capturing
from headscope.forward.logits import finite_hidden
from headscope.measures.detectors import Detectors
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts.texts import first_tokens
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from probes.detectors.options import DetectorsOptions

BYTE_TOKEN_PATTERN = re.compile(r"<0x[0-9A-F]{2}>")
"""A token that stands for one byte, where a tokenizer has no other."""


@dataclass(frozen=True)
class _Task:
    period: int
    sequence: int


class DetectorsRunner:
    """Cells: each (model, period, sequence)."""

    def __init__(self, options: DetectorsOptions, context: StudyContext):
        self.options, self.context = options, context

    def cells(self) -> list[Cell]:
        return [
            Cell(f"{label}: 2 x {period} random tokens, sequence {n}", label, pass_cost(2 * period), _Task(period, n))
            for label in self.context.labels
            for period in self.options.periods
            for n in range(self.options.sequences)
        ]

    def rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        tokenizer, task = self.context.tokenizer(cell.model), cell.task
        ids, opening = repeated_random_tokens(tokenizer, task.period, (self.context.seed, task.period, task.sequence))
        keys = {"model": cell.model, "context_length": len(ids), "sequence": task.sequence}
        return {"detectors": {**keys, **detector_scores(model, torch.from_numpy(ids), opening, task.period)}}


def detector_scores(model: Model, ids: Tensor, opening_length: int, period: int) -> Mapping[str, np.ndarray]:
    """What every head looks at in ids [opening + 2 period], under the model's scheme: columns without study keys."""
    detectors = Detectors(model.geometry, opening_length, period)
    with attached(model), capturing(model) as layers, evaluating(model):
        layers.listen(detectors.update)
        finite_hidden(model, ids.to(model.device)[None])
    return detectors.compute()


def repeated_random_tokens(tokenizer: Any, period: int, seed: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """[opening] r r as ids, int64, and how many tokens open it: those that the tokenizer opens every text with.

    r are `period` seeded draws from the ordinary tokens of the vocabulary, all equally likely.
    """
    special = set(tokenizer.all_special_ids)
    opened = first_tokens("a", tokenizer, 8)
    opening = opened[: next((at for at, token in enumerate(opened) if token not in special), 0)]
    rng = np.random.default_rng(seed)
    drawn: list[int] = []
    while len(drawn) < period:
        some = rng.integers(len(tokenizer), size=period).tolist()
        drawn += [token for token in some if token not in special and is_ordinary_token(tokenizer, token)]
    return np.array([*opening, *drawn[:period], *drawn[:period]], np.int64), len(opening)


def is_ordinary_token(tokenizer: Any, token: int) -> bool:
    """Whether a token is text of its own: neither empty, nor a byte, nor part of a character."""
    text = tokenizer.decode([token])
    return bool(text) and "\ufffd" not in text and not BYTE_TOKEN_PATTERN.fullmatch(str(tokenizer.convert_ids_to_tokens(token)))
