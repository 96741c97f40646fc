"""Generate a model's answer to a needle prompt, compute its recall, and score the heads at every step."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headscope.attention.record import AttentionRecord
from headscope.decomposition.residual_decomposition import ResidualDecomposition
from headscope.forward.prefix_cache import PrefixCachedGenerator, TokenIds
from headscope.measures.copying import AnswerKeysAccumulator, CopyScoreAccumulator, CopyScores
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
    that they attend to (`AnswerKeysAccumulator.compute`) and, if requested, their attribution."""

    text: str
    recall: float
    step_texts: list[str]
    copies: CopyScores
    keys: tuple[torch.Tensor, torch.Tensor]
    attribution: AnswerAttribution | None = None


def answer_prompt(
    generator: PrefixCachedGenerator,
    prompts: Sequence[NeedlePrompt],
    builder: NeedlePromptBuilder,
    mode: str,
    decomposition: ResidualDecomposition | None = None,
) -> TrialAnswer:
    """Generate the answer to a prompt and score every head on the span of each of `prompts`, whose tokens are the same.

    With a `decomposition`, also compute attribution, in total and through the whole needle.
    """
    ids, spans = prompts[0].ids, [(prompt.start, prompt.end) for prompt in prompts]
    copy_scores = CopyScoreAccumulator(generator.model.geometry.layers, spans)
    answer_keys = AnswerKeysAccumulator(generator.model.geometry.layers, MIN_KEY_WEIGHT)
    needles = [(start - builder.cue_count, end) for start, end in spans]
    attribution = None if decomposition is None else AttributionAccumulator(decomposition, needles)

    def listen(record: AttentionRecord) -> None:
        copy_scores.update(record)
        answer_keys.update(record)
        if attribution is not None:
            attribution.update(record)

    with nullcontext() if attribution is None else attribution.hooks_registered():
        tokens, answer_tokens = generate_answer(generator, ids, builder, mode, spans[0][1] - spans[0][0], listen)
    scored = torch.tensor(tokens if mode == "wu" else answer_tokens, dtype=torch.int64)
    copies = copy_scores.compute(torch.from_numpy(ids.astype(np.int64)), scored)
    if mode == "wu":
        lengths = torch.tensor([[[end - start]] for start, end in spans])
        copies = CopyScores(copies.copy_counts / lengths, copies.copy_counts, copies.span_mass, copies.copy_events)
    text = decode_tokens(builder.tokenizer, np.array(answer_tokens, np.int32)).strip()
    step_texts = [*text_increments(builder.tokenizer, scored.tolist())]
    answer_attribution = None if attribution is None else attribution.compute(scored)
    recall, keys = rouge1_recall(builder.scored_text, text), answer_keys.compute(len(scored))
    return TrialAnswer(text, recall, step_texts, copies, keys, answer_attribution)


def generate_answer(
    generator: PrefixCachedGenerator,
    ids: TokenIds,
    builder: NeedlePromptBuilder,
    mode: str,
    scored_count: int,
    listener: Callable[[AttentionRecord], None] = lambda record: None,
) -> tuple[list[int], list[int]]:
    """The generated tokens, and those of them before the token that ends the answer.

    `scored_count` is the number of scored tokens of the needle. With Wu et al.'s own prompt (`is_published`) answers
    also end as in their code, and the token that ends them belongs to the answer.
    """
    max_steps = wu_prompts.MAX_STEPS if mode == "wu" else scored_count + EXTRA_ANSWER_STEPS
    if builder.is_published:
        end = (builder.tokenizer.convert_tokens_to_ids(wu_prompts.PUBLISHED_END_TOKEN), wu_prompts.PUBLISHED_END_ID)
        tokens = generator.generate(ids, listener, max_steps, lambda token: token in end)
        return tokens, tokens
    ends = answer_end_test(generator.model, builder.tokenizer, stop_at_end_token=mode != "wu")
    tokens = generator.generate(ids, listener, max_steps, ends)
    return tokens, tokens[:-1] if ends(tokens[-1]) else tokens


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
