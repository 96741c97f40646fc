"""Cost of optimiser steps of small models from random weights."""

from collections.abc import Callable
from typing import Any

import torch

from headscope.positions.attach import attached
from headscope.positions.model import Model, load
from headscope.training.adapter_trainer import BETAS, EPSILON
from probes.pretrain.declaration import PretrainOptions
from probes.pretrain.trainer import PretrainTrainer, initial_positions, random_model

STEPS_PER_TIMING = 6
"""Steps of one timing of the benchmark; each variant takes one untimed step first."""


TIMED_VARIANTS = ("rope", "alibi", "adarope")


def benchmark_variants(model: Model, length: int) -> dict[str, Callable[[], Any]]:
    """Optimiser steps of the default small model on sequences of `length` tokens.

    The reference is a plain loop over transformers' model. `model` is not used.
    """
    options = PretrainOptions.model_validate({"length": length})
    shape = (options.batch, length)
    ids = torch.randint(options.vocabulary, shape, generator=torch.Generator().manual_seed(0))
    loops = {f"pretrain: {STEPS_PER_TIMING} steps of a plain loop": _plain_training_loop(options, ids)}
    for variant in TIMED_VARIANTS:
        loops[f"pretrain: {STEPS_PER_TIMING} steps under {variant}"] = _headscope_training_loop(variant, options, ids)
    return loops


def _plain_training_loop(options: PretrainOptions, ids: torch.Tensor) -> Callable[[], None]:
    module = random_model(options, options.vocabulary, 0)
    optimizer = torch.optim.AdamW(module.parameters(), lr=options.learning_rate, betas=BETAS, eps=EPSILON)

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
    trainer = PretrainTrainer(model, positions, options)

    def steps(count: int = STEPS_PER_TIMING) -> None:
        with attached(model, positions):
            for _ in range(count):
                trainer.step(ids, 1.0)

    steps(1)
    return steps
