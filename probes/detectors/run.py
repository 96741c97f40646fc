"""Runner of the detectors probe: forward passes over repeated random token sequences."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput
from headscope.forward.capture import capturing
from headscope.forward.free_memory import texts_per_batch
from headscope.forward.logits import finite_hidden_states
from headscope.measures.detectors import DetectorScores
from headscope.measures.key_patterns import PatternScores, token_patterns
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts.texts import first_tokens, prompt_tokens
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, pass_cost
from headscope.study.config import MAX_PROMPT_TOKENS
from headscope.study.context import StudyContext
from probes.detectors.declaration import DetectorsOptions, Matrix, pattern_matrix, pattern_source

BYTE_TOKEN_PATTERN = re.compile(r"<0x[0-9A-F]{2}>")
"""A token for a single byte, as byte-fallback tokenizers have them."""


@dataclass(frozen=True)
class _RepeatedSequence:
    period: int
    sequence: int

    @property
    def length(self) -> int:
        return 2 * self.period


@dataclass(frozen=True, eq=False)
class _Prompt:
    number: int
    ids: np.ndarray
    patterns: Mapping[str, Matrix]

    @property
    def length(self) -> int:
        return len(self.ids)


class DetectorsRunner:
    """Cells: one per (model, period, sequence), or one per (model, prompt)."""

    def __init__(self, options: DetectorsOptions, context: StudyContext):
        self.options, self.context = options, context
        self._scores: dict[tuple[str, _RepeatedSequence], Rows] = {}

    def cells(self) -> list[Cell]:
        if self.options.takes_prompts:
            return [
                Cell(f"{label}: prompt {prompt.number}", label, pass_cost(len(prompt.ids)), prompt)
                for label in self.context.labels
                for prompt in self._prompts(label)
            ]
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

    def _prompts(self, label: str) -> list[_Prompt]:
        """The prompts in the tokens of a model, with their patterns. Raises BadInput for an empty or a long one."""
        options = self.options
        if options.tokens is not None:
            token_lists: list[Sequence[int]] = [[*map(int, ids)] for ids in options.tokens]
        else:
            tokenizer = self.context.tokenizer(label)
            token_lists = [prompt_tokens(text, tokenizer, MAX_PROMPT_TOKENS + 1) for text in options.prompt or ()]
        source = None if options.pattern is None else pattern_source(options.pattern)
        prompts = []
        for number, ids in enumerate(token_lists):
            if not 2 <= len(ids) <= MAX_PROMPT_TOKENS:
                size = f"{len(ids)}" if len(ids) < 2 else f"more than {MAX_PROMPT_TOKENS:,}"
                raise BadInput(f"prompt {number} has {size} tokens. Use 2 to {MAX_PROMPT_TOKENS:,}")
            array = np.array(ids, np.int64)
            own = {} if source is None else {"own": pattern_matrix(source, ids)}
            self.context.record_input(f"prompt {number} of '{label}'", [array, *(m.tobytes() for m in own.values())])
            prompts.append(_Prompt(number, array, token_patterns(array) | own))
        return prompts

    def compute_rows(self, cell: Cell[_RepeatedSequence | _Prompt], model: Model) -> Mapping[str, Rows]:
        if isinstance(cell.work, _Prompt):
            return {"prompt_detectors": self._prompt_rows(cell.model, cell.work, model)}
        if (cell.model, cell.work) not in self._scores:
            self._score_sequences(cell.model, cell.work, model)
        return {"detectors": self._scores.pop((cell.model, cell.work))}

    def _score_sequences(self, label: str, first: _RepeatedSequence, model: Model) -> None:
        """Score a sequence together with the next ones of its period, as many as fit a GPU; on a CPU alone."""
        tokenizer, period = self.context.tokenizer(label), first.period
        most = texts_per_batch(model, 2 * period)
        last = min(first.sequence + most, self.options.sequences)
        works = [_RepeatedSequence(period, number) for number in range(first.sequence, last)]
        drawn = [
            repeated_random_tokens(tokenizer, period, (self.context.seed, period, work.sequence)) for work in works
        ]
        ids = torch.from_numpy(np.stack([ids for ids, _ in drawn]))
        for work, scores in zip(works, sequence_scores(model, ids, drawn[0][1], period), strict=True):
            keys: dict[str, Any] = {
                "model": label,
                "context_length": ids.shape[1],
                "sequence": work.sequence,
            }
            self._scores[label, work] = {**keys, **scores}
        self.context.cells_ahead = len(works) - 1

    def _prompt_rows(self, label: str, prompt: _Prompt, model: Model) -> Rows:
        vocabulary = model.module.get_input_embeddings().num_embeddings
        if int(prompt.ids.max()) >= vocabulary:
            raise BadInput(
                f"no token {prompt.ids.max()} in '{label}' (prompt {prompt.number}). Use ids from 0 to {vocabulary - 1}"
            )
        scores = PatternScores(model.geometry, prompt.patterns, self.options.exclude_first)
        run_listener(model, torch.from_numpy(prompt.ids), scores.update)
        return {"model": label, "prompt": prompt.number, "tokens": len(prompt.ids), **scores.compute()}


def run_listener(model: Model, ids: Tensor, listener: Callable[[AttentionRecord], None]) -> None:
    """Run ids [L] or [B, L] under the model's scheme and pass the attention records of every layer to the listener."""
    with attached(model), capturing(model) as layers, evaluating(model):
        layers.listen(listener)
        finite_hidden_states(model, ids.to(model.device).view(-1, ids.shape[-1]))


def sequence_scores(model: Model, ids: Tensor, opening_length: int, period: int) -> list[Mapping[str, np.ndarray]]:
    """Scores of every head on each of B sequences ids [B, opening_length + 2 period], under the model's scheme.

    From one pass. Returns the columns of table `detectors` from `layer` on.
    """
    detectors = [DetectorScores(model.geometry, opening_length, period) for _ in ids]
    run_listener(model, ids, lambda record: detectors[record.batch_index].update(record))
    return [detector.compute() for detector in detectors]


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
