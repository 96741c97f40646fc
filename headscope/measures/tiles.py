"""How much of a layer is held at once: on a CPU what fits its cache, on a GPU what takes few launches."""

import torch

AT_ONCE = 2**28
"""Numbers in the largest tensor of a GPU's tile, 1 GiB of float32."""


def per_tile(device: torch.device, on_cpu: int, each: int) -> int:
    """How many of something a tile takes, each of which holds `each` numbers."""
    return on_cpu if device.type == "cpu" else max(1, AT_ONCE // each)
