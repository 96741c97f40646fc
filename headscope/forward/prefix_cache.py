"""Prompts read one after the other, each at the cost of what it does not share with the one before.

Keys and values are cached in blocks that begin at fixed places and are computed in one call each, so what is found in
a prompt depends on that prompt alone, to the last bit: not on the prompts before it, nor on where a run was resumed.
Knows nothing of needles.
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from headscope.attention import backend
from headscope.forward.capture import capturing
from headscope.forward.input_checks import refuse_non_finite, refuse_unknown_tokens
from headscope.forward.replay import shares_keys_across_layers
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model

TokenIds = npt.NDArray[np.int32]

TOKENS_PER_BLOCK = {"cpu": 128, "cuda": 512}
"""Tokens a block: small ones share more of a prompt, large ones keep a GPU busy."""


class PrefixCachedGenerator:
    """Answers prompts with one model under its scheme; `tokens` counts what went through the model so far.

    Prompts in an order that keeps common beginnings together cost least. Where what is cached is not a key and a value
    of every token, as in layers without attention, or depends on the total length, nothing is shared (`shares` is
    False): the whole sequence is read again for every token of the answer.
    """

    def __init__(self, model: Model):
        self.model = model
        self.block_size = TOKENS_PER_BLOCK.get(model.device.type, 128)
        self.shares_prefixes = supports_prefix_cache(model)
        self.processed_tokens = 0
        # Without the config, sliding layers keep every key too, and so can be cropped; the seam applies their window.
        self._cache = DynamicCache()
        self._cached_ids: TokenIds = np.empty(0, np.int32)

    def generate(
        self, prompt: TokenIds, listener: backend.Listener, max_tokens: int, is_last_token: Callable[[int], bool]
    ) -> list[int]:
        """At most `most` greedy tokens after `prompt` [L], up to and including the first for which `ends` holds.

        `listener` is called for every layer of the step that produced each token, with the row of that step last.
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
        """Cache all blocks of the prompt but the last, which is returned."""
        kept = shared_prefix_length(self._cached_ids, prompt, self.block_size)
        self._cache.crop(kept - self._cache.get_seq_length())
        self._cached_ids = prompt[:kept]  # whatever interrupts what follows
        last = last_block_start(len(prompt), self.block_size)
        for start in range(kept, last, self.block_size):
            self._forward(prompt[start : start + self.block_size])
        self._cached_ids = prompt[:last]
        return prompt[last:]

    def _forward(self, ids: TokenIds) -> Tensor:
        """The model's logits after these tokens, [vocabulary]."""
        self.processed_tokens += len(ids)
        tensor = torch.from_numpy(ids.astype(np.int64))[None]
        refuse_unknown_tokens(self.model, tensor)
        tensor = tensor.to(self.model.device)
        cache = {"past_key_values": self._cache, "use_cache": True} if self.shares_prefixes else {"use_cache": False}
        # Of a model that lends keys, Gemma 4 would cut its mask down to the logits that are kept.
        last = {} if shares_keys_across_layers(self.model) else {"logits_to_keep": 1}
        logits: Tensor = self.model.module(tensor, **last, **cache).logits
        refuse_non_finite(self.model, tensor, logits[0, -1])
        return logits[0, -1]


def supports_prefix_cache(model: Model) -> bool:
    """Whether the cache of a beginning serves every sequence that begins so."""
    schedule, rotation = model.schedule, model.rotation
    by_length = getattr(schedule, "uses_sequence_length", False) or (
        rotation.frequency_change_length is not None and not schedule.replaces_rotation
    )
    layers = DynamicCache(config=model.module.config).layers
    return not by_length and {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}


def last_block_start(length: int, block_size: int) -> int:
    """Where the last block of a prompt of `length` tokens begins; it holds at least one token."""
    return (length - 1) // block_size * block_size


def shared_prefix_length(cached_ids: TokenIds, prompt: TokenIds, block_size: int) -> int:
    """Tokens of `prompt` in whole blocks that are also `cached`; its last block is always read."""
    shorter = min(len(cached_ids), last_block_start(len(prompt), block_size))
    differ = np.flatnonzero(cached_ids[:shorter] != prompt[:shorter])
    return (int(differ[0]) if len(differ) else shorter) // block_size * block_size
