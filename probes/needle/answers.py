"""A model's answer to a prompt, what is right about it, and what each head copied while it was written."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from headscope.measures.copying import AnswerRows, Copies
from headscope.passes.prefixes import PrefixReader
from headscope.positions.model import Model
from probes.needle import wu
from probes.needle.haystack import Prompt, Prompter, decoded

STEPS_BEYOND = 6
"""Answer steps of a strict trial beyond the length of what is scored [ours]."""


@dataclass(frozen=True, eq=False)
class Answered:
    """A trial's outcome: the answer, its recall 0..1, the steps that were scored, and what each head copied."""

    text: str
    recall: float
    steps: int
    copies: Copies


def answered(reader: PrefixReader, prompts: Sequence[Prompt], prompter: Prompter, mode: str) -> Answered:
    """Let the model answer the prompt, the same in all `prompts`, and score every head on each one's span."""
    ids, spans = prompts[0].ids, [(prompt.start, prompt.end) for prompt in prompts]
    tokenizer = prompter.tokenizer
    rows = AnswerRows(reader.model.geometry.layers, spans)
    most = wu.STEPS if mode == "wu" else spans[0][1] - spans[0][0] + STEPS_BEYOND
    ends = ending(reader.model, tokenizer, at_end_token=mode != "wu")
    tokens = reader.answer(ids, rows.update, most, ends)
    said = tokens[:-1] if ends(tokens[-1]) else tokens
    scored = tokens if mode == "wu" else said
    copies = rows.compute(torch.from_numpy(ids.astype(np.int64)), torch.tensor(scored, dtype=torch.int64))
    if mode == "wu":
        lengths = torch.tensor([[[end - start]] for start, end in spans])
        copies = Copies(copies.copies / lengths, copies.copies, copies.mass)
    text = decoded(tokenizer, np.array(said, np.int32)).strip()
    return Answered(text, recall(prompter.scored_text, text), len(scored), copies)


def ending(model: Model, tokenizer: Any, at_end_token: bool) -> Callable[[int], bool]:
    """Whether a token ends an answer: it holds a line break or, where asked, it is one of the end tokens."""
    configured = model.module.generation_config.eos_token_id if model.module.generation_config else None
    named = [*(configured if isinstance(configured, list) else [configured]), tokenizer.eos_token_id]
    end_tokens = {token for token in named if token is not None} if at_end_token else set()
    return lambda token: token in end_tokens or "\n" in decoded(tokenizer, np.array([token], np.int32))


def recall(wanted: str, said: str) -> float:
    """ROUGE-1 recall, 0..1: the share of the wanted words, counted with repeats, that were said. No stemming [ours]."""
    words, left = re.findall(r"\w+", wanted.lower()), re.findall(r"\w+", said.lower())
    repeated = 0
    for word in words:
        if word in left:
            left.remove(word)
            repeated += 1
    return repeated / len(words)
