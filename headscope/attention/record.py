"""The record of what one attention layer computed for one sequence, and the edits of its logits.

Edits of logits are stage (b) of a layer's pass. They act on the model's own logits, after soft cap and key biases
(ALiBi), in this order: uniform attention sets them to 0; biases add up; every choice of keys is made on the logits that
these leave, and choices intersect; at last, weights of another run replace those of rows or of single entries, which
are not normalised again. A learned sink keeps its logit.

Axes: H query heads, Lq queries, Lk keys, n rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from headscope.attention.chosen_keys import ChosenKeys
from headscope.base.public_functions import checked
from headscope.base.user_input import quote
from headscope.errors import BadInput

LOCAL_DISTANCE = 32
"""Keys closer than this to the query, its own included, are local."""
ROWS_OF_CHOICE = 64
"""Rows whose keys of an indexer are in memory at once, where single keys of rows are read."""
MASKED_LOGIT = -1e30
"""Logit of a masked key: its weight is 0, and 0 x MASKED_LOGIT is 0, whereas -inf would give NaN."""
LOWEST = torch.finfo(torch.float32).min
"""Log-sum-exp of a row without keys: its weights are 0."""
LOG_TINY = math.log(torch.finfo(torch.float32).tiny)
"""A logit this far below the largest of its row has no weight in float32."""


def soft_cap(logits: Tensor, softcap: float | None) -> Tensor:
    """Logits after soft-capping, softcap * tanh(logits / softcap); unchanged if `softcap` is None."""
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


@dataclass(frozen=True, eq=False)
class RowSums:
    """Sums over the visible keys j of every query row i, [H, Lq] each, float32.

    alpha are the row's weights. With a learned sink they sum to less than 1; p are then the weights of the keys alone,
    renormalized to 1. Otherwise p = alpha.
    """

    max_logit: Tensor
    """Largest scaled logit, after the soft cap."""
    max_weight: Tensor
    """Largest alpha."""
    first_weight: Tensor
    """alpha of key 0 of the sequence, 0 if it is hidden."""
    local_weight: Tensor
    """Sum of alpha over the keys closer than LOCAL_DISTANCE."""
    squares: Tensor
    """Sum of p^2."""
    neg_entropy: Tensor
    """Sum of p ln p."""
    distance: Tensor
    """Sum of p (i - j), in tokens."""

    def at_rows(self, rows: Tensor) -> "RowSums":
        """The sums of some rows, given by index."""
        return RowSums(*(of_rows[:, rows] for of_rows in vars(self).values()))


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


@dataclass(frozen=True, eq=False)
class AttentionRecord:
    """What one layer computed for one sequence of the batch, without padding.

    Axes: H query heads, G KV groups, Lq queries, Lk keys, d head dimension, dv value dimension.

    `layer` is the index into the model's attention layers, `batch_index` the number of the sequence in the batch: of
    packed documents, that of the document, counted through all rows of the batch. q [H, Lq, d] and k [G, Lk, d] are the
    inputs of the kernel: after rotation and QK-norm. v is [G, Lk, dv]; z [H, Lq, dv] are the head outputs before
    o_proj. The queries belong to the last Lq of the Lk keys; k[:, 0] is key number `first_key` of the sequence.
    `window`, `chunk_size`, `softcap` and `sink` [H] are those of `kernel.AttentionVariant`; the logits are
    `soft_cap(scaling * q . k)`. lse [H, Lq], float32, is the natural log of each row's softmax denominator: the sum of
    exp(logit) over the visible keys plus the sink's. `row_sums` are None unless a listener asked for them and the
    backend supports it; so are `key_sums` [H, Lq, n], the sums over the keys of a row's weights times the listener's
    `key_columns`. `chosen` are the keys that the model's indexer chose, if not all: weights, outputs and lse are then
    those over the chosen keys.

    Under edits of the heads, q, k and v are the edited ones, `logit_edits` act on the logits, and z is what is passed
    to o_proj. Logits and weights come from `masked_logits`, `logits_at` and `weights` only: they include these edits.
    Under edits of the keys of single heads k and v have an entry for every query head; `kv_groups` is the number of the
    model's KV groups then. `head_numbers` [H] are the layer's query heads, None if the record has all in order.
    """

    layer: int
    batch_index: int
    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    lse: Tensor
    scaling: float
    window: int | None
    first_key: int = 0
    chunk_size: int | None = None
    softcap: float | None = None
    sink: Tensor | None = None
    row_sums: RowSums | None = None
    key_sums: Tensor | None = None
    chosen: ChosenKeys | None = None
    logit_edits: Sequence[LogitEdit] = ()
    kv_groups: int | None = None
    head_numbers: Tensor | None = None

    @property
    def group_count(self) -> int:
        """Number of KV groups of the layer."""
        return len(self.k) if self.kv_groups is None else self.kv_groups

    @property
    def query_key_index(self) -> Tensor:
        """Index into k of each query's own key, [Lq]."""
        keys = self.k.shape[1]
        return torch.arange(keys - self.q.shape[1], keys, device=self.k.device)

    @property
    def visible_counts(self) -> Tensor:
        """Number of keys that each query sees, [Lq], whether or not an indexer chose them."""
        counts = self.query_key_index + 1
        if self.chunk_size is not None:
            counts = torch.minimum(counts, (self.query_key_index + self.first_key) % self.chunk_size + 1)
        return counts if self.window is None else counts.clamp(max=self.window)

    @property
    def last_visible_count(self) -> int:
        """Number of keys that the last query sees, known without waiting for the device."""
        count = self.k.shape[1]
        if self.chunk_size is not None:
            count = min(count, (count - 1 + self.first_key) % self.chunk_size + 1)
        return count if self.window is None else min(count, self.window)

    def _indices(self, numbers: int | Sequence[int] | Tensor, noun: str, dims: int = 1) -> Tensor:
        """Indices into the rows or keys of the record, on its device; negative ones count from the end.

        Raises BadInput for any other. Those on a GPU are not read, which would wait for it.
        """
        index, count = torch.as_tensor(numbers), (self.q if noun == "rows" else self.k).shape[1]
        is_valid = not (index.dtype == torch.bool or index.is_floating_point() or index.is_complex())
        index = index.long() if is_valid else index
        index = index[None] if index.ndim == 0 else index
        is_valid = is_valid and index.ndim == dims
        if not is_valid or (index.device.type == "cpu" and not bool(((index >= -count) & (index < count)).all())):
            raise BadInput(
                f"{noun}={quote(numbers)} are not {noun} of the record. Use numbers from {-count} to {count - 1}"
            )
        index = index.to(self.q.device)
        return torch.where(index < 0, index + count, index)

    def _key_indices(self, keys: Tensor | slice) -> Tensor | slice:
        """Keys as `_indices`; a slice is cut to the keys of the record."""
        if not isinstance(keys, slice):
            return self._indices(keys, "keys")
        numbers = range(self.k.shape[1])[keys]
        is_slice = numbers.step == 1 and len(numbers)
        return slice(numbers.start, numbers.stop) if is_slice else torch.tensor(numbers, device=self.q.device)

    @checked
    def weights(self, rows: int | Sequence[int] | Tensor) -> Tensor:
        """Attention weights of some query rows, [H, rows, Lk], float32, 0 for keys that a row does not see.

        `rows` are indices into the queries of q, or one index; -1 is the last. With a learned sink a row sums to less
        than 1. Memory grows with the number of rows: all rows would be the L x L matrix.
        """
        index = self._indices(rows, "rows")
        logits = self.masked_logits(index, slice(0, self.k.shape[1]))
        return (logits - self.lse[:, index, None]).exp()

    @checked
    def soft_cap(self, logits: Tensor) -> Tensor:
        """Logits after the layer's soft-capping, from scaling * q . k."""
        return soft_cap(logits, self.softcap)

    @checked
    def masked_logits(self, rows: Tensor, keys: Tensor | slice) -> Tensor:
        """Logits of queries [n] with keys [m], both indices of the record: [H, n, m], float32, -inf for hidden keys.

        They include the record's edits. A slice of keys is read without a copy.
        """
        rows, keys = self._indices(rows, "rows"), self._key_indices(keys)
        if not self.logit_edits:
            return self.own_logits(rows, keys)
        visible = self.visible_columns(rows)
        logits, _ = edited_logits(self, rows, visible)
        if isinstance(keys, slice):
            if keys.start == visible.start and keys.stop == visible.stop:
                return logits
            keys = torch.arange(keys.start, keys.stop, device=rows.device)
        is_inside = (keys >= visible.start) & (keys < visible.stop)
        at = (keys - visible.start).clamp(0, logits.shape[-1] - 1)
        return logits[..., at].masked_fill(~is_inside, -torch.inf)

    @checked
    def logits_at(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Logits of queries [n] with keys of their own [n, m], both indices of the record: [H, n, m], float32.

        -inf for hidden keys; they include the record's edits. Costs O(n m d) without edits of the logits.
        """
        rows, keys = self._indices(rows, "rows"), self._indices(keys, "keys", 2)
        if len(keys) != len(rows):
            raise BadInput(f"keys has {len(keys)} rows for {len(rows)} query rows. Give keys of each row")
        if self.logit_edits:
            return self.masked_logits(rows, slice(0, self.k.shape[1])).gather(-1, keys.expand(len(self.q), -1, -1))
        groups, _, dim = self.k.shape
        q = self.q[:, rows].float().view(groups, -1, len(rows), dim)
        logits = torch.einsum("ghnd,gnmd->ghnm", q, self.k[:, keys].float()) * self.scaling
        distance = self.query_key_index[rows][:, None] - keys
        is_hidden = (distance < 0) | (distance >= self.visible_counts[rows][:, None])
        logits = self.soft_cap(logits).flatten(0, 1).masked_fill(is_hidden, -torch.inf)
        if self.chosen is None:
            return logits
        tiles = zip(torch.split(rows, ROWS_OF_CHOICE), torch.split(keys, ROWS_OF_CHOICE), strict=True)
        is_chosen = [self.is_chosen(tile).gather(-1, at.expand(len(self.q), -1, -1)) for tile, at in tiles]
        return logits.masked_fill(~torch.cat(is_chosen, 1), -torch.inf)

    @checked
    def visible_columns(self, rows: Tensor) -> slice:
        """The keys that any of these queries sees, as indices of the record."""
        rows = self._indices(rows, "rows")
        own = self.query_key_index[rows]
        return slice(int((own + 1 - self.visible_counts[rows]).min().clamp(min=0)), int(own.max()) + 1)

    @property
    def replaces_weights(self) -> bool:
        """Whether weights of another run replace some of the record's."""
        return any(isinstance(edit.kind, PatternKind) for edit in self.logit_edits)

    def without_patterns(self) -> "AttentionRecord":
        """The record with its own weights where it has those of another run."""
        edits = [edit for edit in self.logit_edits if not isinstance(edit.kind, PatternKind)]
        return replace(self, logit_edits=edits)

    @checked
    def own_logits(self, rows: Tensor, keys: Tensor | slice) -> Tensor:
        """The logits of `masked_logits` without the record's edits of logits."""
        rows, keys = self._indices(rows, "rows"), self._key_indices(keys)
        groups, _, dim = self.k.shape
        numbers = torch.arange(keys.start, keys.stop, device=rows.device) if isinstance(keys, slice) else keys
        q = self.q[:, rows].float().reshape(groups, -1, dim)
        # Scaled after the product, as in eager attention: the scores are equal bit for bit.
        logits = self.soft_cap((q @ self.k[:, keys].float().mT).mul_(self.scaling)).view(-1, len(rows), len(numbers))
        distance = self.query_key_index[rows][:, None] - numbers
        is_hidden = (distance < 0) | (distance >= self.visible_counts[rows][:, None])
        if rows.device.type != "cpu" or bool(is_hidden.any()):  # a GPU is not waited for
            logits = logits + torch.zeros_like(distance, dtype=torch.float32).masked_fill_(is_hidden, -torch.inf)
        if self.chosen is not None:
            logits.masked_fill_(~self.is_chosen(rows)[..., keys], -torch.inf)
        return logits

    @checked
    def is_chosen(self, rows: Tensor) -> Tensor:
        """Whether an indexer chose keys for queries, by index [n]: bool [H, n, Lk]; it may choose later keys, too."""
        rows = self._indices(rows, "rows")
        if self.chosen is None:
            return torch.ones(len(self.q), len(rows), self.k.shape[1], dtype=torch.bool, device=rows.device)
        return self.chosen.by_head(rows, self.k.shape[1])

    @property
    def sink_weight(self) -> Tensor | None:
        """Weight of the learned sink in each row, [H, Lq], 0..1; None for a model without one."""
        return None if self.sink is None else (self.sink.float()[:, None] - self.lse).exp().clamp(max=1)


def edited_logits(record: AttentionRecord, rows: Tensor, keys: slice) -> tuple[Tensor, Tensor]:
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


def _before_choices(record: AttentionRecord) -> AttentionRecord:
    """The record without choices of keys and patterns; its log-sum-exp is not computed."""
    cache = shared_cache(record)
    if "before choices" not in cache:
        edits = [edit for edit in record.logit_edits if isinstance(edit.kind, UniformKind | BiasKind)]
        cache["before choices"] = replace(record, logit_edits=edits, row_sums=None, key_sums=None)
    before: AttentionRecord = cache["before choices"]
    return before


_caches: WeakKeyDictionary[AttentionRecord, dict[object, Any]] = WeakKeyDictionary()


def shared_cache(record: AttentionRecord) -> dict[object, Any]:
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
