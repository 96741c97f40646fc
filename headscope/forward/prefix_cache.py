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
from headscope.forward.input_checks import refuse_not_finite, refuse_unknown
from headscope.forward.replay import lends_keys
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model

Ids = npt.NDArray[np.int32]

BLOCKS = {"cpu": 128, "cuda": 512}
"""Tokens a block: small ones share more of a prompt, large ones keep a GPU busy."""


class PrefixReader:
    """Answers prompts with one model under its scheme; `tokens` counts what went through the model so far.

    Prompts in an order that keeps common beginnings together cost least. Where what is cached is not a key and a value
    of every token, as in layers without attention, or depends on the total length, nothing is shared (`shares` is
    False): the whole sequence is read again for every token of the answer.
    """

    def __init__(self, model: Model):
        self.model = model
        self.block = BLOCKS.get(model.device.type, 128)
        self.shares = continues(model)
        self.tokens = 0
        # Without the config, sliding layers keep every key too, and so can be cropped; the seam applies their window.
        self._cache = DynamicCache()
        self._blocks: Ids = np.empty(0, np.int32)

    def answer(self, prompt: Ids, listener: backend.Listener, most: int, ends: Callable[[int], bool]) -> list[int]:
        """At most `most` greedy tokens after `prompt` [L], up to and including the first for which `ends` holds.

        `listener` is called for every layer of the step that produced each token, with the row of that step last.
        """
        answer: list[int] = []
        with evaluating(self.model), attached(self.model), capturing(self.model) as layers:
            rest = self._prefilled(prompt) if self.shares else prompt
            layers.listen(listener)
            while len(answer) < most:
                token = int(self._step(rest).argmax())
                answer.append(token)
                if ends(token):
                    break
                rest = np.array([token]) if self.shares else np.append(rest, token)
        return answer

    def _prefilled(self, prompt: Ids) -> Ids:
        """Cache all blocks of the prompt but the last, which is returned."""
        kept = shared_tokens(self._blocks, prompt, self.block)
        self._cache.crop(kept - self._cache.get_seq_length())
        self._blocks = prompt[:kept]  # whatever interrupts what follows
        last = last_block(len(prompt), self.block)
        for start in range(kept, last, self.block):
            self._step(prompt[start : start + self.block])
        self._blocks = prompt[:last]
        return prompt[last:]

    def _step(self, ids: Ids) -> Tensor:
        """The model's logits after these tokens, [vocabulary]."""
        self.tokens += len(ids)
        tensor = torch.from_numpy(ids.astype(np.int64))[None]
        refuse_unknown(self.model, tensor)
        tensor = tensor.to(self.model.device)
        cache = {"past_key_values": self._cache, "use_cache": True} if self.shares else {"use_cache": False}
        # Of a model that lends keys, Gemma 4 would cut its mask down to the logits that are kept.
        last = {} if lends_keys(self.model) else {"logits_to_keep": 1}
        logits: Tensor = self.model.module(tensor, **last, **cache).logits
        refuse_not_finite(self.model, tensor, logits[0, -1])
        return logits[0, -1]


def continues(model: Model) -> bool:
    """Whether the cache of a beginning serves every sequence that begins so."""
    schedule, rotation = model.schedule, model.rotation
    by_length = getattr(schedule, "by_sequence", False) or (rotation.until is not None and not schedule.rotates)
    layers = DynamicCache(config=model.module.config).layers
    return not by_length and {type(layer) for layer in layers} <= {DynamicLayer, DynamicSlidingWindowLayer}


def last_block(length: int, block: int) -> int:
    """Where the last block of a prompt of `length` tokens begins; it holds at least one token."""
    return (length - 1) // block * block


def shared_tokens(cached: Ids, prompt: Ids, block: int) -> int:
    """Tokens of `prompt` in whole blocks that are also `cached`; its last block is always read."""
    shorter = min(len(cached), last_block(len(prompt), block))
    differ = np.flatnonzero(cached[:shorter] != prompt[:shorter])
    return (int(differ[0]) if len(differ) else shorter) // block * block
