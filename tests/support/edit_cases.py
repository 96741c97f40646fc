"""Tiny models with eager attention beside them: one edit in the terms of both."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

import headscope as hs
from headscope.attention.edits import TokenSet
from headscope.attention.streaming_kernel import StreamingKind
from headscope.interventions import kinds
from headscope.interventions.edits import Edit, Run
from headscope.interventions.replay import Replay
from headscope.measures.sparse_rules import parse_rule
from headscope.positions.model import Model
from support import eager_edits, families
from support.eager_edits import Activations, EagerEdit

LENGTH = 24
TOLERANCE, RECORD_TOLERANCE = 1e-5, 2e-5
"""Shares of the largest logit: of logits, and of the z that listeners get; the second also bounds weights."""


@dataclass(frozen=True, eq=False)
class Case:
    """A tiny model with two texts [L]: the one that is edited, and the one that patches come from."""

    model: Model
    ids: Tensor
    other: Replay
    source: Activations
    plain: Tensor
    """Logits [L, vocabulary] without edits, eager."""

    @property
    def scale(self) -> float:
        return float(self.plain.abs().max())

    def eager(self, edits: Sequence[EagerEdit], ids: Tensor | None = None) -> tuple[Tensor, Activations]:
        module, modules = self.model.module, self.model.attention_modules
        return eager_edits.run(module, modules, self.ids if ids is None else ids, edits, self.source)

    def run(self, edits: Sequence[EagerEdit]) -> Run:
        return [self.edit(one) for one in edits]

    def edit(self, one: EagerEdit) -> Edit:
        """The same edit in headscope's terms."""
        make: dict[str, Callable[[], Any]] = {
            "zero": kinds.Zero,
            "scale": lambda: kinds.Scale(one.factor),
            "mean": kinds.DocumentMean,
            "patch": lambda: self.other.source(one.target),  # type: ignore[arg-type]
            "constant": lambda: kinds.mean_over_tokens(self.other.activations("z"), "mean:text"),
            "uniform": kinds.Uniform,
            "steer": lambda: kinds.Steer(TokenSet(one.span), one.factor),
            "suppress": lambda: kinds.Suppress(TokenSet(one.span)),
            "streaming": lambda: StreamingKind(one.sink, one.recent),
            "top": lambda: kinds.RuleChoice(parse_rule(f"top:{one.keys}")),
        }
        heads = tuple((one.layer, head) for head in one.heads)
        return Edit(make[one.kind](), heads, (one.target,), TokenSet(one.tokens))

    def logits(self) -> Tensor:
        with torch.no_grad():
            return self.model.module(self.ids[None], use_cache=False).logits[0].double()

    def assert_close(self, actual: Tensor, expected: Tensor, tolerance: float = TOLERANCE) -> None:
        deviation = float((actual - expected).abs().max()) / self.scale
        assert deviation <= tolerance, f"{deviation:.1e} of the largest logit"


def recorded(model: Model, ids: Tensor, first_target: int = 1) -> Replay:
    replay = Replay(model, model.schedule, ids[None], 1e9, first_target)  # type: ignore[arg-type]
    with replay.capturing(), torch.no_grad():
        replay.record_streams()
        replay.activations("z")
    return replay


def replayed(replay: Replay, runs: Sequence[Run]) -> list[Tensor]:
    """The logits [L - 1, vocabulary] of every run."""
    found: list[Tensor] = []

    def keep(logits: Tensor) -> float:
        found.append(logits.double())
        return float(len(found) - 1)

    with replay.capturing(), torch.no_grad():
        numbers = replay.evaluate(runs, keep)
    return [found[int(number)] for number in numbers]


@cache
def case_of(family: str) -> Case:
    build = families.SPECS[family].build if family in families.SPECS else families.OTHERS[family].build
    module = build()
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    model = hs.load(module)
    generator = torch.Generator().manual_seed(1)
    ids, other = (torch.randint(3, families.VOCAB, (LENGTH,), generator=generator) for _ in range(2))
    plain, _ = eager_edits.run(module, model.attention_modules, ids)
    _, source = eager_edits.run(module, model.attention_modules, other)
    return Case(model, ids, recorded(model, other), source, plain)
