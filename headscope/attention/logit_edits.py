"""Edits of attention logits: stage (b) of a layer's pass. The logits of a record under edits have one definition.

They act on the model's own logits, after soft cap and key biases (ALiBi), in this order: uniform attention sets them
to 0; biases add up; every choice of keys is made on the logits that these leave, and choices intersect; at last,
weights of another run replace those of rows or of single entries, which are not normalised again. A learned sink keeps
its logit.

Axes: H query heads, Lq queries, Lk keys, n rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

if TYPE_CHECKING:
    from headscope.attention.record import AttentionRecord

LOWEST = torch.finfo(torch.float32).min
"""Log-sum-exp of a row without keys: its weights are 0."""
LOG_TINY = math.log(torch.finfo(torch.float32).tiny)
"""A logit this far below the largest of its row has no weight in float32."""


class LogitKind:
    """What an edit of logits does. `name` is its name in labels."""

    name: ClassVar[Any]
    needs_whole_text: ClassVar[Any] = False

    @property
    def for_listeners(self) -> "LogitKind":
        """The kind in the records of listeners, which may compute logits again."""
        return self


class UniformKind(LogitKind):
    """Sets the logits of all visible keys to 0."""


class BiasKind(LogitKind):
    """Adds a bias to the logits of keys."""

    def bias(self, tokens: Tensor, prompt_length: int | None) -> Tensor:
        """The bias of the keys with these token numbers, [Lk], float32."""
        raise NotImplementedError


class ChoiceKind(LogitKind):
    """Chooses keys; the others get no weight."""

    is_layer_wide: ClassVar[Any] = False
    """Whether the choice of a head may depend on the weights of other heads of its layer."""
    replaces_indexer: ClassVar[Any] = False
    """Whether the choice is made among all keys, also those that the model's own indexer did not choose."""

    def choose(self, record: "AttentionRecord", rows: Tensor, keys: slice, logits: Tensor, edit: "LogitEdit") -> Tensor:
        """Which keys each row chooses, bool [H or 1, n, keys]. `rows` [n] and `keys` are indices of the record.

        `logits` [H, n, keys] are those before any choice; the record has no choices of keys either. `edit` is the edit
        of the kind, with a mask [H, Lq].
        """
        raise NotImplementedError


@dataclass(frozen=True)
class StreamingKind(ChoiceKind):
    """Chooses the first `sink` and the last `recent` keys; heads that only stream read no other keys.

    Values of `sink` and `recent` are tokens (Xiao et al. 2024).
    """

    sink: int
    recent: int

    @property
    def name(self) -> str:
        return f"streaming:{self.sink}+{self.recent}"

    def choose(self, record: "AttentionRecord", rows: Tensor, keys: slice, logits: Tensor, edit: "LogitEdit") -> Tensor:
        index = torch.arange(keys.start, keys.stop, device=rows.device)
        distance = record.query_key_index[rows][:, None] - index
        return ((index + record.first_key < self.sink) | (distance < self.recent))[None]


class PatternKind(LogitKind):
    """Takes weights from another run."""

    def log_weights(self, record: "AttentionRecord", rows: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
        """Log-weights of the other run [H, n, keys], and which of them replace those of the record, bool."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class LogitEdit:
    """One kind with the heads and rows that it changes, bool [B, H, Lq], or [H, Lq] in the record of one sequence.

    `prompt_length` is that of the text, for spans that count from the prompt's end.
    """

    kind: LogitKind
    mask: Tensor
    prompt_length: int | None = None

    @property
    def for_listeners(self) -> "LogitEdit":
        """The edit in the records of listeners."""
        return replace(self, kind=self.kind.for_listeners)

    def at(self, *index: slice | Tensor | int) -> "LogitEdit":
        """The edit with a part of its mask."""
        return replace(self, mask=self.mask[index])


def edited_logits(record: "AttentionRecord", rows: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
    """The logits [H, n, keys] of rows of a record after its edits, and which rows [H, n] keep the record's own weights.

    `keys` must hold all keys that the rows see. Rows keep their weights if edits only leave out keys without weight.
    """
    edits = [(edit, edit.mask.to(rows.device)[:, rows, None]) for edit in record.logit_edits]
    logits = record.own_logits(rows, keys)
    is_kept = torch.ones(logits.shape[:2], dtype=torch.bool, device=logits.device)
    for edit, mask in edits:
        if not isinstance(edit.kind, ChoiceKind):
            is_kept &= ~mask[..., 0]
        if isinstance(edit.kind, UniformKind):
            logits = torch.where(mask & (logits > -torch.inf), 0, logits)
    tokens = record.first_key + torch.arange(keys.start, keys.stop, device=rows.device)
    for edit, mask in edits:
        if isinstance(edit.kind, BiasKind):
            logits = logits + mask * edit.kind.bias(tokens, edit.prompt_length)
    choices = [(edit, mask) for edit, mask in edits if isinstance(edit.kind, ChoiceKind)]
    if choices:
        before = _before_choices(record)
        with torch.no_grad():
            chosen = [
                edit.kind.choose(before, rows, keys, logits.detach(), edit) | ~mask  # type: ignore[attr-defined]
                for edit, mask in choices
            ]
        before_choices = logits.detach()
        for choice in chosen:
            logits = logits.masked_fill(~choice, -torch.inf)
        dropped = before_choices.masked_fill(logits > -torch.inf, -torch.inf).amax(-1)
        is_kept &= dropped - before_choices.amax(-1) < LOG_TINY
    patterns = [(edit.kind, mask) for edit, mask in edits if isinstance(edit.kind, PatternKind)]
    lse = log_sum(logits, record.sink)[..., None] if patterns else logits
    for kind, mask in patterns:
        new, is_replaced = kind.log_weights(record, rows, keys)
        logits = torch.where(mask & is_replaced, new + lse, logits)
    return logits, is_kept


def _before_choices(record: "AttentionRecord") -> "AttentionRecord":
    """The record without choices of keys and patterns; its log-sum-exp is not computed."""
    cache = shared_cache(record)
    if "before choices" not in cache:
        edits = [edit for edit in record.logit_edits if isinstance(edit.kind, UniformKind | BiasKind)]
        cache["before choices"] = replace(record, logit_edits=edits, row_sums=None, key_sums=None)
    before: AttentionRecord = cache["before choices"]
    return before


_caches: "WeakKeyDictionary[AttentionRecord, dict[object, Any]]" = WeakKeyDictionary()


def shared_cache(record: "AttentionRecord") -> dict[object, Any]:
    """What readers of a record have computed and share."""
    return _caches.setdefault(record, {})


def log_sum(logits: Tensor, sink: Tensor | None) -> Tensor:
    """Log-sum-exp [H, n] of logits [H, n, keys] and of the sinks [H]; `LOWEST` for rows without keys."""
    lse = logits.logsumexp(-1)
    if sink is not None:
        lse = torch.logaddexp(lse, sink.to(lse)[:, None])
    return lse.clamp(min=LOWEST)


def has_only(edits: Sequence[LogitEdit], kind: type[LogitKind]) -> bool:
    """Whether all edits are of one sort."""
    return all(isinstance(edit.kind, kind) for edit in edits)
