"""Next-token logits and losses from the last hidden states, in chunks: memory O(chunk x vocabulary)."""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from headscope.attention.contexts import replacing
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.backbone import backbone, check_input_ids, refuse_non_finite
from headscope.measures.binned_means import LossByPosition
from headscope.models.checkpoint import LoadedModel
from headscope.prompts.haystack import Ids

POSITIONS_PER_CHUNK, LOW_MEMORY_POSITIONS_PER_CHUNK = 512, 128
"""Positions whose logits are in memory at once; the second, for documents that are read in chunks to save memory."""


def last_hidden_states(model: LoadedModel, ids: Tensor) -> Tensor:
    """The backbone's output for ids [1, L]: [1, L, D]. Raises BadInput for unknown tokens."""
    check_input_ids(model, ids)
    hidden: Tensor = backbone(model)(ids, use_cache=False).last_hidden_state
    return hidden


def finite_hidden_states(model: LoadedModel, ids: Tensor) -> Tensor:
    """`last_hidden_states`, checked. Raises BadInput if they are not finite."""
    hidden = last_hidden_states(model, ids)
    refuse_non_finite(model, ids, hidden)
    return hidden


def predicting_position_slices(
    ids: Tensor, positions_per_chunk: int = POSITIONS_PER_CHUNK, first_position: int = 0
) -> Iterator[slice]:
    """Slices of the positions of ids [1, L] that predict a token, from `first_position` on."""
    last = ids.shape[1] - 1
    return (
        slice(start, min(start + positions_per_chunk, last))
        for start in range(first_position, last, positions_per_chunk)
    )


def logits_and_targets(model: LoadedModel, ids: Tensor, hidden: Tensor, positions: slice) -> tuple[Tensor, Tensor]:
    """Logits [n, vocabulary] at `positions` of ids [1, L], and their target tokens [n].

    `hidden` [1, n, D] are the last hidden states there; gradients flow into it. The model's own forward computes the
    logits, so its own scaling applies. Raises UnsupportedModel for a model without a language-model head, or whose head
    does not use the hidden states.
    """
    return batched_logits(model, ids[:, positions], hidden)[0], ids[0, positions.start + 1 : positions.stop + 1]


def batched_logits(model: LoadedModel, ids: Tensor, hidden: Tensor) -> Tensor:
    """Logits [B, n, vocabulary] from last hidden states [B, n, D] at tokens ids [1, n]. Errors as above."""
    inner, calls = backbone(model), []

    def return_hidden(*_: Any, **__: Any) -> BackboneOutput:
        calls.append(True)
        return BackboneOutput(last_hidden_state=hidden)

    with ExitStack() as stack:
        for module in {inner, getattr(inner, "decoder", inner)}:  # OPT's head calls the inner decoder
            stack.enter_context(replacing_forward(module, return_hidden))
        output = model.module(ids.expand(len(hidden), -1), use_cache=False)
    if getattr(output, "logits", None) is None:
        raise UnsupportedModel(
            f"'{model.name}' has no language-model head. Open it as a causal language model, or measure without losses"
        )
    if not calls:
        raise UnsupportedModel(
            f"the head of '{model.name}' does not compute logits from the output of its backbone. "
            "Measure without losses"
        )
    logits: Tensor = output.logits
    return logits


class BackboneOutput(BaseModelOutputWithPast):  # type: ignore[misc]
    """A backbone's output. Other attributes that a head may read, such as `router_logits`, are None."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


def next_token_logits(
    model: LoadedModel, ids: Tensor, hidden: Tensor, positions_per_chunk: int = POSITIONS_PER_CHUNK
) -> Iterator[tuple[Tensor, Tensor, int]]:
    """Yield (logits [n, vocabulary], target tokens [n], position of the first target) for ids [1, L].

    `hidden` [1, L, D] are the last hidden states; n is at most `positions_per_chunk`.
    """
    for positions in predicting_position_slices(ids, positions_per_chunk):
        logits, tokens = logits_and_targets(model, ids, hidden[:, positions], positions)
        yield logits, tokens, positions.start + 1


def token_losses(logits: Tensor, tokens: Tensor) -> Tensor:
    """-ln p of each token [n] under logits [n, vocabulary], float32.

    Not cross_entropy: its sum over a large vocabulary has an error of 1e-5; logsumexp sums pairwise.
    """
    return logits.logsumexp(-1) - logits.gather(1, tokens[:, None])[:, 0]


def refuse_non_finite_losses(model: LoadedModel, losses: Any) -> None:
    """Raise BadInput if losses (an array or a tensor) are not finite: the logits of the model overflow."""
    if not np.isfinite(np.asarray(losses)).all():
        raise BadInput(
            f"the losses of '{model.name}' are not finite: its logits overflow. Check its weights, its adapter and "
            "--dtype"
        )


def compute_loss_by_position(
    model: LoadedModel, ids: Tensor, hidden: Tensor, positions_per_chunk: int = POSITIONS_PER_CHUNK
) -> LossByPosition:
    """Loss of ids [1, L] by position, from the last hidden states."""
    loss = LossByPosition(ids.shape[1])
    for logits, tokens, first in next_token_logits(model, ids, hidden, positions_per_chunk):
        loss.update(logits, tokens, first)
    return loss


def score_answer(model: LoadedModel, prompt: Ids, answer: Ids) -> tuple[float, bool]:
    """Mean loss of the answer's tokens [n] after a prompt [L], and whether greedy decoding gives them all."""
    ids = torch.from_numpy(np.concatenate([prompt, answer]).astype(np.int64)).to(model.device)[None]
    positions = slice(len(prompt) - 1, ids.shape[1] - 1)
    logits, targets = logits_and_targets(model, ids, finite_hidden_states(model, ids)[:, positions], positions)
    refuse_non_finite(model, ids, logits)
    return float(token_losses(logits.float(), targets).mean()), bool((logits.argmax(-1) == targets).all())


@contextmanager
def replacing_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a module's forward in the calls of the calling thread, inside the `with`."""
    thread, own_forward = threading.get_ident(), module.forward

    def run(*args: Any, **kwargs: Any) -> Any:
        return (forward if threading.get_ident() == thread else own_forward)(*args, **kwargs)

    with replacing(module, "forward", run):
        yield
