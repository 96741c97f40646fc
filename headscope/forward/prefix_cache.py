"""Prefix cache: generate answers to prompts, computing only what a prompt does not share with the previous one.

Keys and values are cached in blocks that start at fixed positions, and each block is computed in one call. So results
for a prompt are bit-identical whatever prompts came before, and wherever a run was resumed.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from headscope.attention.listeners import Listener
from headscope.forward.backbone import check_input_ids, refuse_non_finite
from headscope.forward.capture import capturing
from headscope.forward.carried_state import shares_keys_across_layers
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model

TokenIds = npt.NDArray[np.int32]

TOKENS_PER_BLOCK = {"cpu": 128, "cuda": 512}
"""Tokens per block. Small blocks share more of a prompt, large ones keep a GPU busy."""


class PrefixCachedGenerator:
    """Greedy generation by one model under its scheme; `processed_tokens` counts the tokens that the model has read.

    It is fastest if prompts with a common prefix follow each other. If the cache is not one key and value per token, as
    in layers without attention, or depends on the total length, `shares_prefixes` is False: the model then reads the
    whole sequence again for every token of the answer.
    """

    def __init__(self, model: Model):
        self.model = model
        self.block_size = TOKENS_PER_BLOCK.get(model.device.type, 128)
        self.shares_prefixes = supports_prefix_cache(model)
        self.processed_tokens = 0
        # Without the config, sliding layers also keep every key, so they can be cropped; the backend applies windows.
        self._cache = DynamicCache()
        self._cached_ids: TokenIds = np.empty(0, np.int32)

    def generate(
        self, prompt: TokenIds, listener: Listener, max_tokens: int, is_last_token: Callable[[int], bool]
    ) -> list[int]:
        """At most `max_tokens` greedy tokens after `prompt` [L]; ends with the first for which `is_last_token` holds.

        `listener` is called for every layer of the step that produced each token; the step's query is the last one.
        """
        answer: list[int] = []
        with evaluating(self.model), attached(self.model), capturing(self.model) as layers:
            rest = self._prefill(prompt) if self.shares_prefixes else prompt
            layers.listen(listener)
            while len(answer) < max_tokens:
                token = int(self._forward(rest).argmax())
                answer.append(token)
                if is_last_token(token):
                    break
                rest = np.array([token]) if self.shares_prefixes else np.append(rest, token)
        return answer

    def _prefill(self, prompt: TokenIds) -> TokenIds:
        """Cache all blocks of the prompt except the last, and return the last."""
        shared = shared_prefix_length(self._cached_ids, prompt, self.block_size)
        self._cache.crop(shared - self._cache.get_seq_length())
        self._cached_ids = prompt[:shared]  # stays correct if the loop is interrupted
        last = last_block_start(len(prompt), self.block_size)
        for start in range(shared, last, self.block_size):
            self._forward(prompt[start : start + self.block_size])
        self._cached_ids = prompt[:last]
        return prompt[last:]

    def _forward(self, ids: TokenIds) -> Tensor:
        """The model's logits after these tokens, [vocabulary]."""
        self.processed_tokens += len(ids)
        tensor = torch.from_numpy(ids.astype(np.int64))[None]
        check_input_ids(self.model, tensor, self._cache.get_seq_length() if self.shares_prefixes else 0)
        tensor = tensor.to(self.model.device)
        cache = {"past_key_values": self._cache, "use_cache": True} if self.shares_prefixes else {"use_cache": False}
        # If layers share keys, Gemma 4 would crop its mask to the positions in logits_to_keep.
        last = {} if shares_keys_across_layers(self.model) else {"logits_to_keep": 1}
        logits: Tensor = self.model.module(tensor, **last, **cache).logits
        refuse_non_finite(self.model, tensor, logits[0, -1])
        return logits[0, -1]


def supports_prefix_cache(model: Model) -> bool:
    """Whether the cache of a prefix is valid for every sequence with that prefix."""
    schedule, rotation = model.schedule, model.rotation
    depends_on_length = getattr(schedule, "uses_sequence_length", False) or (
        rotation.frequency_change_length is not None and not schedule.replaces_rotation
    )
    layers = DynamicCache(config=model.module.config).layers
    depends_on_length |= model.padding_check.uncounted_token is not None
    return not depends_on_length and {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}


def last_block_start(length: int, block_size: int) -> int:
    """Start of the last block of a prompt of `length` tokens; the block holds at least one token."""
    return (length - 1) // block_size * block_size


def shared_prefix_length(cached_ids: TokenIds, prompt: TokenIds, block_size: int) -> int:
    """Number of tokens of `prompt` in whole cached blocks. Its last block is never shared."""
    shorter = min(len(cached_ids), last_block_start(len(prompt), block_size))
    differ = np.flatnonzero(cached_ids[:shorter] != prompt[:shorter])
    return (int(differ[0]) if len(differ) else shorter) // block_size * block_size
