"""Trials as the public code of Wu et al. 2024 makes them, for comparison with its published lists of heads.

The haystack is cut 200 tokens short, the prompt is decoded and tokenised again, and the needle's span is the first
stretch of its length that holds nearly the same set of tokens; an answer runs for up to 50 steps, the line break that
ends it is scored, an end token is not looked for, and every repeated copy counts again. Not kept are faults: sentence
ends are found as everywhere in this probe, special tokens stand once at the start, and a span that is not found is an
error instead of a score of 0. The prompt's words are those of the template [ours].
"""

import numpy as np

from headscope.errors import BadInput
from headscope.forward.prefix_cache import Ids
from headscope.prompts.haystack import Haystack, NeedlePrompt, NeedlePromptBuilder, decoded, plain_ids

RESERVED = 200
"""Tokens that the haystack is cut short by."""
OVERLAP = 0.9
STEPS = 50


def place(prompter: NeedlePromptBuilder, haystack: Haystack, length: int, depth: float) -> int:
    """Haystack tokens before the needle; depth 1 is the very end. Raises BadInput for too short a context."""
    room = _room(prompter, length)
    return room if depth == 1 else haystack.sentence_start(int(depth * room))


def hidden(prompter: NeedlePromptBuilder, haystack: Haystack, length: int, depth: float) -> NeedlePrompt:
    """The re-tokenised prompt with the needle at `depth`."""
    at, room = place(prompter, haystack, length, depth), _room(prompter, length)
    text = decoded(
        prompter.tokenizer,
        np.concatenate([haystack.ids[:at], prompter.needle, haystack.ids[at:room], prompter.after]),
    )
    ids = np.concatenate([prompter.head(haystack), plain_ids(prompter.tokenizer, text)])
    start = fuzzy_span(ids, prompter.needle[prompter.given :])
    if start is None:
        raise BadInput(
            f"mode wu cannot find needle '{prompter.name}' again in its prompt, as the tokenizer writes it otherwise "
            "there: use --mode strict"
        )
    return NeedlePrompt(ids, start, start + len(prompter.needle) - prompter.given)


def fuzzy_span(ids: Ids, needle: Ids) -> int | None:
    """Where the first stretch of the needle's length begins that holds more than 0.9 of its set of tokens, if any."""
    wanted = set(needle.tolist())
    for start in range(len(ids) - len(needle) + 1):
        if len(wanted & set(ids[start : start + len(needle)].tolist())) > OVERLAP * len(wanted):
            return start
    return None


def _room(prompter: NeedlePromptBuilder, length: int) -> int:
    room = length - RESERVED - len(prompter.needle)
    if room < 1:
        raise BadInput(
            f"mode wu needs {RESERVED + len(prompter.needle) + 1} tokens or more of context for needle "
            f"'{prompter.name}', found {length}: use longer ones"
        )
    return room
