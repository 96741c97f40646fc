"""Units of interventions: query heads and KV groups."""

from dataclasses import dataclass

from headscope.attention.geometry import Geometry

WHOLE_GROUP = -1
"""Value of `head` for a unit that is a whole KV group."""


@dataclass(frozen=True, order=True)
class Unit:
    """One KV group with all its query heads, or one query head. `layer` is the index of the attention layer."""

    layer: int
    kv_group: int
    head: int = WHOLE_GROUP

    def head_slice(self, geometry: Geometry) -> slice:
        """The query heads of the unit within its layer."""
        if self.head != WHOLE_GROUP:
            return slice(self.head, self.head + 1)
        size = geometry.heads_per_group(self.layer)
        return slice(self.kv_group * size, (self.kv_group + 1) * size)

    def heads(self, geometry: Geometry) -> tuple[tuple[int, int], ...]:
        """The query heads of the unit: pairs of its layer and a head."""
        heads = self.head_slice(geometry)
        return tuple((self.layer, head) for head in range(heads.start, heads.stop))


def kv_group_units(geometry: Geometry) -> list[Unit]:
    """Every KV group, layer by layer."""
    return [Unit(layer, group) for layer, groups in enumerate(geometry.layer_kv_groups) for group in range(groups)]


def head_units(geometry: Geometry) -> list[Unit]:
    """Every query head, layer by layer."""
    return [head_unit(geometry, layer, head) for layer, n in enumerate(geometry.layer_heads) for head in range(n)]


def head_unit(geometry: Geometry, layer: int, head: int) -> Unit:
    """One query head as a unit; `layer` is the index of its attention layer."""
    return Unit(layer, geometry.kv_group(layer, head), head)
