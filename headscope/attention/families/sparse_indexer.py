"""DeepSeek V3.2 and others: an indexer chooses the keys of each query, all of them in texts up to its top-k."""

from typing import Any

from torch import Tensor

from headscope.attention.families.adapter import AttentionFunction, FamilyAdapter
from headscope.attention.masks import OpaqueMask


def _forward(
    attend: AttentionFunction,
    module: Any,
    hidden_states: Tensor,
    q_resid: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    attention_mask: OpaqueMask,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    # Without a mask: if all keys are chosen, their scores do not matter; otherwise the attention function refuses.
    no_mask = hidden_states.new_zeros(1, 1, 1)
    indices: Tensor = type(module).forward(
        module, hidden_states, q_resid, position_embeddings, no_mask, *args, **kwargs
    )
    return indices


ADAPTER = FamilyAdapter("forward", _forward, hides_mask=True)
