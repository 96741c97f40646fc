"""A model's answer to a prompt, what is right about it, and what each head copied while it was written."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headscope.attention.record import AttentionRecord
from headscope.forward.prefix_cache import PrefixCachedGenerator, TokenIds
from headscope.forward.residual_decomposition import ResidualDecomposition
from headscope.measures.copying import CopyScoreAccumulator, CopyScores
from headscope.positions.model import Model
from headscope.prompts import wu_prompts
from headscope.prompts.haystack import NeedlePrompt, NeedlePromptBuilder, decode_tokens
from probes.needle.attribution import AnswerAttribution, AttributionAccumulator

EXTRA_ANSWER_STEPS = 6
"""Answer steps of a strict trial beyond the length of what is scored [ours]."""


@dataclass(frozen=True, eq=False)
class TrialAnswer:
    """A trial's outcome: the answer, its recall 0..1, what each step that was scored added to it, what each head copied
    and, where it was asked for, what each wrote."""

    text: str
    recall: float
    step_texts: list[str]
    copies: CopyScores
    attribution: AnswerAttribution | None = None


def answer_prompt(
    reader: PrefixCachedGenerator,
    prompts: Sequence[NeedlePrompt],
    builder: NeedlePromptBuilder,
    mode: str,
    stream: ResidualDecomposition | None = None,
) -> TrialAnswer:
    """Let the model answer the prompt, the same in all `prompts`, and score every head on each one's span.

    With a `stream` also what each head writes, in all and through the whole needle.
    """
    ids, spans = prompts[0].ids, [(prompt.start, prompt.end) for prompt in prompts]
    rows = CopyScoreAccumulator(reader.model.geometry.layers, spans)
    needles = [(start - builder.given_count, end) for start, end in spans]
    writes = None if stream is None else AttributionAccumulator(stream, needles)

    def listen(heard: AttentionRecord) -> None:
        rows.update(heard)
        if writes is not None:
            writes.update(heard)

    with nullcontext() if writes is None else writes.hooks_registered():
        tokens, said = generate_answer(reader, ids, builder, mode, spans[0][1] - spans[0][0], listen)
    scored = torch.tensor(tokens if mode == "wu" else said, dtype=torch.int64)
    copies = rows.compute(torch.from_numpy(ids.astype(np.int64)), scored)
    if mode == "wu":
        lengths = torch.tensor([[[end - start]] for start, end in spans])
        copies = CopyScores(copies.copy_counts / lengths, copies.copy_counts, copies.span_mass, copies.copy_events)
    text = decode_tokens(builder.tokenizer, np.array(said, np.int32)).strip()
    pieces = [*text_increments(builder.tokenizer, scored.tolist())]
    written = None if writes is None else writes.compute(scored)
    return TrialAnswer(text, rouge1_recall(builder.scored_text, text), pieces, copies, written)


def generate_answer(
    reader: PrefixCachedGenerator,
    ids: TokenIds,
    builder: NeedlePromptBuilder,
    mode: str,
    scored_count: int,
    listener: Callable[[AttentionRecord], None] = lambda heard: None,
) -> tuple[list[int], list[int]]:
    """The tokens of the model's answer to a prompt whose needle has that many scored tokens, and those before the one
    that ended it."""
    most = wu_prompts.MAX_STEPS if mode == "wu" else scored_count + EXTRA_ANSWER_STEPS
    ends = answer_end_test(reader.model, builder.tokenizer, stop_at_end_token=mode != "wu")
    tokens = reader.generate(ids, listener, most, ends)
    return tokens, tokens[:-1] if ends(tokens[-1]) else tokens


def text_increments(tokenizer: Any, tokens: Sequence[int]) -> Iterator[str]:
    """What each token adds to the text; a character that is split over tokens comes with the last of them."""
    told = ""
    for step in range(1, len(tokens) + 1):
        text = decode_tokens(tokenizer, np.array(tokens[:step], np.int32))
        whole = step == len(tokens) or not text.endswith("\ufffd")
        yield text.removeprefix(told) if whole else ""
        told = text if whole else told


def answer_end_test(model: Model, tokenizer: Any, stop_at_end_token: bool) -> Callable[[int], bool]:
    """Whether a token ends an answer: it holds a line break or, where asked, it is one of the end tokens."""
    configured = model.module.generation_config.eos_token_id if model.module.generation_config else None
    named = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    end_tokens = {token for token in named if token is not None} if stop_at_end_token else set()
    return lambda token: token in end_tokens or "\n" in decode_tokens(tokenizer, np.array([token], np.int32))


def rouge1_recall(reference: str, answer: str) -> float:
    """ROUGE-1 recall, 0..1: the share of the wanted words, counted with repeats, that were said. No stemming [ours]."""
    words, left = re.findall(r"\w+", reference.lower()), re.findall(r"\w+", answer.lower())
    repeated = 0
    for word in words:
        if word in left:
            left.remove(word)
            repeated += 1
    return repeated / len(words)
