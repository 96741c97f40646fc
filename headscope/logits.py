"""Next-token logits and losses from a backbone's last hidden states, in chunks: memory O(chunk x vocabulary)."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from headscope.measures import LossByPosition
from headscope.models import Model

CHUNK = 512
"""Positions whose logits are held at once."""


def last_hidden(model: Model, ids: Tensor) -> Tensor:
    """The backbone's output for ids [1, L]: [1, L, hidden]."""
    hidden: Tensor = model.module.base_model(ids, use_cache=False).last_hidden_state
    return hidden


def next_token_logits(model: Model, ids: Tensor, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (logits [n, vocabulary], the tokens [n] they predict, position of the first) for ids [1, L].

    `hidden` [1, L, hidden] is what `last_hidden` returned; gradients flow into it.
    """
    length = ids.shape[1]
    for start in range(0, length - 1, CHUNK):
        stop = min(start + CHUNK, length - 1)
        with backbone_returning(model, hidden[:, start:stop]):
            # The model's own forward, so that every family's scaling of logits is its own code.
            logits = model.module(ids[:, start:stop], use_cache=False).logits[0]
        yield logits, ids[0, start + 1 : stop + 1], start + 1


def loss_by_position(model: Model, ids: Tensor, hidden: Tensor) -> LossByPosition:
    """Loss of ids [1, L] by position, from the last hidden states."""
    loss = LossByPosition(ids.shape[1])
    for logits, targets, first in next_token_logits(model, ids, hidden):
        loss.update(logits, targets, first)
    return loss


@contextmanager
def backbone_returning(model: Model, hidden: Tensor) -> Iterator[None]:
    """Let the decoder stack return given hidden states instead of running."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    backbone = model.module.base_model
    backbone.__dict__["forward"] = lambda *args, **kwargs: BaseModelOutputWithPast(last_hidden_state=hidden)
    try:
        yield
    finally:
        del backbone.__dict__["forward"]
