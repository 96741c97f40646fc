"""Adapters of model families for which it is not enough to register an attention function with transformers.

Most compute attention inside their own module instead of calling the registered function; others do arithmetic on the
attention mask. While a model runs on headscope's backend, an adapter replaces one method of such modules; leaving
restores the modules and the family's Python module.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from headscope.attention.families import alibi, gpt_families, sparse_attention
from headscope.attention.families.adapter import AttentionFunction, FamilyAdapter
from headscope.attention.masks import OpaqueMask

SPARSE_INDEXERS = ("AXK2Indexer", "DeepseekV32Indexer", "Dots3NoteTextIndexer", "GlmMoeDsaIndexer", "HYV4Indexer")
ADAPTERS = {
    "BloomAttention": alibi.BLOOM,
    "CodeGenAttention": gpt_families.GPTJ,
    "DogeAttention": sparse_attention.DOGE,
    "FalconAttention": alibi.FALCON,
    "GPTJAttention": gpt_families.GPTJ,
    "GPTNeoSelfAttention": gpt_families.GPT_NEO,
    "GPTNeoXJapaneseAttention": gpt_families.GPT_NEOX_JAPANESE,
    "MptAttention": alibi.MPT,
    "XGLMAttention": gpt_families.XGLM,
    **dict.fromkeys(SPARSE_INDEXERS, sparse_attention.SPARSE_INDEXER),
}
"""Adapter by the class name of the attention module, or of the indexer that chooses its keys."""


def has_adapter(model: PreTrainedModel) -> bool:
    """Whether the model's attention is reached through an adapter."""
    return bool(_adapted_modules(model))


def reference_implementation(model: PreTrainedModel) -> str:
    """The attention implementation that the eager check compares with: eager, unless an adapter names another."""
    adapted = _adapted_modules(model)
    return adapted[0][1].reference_implementation(model.config) if adapted else "eager"


def output_module(module: nn.Module) -> nn.Module:
    """The module that returns the output of an attention module, without the residual stream."""
    adapter = _adapter(module)
    return module.get_submodule(adapter.output_module) if adapter else module


@contextmanager
def using_adapters(
    model: PreTrainedModel, attention_function: AttentionFunction, implementation: str
) -> Iterator[None]:
    """Make the model's attention modules call `attention_function`; leaving restores them.

    `implementation` is the name under which the function and its mask function are registered with transformers.
    """
    with ExitStack() as stack:
        adapted = _adapted_modules(model)
        for module, adapter in adapted:
            replacement = partial(adapter.replacement, attention_function, module)
            stack.enter_context(_replacing(module, adapter.method, replacement))
        for namespace in {type(module).__module__ for module, adapter in adapted if adapter.hides_mask}:
            python_module = sys.modules[namespace]
            create_mask = _opaque_mask_function(python_module.create_causal_mask, implementation)
            stack.enter_context(_replacing(python_module, "create_causal_mask", create_mask))
        yield


def _adapter(module: nn.Module) -> FamilyAdapter | None:
    return ADAPTERS.get(type(module).__name__)


def _adapted_modules(model: PreTrainedModel) -> list[tuple[nn.Module, FamilyAdapter]]:
    return [(module, adapter) for module in model.modules() if (adapter := _adapter(module)) is not None]


@contextmanager
def _replacing(owner: Any, name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Set an attribute of an object; leaving restores it, or deletes it if the object itself had none."""
    previous = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        if previous is None:
            delattr(owner, name)
        else:
            setattr(owner, name, previous)


def _opaque_mask_function(original: Callable[..., Any], implementation: str) -> Callable[..., Any]:
    """`create_causal_mask` of a family that computes with its mask, for models that run on `implementation`."""

    def create_causal_mask(config: Any, *args: Any, allow_is_causal_skip: bool = True, **kwargs: Any) -> Any:
        if config._attn_implementation != implementation:
            return original(config, *args, allow_is_causal_skip=allow_is_causal_skip, **kwargs)
        mask = original(config, *args, **kwargs)
        return mask if isinstance(mask, OpaqueMask) else OpaqueMask(mask)

    return create_causal_mask
