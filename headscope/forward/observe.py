"""One forward pass over a text that several observers share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from headscope.forward.capture import CapturedLayers, capturing
from headscope.forward.chunked_pass import choose_chunk_size, chunked_hidden_states
from headscope.forward.logits import (
    LOW_MEMORY_POSITIONS_PER_CHUNK,
    POSITIONS_PER_CHUNK,
    compute_loss_by_position,
    finite_hidden_states,
    refuse_non_finite_losses,
)
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.positions.schedule import Schedule


@dataclass(frozen=True)
class FinishedPass:
    """Results of a forward pass: token ids [1, L], the last hidden states [1, L, D] and the attached schedule.

    `tokens_per_chunk` is the number of tokens per chunk, None if the text was read in one pass.
    """

    model: Model
    ids: Tensor
    hidden: Tensor
    schedule: Schedule
    tokens_per_chunk: int | None

    def loss_by_position(self) -> dict[str, np.ndarray]:
        """Loss by position: the columns position, nll, tokens. Raises BadInput for losses that are not finite."""
        at_once = POSITIONS_PER_CHUNK if self.tokens_per_chunk is None else LOW_MEMORY_POSITIONS_PER_CHUNK
        columns = dict(compute_loss_by_position(self.model, self.ids, self.hidden, at_once).compute())
        refuse_non_finite_losses(self.model, columns["nll"])
        return columns


class Observer(Protocol):
    """Collects statistics of one forward pass. It must not keep q, k, v or whole weights: memory is O(L) per layer."""

    needs_whole_text: bool
    """Whether the text must be read in one pass. Other observers also work if a long text is read in chunks."""

    def listen(self, layers: CapturedLayers) -> None:
        """Register listeners before the pass."""

    def tables(self, finished_pass: FinishedPass) -> Mapping[str, Any]:
        """Columns by table, after the pass."""


def observe(model: Model, ids: Tensor, factories: Sequence[Callable[[Tensor], Observer]]) -> list[Mapping[str, Any]]:
    """Run the model once over ids [L] under its position scheme and return the tables of every observer.

    Each factory is called with ids [1, L] on the model's device while the scheme is attached. A long text is read in
    chunks; observers that need the whole text then share a second pass. Raises BadInput for unknown tokens or hidden
    states that are not finite.
    """
    with attached(model) as schedule, evaluating(model):
        ids = ids.to(model.device)[None]
        observers = [factory(ids) for factory in factories]
        chunk_size = choose_chunk_size(model, ids)
        sizes = [None if observer.needs_whole_text else chunk_size for observer in observers]
        tables: dict[int, Mapping[str, Any]] = {}
        for size in dict.fromkeys(sizes):
            sharing = [number for number, observer_size in enumerate(sizes) if observer_size == size]
            with capturing(model) as layers:
                for number in sharing:
                    observers[number].listen(layers)
                hidden = finite_hidden_states(model, ids) if size is None else chunked_hidden_states(model, ids, size)
                finished_pass = FinishedPass(model, ids, hidden, schedule, size)
                tables |= {number: observers[number].tables(finished_pass) for number in sharing}
    return [tables[number] for number in range(len(observers))]
