"""Check by the metric of its unchanged runs whether a model gives the answers of prompt pairs."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from headscope.prompts.pairs import METRICS_WITH_WRONG, metric_label, metric_unit

LEAST_PROBABILITY = 0.01
"""Least probability per token at which a model counts as giving an answer [ours]."""
MIN_EXCHANGE, MIN_EXCHANGED_PROBABILITY = 0.5, 0.05
"""Least lead of the corrupted prompt, in logits or nats and as a probability, at which a pair counts as exchanged
[ours]."""

LEAST_PROBABILITY_TEXT = f"{100 * LEAST_PROBABILITY:.0f} %"
"""The least probability in words."""
ANSWER_CRITERIA: Mapping[str, str] = MappingProxyType(
    dict.fromkeys(METRICS_WITH_WRONG, "its logit is above that of the wrong answer")
    | dict.fromkeys(("logprob", "nll"), f"its probability is at least {LEAST_PROBABILITY_TEXT} per token")
)
"""When a run gives the answer, by metric. The others (kl, rank, a metric of the user) have no such bound."""

Values = npt.NDArray[np.float64]


def gives_answer(metric: str, values: Values) -> npt.NDArray[np.bool_]:
    """Which runs of clean prompts give the answer: [n], of the metric [n] of these runs.

    logit_diff and prob_diff: the answer has a larger logit than the wrong answer. logprob and nll: its probability is
    at least `LEAST_PROBABILITY` per token. Other metrics say nothing about the answer, so it is always True.
    """
    if metric not in ANSWER_CRITERIA:
        return np.ones(len(values), bool)
    least = 0.0 if metric in METRICS_WITH_WRONG else np.log(LEAST_PROBABILITY)
    return np.asarray((-values if metric == "nll" else values) > least)


def shows_answer(metric: str, clean: float, corrupted: float | None = None, is_contrast: bool = True) -> bool:
    """Whether the effects of a prompt show how the model answers, by the metric of its unchanged runs.

    The model gives the answer to the clean prompt. If a corrupted prompt was run and `is_contrast`, the model also
    prefers the wrong answer for it, by logit or probability: a pair whose two prompts prefer the same answer has a
    small difference, and so large effects.
    """
    gives = bool(gives_answer(metric, np.array([clean]))[0])
    prefers_same = corrupted is not None and metric in METRICS_WITH_WRONG and is_contrast and corrupted > 0
    return gives and not prefers_same


def describe_unanswered(metric: str, values: Values, noun: str = "pair") -> str:
    """Sentences about the pairs (or prompts: the `noun`) whose answer the model does not give, with their number.

    "" if the model gives every answer.
    """
    missing = int((~gives_answer(metric, values)).sum())
    if not missing:
        return ""
    reason = (
        "the answer's logit is not above that of the wrong answer"
        if metric in METRICS_WITH_WRONG
        else f"the answer's probability is below {LEAST_PROBABILITY_TEXT} per token"
    )
    question = ""
    if metric in METRICS_WITH_WRONG and 2 * missing > len(values):
        question = " Are answer and wrong answer, or clean and corrupted prompts, exchanged?"
    return (
        f"The unchanged model does not give the answer in {missing} of {len(values)} {noun}s ({reason}), so "
        f"their effects do not show how it answers.{question}"
    )


def count_exchanged(metric: str, clean: Values, corrupted: Values) -> int:
    """Number of pairs whose corrupted prompt favours the answer, by the metric [n] of both runs; 0 for a metric that
    says nothing about the answer."""
    if metric not in ANSWER_CRITERIA:
        return 0
    lead = (corrupted - clean) * (-1 if metric == "nll" else 1)
    return int((lead >= (MIN_EXCHANGED_PROBABILITY if metric == "prob_diff" else MIN_EXCHANGE)).sum())


def ask_about_exchange(metric: str, clean: Values, corrupted: Values) -> str:
    """The question whether clean and corrupted prompts are exchanged, if the corrupted prompt favours the answer in
    most pairs; else ""."""
    exchanged = count_exchanged(metric, clean, corrupted)
    if 2 * exchanged <= len(clean):
        return ""
    return (
        f"Are clean and corrupted prompts exchanged? In {exchanged} of {len(clean)} pairs the corrupted prompt favours "
        f"the answer: the mean {metric_label(metric)} is {clean.mean():.2f} {metric_unit(metric)} for clean and "
        f"{corrupted.mean():.2f} for corrupted prompts."
    )
