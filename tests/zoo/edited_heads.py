"""Head outputs of a family's own eager attention, recorded and edited before its output projection.

Nothing of headscope has a part in it.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

HeadsEdit = Callable[[Tensor], Tensor]
"""Head outputs z [H, L, dv] of one sequence -> those that the model goes on with."""

EAGER_FUNCTIONS = ("eager_attention_forward", "eager_attn_forward")
OWN_ATTENTION = (
    *("GPTJAttention", "CodeGenAttention", "GPTNeoSelfAttention", "GPTNeoXJapaneseAttention"),
    *("BloomAttention", "FalconAttention", "MptAttention", "XGLMAttention"),
)
"""Families without an eager function, whose output projection takes the heads' outputs unchanged."""
PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj")


def output_projection(attention: nn.Module) -> nn.Module:
    """The module that projects the heads' outputs, by the names that transformers gives it."""
    projection: nn.Module = next(getattr(attention, name) for name in PROJECTIONS if hasattr(attention, name))
    return projection


@contextmanager
def edited_heads(model: PreTrainedModel, heads: int, edits: Mapping[nn.Module, HeadsEdit]) -> Iterator[None]:
    """Run eager attention with the head outputs of these attention modules edited."""
    with ExitStack() as stack:
        for attention, edit in edits.items():
            if type(attention).__name__ in OWN_ATTENTION:
                hook = output_projection(attention).register_forward_pre_hook(_edit_projected(heads, edit))
                stack.callback(hook.remove)
        for home in {type(part).__module__ for part in model.modules()}:
            for name in EAGER_FUNCTIONS:
                original = getattr(sys.modules[home], name, None)
                if original is not None:
                    setattr(sys.modules[home], name, _editing(original, edits))
                    stack.callback(setattr, sys.modules[home], name, original)
        yield


def _editing(original: Callable[..., Any], edits: Mapping[nn.Module, HeadsEdit]) -> Callable[..., Any]:
    def attention(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        out, alpha = original(module, *args, **kwargs)  # out [1, L, H, dv]
        if module in edits:
            out = edits[module](out[0].transpose(0, 1)).transpose(0, 1)[None].contiguous()
        return out, alpha

    return attention


def _edit_projected(heads: int, edit: HeadsEdit) -> Callable[..., Any]:
    def hook(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        z = args[0][0].unflatten(-1, (heads, -1)).transpose(0, 1)
        return (edit(z).transpose(0, 1).flatten(-2)[None], *args[1:])

    return hook
