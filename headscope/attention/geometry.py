"""The shape of a model's attention, as data."""

from dataclasses import dataclass
from typing import Literal

Layout = Literal["half", "interleaved"]


@dataclass(frozen=True)
class Geometry:
    """Equal in every layer except for `windows` and `rotates`.

    `pairs` counts the rotary 2-D planes of a head (the rest of head_dim passes unrotated); `layout` says which
    two dimensions form pair f: "half" is (f, f + pairs), "interleaved" (2f, 2f + 1).
    """

    layers: int
    heads: int
    kv_groups: int
    head_dim: int
    pairs: int
    layout: Layout
    native_context: int
    windows: tuple[int | None, ...]
    rotates: tuple[bool, ...]

    @property
    def all_pairs(self) -> int:
        """Rotary pairs plus the pairs that the unrotated dimensions form."""
        return self.head_dim // 2

    @property
    def heads_per_group(self) -> int:
        return self.heads // self.kv_groups
