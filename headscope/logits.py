"""Next-token logits and losses from a backbone's last hidden states, in chunks: memory O(chunk x vocabulary)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from headscope.measures import LossByPosition
from headscope.models import Model

CHUNK = 512
"""Positions whose logits are held at once."""


def last_hidden(model: Model, ids: Tensor) -> Tensor:
    """The backbone's output for ids [1, L]: [1, L, D]."""
    hidden: Tensor = model.module.base_model(ids, use_cache=False).last_hidden_state
    return hidden


def head_logits(model: Model, ids: Tensor, hidden: Tensor) -> Tensor:
    """Logits [n, vocabulary] from the backbone's last hidden states [1, n, D] of the tokens ids [1, n].

    The model's own forward, so that every family's scaling of logits is its own code. Gradients flow into `hidden`.
    """
    from transformers.modeling_outputs import BaseModelOutputWithPast

    with forwarding(model.module.base_model, lambda *_, **__: BaseModelOutputWithPast(last_hidden_state=hidden)):
        logits: Tensor = model.module(ids, use_cache=False).logits[0]
    return logits


def next_token_logits(model: Model, ids: Tensor, hidden: Tensor) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (logits [n, vocabulary], the tokens [n] they predict, position of the first) for ids [1, L].

    `hidden` [1, L, D] is what `last_hidden` returned.
    """
    last = ids.shape[1] - 1
    for start in range(0, last, CHUNK):
        stop = min(start + CHUNK, last)
        logits = head_logits(model, ids[:, start:stop], hidden[:, start:stop])
        yield logits, ids[0, start + 1 : stop + 1], start + 1


def loss_by_position(model: Model, ids: Tensor, hidden: Tensor) -> LossByPosition:
    """Loss of ids [1, L] by position, from the last hidden states."""
    loss = LossByPosition(ids.shape[1])
    for logits, targets, first in next_token_logits(model, ids, hidden):
        loss.update(logits, targets, first)
    return loss


@contextmanager
def forwarding(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module run another forward."""
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
