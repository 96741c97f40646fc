"""Metrics of the logits that predict an answer: built-in ones by name, and a function of the user."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from headscope.errors import BadInput
from headscope.interventions.replay import Objective
from headscope.positions.model import Model
from headscope.prompts.pairs import TokenPair, stored_metric_name

MetricName = Literal["logit_diff", "logprob", "kl", "nll", "prob_diff", "rank"]


@dataclass(frozen=True, eq=False)
class PairTokens:
    """Token ids of a prompt pair on the model's device.

    `clean` [1, L] and `corrupted` [1, L'] end with the answer [n], or `corrupted` with other n tokens; `wrong` [m] is
    the wrong answer. The last `aligned` prompt tokens of both prompts correspond, and so do the answer's tokens.
    """

    clean: Tensor
    corrupted: Tensor
    answer: Tensor
    wrong: Tensor
    aligned: int

    @classmethod
    def on_device(cls, pair: TokenPair, device: Any) -> "PairTokens":
        """The pair as tensors, each prompt followed by the answer or, if the pair has one, its corrupted answer."""

        def tensor(ids: np.ndarray) -> Tensor:
            return torch.from_numpy(ids.astype(np.int64)).to(device)

        corrupted_answer = pair.answer if pair.corrupted_answer is None else pair.corrupted_answer
        clean, corrupted = (
            tensor(np.concatenate(parts))[None]
            for parts in ((pair.clean, pair.answer), (pair.corrupted, corrupted_answer))
        )
        return cls(clean, corrupted, tensor(pair.answer), tensor(pair.wrong), pair.aligned)

    def aligned_positions(self, ids: Tensor) -> range:
        """The positions of `ids` that correspond to positions of the other prompt, the answer's tokens included."""
        length = ids.shape[1]
        return range(length - len(self.answer) - self.aligned, length)


OwnMetric = Callable[[Tensor, PairTokens], Any]
"""A metric of the user: (logits [n, vocabulary] that predict the answer's tokens, tokens of the pair) -> a number, or
a tensor with one value. Estimates need a tensor that torch can differentiate."""
Metric = MetricName | OwnMetric


def metric_function(metric: Metric, pair: PairTokens, clean_logits: Tensor) -> Objective:
    """A metric of the logits [n, vocabulary] that predict the answer's tokens [n].

    logit_diff: logit of the answer minus logit of the wrong answer; prob_diff: the same of probabilities; logprob:
    log-probability of the answer in nats; rank: number of tokens with a larger logit than the answer; kl: KL(clean ||
    run) at the last token of the prompt in nats; nll: mean loss of the answer's tokens in nats/token. `clean_logits`
    [n, vocabulary] are those of the clean run. A function of the user raises BadInput if it returns no single number.
    """
    answer, wrong = pair.answer[0], pair.wrong[:1]
    clean_log_p = clean_logits[0].double().log_softmax(-1)

    def logit_difference(logits: Tensor, tokens: Tensor) -> Tensor:
        return logits[0, answer] - logits[0, wrong[0]]

    def probability_difference(logits: Tensor, tokens: Tensor) -> Tensor:
        p = logits[0].softmax(-1)
        return p[answer] - p[wrong[0]]

    def log_probability(logits: Tensor, tokens: Tensor) -> Tensor:
        return logits[0].log_softmax(-1)[answer]

    def rank(logits: Tensor, tokens: Tensor) -> Tensor:
        return (logits[0] > logits[0, answer]).sum()

    def divergence(logits: Tensor, tokens: Tensor) -> Tensor:
        log_p = logits[0].double().log_softmax(-1)
        return (clean_log_p.exp() * (clean_log_p - log_p)).sum()

    def loss(logits: Tensor, tokens: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(logits, tokens)

    if callable(metric):
        return _checked(metric, pair)
    return {
        "logit_diff": logit_difference,
        "prob_diff": probability_difference,
        "logprob": log_probability,
        "rank": rank,
        "kl": divergence,
        "nll": loss,
    }[metric]


def finite_metric(model: Model, metric: Objective, logits: Tensor, answer: Tensor) -> float:
    """The metric of the logits that predict the answer. Raises BadInput if it is not finite."""
    value = float(metric(logits, answer))
    if not math.isfinite(value):
        raise BadInput(
            f"the metric of '{model.name}' is {value}: its logits overflow. Check its weights, its adapter and --dtype"
        )
    return value


def _checked(function: OwnMetric, pair: PairTokens) -> Objective:
    """A function of the user as an objective. It raises BadInput for what is not one finite number, and for one
    without a gradient where a gradient is needed."""
    name = stored_metric_name(function)

    def objective(logits: Tensor, tokens: Tensor) -> Tensor:
        value = function(logits, pair)
        try:
            tensor = value if isinstance(value, Tensor) else torch.as_tensor(np.asarray(value, np.float64))
        except (TypeError, ValueError) as error:
            raise BadInput(f"the metric '{name}' returns a {type(value).__name__}. Return one number") from error
        if tensor.numel() != 1:
            raise BadInput(f"the metric '{name}' returns an array of shape {[*tensor.shape]}. Return one number")
        if not math.isfinite(tensor.item()):
            raise BadInput(f"the metric '{name}' is {tensor.item()}. Return a finite number for all logits")
        if logits.requires_grad and not tensor.requires_grad:
            raise BadInput(f"the metric '{name}' has no gradient, which estimates need. Use method exact")
        return tensor.reshape(())

    return objective
