"""The shape of a model's attention."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from headscope.errors import BadInput

RotaryLayout = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Geometry:
    """Shape of a model's attention: the same in every layer except for the fields with one entry per layer.

    Only layers with attention count. `layer_numbers` are their numbers in the model, from 0: a hybrid model also has
    layers without attention. The code identifies a layer by its index into `layer_numbers`; tables, messages and
    options use the layer number.

    `pairs` is the number of rotary pairs of a head, 0 if nothing rotates; the other dimensions pass unrotated.
    `rotary_layout` says which two dimensions form pair f: "half" is (f, f + pairs), "interleaved" is (2f, 2f + 1),
    counted from dimension `rotary_start`. That is 0 except in latent attention, where the rotary dimensions come last.
    `heads`, `kv_groups`, `head_dim` and `pairs` are the largest of all layers; `layer_heads`, `layer_kv_groups`,
    `layer_head_dims` and `layer_pairs` are those of each layer (by default, all layers are alike). With growing
    position a pair rotates from its first dimension to its second, or back (`rotation_direction` -1).

    `native_context` is the length in tokens that the checkpoint was trained or declared for, `original_context` the
    length before RoPE scaling, by default the same.
    """

    layer_numbers: tuple[int, ...]
    heads: int
    kv_groups: int
    head_dim: int
    pairs: int
    rotary_layout: RotaryLayout
    native_context: int
    windows: tuple[int | None, ...]
    layer_rotates: tuple[bool, ...]
    layer_kv_groups: tuple[int, ...]
    rotary_start: int = 0
    rotation_direction: Literal[1, -1] = 1
    layer_heads: tuple[int, ...] = ()
    layer_head_dims: tuple[int, ...] = ()
    layer_pairs: tuple[int, ...] = ()
    original_context: int = 0

    def __post_init__(self) -> None:
        if not self.original_context:
            object.__setattr__(self, "original_context", self.native_context)
        for by_layer, value in (
            ("layer_heads", self.heads),
            ("layer_head_dims", self.head_dim),
            ("layer_pairs", self.pairs),
        ):
            if not getattr(self, by_layer):
                object.__setattr__(self, by_layer, (value,) * self.layers)

    @property
    def layers(self) -> int:
        """Number of layers with attention."""
        return len(self.layer_numbers)

    @property
    def all_pairs(self) -> int:
        """Number of rotary pairs plus the pairs that the unrotated dimensions form."""
        return self.head_dim // 2

    def heads_per_group(self, layer: int) -> int:
        """Number of query heads per KV group of a layer."""
        return self.layer_heads[layer] // self.layer_kv_groups[layer]

    def has_head(self, number: int, head: int) -> bool:
        """Whether the layer with this number has attention and this query head."""
        return number in self.layer_numbers and 0 <= head < self.layer_heads[self.layer_numbers.index(number)]

    def check_shape(self, source: str, shape: tuple[int, int] | None, model: str, per_group: bool = False) -> None:
        """Raise BadInput if `source` states another shape than the model's: [layers, heads], or [layers, KV groups]."""
        counts = self.layer_kv_groups if per_group else self.layer_heads
        if shape is None or (self.layer_numbers == tuple(range(shape[0])) and {*counts} == {shape[1]}):
            return
        noun, own = ("KV groups" if per_group else "heads"), " or ".join(map(str, sorted({*counts})))
        advice = "Give those of this model"
        if not per_group and shape == (self.layers, self.kv_groups):
            advice = (
                "It has a column per KV group, not per head: name heads, as in L0H1, or import a .tsv of DuoAttention"
            )
        if self.layer_numbers[-1] >= self.layers:
            own += f", numbered {', '.join(map(str, self.layer_numbers))}"
            advice = f"Name the heads, as in L{self.layer_numbers[0]}H0"
        raise BadInput(
            f"{source} has scores of {shape[0]} layers of {shape[1]} {noun}, but model '{model}' has {self.layers} "
            f"layers of {own} {noun}. {advice}"
        )

    def suggest_heads(self, number: int) -> str:
        """What to use instead of a head that the layer with this number does not have, as a sentence."""
        if number in self.layer_numbers:
            return f"Use heads 0 to {self.layer_heads[self.layer_numbers.index(number)] - 1} of layer {number}"
        first, last = self.layer_numbers[0], self.layer_numbers[-1]
        is_range = self.layer_numbers == tuple(range(first, last + 1))
        return f"Use layers {f'{first} to {last}' if is_range else ', '.join(map(str, self.layer_numbers))}"

    def has_pair(self, layer: Tensor, head: Tensor, pair: Tensor) -> Tensor:
        """Whether layers have these heads and pairs of dimensions, for tensors of one shape."""
        heads, head_dims = torch.tensor(self.layer_heads), torch.tensor(self.layer_head_dims)
        return (head < heads[layer]) & (pair < head_dims[layer] // 2)

    def at_layer(self, layer: int) -> "Geometry":
        """The geometry with the heads, KV groups, head dimension and pairs of one layer."""
        return replace(
            self,
            heads=self.layer_heads[layer],
            kv_groups=self.layer_kv_groups[layer],
            head_dim=self.layer_head_dims[layer],
            pairs=self.layer_pairs[layer],
        )

    def kv_group(self, layer: Any, head: Any) -> Any:
        """The KV group of query heads: layer indices and heads as two ints, or two arrays or tensors of one shape."""
        sizes = torch.tensor([self.heads_per_group(index) for index in range(self.layers)])
        if isinstance(layer, Tensor):
            return head // sizes[layer]
        return head // (int(sizes[layer]) if isinstance(layer, int) else sizes.numpy()[layer])


def stack_layers(layers: Sequence[Tensor], fill: float) -> Tensor:
    """Stack one tensor [.., H] per layer as [layers, .., H], on the device of the first.

    Layers with fewer heads are filled with `fill`.
    """
    heads, device = max(layer.shape[-1] for layer in layers), layers[0].device
    padded = [nn.functional.pad(layer, (0, heads - layer.shape[-1]), value=fill) for layer in layers]
    return torch.stack([layer.to(device) for layer in padded])
