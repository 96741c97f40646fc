"""Keys and values that several layers share: Gemma 3n and Gemma 4 pass them to later layers in one dictionary.

The last layers have no keys of their own. The last layer with its own keys of each layer type writes them, after
rotation and norms, into the dictionary that every decoder layer receives; the layers after it read them there.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import KVSharingDict

from headscope.models.checkpoint import LoadedModel

ARGUMENT = "shared_kv_states"
"""The keyword of a decoder layer that takes the dictionary."""


def shares_keys_across_layers(model: LoadedModel) -> bool:
    """Whether layers of the model use the keys and values of another layer."""
    return bool(getattr(model.module.config.get_text_config(), "num_kv_shared_layers", 0))


class SharedKeys:
    """The shared keys of one recorded pass: k [1, G, L, d] and v [1, G, L, dv] by layer type.

    `layer_types` [layers + 1] are the types that the dictionary held before each layer and at the end.
    """

    def __init__(self) -> None:
        self.pairs = KVSharingDict()
        self.layer_types: list[Collection[str]] = []

    def record(self, arguments: Mapping[str, Any]) -> None:
        """Record the dictionary among the keyword arguments of the layer that runs next, or of the last one."""
        self.pairs = KVSharingDict(arguments.get(ARGUMENT) or {})
        self.layer_types.append({*self.pairs})

    def layer_types_written_by(self, layer: int) -> list[str]:
        """The layer types whose keys a layer wrote."""
        return sorted(set(self.layer_types[layer + 1]) - set(self.layer_types[layer]))

    def copy_for_batch(self, copies: int) -> KVSharingDict:
        """A dictionary for a batch of `copies` of the recorded sequence, into which layers may write."""
        return KVSharingDict(
            {kind: tuple(t.expand(copies, -1, -1, -1) for t in pair) for kind, pair in self.pairs.items()}
        )


class SharedKeyGradients:
    """Gradients of several objectives with respect to shared keys, summed over the layers that read them."""

    def __init__(self, shared: SharedKeys, objectives: int):
        self.shared = shared
        self.leaves = KVSharingDict(
            {kind: tuple(t.detach().requires_grad_() for t in pair) for kind, pair in shared.pairs.items()}
        )
        self._sums = [
            {kind: [torch.zeros_like(t) for t in pair] for kind, pair in shared.pairs.items()}
            for _ in range(objectives)
        ]

    def pull_back(
        self, layer: int, output: Tensor, keys: KVSharingDict, inputs: Sequence[Tensor], seeds: Sequence[Tensor]
    ) -> list[tuple[Tensor, ...]]:
        """Gradients with respect to `inputs` of one layer by objective, from the gradients `seeds` of its `output`.

        The layer ran with the dictionary `keys`, a copy of `leaves`, into which it may have written.
        """
        written = self.shared.layer_types_written_by(layer)
        outputs = [output, *(tensor for kind in written for tensor in keys[kind])]
        leaves = [tensor for pair in self.leaves.values() for tensor in pair]
        by_objective = []
        for number, (seed, sums) in enumerate(zip(seeds, self._sums, strict=True)):
            gradients = torch.autograd.grad(
                outputs,
                [*inputs, *leaves],
                [seed, *(total for kind in written for total in sums[kind])],
                retain_graph=number < len(seeds) - 1,
                allow_unused=True,  # most layers read the keys of one layer type, or none
            )
            totals = [total for pair in sums.values() for total in pair]
            for total, gradient in zip(totals, gradients[len(inputs) :], strict=True):
                if gradient is not None:
                    total += gradient
            by_objective.append(gradients[: len(inputs)])
        return by_objective


def with_shared_keys(arguments: Mapping[str, Any], keys: KVSharingDict) -> Mapping[str, Any]:
    """The keyword arguments of a decoder layer with this dictionary in place of the recorded one."""
    return {**arguments, ARGUMENT: keys} if ARGUMENT in arguments else arguments
