"""The declaration of an attention override, and what overrides share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

AttentionFunction = Callable[..., tuple[Tensor, None]]
"""`backend.attention_forward`: (module, q, k, v, attention_mask, scaling=, ...) -> (out [B, Lq, H, dv], None).

Axes: B batch, H query heads, Lq queries, dv value dimension.
"""


@dataclass(frozen=True)
class AttentionOverride:
    """How a family's attention module is made to call headscope's attention function: by replacing one method.

    `replacement(attention_function, module, ...)` runs in place of `method` of the module, with its arguments.
    With `hides_mask`, a model that computes with its causal mask gets an `OpaqueMask`. `output_module` names the
    submodule that returns the attention output, if the module itself adds the residual stream to it.
    `reference_implementation` gives the implementation with which the eager check compares, for a config.
    """

    method: str
    replacement: Callable[..., Any]
    hides_mask: bool = False
    output_module: str = ""
    reference_implementation: Callable[[Any], str] = lambda config: "eager"


def active_dropout(module: nn.Dropout) -> float:
    """The probability with which a dropout module drops weights now."""
    return module.p if module.training else 0.0


def split_heads(states: Tensor, heads: int) -> Tensor:
    """[B, L, heads x d] -> [B, heads, L, d]."""
    return states.view(*states.shape[:2], heads, -1).transpose(1, 2)
