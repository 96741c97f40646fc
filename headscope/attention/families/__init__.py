"""Attention overrides for model families that need more than an attention function registered with transformers.

Most compute attention inside their own module instead of calling the registered function; others do arithmetic on the
attention mask. While a model runs on headscope's backend, an override replaces one method of its own modules; leaving
restores them.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

from torch import nn
from transformers import PreTrainedModel

from headscope.attention.contexts import replacing
from headscope.attention.families import alibi, gpt_families, sparse_attention
from headscope.attention.families.override import AttentionFunction, AttentionOverride

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
    "Qwen4ExpTextQSAIndexer": sparse_attention.QWEN_INDEXER,
    **dict.fromkeys(SPARSE_INDEXERS, sparse_attention.SPARSE_INDEXER),
}
"""Override by the class name of the attention module, or of the indexer that chooses its keys."""
INDEXERS = frozenset((*SPARSE_INDEXERS, "MiniMaxM3VLIndexer", "Qwen4ExpTextQSAIndexer"))


def indexers(model: nn.Module) -> list[nn.Module]:
    """The modules of the model that choose the keys of each query."""
    return [module for module in model.modules() if type(module).__name__ in INDEXERS]


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


def needs_opaque_mask(model: PreTrainedModel) -> bool:
    """Whether the model computes with its attention mask, so that it must get an `OpaqueMask`."""
    return any(override.hides_mask for _, override in _overridden_modules(model))


@contextmanager
def overriding_attention(model: PreTrainedModel, attention_function: AttentionFunction) -> Iterator[None]:
    """Make the model's attention modules call `attention_function`; leaving restores them."""
    with ExitStack() as stack:
        for module, override in _overridden_modules(model):
            replacement = partial(override.replacement, attention_function, module)
            stack.enter_context(replacing(module, override.method, replacement))
        yield


@contextmanager
def with_own_attention(model: PreTrainedModel) -> Iterator[None]:
    """Give the model's attention modules back the methods that open contexts have overridden, inside the `with`."""
    with ExitStack() as stack:
        for module, override in _overridden_modules(model):
            replacement = vars(module).get(override.method)
            if isinstance(replacement, partial) and replacement.func is override.replacement:
                own_method = getattr(type(module), override.method).__get__(module)
                stack.enter_context(replacing(module, override.method, own_method))
        yield


def _find_override(module: nn.Module) -> AttentionOverride | None:
    return ATTENTION_OVERRIDES.get(type(module).__name__)


def _overridden_modules(model: PreTrainedModel) -> list[tuple[nn.Module, AttentionOverride]]:
    return [(module, override) for module in model.modules() if (override := _find_override(module)) is not None]
