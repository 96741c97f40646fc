"""Trainable parameters of AdaRoPE by variant: all of them, or those of the paper's ablations ('Ablation Studies')."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from headscope.positions.adarope import AdaRoPE


def _learn_all(adarope: AdaRoPE) -> None:
    """Train xi, tau and gamma."""


def _freeze_all(adarope: AdaRoPE) -> None:
    """Train nothing: the positions keep their initial values."""
    adarope.requires_grad_(False)


def _freeze_frequencies(adarope: AdaRoPE) -> None:
    """Keep the initial frequencies (YaRN's); train tau and gamma."""
    adarope.xi.requires_grad_(False)


def _freeze_scales(adarope: AdaRoPE) -> None:
    """Keep the initial tau and gamma (YaRN's temperature); train the frequencies."""
    adarope.tau.requires_grad_(False)
    adarope.gamma.requires_grad_(False)


def _share_frequency_change(adarope: AdaRoPE) -> None:
    """Train one change of the P log-frequencies for all heads of all layers [ours: the paper says "all heads"]."""
    register_parametrization(adarope, "xi", _ConstrainedChange(adarope.xi, torch.ones(adarope.xi.shape[-1]), (1, 1)))


def _learn_base_only(adarope: AdaRoPE) -> None:
    """Train one RoPE base per KV group: ln theta_f = -(f / P) ln base."""
    pairs = adarope.xi.shape[-1]
    slope = -torch.arange(pairs) / pairs
    register_parametrization(adarope, "xi", _ConstrainedChange(adarope.xi, slope, (*adarope.xi.shape[:2], 1)))


def _fix_log_scaling(adarope: AdaRoPE) -> None:
    """Train the frequencies; beyond L_ref every query grows by ln(1 + n / L_ref) / ln 2.

    This is gamma = 1 and tau = ln 2 times the initial tau, which changes nothing up to L_ref [ours].
    """
    with torch.no_grad():
        adarope.tau.mul_(math.log(2))
        adarope.gamma.fill_(1.0)
        torch.as_tensor(adarope.tau_init).copy_(adarope.tau)
        torch.as_tensor(adarope.gamma_init).copy_(adarope.gamma)
    _freeze_scales(adarope)


VARIANT_SETUPS: Mapping[str, Callable[[AdaRoPE], None]] = MappingProxyType(
    {
        "full": _learn_all,
        "no-freq": _freeze_frequencies,
        "no-scale": _freeze_scales,
        "shared-freq": _share_frequency_change,
        "fixed-log": _fix_log_scaling,
        "learned-base": _learn_base_only,
        "frozen": _freeze_all,
    }
)
"""Variant -> function that restricts an AdaRoPE, in place, to the parameters that the variant trains."""


class _ConstrainedChange(nn.Module):
    """xi = its initial value + slope x a trained change of fewer dimensions."""

    start: Tensor
    slope: Tensor

    def __init__(self, xi: Tensor, slope: Tensor, shape: tuple[int, ...]):
        super().__init__()
        self.register_buffer("start", xi.detach().clone(), persistent=False)
        self.register_buffer("slope", slope.to(xi), persistent=False)
        self.shape = shape if len(shape) == 3 else (*shape, slope.numel())

    def forward(self, change: Tensor) -> Tensor:
        return self.start + self.slope * change

    def right_inverse(self, xi: Tensor) -> Tensor:
        return xi.new_zeros(self.shape)
