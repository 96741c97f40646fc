"""State that decoder layers pass to later layers beside the residual stream: record it in one pass, use it in others.

Gemma 3n and Gemma 4 write the keys that layers share into one dictionary that every layer receives: the last layer with
keys of its own of each layer type writes them, after rotation and norms, and the layers after it have none. Zaya's
layers return the state of their router, and indexers return the keys that they chose, for the layer that follows.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headscope.compat.transformers import KV_SHARING_DICT
from headscope.models.checkpoint import LoadedModel

ARGUMENT = "shared_kv_states"
"""The keyword of a decoder layer that takes the dictionary of shared keys."""

Key = tuple[str | int, int]
"""A carried tensor: layer type and 0 or 1 for shared keys or values; decoder layer and place for a further output."""


def shares_keys_across_layers(model: LoadedModel) -> bool:
    """Whether layers of the model use the keys and values of another layer."""
    return bool(getattr(model.module.config.get_text_config(), "num_kv_shared_layers", 0))


def batch_axis(recorded: Tensor) -> int | None:
    """The batch axis of a tensor of a pass over one sequence: the first of size 1, None if there is none.

    It is not the first axis of the streams of Gemma 3n, [4, 1, L, D].
    """
    return recorded.shape.index(1) if 1 in recorded.shape else None


def expand_batch(value: Any, copies: int) -> Any:
    """Expand a tensor of a pass over one sequence to `copies` of the sequence; return other values unchanged."""
    if not isinstance(value, Tensor) or (axis := batch_axis(value)) is None:
        return value
    return value.expand(*(copies if index == axis else -1 for index in range(value.dim())))


class CarriedState:
    """The arguments and outputs of the layers in one recorded pass, without the residual stream.

    `tensors` are the carried tensors that gradients flow through: shared keys k [1, G, L, d], values v [1, G, L, dv],
    and further outputs that a later layer reads. `writers` has the decoder layer that wrote each of them.
    """

    def __init__(self) -> None:
        self.tensors: dict[Key, Tensor] = {}
        self.writers: dict[Key, int] = {}
        self._arguments: list[tuple[Any, Mapping[str, Any]]] = []
        self._further_outputs: list[tuple[Any, ...] | None] = []  # None of a layer that returns one tensor
        self._keys_by_tensor: dict[int, Key] = {}

    @property
    def passes_streams_only(self) -> bool:
        """Whether layers pass nothing but the residual stream to later layers."""
        has_further = any(isinstance(value, Tensor) for further in self._further_outputs for value in further or ())
        shares = any(kwargs.get(ARGUMENT) is not None for _, kwargs in self._arguments)
        return not self.tensors and not has_further and not shares

    def record_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record the arguments of the layer that runs next, without the residual stream."""
        self._arguments.append((tuple(args), kwargs))
        for value in (*args, *kwargs.values()):
            if (key := self._keys_by_tensor.get(id(value))) is not None and value.is_floating_point():
                self.tensors[key], self.writers[key] = value, int(key[0])

    def record_outputs(self, output: Any) -> None:
        """Record the output of the layer that ran last, and the keys that it wrote for other layers."""
        layer = len(self._further_outputs)
        further = None if isinstance(output, Tensor) else tuple(output[1:])
        self._further_outputs.append(further)
        self._keys_by_tensor |= {
            id(t): (layer, place) for place, t in enumerate(further or ()) if isinstance(t, Tensor)
        }
        for key, tensor in _shared_tensors(self._arguments[-1][1].get(ARGUMENT)):
            if key not in self.tensors:
                self.tensors[key], self.writers[key] = tensor, layer

    def arguments(self, layer: int, tensors: Mapping[Key, Tensor]) -> tuple[Sequence[Any], dict[str, Any]]:
        """The recorded arguments of a layer with these carried tensors in place of the recorded ones.

        The layer may write into its dictionary of shared keys, which is a copy.
        """

        def replaced(value: Any) -> Any:
            return tensors.get(self._keys_by_tensor.get(id(value), ("", 0)), value)

        args, kwargs = self._arguments[layer]
        kwargs = {name: replaced(value) for name, value in kwargs.items()}
        if kwargs.get(ARGUMENT) is not None:
            kwargs[ARGUMENT] = self._shared_dictionary(tensors)
        return [replaced(value) for value in args], kwargs

    def written(self, layer: int, output: Any, kwargs: Mapping[str, Any]) -> dict[Key, Tensor]:
        """The carried tensors that a layer wrote when it returned `output`, called with `kwargs`."""
        keys = [key for key, writer in self.writers.items() if writer == layer]
        return {key: output[1 + key[1]] if key[0] == layer else kwargs[ARGUMENT][key[0]][key[1]] for key in keys}

    def outputs(self, layer: int, stream: Tensor, copies: int, kwargs: Mapping[str, Any]) -> Any:
        """The output of a layer in a pass over `copies` of the sequence: `stream` and its recorded further outputs.

        It writes its recorded keys into the dictionary of shared keys among its `kwargs`.
        """
        if kwargs.get(ARGUMENT) is not None:
            recorded = {key: tensor for key, tensor in self.tensors.items() if self.writers[key] == layer}
            kwargs[ARGUMENT].update(self._shared_dictionary(recorded, copies))
        further = self._further_outputs[layer]
        return stream if further is None else (stream, *(expand_batch(value, copies) for value in further))

    def _shared_dictionary(self, tensors: Mapping[Key, Tensor], copies: int = 1) -> Any:
        """The shared keys and values among carried tensors, by layer type."""
        kinds = dict.fromkeys(kind for kind, _ in tensors if isinstance(kind, str))
        return KV_SHARING_DICT.resolve()(
            {kind: tuple(expand_batch(tensors[kind, place], copies) for place in (0, 1)) for kind in kinds}
        )


def _shared_tensors(dictionary: Mapping[str, Sequence[Tensor]] | None) -> Iterator[tuple[Key, Tensor]]:
    """The entries of a dictionary of shared keys."""
    for kind, pair in (dictionary or {}).items():
        yield from (((kind, place), tensor) for place, tensor in enumerate(pair))


class CarriedGradients:
    """Gradients of several objectives with respect to carried tensors, summed over the layers that read them."""

    def __init__(self, carried: CarriedState, objectives: int):
        self.leaves = {key: tensor.detach().requires_grad_() for key, tensor in carried.tensors.items()}
        self._sums = [{key: torch.zeros_like(leaf) for key, leaf in self.leaves.items()} for _ in range(objectives)]

    def pull_back(
        self, output: Tensor, written: Mapping[Key, Tensor], inputs: Sequence[Tensor], seeds: Sequence[Tensor]
    ) -> list[tuple[Tensor, ...]]:
        """Gradients with respect to `inputs` of one layer by objective, from the gradients `seeds` of its `output`.

        The layer read `leaves` and wrote the carried tensors `written`.
        """
        by_objective = []
        for number, (seed, sums) in enumerate(zip(seeds, self._sums, strict=True)):
            gradients = torch.autograd.grad(
                [output, *written.values()],
                [*inputs, *self.leaves.values()],
                [seed, *(sums[key] for key in written)],
                retain_graph=number < len(seeds) - 1,
                allow_unused=True,  # a layer reads few of the carried tensors, or none
            )
            for total, gradient in zip(sums.values(), gradients[len(inputs) :], strict=True):
                if gradient is not None:
                    total += gradient
            by_objective.append(gradients[: len(inputs)])
        return by_objective
