"""The text that each token adds: joined, these texts are the document, byte for byte.

The bytes of byte-level tokenizers (GPT-2's kind, and ByT5's with one token per byte) are decoded incrementally: a
character that is split over tokens is stored with the last of them. For other tokenizers, the text of a token is what
decoding it after an ordinary token adds.
"""

import codecs
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
"""A token that stands for one byte without a character of its own."""

_PRINTABLE_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHER_BYTES = [byte for byte in range(256) if byte not in _PRINTABLE_BYTES]
_BYTE_BY_CHARACTER = {chr(byte): byte for byte in _PRINTABLE_BYTES} | {
    chr(256 + index): byte for index, byte in enumerate(_OTHER_BYTES)
}
"""GPT-2's characters for bytes, the inverse of transformers' `bytes_to_unicode`."""


def token_texts(tokenizer: Any, ids: Sequence[int]) -> tuple[list[str], list[bool]]:
    """The text that each token adds, and whether it is a special token; the text of a special token is its name.

    Bytes that form no character become U+FFFD on the last token before they prove invalid.
    """
    special = {
        *tokenizer.all_special_ids,
        *(token_id for token_id, token in _added_tokens(tokenizer).items() if token.special),
    }
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decode_token = _token_decoder(tokenizer)
    texts: list[str] = []
    for token in ids:
        if token in special:
            if texts:
                texts[-1] += decoder.decode(b"", final=True)
            texts.append(str(tokenizer.convert_ids_to_tokens(token)))
        else:
            texts.append(decoder.decode(decode_token(token)))
    if texts:
        texts[-1] += decoder.decode(b"", final=True)
    return texts, [token in special for token in ids]


def token_offsets(tokenizer: Any, text: str) -> list[tuple[int, int]] | None:
    """First character and the one after the last of each token of a text, tokenized without special tokens.

    Every token that holds a part of a character holds it whole. None if the tokenizer gives no offsets and its tokens
    do not add up to the text.
    """
    is_fast = getattr(tokenizer, "is_fast", False)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=is_fast, verbose=False)
    if "offset_mapping" in encoded:
        return [(int(first), int(end)) for first, end in encoded["offset_mapping"]]
    texts, _ = token_texts(tokenizer, encoded["input_ids"])
    if "".join(texts) != text:
        return None
    ends = [*accumulate(map(len, texts))]
    # A token without text is the start of the character that a later token completes.
    return [(start, max(end, start + 1)) for start, end in zip([0, *ends], ends, strict=False)]


def _token_decoder(tokenizer: Any) -> Callable[[int], bytes]:
    """A function from the next token, which is not special, to the bytes that it adds."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None and "ByteLevel" in repr(backend.decoder):
        return partial(_decode_byte_level, tokenizer, _added_tokens(tokenizer), _BYTE_BY_CHARACTER)
    if backend is None and _has_byte_tokens(tokenizer):
        return partial(
            _decode_byte_level, tokenizer, _added_tokens(tokenizer), {chr(byte): byte for byte in range(256)}
        )
    return _IncrementalDecoder(tokenizer).decode_token


def _has_byte_tokens(tokenizer: Any) -> bool:
    """Whether each token is one byte, named by the character of that number, as ByT5's are."""
    ids = tokenizer("é", add_special_tokens=False, verbose=False)["input_ids"]
    return [*tokenizer.convert_ids_to_tokens(ids)] == [chr(byte) for byte in "é".encode()]


def _decode_byte_level(
    tokenizer: Any, added_tokens: dict[int, Any], byte_by_character: Mapping[str, int], token: int
) -> bytes:
    if token in added_tokens:
        return str(added_tokens[token].content).encode()
    return bytes(byte_by_character[character] for character in tokenizer.convert_ids_to_tokens(token))


class _IncrementalDecoder:
    """Decodes a token after the last one that is not a byte token, and removes the text of that one."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._previous_ids: list[int] = []

    def decode_token(self, token: int) -> bytes:
        if byte := BYTE_TOKEN.fullmatch(str(self._tokenizer.convert_ids_to_tokens(token))):
            return bytes.fromhex(byte[1])
        previous_text, joined_text = (
            self._decode_ids(self._previous_ids),
            self._decode_ids([*self._previous_ids, token]),
        )
        self._previous_ids = [token]
        return (
            joined_text.removeprefix(previous_text)
            if joined_text.startswith(previous_text)
            else self._decode_ids([token])
        ).encode()

    def _decode_ids(self, ids: list[int]) -> str:
        text: str = self._tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return text


def _added_tokens(tokenizer: Any) -> dict[int, Any]:
    """The tokens that were added to the vocabulary, by id."""
    tokens: dict[int, Any] = tokenizer.added_tokens_decoder
    return tokens
