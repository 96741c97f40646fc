"""A prompt with named spans in the tokens of one model: which token belongs to which span."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headscope.base.user_input import quote
from headscope.errors import BadInput, first_line
from headscope.prompts.pairs import continuation_tokens
from headscope.prompts.spans import (
    FIRST,
    GENERATED,
    IMAGE,
    REST,
    TEMPLATE,
    MarkedText,
    SpanPrompt,
    align_images,
    process_images,
)
from headscope.prompts.special_tokens import leading_special_tokens
from headscope.prompts.token_text import token_offsets

BoolArray = npt.NDArray[np.bool_]
PLACEHOLDER = "\ue000{}\ue001"
"""Stands for the content of a message in a chat template."""


@dataclass(frozen=True, eq=False)
class SpanTokens:
    """Tokens of a prompt and of its continuation, and masks [L] of its spans.

    `spans` is a partition: every token belongs to one. `messages` are the single messages of a chat whose role occurs
    more than once: "user 1", "user 2". The last L - `prompt_length` tokens follow the prompt. `cut_tokens` says of each
    token that lies in two spans, other than by white space, to which of them it was counted. `wrong` are the tokens of
    the wrong continuation.
    """

    ids: list[int]
    spans: Mapping[str, BoolArray]
    messages: Mapping[str, BoolArray]
    prompt_length: int
    cut_tokens: tuple[str, ...] = ()
    wrong: tuple[int, ...] = ()

    def extended(self, new_ids: Sequence[int]) -> "SpanTokens":
        """The tokens with generated ones after them."""
        new = np.arange(len(self.ids) + len(new_ids)) >= len(self.ids)
        spans = {name: np.append(mask, [False] * len(new_ids)) for name, mask in self.spans.items()}
        messages = {name: np.append(mask, [False] * len(new_ids)) for name, mask in self.messages.items()}
        spans = {**spans, GENERATED: new | spans.get(GENERATED, False)} if len(new_ids) else spans
        return SpanTokens([*self.ids, *new_ids], spans, messages, self.prompt_length, self.cut_tokens, self.wrong)


def tokenize_spans(tokenizer: Any, prompt: SpanPrompt, processor: Any = None) -> SpanTokens:
    """The prompt in tokens, after the tokenizer's leading special tokens or in its chat template.

    A prompt with images needs the model's `processor`; the tokens that stand for an image are the span `image`.

    A token in two spans belongs to that with more of its characters, or to the later one. Position 0 is `first`. Raises
    BadInput naming the prompt's location for a span without tokens, a chat template that fails or changes a message,
    and a continuation that merges with the last token of the prompt.
    """
    text, by_message = _render_chat(tokenizer, prompt, processor) if prompt.messages else (prompt.marked, {})
    encoded = [*tokenizer(text.text, add_special_tokens=False, verbose=False)["input_ids"]]
    offsets = token_offsets(tokenizer, text.text)
    if offsets is None:
        raise BadInput(f"{prompt.location}: the tokenizer does not say which tokens hold a text. Use another tokenizer")
    leading = [] if prompt.messages else leading_special_tokens(text.text, tokenizer)
    names, text_labels, cut = _label_tokens(text, offsets, prompt.location)
    messages = {name: _character_mask(offsets, *ends, len(leading)) for name, ends in by_message.items()}
    if prompt.images:
        expanded, _ = process_images(processor, prompt, text.text)
        source = align_images(encoded, expanded, processor.image_token_id, prompt.location)
        names.append(IMAGE)
        text_labels = [
            text_labels[place] if place >= 0 else names.index(IMAGE if token == processor.image_token_id else TEMPLATE)
            for place, token in zip(source, expanded, strict=True)
        ]
        messages = {name: mask[source] & (np.array(source) >= 0) for name, mask in messages.items()}
        encoded = expanded
    prefix = [names.index(TEMPLATE)] * len(leading)
    labels = np.array([*prefix, *text_labels], np.int64)
    if not len(labels):
        raise BadInput(f"{prompt.location}: the prompt has no token. Write a longer text")
    has_token = {names[label] for label in labels[1:]}
    roles = [role for role, _ in prompt.messages]  # marks may cover a whole message
    if missing := [name for name in names if name not in (*has_token, *roles, REST, TEMPLATE)]:
        is_only = names[labels[0]] == missing[0]
        reason = "its only token is the first of the prompt" if is_only else "it holds no whole token"
        raise BadInput(f"{prompt.location}: span '{missing[0]}' has no token: {reason}. Give it more text")
    is_first = np.arange(len(labels)) == 0
    masks = {name: (labels == number) & ~is_first for number, name in enumerate(names)}
    order = [TEMPLATE, *(name for name in names if name not in (REST, TEMPLATE)), REST]
    spans = {FIRST: is_first, **{name: masks[name] for name in order if masks[name].any()}}
    messages = {name: mask & ~is_first for name, mask in messages.items()}
    location = prompt.location
    wrong = _continuation(tokenizer, text.text, prompt.wrong, location) if prompt.wrong else []
    tokens = SpanTokens([*leading, *encoded], spans, messages, len(labels), tuple(cut), tuple(wrong))
    if not prompt.continuation:
        return tokens
    return tokens.extended(_continuation(tokenizer, text.text, prompt.continuation, location))


def _label_tokens(
    text: MarkedText, offsets: Sequence[tuple[int, int]], location: str
) -> tuple[list[str], list[int], list[str]]:
    """Names of spans, the number of its span for every token, and what was done with tokens in two spans."""
    names = [*dict.fromkeys([REST, TEMPLATE, *(name for name, *_ in text.spans)])]
    by_character = np.zeros(len(text.text) + 1, np.int64)
    for name, start, end in text.spans:
        by_character[start:end] = names.index(name)
    labels, cut = [], []
    for start, end in offsets:
        inside = by_character[start : max(end, start + 1)]
        counts = np.bincount(inside)
        best = np.flatnonzero(counts == counts.max())
        label = int(best[0]) if len(best) == 1 else int(inside[-1])
        labels.append(label)
        lost = "".join(text.text[start + at] for at in np.flatnonzero(inside != label))
        if lost.strip():  # white space may belong to the token of the next word
            used = dict.fromkeys(inside.tolist())
            both = " and ".join(f"'{names[number]}'" for number in used)
            cut.append(f"{location}: token {quote(text.text[start:end])} lies in {both} and counts as '{names[label]}'")
    return names, labels, cut


def _character_mask(offsets: Sequence[tuple[int, int]], start: int, end: int, leading: int) -> BoolArray:
    """Mask of the tokens most of whose characters lie from `start` to `end`."""
    inside = [2 * (min(last, end) - max(first, start)) >= max(last - first, 1) for first, last in offsets]
    return np.array([False] * leading + inside, dtype=bool)


def _continuation(tokenizer: Any, text: str, continuation: str, location: str) -> list[int]:
    new = continuation_tokens(tokenizer, text, continuation)
    if new is None or len(new) == 0:
        raise BadInput(
            f"{location}: the continuation {quote(continuation)} merges with the last token of the "
            "prompt. Move the space at the end of the prompt to its start"
        )
    return [int(token) for token in new]


# Chat templates ----------------------------------------------------------------------------------------------------


def image_inputs(tokenizer: Any, processor: Any, prompt: SpanPrompt) -> Mapping[str, Any]:
    """What a model reads of the images beside the token ids, such as pixel values."""
    text, _ = _render_chat(tokenizer, prompt, processor)
    return process_images(processor, prompt, text.text)[1]


def _render_chat(
    tokenizer: Any, prompt: SpanPrompt, processor: Any = None
) -> tuple[MarkedText, dict[str, tuple[int, int]]]:
    """The messages in the tokenizer's chat template with spans by role and mark, and the ends of single messages.

    The text of the template comes from rendering placeholders in place of the contents, so that a content that also
    occurs in the template is found where it belongs.
    """
    pieces = _template_pieces(tokenizer, prompt, processor)
    text = _apply_template(tokenizer, prompt, [part.text for _, part in prompt.messages], processor)
    spans: list[tuple[str, int, int]] = []
    by_message: dict[str, tuple[int, int]] = {}
    position = 0
    for number, (role, part) in enumerate(prompt.messages):
        start = position + len(pieces[number])
        variants = (part.text, part.text.strip(), part.text.rstrip(), part.text.lstrip())
        contents = (
            variant for variant in variants if text.startswith(pieces[number] + variant + pieces[number + 1], position)
        )
        if (content := next(contents, None)) is None:
            raise BadInput(
                f"{prompt.location}: the chat template changes message {number + 1} ({role}). Use 'segments'"
            )
        end, shift = start + len(content), start - part.text.index(content)
        spans += [(TEMPLATE, position, start), (role, start, end)]
        spans += [(name, max(start, shift + first), min(end, shift + last)) for name, first, last in part.spans]
        if name := prompt.message_names[number]:
            by_message[name] = start, end
        position = end
    return MarkedText(text, (*spans, (TEMPLATE, position, len(text)))), by_message


def _template_pieces(tokenizer: Any, prompt: SpanPrompt, processor: Any) -> list[str]:
    """The text of the template before each message and after the last. Raises BadInput if it drops a message."""
    placeholders = [PLACEHOLDER.format(number) for number in range(len(prompt.messages))]
    rest, pieces = _apply_template(tokenizer, prompt, placeholders, processor), []
    for number, placeholder in enumerate(placeholders):
        piece, separator, rest = rest.partition(placeholder)
        if not separator:
            role = prompt.messages[number][0]
            raise BadInput(
                f"{prompt.location}: the chat template drops message {number + 1} ({role}). Remove it or use 'segments'"
            )
        pieces.append(piece)
    return [*pieces, rest]


def _apply_template(tokenizer: Any, prompt: SpanPrompt, contents: Sequence[str], processor: Any) -> str:
    template = getattr(tokenizer, "chat_template", None) or getattr(processor, "chat_template", None)
    if not template:
        raise BadInput(f"{prompt.location}: the model's tokenizer has no chat template. Use 'segments' or 'text'")
    roles = [role for role, _ in prompt.messages]
    messages: list[dict[str, Any]] = [
        {"role": role, "content": text} for role, text in zip(roles, contents, strict=True)
    ]
    if prompt.images:  # templates of vision-language models read the parts of a message
        for message in messages:
            message["content"] = [{"type": "text", "text": message["content"]}]
        for image in prompt.images:
            messages[image.message]["content"].insert(0, {"type": "image"})
    options: dict[str, Any] = {"tokenize": False, "add_generation_prompt": roles[-1] != "assistant"}
    if not getattr(tokenizer, "chat_template", None):
        options["chat_template"] = template
    try:
        return str(tokenizer.apply_chat_template(messages, **options))
    except Exception as error:  # a template is a Jinja program of the checkpoint, which may raise any error
        raise BadInput(
            f"{prompt.location}: the chat template fails ({first_line(error)}). Change the messages, or use 'segments'"
        ) from error
