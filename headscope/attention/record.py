"""What one attention layer computed for one sequence: the record that travels from the seam to the measures."""

from dataclasses import dataclass

import torch
from torch import Tensor


def soft_cap(logits: Tensor, cap: float | None) -> Tensor:
    """Logits as the softmax gets them, softly bounded by `cap` where there is one."""
    return logits if cap is None else cap * torch.tanh(logits / cap)


@dataclass(frozen=True, eq=False)
class AttentionRecord:
    """One layer, one sequence of the batch, padding removed. Axes: H heads, G kv groups, Lq queries, Lk keys, d dims.

    `layer` is the index into the model's attention layers. q [H, Lq, d] and k [G, Lk, d] are the kernel's inputs,
    rotated, normed and scaled; v [G, Lk, dv]; z [H, Lq, dv] is the head output before o_proj. Queries are the last Lq
    of the Lk keys; k[:, 0] is the sequence's key number `first_key`. The window, chunk, cap and sink [H] are
    those of `kernel.Rule`: the logits are `capped(scaling q . k)`. lse [H, Lq] is the natural log of what a row's
    exp(logit) are divided by, float32: the sum of them all and, where there is one, of the sink's.
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
    chunk: int | None = None
    cap: float | None = None
    sink: Tensor | None = None

    @property
    def query_key_index(self) -> Tensor:
        """Index into k of each query's own key, [Lq]."""
        keys = self.k.shape[1]
        return torch.arange(keys - self.q.shape[1], keys, device=self.k.device)

    @property
    def visible_counts(self) -> Tensor:
        """Number of keys that each query sees, [Lq]."""
        seen = self.query_key_index + 1
        if self.chunk is not None:
            seen = torch.minimum(seen, (self.query_key_index + self.first_key) % self.chunk + 1)
        return seen if self.window is None else seen.clamp(max=self.window)

    def soft_cap(self, logits: Tensor) -> Tensor:
        """Logits as the softmax gets them, from scaling q . k."""
        return soft_cap(logits, self.cap)

    @property
    def sink_weight(self) -> Tensor | None:
        """The weight of the learned sink in each row, [H, Lq], 0..1; None for a model without."""
        return None if self.sink is None else (self.sink.float()[:, None] - self.lse).exp().clamp(max=1)
