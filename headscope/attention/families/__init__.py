"""Attention overrides for model families that need more than an attention function registered with transformers.

Most compute attention inside their own module instead of calling the registered function; others do arithmetic on the
attention mask. While a model runs on headscope's backend, an override replaces one method of such modules; leaving
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
from headscope.attention.families.override import AttentionFunction, AttentionOverride
from headscope.attention.masks import OpaqueMask

SPARSE_INDEXERS = ("AXK2Indexer", "DeepseekV32Indexer", "Dots3NoteTextIndexer", "GlmMoeDsaIndexer", "HYV4Indexer")
ATTENTION_OVERRIDES = {
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
"""Override by the class name of the attention module, or of the indexer that chooses its keys."""


def has_attention_override(model: PreTrainedModel) -> bool:
    """Whether the model's attention needs an override."""
    return bool(_overridden_modules(model))


def reference_implementation(model: PreTrainedModel) -> str:
    """The attention implementation that the eager check compares with: eager, unless an override names another."""
    overridden = _overridden_modules(model)
    return overridden[0][1].reference_implementation(model.config) if overridden else "eager"


def output_module(module: nn.Module) -> nn.Module:
    """The module that returns the output of an attention module, without the residual stream."""
    override = _find_override(module)
    return module.get_submodule(override.output_module) if override else module


@contextmanager
def overriding_attention(
    model: PreTrainedModel, attention_function: AttentionFunction, implementation: str
) -> Iterator[None]:
    """Make the model's attention modules call `attention_function`; leaving restores them.

    `implementation` is the name under which the function and its mask function are registered with transformers.
    """
    with ExitStack() as stack:
        overridden = _overridden_modules(model)
        for module, override in overridden:
            replacement = partial(override.replacement, attention_function, module)
            stack.enter_context(_replacing(module, override.method, replacement))
        for namespace in {type(module).__module__ for module, override in overridden if override.hides_mask}:
            python_module = sys.modules[namespace]
            create_mask = _opaque_mask_function(python_module.create_causal_mask, implementation)
            stack.enter_context(_replacing(python_module, "create_causal_mask", create_mask))
        yield


def _find_override(module: nn.Module) -> AttentionOverride | None:
    return ATTENTION_OVERRIDES.get(type(module).__name__)


def _overridden_modules(model: PreTrainedModel) -> list[tuple[nn.Module, AttentionOverride]]:
    return [(module, override) for module in model.modules() if (override := _find_override(module)) is not None]


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
