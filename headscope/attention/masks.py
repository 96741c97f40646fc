"""Which keys each query may see, as a family tells transformers' mask function: in O(Lk), never L x L.

What transformers passes from the mask function to the attention function is one tensor, [B|1, 1, 2, Lk|1] int32. In
its first row bits 1 and 2 of an entry are the role of a key, the others hold a window or chunk, the same in every
entry; the second row holds how many real keys came before the first, which a sliding cache has dropped.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

from headscope.errors import UnsupportedModel

REAL = 1
"""The key is not padding, nor an empty slot of a cache."""
QUERY = 2
"""The key's token is a query of this call."""
CHUNKED = 4
REACH = 8
STRANGE = -1
"""All there is in a mask of another kind, which is refused where a layer attends by it."""


class OtherMask(UnsupportedModel):
    """What reached the model is not the causal mask of one sequence: its caller's doing, or its own."""


@dataclass(frozen=True, eq=False)
class Seen:
    """What a mask says: the roles [B|1, Lk] of the keys, None where all are real and the last are the queries'.

    `dropped` [B|1] real keys came before the first of these.
    """

    roles: Tensor | None = None
    window: int | None = None
    chunk: int | None = None
    dropped: tuple[int, ...] = (0,)

    @classmethod
    def read(cls, mask: Tensor | None) -> "Seen":
        """Read what `mask` wrote. Raises UnsupportedModel for a mask that it did not write."""
        if mask is None:
            return cls()
        if mask.dtype != torch.int32 or mask.shape[1:3] != (1, 2):
            raise OtherMask("a custom 4-D attention mask reached the model; pass a 2-D padding mask or none")
        first = int(mask[0, 0, 0, 0])
        if first == STRANGE:
            raise UnsupportedModel(
                "its queries see other keys than the last ones: headscope measures causal attention, windows and chunks"
            )
        reach = first // REACH or None
        roles = mask[:, 0, 0] if mask.shape[-1] > 1 or first & (REAL | QUERY) else None
        dropped = tuple(mask[:, 0, 1, 0].tolist())
        return cls(roles, None, reach, dropped) if first & CHUNKED else cls(roles, reach, None, dropped)

    def positions(self, queries: int, keys: int, device: torch.device) -> Tensor:
        """Positions [1|B, Lq] of the queries, counted from the first real key."""
        if self.roles is None:
            end = self.dropped[0] + keys
            return torch.arange(end - queries, end, device=device)[None]
        before = torch.tensor(self.dropped, device=device)[:, None]
        counted = (before + (self.roles & REAL).cumsum(-1) - 1).clamp(min=0)
        return counted[(self.roles & QUERY).bool()].view(len(counted), -1)


def mask(
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
    """transformers' mask function: None for plain causal attention, else what `Seen` reads."""
    both_ways = mask_function is bidirectional_mask_function
    if not allow_is_causal_skip and q_length > 1 and not both_ways:
        if mask_function is causal_mask_function:
            raise UnsupportedModel("it computes with its attention mask, and so may change its weights by it")
        raise OtherMask(
            "packed sequences or a custom mask function reached the model; headscope measures one causal "
            "sequence a row, so pass each document as its own row"
        )
    reach = STRANGE if both_ways else _reach(mask_function, local_size, config, device)
    if reach == STRANGE:
        return _written(torch.full((1, 1), STRANGE), torch.zeros(1))
    offset = int(q_offset)
    seen = offset + q_length
    if kv_offset + kv_length == seen and (attention_mask is None or bool(attention_mask.all())):
        return _written(torch.full((1, 1), reach), torch.full((1,), kv_offset)) if reach or kv_offset else None
    if reach & CHUNKED and kv_offset:
        raise UnsupportedModel("chunked attention in a padded batch over a sliding cache; pass one sequence at a time")
    slots = torch.arange(kv_offset, kv_offset + kv_length, device=device)
    real = (slots < seen).expand(batch_size, -1)
    dropped = torch.full((batch_size,), kv_offset)
    if attention_mask is not None:
        padded = nn.functional.pad(attention_mask, (0, max(0, kv_offset + kv_length - attention_mask.shape[-1])))
        real = real & padded[:, slots].bool()
        dropped = attention_mask[:, :kv_offset].sum(-1)
    queries = (slots >= offset) & (slots < seen)
    return _written(REAL * real.int() + QUERY * queries.int() + reach, dropped)


def _written(entries: Tensor, dropped: Tensor) -> Tensor:
    """The tensor that `Seen.read` reads, from the entries [B|1, Lk|1] of its first row."""
    second = dropped.to(entries)[:, None].expand_as(entries)
    return torch.stack((entries, second), 1).to(torch.int32)[:, None]


def _reach(sees: Callable[..., Any], size: int | None, config: Any, device: torch.device | str) -> int:
    """The bits of a window or chunk of `size` keys, which the mask function is asked about: nothing is assumed."""
    if sees is causal_mask_function:
        return 0
    if size:
        rows = torch.arange(size, size + 2, device=device)  # at most one of them is the last of its chunk
        last, before, next_ = (sees(0, 0, rows, rows + by) for by in (1 - size, -size, 1))
        if bool((last & ~before & ~next_).all()):
            return REACH * size
        if getattr(config, "attention_chunk_size", None) == size:
            return REACH * size + CHUNKED
    return STRANGE
