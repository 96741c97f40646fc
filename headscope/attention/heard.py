"""What one attention layer computed for one sequence: the record that travels from the seam to the measures."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Attention:
    """One layer, one sequence of the batch, padding removed. Axes: H heads, G kv groups, Lq queries, Lk keys, d dims.

    q [H, Lq, d] and k [G, Lk, d] are the kernel's inputs, rotated, normed and scaled; v [G, Lk, d]; z
    [H, Lq, d] is the head output before o_proj; lse [H, Lq] the natural log-sum-exp of each row's logits,
    float32. Queries are the last Lq of the Lk keys; k[:, 0] is the sequence's key number `first_key`.
    """

    layer: int
    sequence: int
    q: Tensor
    k: Tensor
    v: Tensor
    z: Tensor
    lse: Tensor
    scaling: float
    window: int | None
    first_key: int = 0

    @property
    def query_index(self) -> Tensor:
        """Index into k of each query's own key, [Lq]."""
        keys = self.k.shape[1]
        return torch.arange(keys - self.q.shape[1], keys, device=self.k.device)

    @property
    def visible(self) -> Tensor:
        """Number of keys that each query sees, [Lq]."""
        seen = self.query_index + 1
        return seen if self.window is None else seen.clamp(max=self.window)
