"""The log-probabilities of a prompt's continuations, without and with heads steered to one of its spans."""

from collections.abc import Sequence
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from headscope.forward.logits import finite_hidden_states, logits_and_targets, token_losses
from headscope.interventions.steering import steered
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts.span_tokens import SpanTokens
from probes.spans.declaration import LEAD, LOGPROB

ANSWER_METRICS = MappingProxyType({LOGPROB: "logprob", LEAD: "logit_diff"})
"""The metrics of answers whose rule says whether the model gives the continuation: at least 1 % per token; a lead above
0."""


def steering_rows(model: Model, tokens: SpanTokens, key: str, heads: Sequence[str], alpha: float) -> dict[str, Any]:
    """Columns metric, plain and steered of one prompt: both metrics, or only the first without a wrong continuation."""
    spans = {**tokens.spans, **tokens.messages}
    span = np.flatnonzero(spans[key][: tokens.prompt_length])
    layers = model.geometry.layer_numbers
    everything = {layer: range(model.geometry.layer_heads[index]) for index, layer in enumerate(layers)}
    prompt, continuation = tokens.ids[: tokens.prompt_length], tokens.ids[tokens.prompt_length :]
    values = []
    for is_steered in (False, True):
        context = steered(model, [*heads] or everything, span.tolist(), alpha) if is_steered else nullcontext()
        with torch.no_grad(), attached(model), evaluating(model), context:
            right = _log_probability(model, prompt, continuation)
            of_run = [right / len(continuation)]
            if tokens.wrong:
                of_run.append(right - _log_probability(model, prompt, tokens.wrong))
        values.append(of_run)
    plain, with_steering = values
    return {"metric": [LOGPROB, LEAD][: len(plain)], "plain": plain, "steered": with_steering}


def _log_probability(model: Model, prompt: Sequence[int], continuation: Sequence[int]) -> float:
    """Summed log-probability of the continuation's tokens, in nats."""
    ids = torch.tensor([[*prompt, *continuation]], device=model.device)
    hidden = finite_hidden_states(model, ids)
    rows = slice(len(prompt) - 1, ids.shape[1] - 1)
    logits, targets = logits_and_targets(model, ids, hidden[:, rows], rows)
    return -float(token_losses(logits.float(), targets).double().sum())
