"""Head outputs under a rule: every query attends to the chosen keys only, its weights renormalised over them."""

import numpy as np
import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord
from headscope.measures.row_sampling import items_per_tile, query_range, to_device
from headscope.measures.row_tile import RowTile
from headscope.measures.span_mass import row_logits
from headscope.measures.sparse_rows import LOGITS_PER_TILE
from headscope.measures.sparse_rules import Rule
from headscope.measures.sparse_sums import TINY

LOWEST = torch.finfo(torch.float32).min


def sparse_outputs(record: AttentionRecord, rule: Rule) -> tuple[Tensor, Tensor]:
    """Outputs [H, Lq, dv] of heads that attend to the rule's keys only, in the dtype of z, and kept keys [H, Lq].

    A learned sink is always kept. Where every key with weight is kept, the output is z itself; where no key is kept, 0.
    Rows are visited in cache-sized tiles; memory is O(L).
    """
    outputs, kept = record.z.clone(), record.z.new_zeros(record.z.shape[:2], dtype=torch.float32)
    elements, start = len(record.q) * record.k.shape[1], query_range(record).start
    size = items_per_tile(record.q.device, max(2, LOGITS_PER_TILE // elements), elements)
    layer_cache = dict[object, Tensor]()
    for begin in range(0, record.q.shape[1], size):
        indices = np.arange(begin, min(begin + size, record.q.shape[1]))
        first, logits = row_logits(record, indices)
        weights = (logits - record.lse[:, to_device(logits.device, indices), None]).exp_()
        tile = RowTile(record, indices + start, first, weights, layer_cache)
        chosen = (rule.select(tile) & tile.is_visible).expand_as(weights)
        rows = slice(begin, begin + len(indices))
        dropped = (~chosen).view(torch.uint8).float()  # torch converts bool several times as slowly on a CPU
        kept[:, rows] = dropped.shape[-1] - dropped.sum(-1)
        is_whole = weights.mul_(dropped).amax(-1, keepdim=True) < TINY
        sparse = _attend(record, logits.masked_fill_(~chosen, -torch.inf), tile.columns).to(outputs.dtype)
        outputs[:, rows] = torch.where(is_whole, outputs[:, rows], sparse)
    return outputs, kept


def _attend(record: AttentionRecord, logits: Tensor, columns: slice) -> Tensor:
    """Outputs [H, n, dv] of rows with logits [H, n, keys] for these keys of the record; 0 if all are -inf."""
    lse = logits.logsumexp(-1, keepdim=True)
    if record.sink is not None:
        lse = torch.logaddexp(lse, record.sink.float()[:, None, None])
    weights = (logits - lse.clamp(min=LOWEST)).exp_()
    values = record.v[:, columns].float()
    outputs = weights.view(len(values), -1, weights.shape[-1]) @ values
    return outputs.view(*weights.shape[:2], -1)
