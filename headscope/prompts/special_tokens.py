"""The special tokens of a prompt: the tokenizer's, those in the text, those of a chat template, and a BOS token."""

import logging
from collections.abc import Sequence
from typing import Any, Literal

from headscope.errors import BadInput, first_line

log = logging.getLogger("headscope")


def leading_special_tokens(text: str, tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before a text."""
    with_special = list(tokenizer(text[:64], verbose=False)["input_ids"])
    plain = list(tokenizer(text[:64], add_special_tokens=False, verbose=False)["input_ids"])
    starts = range(len(with_special) - len(plain) + 1)
    return with_special[: next((start for start in starts if with_special[start : start + len(plain)] == plain), 0)]


def warn_about_repeated_bos(tokenizer: Any, sequences: Sequence[Sequence[int]], noun: str) -> None:
    """Warn in one line if token sequences begin twice with the tokenizer's leading special tokens, the second time from
    the text.

    `noun` names the sequences: "prompts".
    """
    leading = leading_special_tokens("a", tokenizer)
    count = len(leading)
    repeats = [bool(leading) and [*ids[count : 2 * count]] == leading for ids in sequences]
    if any(repeats):
        name = "".join(map(str, tokenizer.convert_ids_to_tokens(leading)))
        log.warning(
            "%d of %d %s begin with '%s', which the tokenizer adds by itself: the model reads it twice. Remove it from "
            "the text",
            *(sum(repeats), len(sequences), noun, name),
        )


def chat_text(tokenizer: Any, message: str, alternative: str) -> str:
    """A user's message in the chat template of the tokenizer, up to the start of the answer, with its special tokens.

    Raises BadInput, whose text ends with `alternative`, if there is no template, or if it fails or drops the message.
    """
    if not getattr(tokenizer, "chat_template", None):
        raise BadInput(f"the model's tokenizer has no chat template. {alternative}")
    messages = [{"role": "user", "content": message}]
    try:
        text = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # a template is a small program and fails as it likes
        raise BadInput(f"the model's chat template fails ({first_line(error)}). {alternative}") from error
    if not all(word in text for word in message.split()):
        raise BadInput(f"the model's chat template drops the user message. {alternative}")
    return text


BosChoice = Literal["auto", "yes", "no"]


def with_bos(tokenizer: Any, choice: BosChoice) -> Any:
    """The tokenizer (auto), or one that puts its BOS token (yes) or no special token (no) before every text.

    With yes, a tokenizer that already begins with special tokens keeps them. Raises BadInput if it has no BOS token.
    """
    if choice == "auto":
        return tokenizer
    leading = leading_special_tokens("a", tokenizer) if choice == "yes" else []
    if choice == "yes" and not leading:
        if tokenizer.bos_token_id is None:
            raise BadInput(
                "bos is 'yes', but the model's tokenizer has no BOS token. Use auto, and write a special token at the "
                "start of the prompt"
            )
        leading = [int(tokenizer.bos_token_id)]
    return _TokenizerWithBos(tokenizer, leading)


def opening_tokens(tokenizer: Any) -> list[str]:
    """The special tokens before every text, as text: [] or, for example, ["<s>"]."""
    return [str(token) for token in tokenizer.convert_ids_to_tokens(leading_special_tokens("a", tokenizer))]


class _TokenizerWithBos:
    """A tokenizer that puts `leading` before every text, in place of its own special tokens."""

    def __init__(self, tokenizer: Any, leading: list[int]):
        self._tokenizer, self._leading = tokenizer, leading

    def __call__(self, text: str, *, add_special_tokens: bool = True, **options: Any) -> Any:
        encoded = self._tokenizer(text, add_special_tokens=False, **options)
        return {"input_ids": [*self._leading, *encoded["input_ids"]]} if add_special_tokens else encoded

    def __len__(self) -> int:
        return len(self._tokenizer)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_tokenizer":  # copies and pickles look for their own methods
            raise AttributeError(name)
        return getattr(self._tokenizer, name)
