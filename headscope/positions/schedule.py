"""What a position scheme resolves to for one checkpoint: frequencies, factors and query scale by layer, slopes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headscope.errors import UnsupportedModel
from headscope.models.checkpoint import LoadedModel

QueryScale = Callable[[int, Tensor], Tensor]
"""(layer, visible keys n [B, Lq]) -> what each query is multiplied by, [1|B, 1|H, Lq]."""


class Schedule(Protocol):
    """Positions of one checkpoint. Shapes: G kv groups, P rotary pairs, H heads, T layers."""

    @property
    def rotates(self) -> bool:
        """False where the checkpoint's own rotation is left untouched."""

    @property
    def scales_queries(self) -> bool: ...

    @property
    def reference_length(self) -> int:
        """L_ref: the length in tokens up to which the query scale is constant."""

    def theta(self, layer: int) -> Tensor:
        """Frequencies [1|G, P], rad/token, float32; one row where all groups share them."""

    def factor(self, layer: int) -> float:
        """What cos and sin are multiplied by."""

    def query_scale(self, layer: int, visible: Tensor) -> Tensor: ...

    @property
    def slopes(self) -> Tensor | None:
        """What each head's logits fall by per token of distance, [H]; None where distance costs nothing."""

    def log_theta_init(self, layer: int) -> Tensor:
        """Log-frequencies [1|G, P] that learning started from."""

    def temperatures(self) -> tuple[Tensor, Tensor]:
        """tau and gamma, each [T, H]."""


@dataclass(frozen=True, eq=False)
class Fixed:
    """A schedule without learned parameters; `thetas` [1, P] by layer, equal layers share one tensor."""

    checkpoint: LoadedModel
    thetas: tuple[Tensor, ...]
    factors: tuple[float, ...]
    rotates: bool = True
    scale: QueryScale | None = None
    reference: int | None = None
    slopes: Tensor | None = None

    @classmethod
    def own(
        cls, checkpoint: LoadedModel, scale: QueryScale | None = None, reference_length: int | None = None
    ) -> "Fixed":
        """The checkpoint's own rotation, left untouched."""
        shared: dict[bytes, Tensor] = {}
        rotation = checkpoint.rotation
        thetas = tuple(shared.setdefault(row.numpy().tobytes(), row[None]) for row in rotation.theta)
        return cls(checkpoint, thetas, rotation.factors, rotates=False, scale=scale, reference=reference_length)

    @property
    def reference_length(self) -> int:
        return self.reference or self.checkpoint.geometry.native_context

    def theta(self, layer: int) -> Tensor:
        return self.thetas[layer]

    def factor(self, layer: int) -> float:
        return self.factors[layer]

    @property
    def scales_queries(self) -> bool:
        return self.scale is not None

    def query_scale(self, layer: int, visible: Tensor) -> Tensor:
        assert self.scale is not None
        return self.scale(layer, visible)

    def log_theta_init(self, layer: int) -> Tensor:
        return self.thetas[layer].log()

    def temperatures(self) -> tuple[Tensor, Tensor]:
        """tau = 1 / factor^2 (the factor multiplies q and k), relative to the checkpoint's own; gamma = 0."""
        geometry = self.checkpoint.geometry
        relative = torch.tensor(self.factors) / torch.tensor(self.checkpoint.rotation.factors)
        tau = (relative**-2)[:, None].expand(geometry.layers, geometry.heads)
        return tau, torch.zeros_like(tau)


def refusal(checkpoint: LoadedModel, scheme: str, why: str) -> UnsupportedModel:
    """Says in one line why a checkpoint cannot run under a scheme."""
    return UnsupportedModel(
        f"cannot put {scheme} on '{checkpoint.name}' ({checkpoint.module.config.model_type}): {why}"
    )


def refuse_without_rotation(checkpoint: LoadedModel, scheme: str) -> None:
    """A scheme of frequencies needs a checkpoint that rotates."""
    if not checkpoint.geometry.pairs:
        raise refusal(checkpoint, scheme, f"{checkpoint.rotation.no_pairs_reason}, so it has no frequencies to change")


def refuse_shared_keys(checkpoint: LoadedModel) -> None:
    """Learned frequencies need layers that turn their own keys."""
    if checkpoint.rotation.shares_keys:
        raise refusal(checkpoint, "adarope", "some of its layers attend to keys that another layer has turned")


def all_theta(model: LoadedModel, schedule: Schedule) -> Tensor:
    """Frequencies of every pair, unrotated ones as 0: [layers, G, d/2], float32, cpu."""
    return padded(model, [schedule.theta(layer).detach() for layer in range(model.geometry.layers)])


def padded(model: LoadedModel, thetas: list[Tensor]) -> Tensor:
    """Frequencies by layer, [1|G, P] each, with 0 for the pairs that do not rotate: [layers, G, d/2]."""
    geometry = model.geometry
    full = torch.zeros(geometry.layers, geometry.kv_groups, geometry.all_pairs)
    for layer, theta in enumerate(thetas):
        full[layer, :, : geometry.pairs] = theta.cpu()
    return full
