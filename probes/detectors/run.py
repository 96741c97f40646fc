"""Runner of the detectors probe: forward passes over repeated random token sequences."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.errors import BadInput
from headscope.forward.capture import capturing
from headscope.forward.logits import finite_hidden_states
from headscope.measures.detectors import DetectorScores
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts.texts import first_tokens
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.context import StudyContext
from probes.detectors.schema import DetectorsOptions

BYTE_TOKEN_PATTERN = re.compile(r"<0x[0-9A-F]{2}>")
"""A token for a single byte, as byte-fallback tokenizers have them."""


@dataclass(frozen=True)
class _RepeatedSequence:
    period: int
    sequence: int


class DetectorsRunner:
    """Cells: one per (model, period, sequence)."""

    def __init__(self, options: DetectorsOptions, context: StudyContext):
        self.options, self.context = options, context

    def cells(self) -> list[Cell]:
        return [
            Cell(
                f"{label}: 2 x {period} random tokens, sequence {n}",
                label,
                pass_cost(2 * period),
                _RepeatedSequence(period, n),
            )
            for label in self.context.labels
            for period in self.options.periods
            for n in range(self.options.sequences)
        ]

    def compute_rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert cell.model is not None
        tokenizer, work = self.context.tokenizer(cell.model), cell.work
        seed = (self.context.seed, work.period, work.sequence)
        ids, opening_length = repeated_random_tokens(tokenizer, work.period, seed)
        keys = {"model": cell.model, "context_length": len(ids), "sequence": work.sequence}
        return {"detectors": {**keys, **detector_scores(model, torch.from_numpy(ids), opening_length, work.period)}}


def detector_scores(model: Model, ids: Tensor, opening_length: int, period: int) -> Mapping[str, np.ndarray]:
    """Scores of every head on ids [opening_length + 2 period], under the model's scheme.

    Returns the columns of table `detectors` from `layer` on.
    """
    detectors = DetectorScores(model.geometry, opening_length, period)
    with attached(model), capturing(model) as layers, evaluating(model):
        layers.listen(detectors.update)
        finite_hidden_states(model, ids.to(model.device)[None])
    return detectors.compute()


def repeated_random_tokens(tokenizer: Any, period: int, seed: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """A random sequence of `period` tokens, twice, after the tokenizer's opening special tokens.

    The tokens are drawn uniformly from the ordinary tokens of the vocabulary. Returns the ids (int64) and the number of
    opening tokens.
    """
    special = set(tokenizer.all_special_ids)
    start = first_tokens("a", tokenizer, 8)
    opening = start[: next((index for index, token in enumerate(start) if token not in special), 0)]
    rng = np.random.default_rng(seed)
    sequence: list[int] = []
    while len(sequence) < period:
        candidates = rng.integers(len(tokenizer), size=period).tolist()
        ordinary = [token for token in candidates if token not in special and is_ordinary_token(tokenizer, token)]
        if not ordinary and not any(
            is_ordinary_token(tokenizer, token) for token in {*range(len(tokenizer))} - special
        ):
            raise BadInput("the tokenizer has no token that stands for text. Use the tokenizer of this model")
        sequence += ordinary
    return np.array([*opening, *sequence[:period], *sequence[:period]], np.int64), len(opening)


def is_ordinary_token(tokenizer: Any, token: int) -> bool:
    """Whether a token decodes to text by itself: not empty, not a single byte, not part of a character."""
    text = tokenizer.decode([token])
    if not text or "\ufffd" in text:
        return False
    return not BYTE_TOKEN_PATTERN.fullmatch(str(tokenizer.convert_ids_to_tokens(token)))


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """The detectors on one sequence of about `length` tokens, and plain forward passes, for `headscope bench`."""
    period = length // 2
    token_ids, opening_length = repeated_random_tokens(model.tokenizer, period, (0,))
    ids = torch.from_numpy(token_ids)

    def plain(module: Any) -> None:
        with torch.no_grad():
            module(ids.to(model.device)[None], use_cache=False)

    return {
        "detectors: plain forward with logits": lambda: plain(model.module),
        "detectors: plain forward without logits": lambda: plain(model.module.base_model),
        "detectors": lambda: detector_scores(model, ids, opening_length, period),
    }
