"""Next-token logits and losses from a backbone's last hidden states, in chunks: memory O(chunk x vocabulary)."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from headscope.errors import UnsupportedModel
from headscope.forward.backbone import backbone
from headscope.forward.input_checks import refuse_non_finite, refuse_unknown_tokens
from headscope.measures.loss_by_position import LossByPosition
from headscope.models.checkpoint import LoadedModel

POSITIONS_PER_CHUNK, LOW_MEMORY_POSITIONS_PER_CHUNK = 512, 128
"""Positions whose logits are held at once, and as many of a document that is read in chunks to need little memory."""


def last_hidden_states(model: LoadedModel, ids: Tensor) -> Tensor:
    """The backbone's output for ids [1, L]: [1, L, D]. Raises BadInput for tokens that the model does not know."""
    refuse_unknown_tokens(model, ids)
    hidden: Tensor = backbone(model)(ids, use_cache=False).last_hidden_state
    return hidden


def finite_hidden_states(model: LoadedModel, ids: Tensor) -> Tensor:
    """`last_hidden`, for who goes on from it as if it were sound: BadInput where it is not finite."""
    hidden = last_hidden_states(model, ids)
    refuse_non_finite(model, ids, hidden)
    return hidden


def predicting_position_slices(
    ids: Tensor, positions_per_chunk: int = POSITIONS_PER_CHUNK, first_position: int = 0
) -> Iterator[slice]:
    """The positions of ids [1, L] from `first` on that predict a token of it, at most `size` at a time."""
    last = ids.shape[1] - 1
    return (
        slice(start, min(start + positions_per_chunk, last))
        for start in range(first_position, last, positions_per_chunk)
    )


def logits_and_targets(model: LoadedModel, ids: Tensor, hidden: Tensor, positions: slice) -> tuple[Tensor, Tensor]:
    """Logits [n, vocabulary] of the positions `at` of ids [1, L], and the tokens [n] that they predict.

    `hidden` [1, n, D] are the backbone's last states there; gradients flow into it. The logits are the model's own
    forward, so that every family's scaling of them is its own code. Raises UnsupportedModel for a backbone that has no
    head, and for a head that computes its logits from something else.
    """
    inner, asked = backbone(model), []

    def answer(*_: Any, **__: Any) -> BackboneOutput:
        asked.append(True)
        return BackboneOutput(last_hidden_state=hidden)

    with ExitStack() as stack:
        for module in {inner, getattr(inner, "decoder", inner)}:  # OPT's head asks the decoder within
            stack.enter_context(replacing_forward(module, answer))
        output = model.module(ids[:, positions], use_cache=False)
    if getattr(output, "logits", None) is None:
        raise UnsupportedModel(
            f"'{model.name}' has no head that predicts tokens: open it as a causal language model, or measure without "
            "losses"
        )
    if not asked:
        raise UnsupportedModel(f"the head of '{model.name}' does not compute its logits from what its backbone returns")
    return output.logits[0], ids[0, positions.start + 1 : positions.stop + 1]


class BackboneOutput(BaseModelOutputWithPast):  # type: ignore[misc]
    """A backbone's output. What a head reads beyond the hidden states (`router_logits`, say) is None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def next_token_logits(
    model: LoadedModel, ids: Tensor, hidden: Tensor, positions_per_chunk: int = POSITIONS_PER_CHUNK
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (logits [n, vocabulary], the tokens [n] they predict, position of the first) for ids [1, L].

    `hidden` [1, L, D] is what `last_hidden` returned; n is at most `size`.
    """
    for at in predicting_position_slices(ids, positions_per_chunk):
        logits, tokens = logits_and_targets(model, ids, hidden[:, at], at)
        yield logits, tokens, at.start + 1


def token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """-ln p of each token [n] under logits [n, vocabulary], float32.

    Not cross_entropy: its running sum over a large vocabulary is off by 1e-5, logsumexp adds pairwise.
    """
    return logits.logsumexp(-1) - logits.gather(1, tokens[:, None])[:, 0]


def compute_loss_by_position(
    model: LoadedModel, ids: Tensor, hidden: Tensor, positions_per_chunk: int = POSITIONS_PER_CHUNK
) -> LossByPosition:
    """Loss of ids [1, L] by position, from the last hidden states, with the logits of `size` positions at once."""
    loss = LossByPosition(ids.shape[1])
    for logits, tokens, first in next_token_logits(model, ids, hidden, positions_per_chunk):
        loss.update(logits, tokens, first)
    return loss


@contextmanager
def replacing_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a module run another forward; what it ran before, its class's or one put on it, returns on exit."""
    before = {key: value for key, value in vars(module).items() if key == "forward"}
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        del module.__dict__["forward"]
        module.__dict__.update(before)
