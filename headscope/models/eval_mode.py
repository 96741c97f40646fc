"""A module that answers for a while, and neither drops out nor learns."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def inference(module: nn.Module) -> Iterator[None]:
    """Run the module without dropout or gradients; leaving restores the mode of each of its parts."""
    training = [part for part in module.modules() if part.training]
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for part in training:
            part.training = True
