"""What each token adds to a text: pieces that joined are the text, byte for byte.

Tokenizers that cut bytes are read as bytes, so that a character that is split over tokens comes with the last of them;
others are asked what a token adds after an ordinary one.
"""

import codecs
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from transformers.convert_slow_tokenizer import bytes_to_unicode

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A token that stands for one byte, where a tokenizer has no other for it."""

_BYTE_BY_CHARACTER = {character: byte for byte, character in bytes_to_unicode().items()}


def token_texts(tokenizer: Any, ids: Sequence[int]) -> tuple[list[str], list[bool]]:
    """The text that each token adds, and whether it is a special token, which is told by its name.

    Bytes that are no character show as U+FFFD, on the last token before that is known.
    """
    special = {*tokenizer.all_special_ids, *(at for at, token in _added_tokens(tokenizer).items() if token.special)}
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    told: list[str] = []
    read = _token_decoder(tokenizer)
    for token in ids:
        if token in special:
            if told:
                told[-1] += decoder.decode(b"", final=True)
            told.append(str(tokenizer.convert_ids_to_tokens(token)))
        else:
            told.append(decoder.decode(read(token)))
    if told:
        told[-1] += decoder.decode(b"", final=True)
    return told, [token in special for token in ids]


def _token_decoder(tokenizer: Any) -> Callable[[int], bytes]:
    """What the next token that is not special adds, in bytes."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and "ByteLevel" in repr(backend.decoder):
        return partial(_decode_byte_level, tokenizer, _added_tokens(tokenizer))
    return _IncrementalDecoder(tokenizer).decode_token


def _decode_byte_level(tokenizer: Any, added_tokens: dict[int, Any], token: int) -> bytes:
    if token in added_tokens:
        return str(added_tokens[token].content).encode()
    return bytes(_BYTE_BY_CHARACTER[character] for character in tokenizer.convert_ids_to_tokens(token))


class _IncrementalDecoder:
    """Decodes a token after the last one that is not a byte, and takes off what that one is alone."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._previous_ids: list[int] = []

    def decode_token(self, token: int) -> bytes:
        if byte := BYTE_TOKEN.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))):
            return bytes.fromhex(byte[1])
        alone, both = self._decode_ids(self._previous_ids), self._decode_ids([*self._previous_ids, token])
        self._previous_ids = [token]
        return (both.removeprefix(alone) if both.startswith(alone) else self._decode_ids([token])).encode()

    def _decode_ids(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


def _added_tokens(tokenizer: Any) -> dict[int, Any]:
    """The tokens that were added to the vocabulary, which are not cut like others."""
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    return added
