"""The positions of one checkpoint under a scheme: frequencies, attention factors and query scales by layer, slopes."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from headscope.errors import UnsupportedModel
from headscope.models.checkpoint import LoadedModel

QueryScale = Callable[[int, Tensor], Tensor]
"""(layer, visible keys n [B, Lq]) -> factor on each query, [1|B, 1|H, Lq]."""


class Schedule(Protocol):
    """Positions of one checkpoint. Shapes: T layers; G KV groups, P rotary pairs and H heads of a layer, or of the
    layer that has most where layers are stacked."""

    @property
    def replaces_rotation(self) -> bool:
        """Whether the schedule replaces the checkpoint's own rotation."""

    @property
    def scales_queries(self) -> bool: ...

    @property
    def reference_length(self) -> int:
        """L_ref: the length in tokens up to which the query scale is constant."""

    def theta(self, layer: int) -> Tensor:
        """Frequencies [1|G, P], rad/token, float32; one row if all groups share them."""

    def attention_factor(self, layer: int) -> float:
        """Factor on cos and sin."""

    def query_scale(self, layer: int, visible: Tensor) -> Tensor: ...

    @property
    def slopes(self) -> Tensor | None:
        """Decrease of each head's logits per token of distance, [H]; None without such a decrease."""

    def log_theta_init(self, layer: int) -> Tensor:
        """Log-frequencies [1|G, P] at the start of training."""

    def tau_and_gamma(self) -> tuple[Tensor, Tensor]:
        """Temperature tau and growth exponent gamma, each [T, H]."""


@dataclass(frozen=True, eq=False)
class FixedSchedule:
    """A schedule without trained parameters; `thetas` [1, P] by layer, equal layers share one tensor."""

    checkpoint: LoadedModel
    thetas: tuple[Tensor, ...]
    attention_factors: tuple[float, ...]
    replaces_rotation: bool = True
    query_scale_function: QueryScale | None = None
    scale_reference_length: int | None = None
    slopes: Tensor | None = None

    @classmethod
    def of_checkpoint(
        cls, checkpoint: LoadedModel, query_scale: QueryScale | None = None, reference_length: int | None = None
    ) -> "FixedSchedule":
        """The checkpoint's own rotation, optionally with a query scale."""
        tensor_by_bytes: dict[bytes, Tensor] = {}
        rotation = checkpoint.rotation
        rows = map(rotation.layer_theta, range(len(rotation.theta)))
        thetas = tuple(tensor_by_bytes.setdefault(row.numpy().tobytes(), row[None]) for row in rows)
        return cls(checkpoint, thetas, rotation.factors, False, query_scale, reference_length)

    @property
    def reference_length(self) -> int:
        return self.scale_reference_length or self.checkpoint.geometry.native_context

    def theta(self, layer: int) -> Tensor:
        return self.thetas[layer]

    def attention_factor(self, layer: int) -> float:
        return self.attention_factors[layer]

    @property
    def scales_queries(self) -> bool:
        return self.query_scale_function is not None

    def query_scale(self, layer: int, visible: Tensor) -> Tensor:
        assert self.query_scale_function is not None
        return self.query_scale_function(layer, visible)

    def log_theta_init(self, layer: int) -> Tensor:
        return self.thetas[layer].log()

    def tau_and_gamma(self) -> tuple[Tensor, Tensor]:
        """tau = 1 / factor^2, relative to the checkpoint's own (the factor multiplies both q and k); gamma = 0."""
        geometry = self.checkpoint.geometry
        relative_factors = torch.tensor(self.attention_factors) / torch.tensor(self.checkpoint.rotation.factors)
        tau = (relative_factors**-2)[:, None].expand(geometry.layers, geometry.heads)
        return tau, torch.zeros_like(tau)


def unsupported_scheme_error(
    checkpoint: LoadedModel, scheme: str, reason: str, advice: str = "Use another scheme"
) -> UnsupportedModel:
    """The error for a checkpoint that cannot run under a scheme."""
    model_type = checkpoint.module.config.model_type
    return UnsupportedModel(f"cannot apply {scheme} to '{checkpoint.name}' ({model_type}): {reason}. {advice}")


def require_rotation(checkpoint: LoadedModel, scheme: str) -> None:
    """Raise UnsupportedModel if the checkpoint has no rotary frequencies that a scheme could change."""
    if not checkpoint.geometry.pairs:
        reason = f"{checkpoint.rotation.no_pairs_reason}, so it has no frequencies to change"
        raise unsupported_scheme_error(checkpoint, scheme, reason)


def require_own_keys(checkpoint: LoadedModel) -> None:
    """Raise UnsupportedModel if some layers attend to keys that another layer has rotated."""
    if checkpoint.rotation.shares_keys:
        reason = "some layers attend to keys that another layer has rotated"
        raise unsupported_scheme_error(checkpoint, "adarope", reason)


def frequencies_by_layer(model: LoadedModel, schedule: Schedule) -> Tensor:
    """Frequencies of every pair, 0 for unrotated pairs: [layers, G, d/2], float32, on the CPU."""
    return pad_frequencies(model, [schedule.theta(layer).detach() for layer in range(model.geometry.layers)])


def pad_frequencies(model: LoadedModel, thetas: list[Tensor]) -> Tensor:
    """Stack frequencies by layer, [1|G, P] each, with 0 for unrotated pairs and for what a layer does not have:
    [layers, G, d/2]."""
    geometry = model.geometry
    padded = torch.zeros(geometry.layers, geometry.kv_groups, geometry.all_pairs)
    for layer, theta in enumerate(thetas):
        padded[layer, : geometry.layer_kv_groups[layer], : theta.shape[1]] = theta.cpu()
    return padded
