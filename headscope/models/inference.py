"""A module that answers for a while, and neither drops out nor learns."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def inference(module: nn.Module) -> Iterator[None]:
    """Run the module without dropout or gradients; leaving restores its mode."""
    was_training = module.training
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        module.train(was_training)
