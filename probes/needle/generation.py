"""Generate a model's answer to a needle prompt, compute its recall, and score the heads at every step."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headscope.attention.record import AttentionRecord
from headscope.decomposition.residual_decomposition import ResidualDecomposition
from headscope.forward.prefix_cache import GenerationRequest, PrefixCachedGenerator, StepListener
from headscope.measures.copying import AnswerKeys, CopyScoreAccumulator, CopyScores, last_query_weights
from headscope.positions.model import Model
from headscope.prompts import wu_prompts
from headscope.prompts.haystack import NeedlePrompt, NeedlePromptBuilder, decode_tokens
from probes.needle.attribution import AnswerAttribution, AttributionAccumulator

MIN_KEY_WEIGHT = 0.15
"""Least weight of a key that is stored at an answer step: a head has at most six of them [ours]."""
EXTRA_ANSWER_STEPS = 6
"""Answer steps of a strict trial beyond the number of scored tokens [ours]."""


@dataclass(frozen=True, eq=False)
class TrialAnswer:
    """Outcome of a trial: the answer, its recall 0..1, the text of each scored step, copy scores of the heads, the keys
    that they attend to (`AnswerKeys.compute`) and, if requested, their attribution."""

    text: str
    recall: float
    step_texts: list[str]
    copies: CopyScores
    keys: tuple[torch.Tensor, torch.Tensor]
    attribution: AnswerAttribution | None = None


@dataclass(frozen=True, eq=False)
class TrialPrompt:
    """A trial to answer: its prompt once per span to score, with the same tokens, its builder and its mode."""

    prompts: Sequence[NeedlePrompt]
    builder: NeedlePromptBuilder
    mode: str

    @property
    def ids(self) -> np.ndarray:
        return self.prompts[0].ids

    @property
    def spans(self) -> list[tuple[int, int]]:
        return [(prompt.start, prompt.end) for prompt in self.prompts]


def answer_trials(
    generator: PrefixCachedGenerator, trials: Sequence[TrialPrompt], decomposition: ResidualDecomposition | None = None
) -> list[TrialAnswer]:
    """Generate the answers to trials of one length together, and score every head on the spans of each trial.

    With a `decomposition`, also compute attribution, in total and through the whole needle.
    """
    layers = generator.model.geometry.layers
    copy_scores = CopyScoreAccumulator(layers, [trial.spans for trial in trials])
    answer_keys = AnswerKeys(layers, MIN_KEY_WEIGHT)
    attributions = []
    if decomposition is not None:
        for trial in trials:
            needles = [(start - trial.builder.cue_count, end) for start, end in trial.spans]
            attributions.append(AttributionAccumulator(decomposition, needles))

    def listen(numbers: Sequence[int], records: Sequence[AttentionRecord]) -> None:
        weights = last_query_weights(records)
        copy_scores.add(records[0].layer, numbers, weights)
        answer_keys.add(records[0].layer, numbers, weights)
        if attributions:
            for number, record, own_weights in zip(numbers, records, weights, strict=True):
                attributions[number].update(record, own_weights)

    with ExitStack() as hooks:
        for accumulator in attributions:
            hooks.enter_context(accumulator.hooks_registered())
        answers = generate_answers(generator, trials, listen)
    results = []
    for number, (trial, (tokens, answer_tokens)) in enumerate(zip(trials, answers, strict=True)):
        scored = torch.tensor(tokens if trial.mode == "wu" else answer_tokens, dtype=torch.int64)
        copies = copy_scores.compute(number, torch.from_numpy(trial.ids.astype(np.int64)), scored)
        if trial.mode == "wu":
            lengths = torch.tensor([[[end - start]] for start, end in trial.spans])
            copies = CopyScores(copies.copy_counts / lengths, copies.copy_counts, copies.span_mass, copies.copy_events)
        text = answer_text(trial.builder, answer_tokens)
        step_texts = [*text_increments(trial.builder.tokenizer, scored.tolist())]
        attribution = attributions[number].compute(scored) if attributions else None
        recall, keys = rouge1_recall(trial.builder.scored_text, text), answer_keys.compute(number, len(scored))
        results.append(TrialAnswer(text, recall, step_texts, copies, keys, attribution))
    return results


def generate_answers(
    generator: PrefixCachedGenerator, trials: Sequence[TrialPrompt], listener: StepListener = lambda *_: None
) -> list[tuple[list[int], list[int]]]:
    """The tokens generated for each trial, and those of them before the token that ends the answer.

    With Wu et al.'s own prompt (`is_published`) answers also end as in their code, and the token that ends them belongs
    to the answer.
    """
    requests = [_request(generator.model, trial) for trial in trials]
    answers = []
    for trial, request, tokens in zip(trials, requests, generator.generate_batch(requests, listener), strict=True):
        keeps_last = trial.builder.is_published or not request.is_last_token(tokens[-1])
        answers.append((tokens, tokens if keeps_last else tokens[:-1]))
    return answers


def _request(model: Model, trial: TrialPrompt) -> GenerationRequest:
    """What to generate for a trial; the number of steps follows from the scored tokens of its first span."""
    builder, (start, end) = trial.builder, trial.spans[0]
    max_steps = wu_prompts.MAX_STEPS if trial.mode == "wu" else end - start + EXTRA_ANSWER_STEPS
    is_last = answer_end_test(model, builder.tokenizer, stop_at_end_token=trial.mode != "wu")
    if builder.is_published:
        published = builder.tokenizer.convert_tokens_to_ids(wu_prompts.PUBLISHED_END_TOKEN)
        return GenerationRequest(trial.ids, max_steps, {published, wu_prompts.PUBLISHED_END_ID}.__contains__)
    return GenerationRequest(trial.ids, max_steps, is_last)


def answer_text(builder: NeedlePromptBuilder, answer_tokens: Sequence[int]) -> str:
    """The text of an answer without white space around it."""
    return decode_tokens(builder.tokenizer, np.array(answer_tokens, np.int32)).strip()


def text_increments(tokenizer: Any, tokens: Sequence[int]) -> Iterator[str]:
    """The text that each token adds; a character split over several tokens belongs to the last of them."""
    complete_text = ""
    for step in range(1, len(tokens) + 1):
        text = decode_tokens(tokenizer, np.array(tokens[:step], np.int32))
        is_complete = step == len(tokens) or not text.endswith("\ufffd")
        yield text.removeprefix(complete_text) if is_complete else ""
        complete_text = text if is_complete else complete_text


def answer_end_test(model: Model, tokenizer: Any, stop_at_end_token: bool) -> Callable[[int], bool]:
    """A test whether a token ends an answer: it contains a line break or, if requested, is an end token."""
    configured = model.module.generation_config.eos_token_id if model.module.generation_config else None
    candidates = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    end_tokens = {token for token in candidates if token is not None} if stop_at_end_token else set()
    return lambda token: token in end_tokens or "\n" in decode_tokens(tokenizer, np.array([token], np.int32))


def rouge1_recall(reference: str, answer: str) -> float:
    """ROUGE-1 recall, 0..1: share of the reference words, counted with repeats, in the answer. No stemming [ours]."""
    words, remaining = re.findall(r"\w+", reference.lower()), re.findall(r"\w+", answer.lower())
    repeated = 0
    for word in words:
        if word in remaining:
            remaining.remove(word)
            repeated += 1
    return repeated / len(words)
