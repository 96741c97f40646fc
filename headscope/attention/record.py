"""The shape of a model's attention, and the record of what one attention layer computed for one sequence."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headscope.attention.chosen_keys import ChosenKeys
from headscope.attention.logit_edits import LogitEdit, PatternKind, edited_logits

RotaryLayout = Literal["half", "interleaved"]

LOCAL_DISTANCE = 32
"""Keys closer than this to the query, its own included, are local."""
ROWS_OF_CHOICE = 64
"""Rows whose keys of an indexer are in memory at once, where single keys of rows are read."""
MASKED_LOGIT = -1e30
"""Logit of a masked key: its weight is 0, and 0 x MASKED_LOGIT is 0, whereas -inf would give NaN."""


@dataclass(frozen=True)
class Geometry:
    """Shape of a model's attention: the same in every layer except for the fields with one entry per layer.

    Only layers with attention count. `layer_numbers` are their numbers in the model, from 0: a hybrid model also has
    layers without attention. The code identifies a layer by its index into `layer_numbers`; tables, messages and
    options use the layer number.

    `pairs` is the number of rotary pairs of a head, 0 if nothing rotates; the other dimensions pass unrotated.
    `rotary_layout` says which two dimensions form pair f: "half" is (f, f + pairs), "interleaved" is (2f, 2f + 1),
    counted from dimension `rotary_start`. That is 0 except in latent attention, where the rotary dimensions come last.
    `heads`, `kv_groups`, `head_dim` and `pairs` are the largest of all layers; `layer_heads`, `layer_kv_groups`,
    `layer_head_dims` and `layer_pairs` are those of each layer (by default, all layers are alike). With growing
    position a pair rotates from its first dimension to its second, or back (`rotation_direction` -1).

    `native_context` is the length in tokens that the checkpoint was trained or declared for, `original_context` the
    length before RoPE scaling, by default the same.
    """

    layer_numbers: tuple[int, ...]
    heads: int
    kv_groups: int
    head_dim: int
    pairs: int
    rotary_layout: RotaryLayout
    native_context: int
    windows: tuple[int | None, ...]
    layer_rotates: tuple[bool, ...]
    layer_kv_groups: tuple[int, ...]
    rotary_start: int = 0
    rotation_direction: Literal[1, -1] = 1
    layer_heads: tuple[int, ...] = ()
    layer_head_dims: tuple[int, ...] = ()
    layer_pairs: tuple[int, ...] = ()
    original_context: int = 0

    def __post_init__(self) -> None:
        if not self.original_context:
            object.__setattr__(self, "original_context", self.native_context)
        for by_layer, value in (
            ("layer_heads", self.heads),
            ("layer_head_dims", self.head_dim),
            ("layer_pairs", self.pairs),
        ):
            if not getattr(self, by_layer):
                object.__setattr__(self, by_layer, (value,) * self.layers)

    @property
    def layers(self) -> int:
        """Number of layers with attention."""
        return len(self.layer_numbers)

    @property
    def all_pairs(self) -> int:
        """Number of rotary pairs plus the pairs that the unrotated dimensions form."""
        return self.head_dim // 2

    def heads_per_group(self, layer: int) -> int:
        """Number of query heads per KV group of a layer."""
        return self.layer_heads[layer] // self.layer_kv_groups[layer]

    def has_head(self, number: int, head: int) -> bool:
        """Whether the layer with this number has attention and this query head."""
        return number in self.layer_numbers and 0 <= head < self.layer_heads[self.layer_numbers.index(number)]

    def suggest_heads(self, number: int) -> str:
        """What to use instead of a head that the layer with this number does not have, as a sentence."""
        if number in self.layer_numbers:
            return f"Use heads 0 to {self.layer_heads[self.layer_numbers.index(number)] - 1} of layer {number}"
        first, last = self.layer_numbers[0], self.layer_numbers[-1]
        is_range = self.layer_numbers == tuple(range(first, last + 1))
        return f"Use layers {f'{first} to {last}' if is_range else ', '.join(map(str, self.layer_numbers))}"

    def has_pair(self, layer: Tensor, head: Tensor, pair: Tensor) -> Tensor:
        """Whether layers have these heads and pairs of dimensions, for tensors of one shape."""
        heads, head_dims = torch.tensor(self.layer_heads), torch.tensor(self.layer_head_dims)
        return (head < heads[layer]) & (pair < head_dims[layer] // 2)

    def at_layer(self, layer: int) -> "Geometry":
        """The geometry with the heads, KV groups, head dimension and pairs of one layer."""
        return replace(
            self,
            heads=self.layer_heads[layer],
            kv_groups=self.layer_kv_groups[layer],
            head_dim=self.layer_head_dims[layer],
            pairs=self.layer_pairs[layer],
        )

    def kv_group(self, layer: Any, head: Any) -> Any:
        """The KV group of query heads: layer indices and heads as two ints, or two arrays or tensors of one shape."""
        sizes = torch.tensor([self.heads_per_group(index) for index in range(self.layers)])
        if isinstance(layer, Tensor):
            return head // sizes[layer]
        return head // (int(sizes[layer]) if isinstance(layer, int) else sizes.numpy()[layer])


def stack_layers(layers: Sequence[Tensor], fill: float) -> Tensor:
    """Stack one tensor [.., H] per layer as [layers, .., H], on the device of the first.

    Layers with fewer heads are filled with `fill`.
    """
    heads, device = max(layer.shape[-1] for layer in layers), layers[0].device
    padded = [nn.functional.pad(layer, (0, heads - layer.shape[-1]), value=fill) for layer in layers]
    return torch.stack([layer.to(device) for layer in padded])


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


@dataclass(frozen=True, eq=False)
class AttentionRecord:
    """What one layer computed for one sequence of the batch, without padding.

    Axes: H query heads, G KV groups, Lq queries, Lk keys, d head dimension, dv value dimension.

    `layer` is the index into the model's attention layers. q [H, Lq, d] and k [G, Lk, d] are the inputs of the kernel:
    after rotation and QK-norm. v is [G, Lk, dv]; z [H, Lq, dv] are the head outputs before o_proj. The queries belong
    to the last Lq of the Lk keys; k[:, 0] is key number `first_key` of the sequence. `window`, `chunk_size`, `softcap`
    and `sink` [H] are those of `kernel.AttentionVariant`; the logits are `soft_cap(scaling * q . k)`. lse [H, Lq],
    float32, is the natural log of each row's softmax denominator: the sum of exp(logit) over the visible keys plus the
    sink's. `row_sums` are None unless a listener asked for them and the backend supports it; so are `key_sums`
    [H, Lq, n], the sums over the keys of a row's weights times the listener's `key_columns`. `chosen` are the keys that
    the model's indexer chose, if not all: weights, outputs and lse are then those over the chosen keys.

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

    def weights(self, rows: int | Sequence[int] | Tensor) -> Tensor:
        """Attention weights of some query rows, [H, rows, Lk], float32, 0 for keys that a row does not see.

        `rows` are indices into the queries of q, or one index; -1 is the last. With a learned sink a row sums to less
        than 1. Memory grows with the number of rows: all rows would be the L x L matrix.
        """
        index = torch.as_tensor(rows, device=self.q.device)
        index = index[None] if index.ndim == 0 else index
        index = torch.where(index < 0, index + self.q.shape[1], index)
        logits = self.masked_logits(index, slice(0, self.k.shape[1]))
        return (logits - self.lse[:, index, None]).exp()

    def soft_cap(self, logits: Tensor) -> Tensor:
        """Logits after the layer's soft-capping, from scaling * q . k."""
        return soft_cap(logits, self.softcap)

    def masked_logits(self, rows: Tensor, keys: Tensor | slice) -> Tensor:
        """Logits of queries [n] with keys [m], both indices of the record: [H, n, m], float32, -inf for hidden keys.

        They include the record's edits. A slice of keys is read without a copy.
        """
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

    def logits_at(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Logits of queries [n] with keys of their own [n, m], both indices of the record: [H, n, m], float32.

        -inf for hidden keys; they include the record's edits. Costs O(n m d) without edits of the logits.
        """
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

    def visible_columns(self, rows: Tensor) -> slice:
        """The keys that any of these queries sees, as indices of the record."""
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

    def own_logits(self, rows: Tensor, keys: Tensor | slice) -> Tensor:
        """The logits of `masked_logits` without the record's edits of logits."""
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

    def is_chosen(self, rows: Tensor) -> Tensor:
        """Whether an indexer chose keys for queries, by index [n]: bool [H, n, Lk]; it may choose later keys, too."""
        if self.chosen is None:
            return torch.ones(len(self.q), len(rows), self.k.shape[1], dtype=torch.bool, device=rows.device)
        return self.chosen.by_head(rows, self.k.shape[1])

    @property
    def sink_weight(self) -> Tensor | None:
        """Weight of the learned sink in each row, [H, Lq], 0..1; None for a model without one."""
        return None if self.sink is None else (self.sink.float()[:, None] - self.lse).exp().clamp(max=1)
