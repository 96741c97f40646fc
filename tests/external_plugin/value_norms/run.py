"""The score of one layer's heads. Only this file imports torch."""

from torch import Tensor

from headscope.plugin_api import AttentionRecord


def head_scores(record: AttentionRecord) -> Tensor:
    """The mean length of the values [KV groups, keys, dimension] of each head's KV group: [heads]."""
    norms = record.v.float().norm(dim=-1).mean(-1)
    return norms.repeat_interleave(record.q.shape[0] // norms.shape[0])
