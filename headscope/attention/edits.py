"""Edits of attention heads in three stages of one layer's pass, and the one place where they are composed.

(a) inputs: q, k and v. (b) logits: uniform attention, then biases, which add up, then choices of keys, which intersect,
then weights of another run. (c) outputs: z. What a later stage sees is what the earlier ones left. Edits of different
stages compose, whatever the order in which they were registered. Two edits of one tensor, head and token are refused.

Axes: B sequences of the batch, H query heads, G KV groups, Lq queries, Lk keys, d head dimension, dv value dimension.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from headscope.attention.cuda import without_waiting
from headscope.attention.record import LogitEdit, LogitKind
from headscope.errors import BadInput

Target = Literal["q", "k", "v", "qkv", "logits", "z"]
"""What an edit changes: one input of the kernel, all three together, the logits, or the head outputs."""
INPUTS: tuple[Literal["q", "k", "v"], ...] = ("q", "k", "v")

prompt_length: ContextVar[int | None] = ContextVar("prompt_length", default=None)
"""The number of tokens of the prompt in the passes that run, if these passes know it: without the answer's tokens, and
the whole text where it is read in chunks."""


@contextmanager
def knowing_prompt_length(tokens: int) -> Iterator[None]:
    """Let the passes inside the `with` know the length of their prompt, unless an outer context knows it."""
    token = prompt_length.set(tokens) if prompt_length.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            prompt_length.reset(token)


@dataclass(frozen=True, eq=False)
class Place:
    """Where the vectors [n, L, d] that a kind changes come from.

    `target` is the tensor. `heads` [n] are the query heads, of a KV group its first; `head_count` is H. `sequences` [n]
    are their indices in the batch, `tokens` [L] the numbers of the tokens in their text, all on the CPU; `positions`
    [1|B, L], on the device of the vectors, are those of the model.
    """

    layer: int
    target: str
    heads: Tensor
    head_count: int
    sequences: Tensor
    tokens: Tensor
    positions: Tensor

    def rows_of(self, values: Tensor) -> Tensor:
        """The entries of `values` [H or G, ...] that belong to the heads, [n, ...]."""
        return values[without_waiting(values.device, self.heads * len(values) // self.head_count)]

    def positions_of(self) -> Tensor:
        """The model's positions of every vector, [n, L]."""
        if len(self.positions) == 1:
            return self.positions.expand(len(self.sequences), -1)
        return self.positions[without_waiting(self.positions.device, self.sequences)]


class TensorKind:
    """What an edit does with q, k, v or z: `kind(t [n, L, d], place)` returns the new values, of the same shape."""

    name: ClassVar[Any]
    """The name in labels."""
    needs_whole_text: ClassVar[Any] = False
    """Whether it is defined on a whole text only, not on tokens after a cache."""

    def __call__(self, t: Tensor, place: Place) -> Tensor:
        raise NotImplementedError

    def has_values_for(self, tokens: Tensor) -> Tensor:
        """For which tokens [L] it has new values, bool; the others keep theirs."""
        return torch.ones_like(tokens, dtype=torch.bool)


class InputsKind:
    """What an edit does with q, k and v of one unit together: q [B, n, Lq, d], k [B, 1, Lk, d], v [B, 1, Lk, dv]."""

    name: ClassVar[Any]
    needs_whole_text: ClassVar[Any] = False

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> tuple[Tensor, ...]:
        raise NotImplementedError


Kind = TensorKind | InputsKind | LogitKind


@dataclass(eq=False)
class TokenSet:
    """Tokens of a text: all (None), a range of numbers, or single numbers. Negative ones count from the prompt's end.

    `prompt_length` is that of the passes, if it is known beforehand; else the pass that starts a text sets it.
    """

    tokens: slice | tuple[int, ...] | None = None
    prompt_length: int | None = None
    is_used: bool = False
    """Whether a pass had one of the tokens."""
    name: str = ""
    """The tokens in messages."""
    _lengths: dict[int, int] = field(default_factory=dict)

    @property
    def counts_from_end(self) -> bool:
        """Whether a number is negative."""
        if isinstance(self.tokens, slice):
            return any(end is not None and end < 0 for end in (self.tokens.start, self.tokens.stop))
        return any(token < 0 for token in self.tokens or ())

    def contains(self, tokens: Tensor, length: int | None) -> Tensor:
        """Which of the tokens [L] of a text are in the set, bool; its prompt has `length` tokens."""
        if self.tokens is None:
            return torch.ones_like(tokens, dtype=torch.bool)
        if self.counts_from_end and length is None:
            raise BadInput(f"tokens {self} count from the end of a prompt of unknown length. Count them from its start")
        if isinstance(self.tokens, slice):  # an end beyond the prompt names tokens after it; an open one does not
            first, stop = (
                end if end is None or end >= 0 else max(0, end + (length or 0))
                for end in (self.tokens.start, self.tokens.stop)
            )
            stop = length if stop is None else stop
            is_before_stop = torch.ones_like(tokens, dtype=torch.bool) if stop is None else tokens < stop
            return (tokens >= (first or 0)) & is_before_stop
        numbers = [token + (length or 0) if token < 0 else token for token in self.tokens]
        return torch.isin(tokens, torch.tensor(numbers, dtype=torch.long, device=tokens.device))

    def length_in(self, sequence: int, tokens: int, is_start: bool) -> int | None:
        """The prompt's length in a pass that reads a sequence up to `tokens` tokens; `is_start`: from its first."""
        known = self.prompt_length if prompt_length.get() is None else prompt_length.get()
        if known is not None:
            return known
        if is_start:
            self._lengths[sequence] = tokens
        return self._lengths.get(sequence)

    def __str__(self) -> str:
        if self.name:
            return self.name
        if self.tokens is None:
            return "all"
        if isinstance(self.tokens, slice):
            return ":".join("" if end is None else str(end) for end in (self.tokens.start, self.tokens.stop))
        return ",".join(map(str, self.tokens))


@dataclass(frozen=True, eq=False)
class LayerEdit:
    """One kind of change of some heads of one layer, in some sequences of the batch, at some tokens.

    Tokens are those of the queries for q, logits and z, and those of the keys for k and v. An edit of the keys of one
    query head does not change those of the other heads in its KV group.
    """

    kind: Kind
    target: Target
    heads: tuple[int, ...]
    tokens: TokenSet
    label: str
    sequences: range | None = None
    """Sequences of the batch; None is all."""
    layer: int = 0
    """Index of the attention layer."""

    @property
    def tensors(self) -> tuple[str, ...]:
        """The tensors that the edit owns."""
        return INPUTS if self.target == "qkv" else (self.target,)


@dataclass(frozen=True, eq=False)
class LayerInputs:
    """The inputs of one layer's kernel before any edit, of B sequences without padding.

    q [B, H, Lq, d], k [B, G, Lk, d], v [B, G, Lk, dv]; `positions` [1|B, Lq] are those of the queries for the model.
    k[:, :, 0] is key number `first_key`. `first_sequence` is the number of the first sequence in the batch.
    """

    layer: int
    q: Tensor
    k: Tensor
    v: Tensor
    positions: Tensor
    first_key: int = 0
    first_sequence: int = 0

    @property
    def key_tokens(self) -> Tensor:
        """Numbers of the keys' tokens, [Lk], on the CPU."""
        return self.first_key + torch.arange(self.k.shape[2])

    @property
    def query_tokens(self) -> Tensor:
        """Numbers of the queries' tokens, [Lq], on the CPU."""
        return self.key_tokens[self.k.shape[2] - self.q.shape[2] :]

    @property
    def key_positions(self) -> Tensor:
        """The model's positions of the keys, [1|B, Lk]; the last key is at the position of the last query."""
        keys = self.k.shape[2]
        return self.positions[:, -1:] - (keys - 1) + torch.arange(keys, device=self.positions.device)

    @property
    def is_start(self) -> bool:
        """Whether the pass reads its text from the first token."""
        return self.first_key == 0 and self.q.shape[2] == self.k.shape[2]


class LayerEdits:
    """The edits of one layer in one pass: which tokens of which heads each kind changes. Raises BadInput for conflicts.

    Masks are computed on the CPU, so that nothing waits for the device.
    """

    def __init__(self, edits: Sequence[LayerEdit], inputs: LayerInputs):
        self.inputs = inputs
        self._owners: dict[str, list[tuple[LayerEdit, Tensor]]] = {}
        self._owned: dict[str, Tensor] = {}
        self._masks: dict[str, dict[Any, Tensor]] = {}
        self._joint: list[tuple[LayerEdit, Tensor]] = []
        for edit in edits:
            self._add(edit)
        self.logit_edits = [
            LogitEdit(kind, mask, self._prompt_length(kind)) for kind, mask in self._masks.get("logits", {}).items()
        ]

    def _prompt_length(self, kind: Any) -> int | None:
        tokens = self.inputs.first_key + self.inputs.k.shape[2]
        known: TokenSet | None = getattr(kind, "span", None)
        return None if known is None else known.length_in(self.inputs.first_sequence, tokens, self.inputs.is_start)

    def _add(self, edit: LayerEdit) -> None:
        inputs = self.inputs
        batch, heads, queries = inputs.q.shape[:3]
        first, stop = inputs.first_sequence, inputs.first_sequence + batch
        own = (
            range(first, stop)
            if edit.sequences is None
            else range(max(first, edit.sequences.start), min(stop, edit.sequences.stop))
        )
        if not len(own):
            return
        if edit.kind.needs_whole_text and not inputs.is_start:
            raise BadInput(
                f"{edit.label} needs the whole text, and this pass reads {queries:,} of "
                f"{inputs.first_key + inputs.k.shape[2]:,} tokens after a cache. Pass use_cache=False"
            )
        for name in edit.tensors:
            tokens = inputs.key_tokens if name in "kv" else inputs.query_tokens
            mask = torch.zeros(batch, heads, len(tokens), dtype=torch.bool)
            if edit.tokens.counts_from_end:
                for sequence in own:
                    mask[sequence - first, list(edit.heads)] = self._tokens_of(edit, sequence, tokens)
            else:
                of_sequences = slice(own.start - first, own.stop - first)
                mask[of_sequences, list(edit.heads)] = self._tokens_of(edit, own.start, tokens)
            edit.tokens.is_used |= bool(mask.any())
            if name != "logits":
                self._refuse_conflict(name, edit, mask)
            if edit.target == "qkv":
                continue
            of_name = self._masks.setdefault(name, {})
            of_name[edit.kind] = of_name[edit.kind] | mask if edit.kind in of_name else mask
        if edit.target == "qkv":
            self._joint.append((edit, mask))

    def _tokens_of(self, edit: LayerEdit, sequence: int, tokens: Tensor) -> Tensor:
        read = self.inputs.first_key + self.inputs.k.shape[2]
        chosen = edit.tokens.contains(tokens, edit.tokens.length_in(sequence, read, self.inputs.is_start))
        return chosen & edit.kind.has_values_for(tokens) if isinstance(edit.kind, TensorKind) else chosen

    def _refuse_conflict(self, name: str, edit: LayerEdit, mask: Tensor) -> None:
        owners = self._owners.setdefault(name, [])
        owned = self._owned.setdefault(name, torch.zeros_like(mask))
        if bool((owned & mask).any()):
            other = next(other for other, of_other in owners if bool((of_other & mask).any()))
            raise BadInput(
                f"two edits of {name} of one head and token: {other.label}, and {edit.label}. Use one of them"
            )
        owned |= mask
        owners.append((edit, mask))

    def edited_inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v after stage (a). k and v have an entry for every query head where heads of a group differ."""
        inputs, heads = self.inputs, self.inputs.q.shape[1]
        tensors = {"q": inputs.q, "k": inputs.k, "v": inputs.v}
        needs_own_keys = any(
            not _are_equal_in_groups(mask, tensors[name].shape[1])
            for name in "kv"
            for mask in (*self._masks.get(name, {}).values(), *(mask for _, mask in self._joint))
        )
        if needs_own_keys:
            per_group = heads // inputs.k.shape[1]
            tensors |= {name: tensors[name].repeat_interleave(per_group, 1) for name in "kv"}
        edited = {
            name: self._changed(
                name, tensor, self._masks.get(name, {}), inputs.key_tokens if name in "kv" else inputs.query_tokens,
                inputs.key_positions if name in "kv" else inputs.positions,
            )
            for name, tensor in tensors.items()
        }  # fmt: skip
        for edit, mask in self._joint:
            self._change_together(edit, mask, tensors, edited)
        return edited["q"], edited["k"], edited["v"]

    def edited_outputs(self, z: Tensor) -> Tensor:
        """Head outputs [B, H, Lq, dv] after stage (c)."""
        return self._changed("z", z, self._masks.get("z", {}), self.inputs.query_tokens, self.inputs.positions)

    def _changed(self, name: str, t: Tensor, masks: Mapping[Any, Tensor], tokens: Tensor, positions: Tensor) -> Tensor:
        """t [B, n, L, d] with the values of every kind where its mask [B, H, L] is True; kinds read the old values."""
        if not masks:
            return t
        heads = self.inputs.q.shape[1]
        step, edited = heads // t.shape[1], t.clone()
        for kind, of_heads in masks.items():
            mask = of_heads[:, ::step]
            sequences, entries = mask.any(-1).nonzero(as_tuple=True)
            if not len(entries):
                continue
            place = Place(self.inputs.layer, name, entries * step, heads, sequences, tokens, positions.to(t.device))
            at = without_waiting(t.device, sequences), without_waiting(t.device, entries)
            new = kind(t[at], place).to(t.dtype)
            chosen = mask[sequences, entries]
            if not bool(chosen.all()):
                new = torch.where(without_waiting(t.device, chosen)[..., None], new, edited[at])
            edited = edited.index_put(at, new)
        return edited

    def _change_together(
        self, edit: LayerEdit, mask: Tensor, old: Mapping[str, Tensor], edited: dict[str, Tensor]
    ) -> None:
        """Change q, k and v of one unit by a kind of all three, where the mask of its keys [B, H, Lk] is True."""
        assert isinstance(edit.kind, InputsKind)
        heads, chosen = self.inputs.q.shape[1], [*edit.heads]
        step = heads // old["k"].shape[1]
        sequences = without_waiting(old["q"].device, mask.any(-1).any(-1).nonzero()[:, 0])
        keys = [*dict.fromkeys(head // step for head in chosen)]
        q, k, v = (old["q"][sequences][:, chosen], *(old[name][sequences][:, keys[:1]] for name in "kv"))
        new = edit.kind(q, k, v, self.inputs.layer)
        for name, values in zip(INPUTS, new, strict=True):
            tensor = edited[name].clone()
            entries = chosen if name == "q" else keys
            rows = without_waiting(tensor.device, mask)[sequences, :, -tensor.shape[2] :, None]
            for entry, value in zip(entries, values.expand(-1, len(entries), -1, -1).unbind(1), strict=True):
                head = entry * (heads // tensor.shape[1])
                tensor[sequences, entry] = torch.where(rows[:, head], value, tensor[sequences, entry])
            edited[name] = tensor


def _are_equal_in_groups(mask: Tensor, groups: int) -> bool:
    """Whether the heads of every KV group have equal masks [B, H, L]."""
    grouped = mask.view(len(mask), groups, -1, mask.shape[-1])
    return bool((grouped == grouped[:, :, :1]).all())
