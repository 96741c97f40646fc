"""The positions of one checkpoint under a scheme: frequencies, attention factors and query scales by layer, slopes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.base.public_functions import checked_methods
from headscope.base.user_input import check_index
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

    def softmax_ratio(self, layer: int) -> float:
        """Constant factor on all logits relative to the checkpoint's own, included in the query scale."""

    @property
    def slopes(self) -> Tensor | None:
        """Decrease of each head's logits per token of distance, [H]; None without such a decrease."""

    def log_theta_init(self, layer: int) -> Tensor:
        """Log-frequencies [1|G, P] at the start of training."""

    def tau_and_gamma(self) -> tuple[Tensor, Tensor]:
        """Temperature tau and growth exponent gamma, each [T, H]."""


@checked_methods
@dataclass(frozen=True, eq=False)
class FixedSchedule:
    """A schedule without trained parameters; `thetas` [1, P] by layer, equal layers share one tensor.

    `softmax_ratios` by layer (by default 1) are factors on all logits, for families whose attention modules multiply
    the softmax scale by a factor of their own. `rope_parameters`, by layer type, are those of a transformers config
    that gives the same model; None if there is no such config.
    """

    checkpoint: LoadedModel
    thetas: tuple[Tensor, ...]
    attention_factors: tuple[float, ...]
    replaces_rotation: bool = True
    query_scale_function: QueryScale | None = None
    scale_reference_length: int | None = None
    slopes: Tensor | None = None
    softmax_ratios: tuple[float, ...] = ()
    rope_parameters: Mapping[str | None, Mapping[str, Any]] | None = None

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
        return self.thetas[self._index(layer)]

    def _index(self, layer: int) -> int:
        return check_index(layer, len(self.thetas), "layer")

    def attention_factor(self, layer: int) -> float:
        return self.attention_factors[self._index(layer)]

    @property
    def scales_queries(self) -> bool:
        return self.query_scale_function is not None or any(ratio != 1 for ratio in self.softmax_ratios)

    def query_scale(self, layer: int, visible: Tensor) -> Tensor:
        ratio = self.softmax_ratio(layer)
        if self.query_scale_function is None:
            return torch.full((1, 1, visible.shape[-1]), ratio, device=visible.device)
        return self.query_scale_function(layer, visible) * ratio

    def softmax_ratio(self, layer: int) -> float:
        return (self.softmax_ratios or (1.0,) * len(self.thetas))[self._index(layer)]

    def log_theta_init(self, layer: int) -> Tensor:
        return self.theta(layer).log()

    def tau_and_gamma(self) -> tuple[Tensor, Tensor]:
        """tau = 1 / the constant factor on all logits, relative to the checkpoint's own; gamma = 0.

        The factor on cos and sin multiplies both q and k. It counts where it scales all logits: if the whole head
        rotates.
        """
        geometry = self.checkpoint.geometry
        tau = torch.ones(geometry.layers, geometry.heads)
        for layer, own_factor in enumerate(self.checkpoint.rotation.factors):
            scale = self.softmax_ratio(layer)
            if rotates_whole_head(geometry, layer):
                scale *= (self.attention_factors[layer] / own_factor) ** 2
            tau[layer] /= scale
        return tau, torch.zeros_like(tau)


def rotates_whole_head(geometry: Geometry, layer: int) -> bool:
    """Whether a layer rotates all dimensions of its heads, so that a factor on cos and sin scales all logits."""
    return geometry.layer_rotates[layer] and 2 * geometry.layer_pairs[layer] == geometry.layer_head_dims[layer]


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
