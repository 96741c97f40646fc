"""How much of a layer is held at once: on a CPU what fits its cache, on a GPU what takes few launches."""

import torch

MAX_GPU_TILE_ELEMENTS = 2**28
"""Numbers in the largest tensor of a GPU's tile, 1 GiB of float32."""


def items_per_tile(device: torch.device, cpu_items: int, elements_per_item: int) -> int:
    """How many of something a tile takes, each of which holds `each` numbers."""
    return cpu_items if device.type == "cpu" else max(1, MAX_GPU_TILE_ELEMENTS // elements_per_item)
