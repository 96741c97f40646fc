"""Prompts with a needle in a haystack, assembled from token ids, so the position of the needle is exact.

A prompt is: opening special tokens, haystack, needle, rest of the haystack, question. No text is decoded and tokenized
again.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from headscope.errors import BadInput
from headscope.prompts.needles import Needle
from headscope.prompts.special_tokens import chat_text
from headscope.prompts.texts import load_token_documents

Ids = npt.NDArray[np.int32]
"""Token ids [L]."""

Template = Literal["prefix", "plain", "chat", "published"]
"""The end of a prompt; published: the wording and the scored part of Wu et al.'s code (mode wu, template plain)."""

SENTENCE_END_PATTERN = re.compile(r"[^\sA-Z][.!?…]+[\"'’”)\]»_]*\s*$")
"""A full stop after a capital ends an abbreviation or a speaker's name, not a sentence."""
UNSPACED_END_PATTERN = re.compile(r"[。！？][」』”’）]*\s*$")
"""Scripts that put no space between sentences."""
BOUNDARY_TOKENS = 12
"""Tokens to decode on each side of a possible sentence start."""
HAYSTACK_PLACEHOLDER = "⟦haystack⟧"


@dataclass(frozen=True)
class NeedlePrompt:
    """A prompt [L], the span of the scored part of the needle, and the share of the haystack before the needle."""

    ids: Ids
    start: int
    end: int
    depth: float


class Haystack:
    """One document as tokens, with its sentence starts."""

    def __init__(self, name: str, ids: Sequence[int], tokenizer: Any):
        special = set(tokenizer.all_special_ids)
        opening = next((index for index, token in enumerate(ids) if token not in special), len(ids))
        self.name = name
        self.special_prefix = np.array(ids[:opening], np.int32)
        self.ids = np.array(ids[opening:], np.int32)
        self._tokenizer = tokenizer

    def sentence_start(self, target: int) -> int:
        """The start of the last sentence that begins at or before token `target`."""
        position = next(
            position for position in range(target, -1, -1) if position == 0 or self._starts_sentence(position)
        )
        while position > 0 and self._starts_sentence(position - 1):  # white space belongs to the later sentence
            position -= 1
        return position

    def _starts_sentence(self, position: int) -> bool:
        before = self.ids[max(0, position - BOUNDARY_TOKENS) : position]
        preceding_text = decode_tokens(self._tokenizer, before)
        joined_text = decode_tokens(
            self._tokenizer, self.ids[max(0, position - BOUNDARY_TOKENS) : position + BOUNDARY_TOKENS]
        )
        if not joined_text.startswith(preceding_text):  # a token boundary within a character
            return False
        spaced = preceding_text[-1:].isspace() or joined_text[len(preceding_text) : len(preceding_text) + 1].isspace()
        return bool(
            UNSPACED_END_PATTERN.search(preceding_text) or (spaced and SENTENCE_END_PATTERN.search(preceding_text))
        )

    def contains_text(self, fact: str) -> bool:
        """Whether the text contains these words."""
        return _normalize_words(fact) in self._normalized_text

    @cached_property
    def _normalized_text(self) -> str:
        return _normalize_words(decode_tokens(self._tokenizer, self.ids))


class NeedlePromptBuilder:
    """Builds the prompts of one needle with one tokenizer and template.

    `needle_ids` [N] are the needle's tokens; the first `cue_count` of them are not scored. `scored_ids` are the others
    or, if `is_published`, the tokens of the real needle alone, as Wu et al.'s code has them. `suffix_ids` follow the
    haystack: the question and, for a literal needle, its first `cue_count` tokens. The prompt of an indirect needle
    ends with its cue instead.
    """

    def __init__(self, needle: Needle, tokenizer: Any, template: Template):
        self.name = needle.name
        self.tokenizer = tokenizer
        self.needle_ids = tokenize_continuation(tokenizer, needle.text)
        opening = tokenize_continuation(tokenizer, needle.opening) if needle.opening else self.needle_ids[:0]
        shorter = min(len(opening), len(self.needle_ids) - 1)
        differ = np.flatnonzero(opening[:shorter] != self.needle_ids[:shorter])
        scored_whole = template in ("plain", "chat") and not needle.is_indirect
        self.cue_count = 0 if scored_whole else int(differ[0]) if len(differ) else shorter
        self.is_published = template == "published"
        self.scored_ids = self.needle_ids[self.cue_count :]
        if self.is_published:
            self.scored_ids = tokenize_plain(tokenizer, needle.real_needle or needle.fact)
        self.scored_text = decode_tokens(tokenizer, self.scored_ids).strip()
        self._is_chat = template == "chat"
        if self._is_chat:
            before, after = _split_chat_template(tokenizer, needle.question)
            self._prefix_ids, self.suffix_ids = tokenize_plain(tokenizer, before), tokenize_plain(tokenizer, after)
        else:
            request = "Based on the content of the book, " if self.is_published else "\n\n"
            question = tokenize_plain(tokenizer, f"{request}Question: {needle.question}\nAnswer:")
            answer_start = (
                tokenize_continuation(tokenizer, needle.cue)
                if needle.is_indirect
                else self.needle_ids[: self.cue_count]
            )
            self._prefix_ids, self.suffix_ids = (
                question[:0],
                np.append(question, answer_start if template == "prefix" else answer_start[:0]),
            )

    def haystack_length(self, haystack: Haystack, length: int) -> int:
        """Haystack tokens in a prompt of `length` tokens. Raises BadInput if there is no room for any."""
        room = length - len(self.prompt_prefix(haystack)) - len(self.needle_ids) - len(self.suffix_ids)
        if room < 1:
            raise BadInput(
                f"needle '{self.name}' and its question take {length - room} tokens, which leaves no room for a "
                f"haystack in a context of {length}. Use lengths of at least {length - room + 1}"
            )
        return room

    def insertion_point(self, haystack: Haystack, length: int, depth: float) -> int:
        """Haystack tokens before the needle: `depth` of them all, back to the start of a sentence."""
        return haystack.sentence_start(int(depth * self.haystack_length(haystack, length)))

    def prompt_with_needle(self, haystack: Haystack, length: int, depth: float) -> NeedlePrompt:
        """The prompt of exactly `length` tokens with the needle at `depth`."""
        prefix, haystack_length, insertion = (
            self.prompt_prefix(haystack),
            self.haystack_length(haystack, length),
            self.insertion_point(haystack, length, depth),
        )
        ids = np.concatenate(
            [
                prefix,
                haystack.ids[:insertion],
                self.needle_ids,
                haystack.ids[insertion:haystack_length],
                self.suffix_ids,
            ]
        )
        start, end = len(prefix) + insertion + self.cue_count, len(prefix) + insertion + len(self.needle_ids)
        return NeedlePrompt(ids, start, end, insertion / haystack_length)

    def control_prompts(self, haystack: Haystack, length: int, depths: Sequence[float]) -> list[NeedlePrompt]:
        """The control of the same length without the needle, with the span at its position, for every depth."""
        prefix, haystack_length = (
            self.prompt_prefix(haystack),
            self.haystack_length(haystack, length) + len(self.needle_ids),
        )
        ids = np.concatenate([prefix, haystack.ids[:haystack_length], self.suffix_ids])
        points = [self.insertion_point(haystack, length, depth) for depth in depths]
        return [
            NeedlePrompt(
                ids,
                len(prefix) + insertion + self.cue_count,
                len(prefix) + insertion + self.cue_count + len(self.scored_ids),
                insertion / self.haystack_length(haystack, length),
            )
            for insertion in points
        ]

    def prompt_prefix(self, haystack: Haystack) -> Ids:
        """Tokens before the haystack: opening special tokens, or the first part of the chat template."""
        return self._prefix_ids if self._is_chat else haystack.special_prefix


def load_haystacks(source: str, tokenizer: Any, count: int, length: int, seed: int) -> list[Haystack]:
    """The first `count` documents of the seeded source that hold `length` tokens, as haystacks.

    Raises BadInput, naming the longest document, when fewer do.
    """
    return [
        Haystack(document.name, document.ids, tokenizer)
        for document in load_token_documents(source, tokenizer, count, length, seed)
    ]


def tokenize_continuation(tokenizer: Any, text: str) -> Ids:
    """Tokens of a text that follows another sentence: with a space before it, unless the tokenizer brings its own."""
    bare_tokens = tokenize_plain(tokenizer, text)
    joined_text = decode_tokens(tokenizer, np.append(tokenize_plain(tokenizer, "so."), bare_tokens))
    return bare_tokens if joined_text.lower().endswith(f" {text}".lower()) else tokenize_plain(tokenizer, f" {text}")


def tokenize_plain(tokenizer: Any, text: str) -> Ids:
    """Tokens of a text without special tokens around it."""
    return np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32)


def decode_tokens(tokenizer: Any, ids: Ids) -> str:
    """The text of these tokens, exactly as the tokenizer wrote them."""
    text: str = tokenizer.decode(ids.tolist(), clean_up_tokenization_spaces=False)
    return text


def _split_chat_template(tokenizer: Any, question: str) -> tuple[str, str]:
    """What the model's chat template puts before the haystack, and the question with what comes after it."""
    alternative = "Use --template prefix or plain"
    prompt_text = chat_text(tokenizer, f"{HAYSTACK_PLACEHOLDER}\n\n{question}", alternative)
    before, _, after = prompt_text.partition(HAYSTACK_PLACEHOLDER)
    return before, after


def _normalize_words(text: str) -> str:
    return " ".join(re.findall(r"\w+", text.lower()))


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
