"""Prompt pairs as tensors: random ones for tiny models, and generated ones for the real model."""

import torch

from headscope.interventions.metrics import PairTokens
from headscope.positions.model import Model
from headscope.prompts.pair_sets import generated_pairs
from support import families

LENGTH = 20


def random_pair(answer: tuple[int, ...] = (7,), wrong: int = 9, seed: int = 0) -> PairTokens:
    """Two prompts of equal length that differ at three positions."""
    generator = torch.Generator().manual_seed(seed)
    clean = torch.randint(3, families.VOCAB, (1, LENGTH), generator=generator)
    corrupted = clean.clone()
    corrupted[0, [2, 9, 15]] = torch.randint(3, families.VOCAB, (3,), generator=generator)
    tokens = torch.tensor(answer)
    return PairTokens(
        *(torch.cat([prompt, tokens[None]], 1) for prompt in (clean, corrupted)),
        tokens,
        torch.tensor([wrong]),
        LENGTH,
    )


def ioi_pairs(model: Model, count: int) -> list[PairTokens]:
    """Pairs of the set ioi in the tokens of a model."""
    generated = generated_pairs("ioi", model.tokenizer, count, 0, 0)
    return [
        PairTokens(
            *(torch.tensor([[*prompt, *pair.answer]]).long() for prompt in (pair.clean, pair.corrupted)),
            *(torch.from_numpy(answer).long() for answer in (pair.answer, pair.wrong)),
            pair.aligned,
        )
        for pair in map(generated.build, range(count))
    ]
