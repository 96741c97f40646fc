"""Encoding and decoding of attention masks: which keys each query sees, in O(Lk) memory instead of L x L.

transformers passes one tensor from the mask function to the attention function. headscope's is [B|1, 1, 2, Lk|1]
int32. In its first row, bits 1 and 2 of an entry are the role of a key; the other bits hold a window or chunk, the
same in every entry. Its second row holds the number of real keys before the first, which a sliding cache has dropped.
Of packed documents it has a third row, the number of each key's document. A dense mask of packed documents, [B|1, 1, L,
L], which a caller passes to the model, is decoded as well.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from headscope.errors import UnsupportedModel

REAL_KEY_BIT = 1
"""The key is neither padding nor an empty slot of a cache."""
QUERY_BIT = 2
"""The key's token is a query of this call."""
CHUNKED_BIT = 4
WINDOW_MULTIPLIER = 8
PAIRS_PER_TILE = 2**24
"""Pairs of a query and a key for which a mask function is evaluated at once."""
UNSUPPORTED_MASK_CODE = -1
"""Only entry of an unsupported mask. The attention function refuses it, so that unused masks do no harm."""
PADDING = -1
"""Number of the document of a key that is padding."""


class UnsupportedMask(UnsupportedModel):
    """The model or its caller passed a mask that is not the causal mask of one sequence, or of packed documents."""


@dataclass(frozen=True, eq=False)
class OpaqueMask:
    """An encoded mask for a model that converts or slices its mask, or adds a bias to it: it passes unchanged.

    `indices` [B, Lq, n] are the keys that an indexer chose, with which the model has combined the mask; -1 is none.
    """

    encoded: Tensor | None
    indices: Tensor | None = None
    ndim = 0
    dtype = torch.bool

    def to(self, *args: Any, **kwargs: Any) -> "OpaqueMask":
        return self

    def __getitem__(self, index: Any) -> "OpaqueMask":
        return self

    def __and__(self, indices: Tensor) -> "OpaqueMask":
        """The mask with the keys that the model's own code combines it with."""
        return replace(self, indices=indices)

    def encoded_on(self, device: torch.device) -> Tensor | None:
        """The encoded mask on a device."""
        return None if self.encoded is None else self.encoded.to(device)


@dataclass(frozen=True, eq=False)
class DecodedMask:
    """Content of an encoded mask.

    `key_roles` [B|1, Lk] are the roles of the keys; None if all keys are real and the last ones are the queries'.
    `dropped_keys` [B|1] is the number of real keys before the first. `documents` [B|1, Lk] are the numbers of the
    documents that are packed in a row of the batch, `PADDING` for padding; None if every row is one text.
    """

    key_roles: Tensor | None = None
    window: int | None = None
    chunk_size: int | None = None
    dropped_keys: tuple[int, ...] = (0,)
    documents: Tensor | None = None

    @classmethod
    def decode(cls, encoded_mask: Tensor | None) -> "DecodedMask":
        """Decode the result of `encode_mask`, or a dense mask of packed documents.

        Raises UnsupportedMask for another custom 4-D mask and for one that hides tokens inside the text from a layer
        with a window or chunks, and UnsupportedModel for one that is not causal. transformers counts hidden tokens in
        windows and chunks; the positions here skip them.
        """
        if encoded_mask is None:
            return cls()
        if not _is_encoded(encoded_mask):
            encoded_mask = _encode_dense_mask(encoded_mask)
        first = int(encoded_mask[0, 0, 0, 0])
        if first == UNSUPPORTED_MASK_CODE:
            raise UnsupportedModel(
                "its attention mask is not causal, sliding-window or chunked. Use a causal language model"
            )
        size = first // WINDOW_MULTIPLIER or None
        roles = encoded_mask[:, 0, 0] if encoded_mask.shape[-1] > 1 or first & (REAL_KEY_BIT | QUERY_BIT) else None
        dropped = tuple(encoded_mask[:, 0, 1, 0].tolist())
        documents = encoded_mask[:, 0, 2] if encoded_mask.shape[2] == 3 else None
        if size and roles is not None and documents is None and _has_gaps(roles, encoded_mask[:, 0, 1, :1]):
            kind = f"chunks of {size}" if first & CHUNKED_BIT else f"a window of {size}"
            raise UnsupportedMask(
                f"the attention mask hides tokens inside the text, and a layer has {kind} tokens, in which "
                "transformers counts hidden tokens and headscope does not. Remove these tokens from the text"
            )
        window, chunk_size = (None, size) if first & CHUNKED_BIT else (size, None)
        return cls(roles, window, chunk_size, dropped, documents)

    def sequences(self, batch_size: int) -> Iterator[tuple[int, Tensor]]:
        """The row of the batch and the keys, bool [Lk], of each text of the batch, in order: a row or a document."""
        assert self.key_roles is not None
        for row, roles in enumerate(self.key_roles.expand(batch_size, -1)):
            if self.documents is None:
                yield row, (roles & REAL_KEY_BIT).bool()
                continue
            documents = self.documents.expand(batch_size, -1)[row]
            yield from ((row, documents == number) for number in range(int(documents.max()) + 1))

    def query_positions(self, n_queries: int, n_keys: int, device: torch.device) -> Tensor:
        """Positions [1|B, Lq] of the queries, counted from the first real key, or the first of their document."""
        if self.key_roles is None:
            end = self.dropped_keys[0] + n_keys
            return torch.arange(end - n_queries, end, device=device)[None]
        if self.documents is not None:  # without a cache, so that all keys are those of queries
            slots = torch.arange(n_keys, device=device)
            is_first = self.documents.diff(prepend=self.documents[:, :1] - 1) != 0
            return slots - torch.where(is_first, slots, 0).cummax(-1).values
        before = torch.tensor(self.dropped_keys, device=device)[:, None]
        positions = (before + (self.key_roles & REAL_KEY_BIT).cumsum(-1) - 1).clamp(min=0)
        return positions[(self.key_roles & QUERY_BIT).bool()].view(len(positions), -1)


def encode_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    device: torch.device | str = "cpu",
    config: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """transformers' mask function: None for plain causal attention, otherwise the tensor that `DecodedMask` decodes.

    Packed documents, as by position_ids that restart, are encoded as documents. Raises UnsupportedModel for a model
    that computes with its mask, and UnsupportedMask for a custom mask function.
    """
    documents = None
    is_bidirectional = mask_function is bidirectional_mask_function
    if not allow_is_causal_skip and q_length > 1 and mask_function is causal_mask_function:
        raise UnsupportedModel(
            "its own code computes with the attention mask, so its attention weights may differ from those that "
            "headscope computes. Use another model"
        )
    if is_bidirectional:
        window_code = UNSUPPORTED_MASK_CODE
    elif allow_is_causal_skip:
        window_code = _encode_window(mask_function, local_size, config, device)
    else:
        queries, keys = (
            torch.arange(start, start + n, device=device)
            for start, n in ((int(q_offset), q_length), (kv_offset, kv_length))
        )
        if not _equals_causal_mask(mask_function, batch_size, queries, keys, local_size):
            documents = _find_documents(mask_function, batch_size, queries, keys, local_size)
            if documents is None:
                raise UnsupportedMask(
                    "the model got a custom mask function, or packed documents that it does not isolate by a causal "
                    "mask. Pass each document as its own row"
                )
        window_code = WINDOW_MULTIPLIER * (local_size or 0)
    if window_code == UNSUPPORTED_MASK_CODE:
        return _pack_mask(torch.full((1, 1), UNSUPPORTED_MASK_CODE), torch.zeros(1))
    if documents is not None:
        return _pack_documents(documents, window_code)
    offset = int(q_offset)
    end = offset + q_length
    if kv_offset + kv_length == end and (attention_mask is None or bool(attention_mask.all())):
        if not window_code and not kv_offset:
            return None
        return _pack_mask(torch.full((1, 1), window_code), torch.full((1,), kv_offset))
    if window_code & CHUNKED_BIT and kv_offset:
        raise UnsupportedModel(
            "chunked attention in a padded batch over a sliding cache is not supported. Pass one sequence at a time"
        )
    slots = torch.arange(kv_offset, kv_offset + kv_length, device=device)
    real = (slots < end).expand(batch_size, -1)
    dropped = torch.full((batch_size,), kv_offset)
    if attention_mask is not None:
        padded = nn.functional.pad(attention_mask, (0, max(0, kv_offset + kv_length - attention_mask.shape[-1])))
        real = real & padded[:, slots].bool()
        dropped = attention_mask[:, :kv_offset].sum(-1)
    queries = (slots >= offset) & (slots < end)
    return _pack_mask(REAL_KEY_BIT * real.int() + QUERY_BIT * queries.int() + window_code, dropped)


def encode_opaque_mask(
    *,
    mask_function: Callable[..., Any] = causal_mask_function,
    allow_is_causal_skip: bool = True,
    **kwargs: Any,
) -> OpaqueMask:
    """transformers' mask function of models that compute with their causal mask: an encoded mask that they cannot read.

    Such a model forbids the skip of a causal mask, which headscope encodes all the same.
    """
    allow_is_causal_skip |= mask_function is causal_mask_function
    encoded = encode_mask(mask_function=mask_function, allow_is_causal_skip=allow_is_causal_skip, **kwargs)
    return OpaqueMask(encoded)


def with_window(encoded_mask: Tensor | None, window: int, device: torch.device | str) -> Tensor:
    """An encoded mask that has no window, restricted to a window of the last keys of each query."""
    if encoded_mask is None:
        return _pack_mask(torch.full((1, 1), WINDOW_MULTIPLIER * window, device=device), torch.zeros(1))
    windowed = encoded_mask.clone() if _is_encoded(encoded_mask) else _encode_dense_mask(encoded_mask)
    windowed[:, :, 0] += WINDOW_MULTIPLIER * window
    return windowed


def _has_gaps(roles: Tensor, dropped_keys: Tensor) -> bool:
    """Whether keys [B|1, Lk] between two real ones are not real, also after dropped real keys [B|1, 1]."""
    real = (roles & REAL_KEY_BIT).int()
    is_inside = (real.cumsum(-1) + dropped_keys > 0) & (real.flip(-1).cumsum(-1).flip(-1) > 0)
    return bool((is_inside & (real == 0)).any())


def _pack_mask(role_entries: Tensor, dropped_keys: Tensor) -> Tensor:
    """The tensor that `DecodedMask.decode` reads, from the entries [B|1, Lk|1] of its first row."""
    second = dropped_keys.to(role_entries)[:, None].expand_as(role_entries)
    return torch.stack((role_entries, second), 1).to(torch.int32)[:, None]


def _encode_window(mask_function: Callable[..., Any], size: int | None, config: Any, device: torch.device | str) -> int:
    """The bits of a window or chunk of `size` keys, found by evaluating the mask function."""
    if mask_function is causal_mask_function:
        return 0
    if size:
        try:
            has_window = _has_window(mask_function, size, "cpu")  # nothing waits for a GPU
        except RuntimeError:  # the function of chunks has a tensor on the model's device
            has_window = _has_window(mask_function, size, device)
        if has_window:
            return WINDOW_MULTIPLIER * size
        if getattr(config, "attention_chunk_size", None) == size:
            return WINDOW_MULTIPLIER * size + CHUNKED_BIT
    return UNSUPPORTED_MASK_CODE


def _has_window(mask_function: Callable[..., Any], size: int, device: torch.device | str) -> bool:
    """Whether a mask function shows a query the last `size` keys and no other."""
    rows = torch.arange(size, size + 2, device=device)  # at most one of them is the last of its chunk
    last, before, next_ = (mask_function(0, 0, rows, rows + offset) for offset in (1 - size, -size, 1))
    return bool((last & ~before & ~next_).all())


def _equals_causal_mask(
    mask_function: Callable[..., Any],
    batch_size: int,
    queries: Tensor,
    keys: Tensor,
    window: int | None,
    documents: Tensor | None = None,
) -> bool:
    """Whether a mask function shows every query exactly the keys up to its own, or those in its window.

    With `documents` [B, Lk], those of its document, unless it is padding. Gemma 4 12B combines the causal mask with one
    for images, which text leaves empty. All pairs are compared, in tiles: that costs far less than the attention.
    """
    for rows in torch.split(queries[:, None], max(1, PAIRS_PER_TILE // len(keys))):
        expected = keys <= rows
        if window:
            expected &= keys > rows - window
        for batch in range(batch_size):
            agrees = mask_function(batch, 0, rows, keys) == expected
            if documents is not None:
                own = documents[batch, rows]
                in_document = expected & (documents[batch] == own)
                agrees = (mask_function(batch, 0, rows, keys) == in_document) | (own == PADDING)
            if not bool(agrees.all()):
                return False
    return True


def _find_documents(
    mask_function: Callable[..., Any], batch_size: int, queries: Tensor, keys: Tensor, window: int | None
) -> Tensor | None:
    """The documents [B, L] of a mask function that shows every query the keys of its document, up to its own and in
    its window; a token that does not see itself is padding. None for other functions."""
    if not torch.equal(queries, keys):
        return None
    documents = torch.full((batch_size, len(keys)), PADDING, device=keys.device)
    for batch, numbers in enumerate(documents):
        is_real = mask_function(batch, 0, keys, keys)
        is_first = is_real.clone()
        is_first[1:] &= ~mask_function(batch, 0, keys[1:], keys[:-1])
        numbers[is_real] = is_first.cumsum(0)[is_real] - 1
    is_packed = _equals_causal_mask(mask_function, batch_size, queries, keys, window, documents)
    return documents if is_packed and bool((documents != PADDING).any(1).all()) else None


def _is_encoded(mask: Tensor) -> bool:
    """Whether a mask is a result of `encode_mask`, not a dense one."""
    return mask.dtype == torch.int32 and mask.shape[1:3] in ((1, 2), (1, 3))


def _encode_dense_mask(mask: Tensor) -> Tensor:
    """Encode a dense mask of packed documents: True or 0 shows a key, False or the lowest number hides it.

    Raises UnsupportedMask for a mask that is not causal within blocks of consecutive tokens along its diagonal.
    """
    is_shown = mask if mask.dtype == torch.bool else mask == 0
    is_two_valued = mask.dtype == torch.bool or (
        mask.is_floating_point() and bool((is_shown | (mask <= torch.finfo(mask.dtype).min / 2)).all())
    )
    documents = None
    if is_two_valued and mask.dim() == 4 and mask.shape[1] == 1 and mask.shape[2] == mask.shape[3]:
        slots = torch.arange(mask.shape[-1], device=mask.device)
        documents = _find_documents(
            lambda batch, head, queries, keys: is_shown[batch, 0, queries, keys], len(mask), slots, slots, None
        )
    if documents is None:
        raise UnsupportedMask(
            "the model got a custom 4-D attention mask that is not causal within documents along its diagonal. Pass a "
            "2-D padding mask or none, or isolate packed documents by a causal mask with one block for each"
        )
    return _pack_documents(documents, 0)


def _pack_documents(documents: Tensor, window_code: int) -> Tensor:
    """The tensor that `DecodedMask.decode` reads, of documents [B|1, L] all of whose tokens are queries."""
    roles = REAL_KEY_BIT * (documents != PADDING).int() + QUERY_BIT + window_code
    return torch.stack((roles, torch.zeros_like(roles), documents.int()), 1)[:, None]
