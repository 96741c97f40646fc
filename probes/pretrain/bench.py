"""What training from scratch costs: steps of a plain loop over transformers' model, and ours under each scheme."""

from collections.abc import Callable
from typing import Any

import torch

from headscope.positions.attach import attached
from headscope.positions.model import Model, load
from probes.adapt.learning import BETAS, EPSILON
from probes.pretrain.learning import Pretraining
from probes.pretrain.models import random_model
from probes.pretrain.options import Pretrain
from probes.pretrain.variants import schedule

STEPS = 6
"""Steps of one timing; the first of each way is not among them."""
TIMED = ("rope", "alibi", "adarope")


def ways(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """Optimiser steps of the default small model on sequences of `length` tokens; the model given is not used."""
    config = Pretrain.model_validate({"length": length})
    shape = (config.batch, length)
    ids = torch.randint(config.vocabulary, shape, generator=torch.Generator().manual_seed(0))
    names = {variant: f"from scratch: {STEPS} steps under {variant}" for variant in TIMED}
    plain = {f"from scratch: {STEPS} steps of a plain loop": _plain(config, ids)}
    return plain | {name: _ours(variant, config, ids) for variant, name in names.items()}


def _plain(config: Pretrain, ids: torch.Tensor) -> Callable[[], None]:
    module = random_model(config, config.vocabulary, 0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=config.rate, betas=BETAS, eps=EPSILON)

    def steps(count: int = STEPS) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()

    steps(1)
    return steps


def _ours(variant: str, config: Pretrain, ids: torch.Tensor) -> Callable[[], None]:
    model = load(random_model(config, config.vocabulary, 0))
    positions = schedule(variant, model)
    learner = Pretraining(model, positions, config)

    def steps(count: int = STEPS) -> None:
        with attached(model, positions):
            for _ in range(count):
                learner.step(ids, 1.0)

    steps(1)
    return steps
