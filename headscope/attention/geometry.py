"""The shape of a model's attention, as data."""

from dataclasses import dataclass
from typing import Literal

RotaryLayout = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Geometry:
    """Equal in every layer except for `windows` and `rotates`. Only layers with attention count.

    `numbers` are the layers' true numbers in the model, from 0: a hybrid model has layers without attention. Inside,
    a layer goes by its index into `numbers`; its true number stands wherever a reader or an option names it.
    `pairs` counts the rotary 2-D planes of a head (the rest of head_dim passes unrotated), 0 where nothing rotates;
    `layout` says which two dimensions form pair f: "half" is (f, f + pairs), "interleaved" (2f, 2f + 1), counted from
    dimension `rotary_start`, which is 0 except for latent attention, where the rotary dimensions end the head. With
    the position a pair turns from its first dimension towards its second, or away from it (`direction` -1).
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
    rotary_start: int = 0
    rotation_direction: Literal[1, -1] = 1

    @property
    def layers(self) -> int:
        """How many layers attend."""
        return len(self.layer_numbers)

    @property
    def all_pairs(self) -> int:
        """Rotary pairs plus the pairs that the unrotated dimensions form."""
        return self.head_dim // 2

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.kv_groups
