"""What training from scratch costs: steps of a plain loop over transformers' model, and ours under each scheme."""

from collections.abc import Callable
from typing import Any

import torch

from headscope.positions.attach import attached
from headscope.positions.model import Model, load
from probes.adapt.trainer import BETAS, EPSILON
from probes.pretrain.model_setup import random_model
from probes.pretrain.options import PretrainOptions
from probes.pretrain.trainer import PretrainTrainer
from probes.pretrain.variants import initial_positions

STEPS_PER_TIMING = 6
"""Steps of one timing; the first of each way is not among them."""
TIMED_VARIANTS = ("rope", "alibi", "adarope")


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """Optimiser steps of the default small model on sequences of `length` tokens; the model given is not used."""
    config = PretrainOptions.model_validate({"length": length})
    shape = (config.batch, length)
    ids = torch.randint(config.vocabulary, shape, generator=torch.Generator().manual_seed(0))
    names = {variant: f"from scratch: {STEPS_PER_TIMING} steps under {variant}" for variant in TIMED_VARIANTS}
    plain = {f"from scratch: {STEPS_PER_TIMING} steps of a plain loop": _plain_training_loop(config, ids)}
    return plain | {name: _headscope_training_loop(variant, config, ids) for variant, name in names.items()}


def _plain_training_loop(options: PretrainOptions, ids: torch.Tensor) -> Callable[[], None]:
    module = random_model(options, options.vocabulary, 0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=options.rate, betas=BETAS, eps=EPSILON)

    def steps(count: int = STEPS_PER_TIMING) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            module(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            optimizer.step()

    steps(1)
    return steps


def _headscope_training_loop(variant: str, options: PretrainOptions, ids: torch.Tensor) -> Callable[[], None]:
    model = load(random_model(options, options.vocabulary, 0))
    positions = initial_positions(variant, model)
    learner = PretrainTrainer(model, positions, options)

    def steps(count: int = STEPS_PER_TIMING) -> None:
        with attached(model, positions):
            for _ in range(count):
                learner.step(ids, 1.0)

    steps(1)
    return steps
