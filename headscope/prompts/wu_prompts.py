"""Needle prompts as the public code of Wu et al. 2024 builds them, for comparison with its published head lists.

The haystack is cut 200 tokens short, the prompt is decoded and tokenised again, and the needle's span is the first
stretch of its length that holds nearly the same set of tokens. An answer runs for up to 50 steps, the line break that
ends it is scored, an end token does not stop it, and every repeated copy counts again. Three faults of that code are
not reproduced: sentence ends are found as in all other prompts, special tokens appear once at the start, and a span
that is not found raises an error instead of scoring 0. With the template plain, the wording of the prompt, the scored
part (the real needle) and the end of an answer are also those of that code; with the others they are ours. A space
stands before a needle, and recall is computed without stemming [ours].
"""

import numpy as np

from headscope.errors import BadInput
from headscope.prompts.haystack import Haystack, Ids, NeedlePrompt, NeedlePromptBuilder, decode_tokens, tokenize_plain

RESERVED_TOKENS = 200
"""Tokens by which the haystack is cut short."""
MIN_OVERLAP = 0.9
MAX_STEPS = 50
"""Answer steps of a trial."""
PUBLISHED_END_TOKEN, PUBLISHED_END_ID = "<0x0A>", 144
"""The token and the id that end an answer in that code, whatever they stand for in a tokenizer."""


def insertion_point(builder: NeedlePromptBuilder, haystack: Haystack, length: int, depth: float) -> int:
    """Haystack tokens before the needle; depth 1 is the very end. Raises BadInput if the context is too short."""
    room = _haystack_token_budget(builder, length)
    return room if depth == 1 else haystack.sentence_start(int(depth * room))


def prompt_with_needle(builder: NeedlePromptBuilder, haystack: Haystack, length: int, depth: float) -> NeedlePrompt:
    """The re-tokenised prompt with the needle at `depth`. Raises BadInput if the needle is not found in it."""
    start, room = insertion_point(builder, haystack, length, depth), _haystack_token_budget(builder, length)
    parts = [haystack.ids[:start], builder.needle_ids, haystack.ids[start:room], builder.suffix_ids]
    text = decode_tokens(builder.tokenizer, np.concatenate(parts))
    ids = np.concatenate([builder.prompt_prefix(haystack), tokenize_plain(builder.tokenizer, text)])
    span_start = fuzzy_span(ids, builder.scored_ids)
    if span_start is None:
        raise BadInput(
            f"mode wu cannot locate needle '{builder.name}': it is tokenised differently inside the prompt. "
            "Use --mode strict"
        )
    return NeedlePrompt(ids, span_start, span_start + len(builder.scored_ids), start / room)


def fuzzy_span(ids: Ids, needle: Ids) -> int | None:
    """Start of the first stretch of the needle's length that holds more than 0.9 of its set of tokens; None without."""
    needle_set = set(needle.tolist())
    for start in range(len(ids) - len(needle) + 1):
        if len(needle_set & set(ids[start : start + len(needle)].tolist())) > MIN_OVERLAP * len(needle_set):
            return start
    return None


def _haystack_token_budget(builder: NeedlePromptBuilder, length: int) -> int:
    """Haystack tokens in a context of `length` tokens."""
    room = length - RESERVED_TOKENS - len(builder.needle_ids)
    if room < 1:
        raise BadInput(
            f"context length {length} is too short for mode wu with needle '{builder.name}'. Use at least "
            f"{RESERVED_TOKENS + len(builder.needle_ids) + 1} tokens"
        )
    return room
