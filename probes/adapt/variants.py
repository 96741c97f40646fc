"""What of AdaRoPE may learn: all of it, or what the paper's ablations leave (section 'Ablation Studies')."""

import math
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization

from headscope.positions.adarope import AdaRoPE


def _learn_all(adarope: AdaRoPE) -> None:
    """xi, tau and gamma learn."""


def _freeze_all(adarope: AdaRoPE) -> None:
    """Nothing learns: positions stay what they started from."""
    adarope.requires_grad_(False)


def _freeze_frequencies(adarope: AdaRoPE) -> None:
    """Frequencies stay the start's (YaRN angles); tau and gamma learn."""
    adarope.xi.requires_grad_(False)


def _freeze_scales(adarope: AdaRoPE) -> None:
    """tau and gamma stay the start's (YaRN's temperature); frequencies learn."""
    adarope.tau.requires_grad_(False)
    adarope.gamma.requires_grad_(False)


def _share_frequency_change(adarope: AdaRoPE) -> None:
    """One change of the P log-frequencies for every head of every layer [ours: the paper says "all heads"]."""
    register_parametrization(adarope, "xi", _ConstrainedChange(adarope.xi, torch.ones(adarope.xi.shape[-1]), (1, 1)))


def _learn_base_only(adarope: AdaRoPE) -> None:
    """Of each KV group's frequencies only the base learns: ln theta_f = -(f / P) ln base."""
    pairs = adarope.xi.shape[-1]
    slope = -torch.arange(pairs) / pairs
    register_parametrization(adarope, "xi", _ConstrainedChange(adarope.xi, slope, (*adarope.xi.shape[:2], 1)))


def _fix_log_scaling(adarope: AdaRoPE) -> None:
    """Frequencies learn; every query grows by ln(1 + n / L_ref) / ln 2 beyond L_ref: gamma = 1, tau = ln 2 times the
    start's, so that nothing changes up to L_ref [ours]."""
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
"""Variant -> what makes an AdaRoPE learn only that much, in place."""


class _ConstrainedChange(nn.Module):
    """xi = what it started from + slope x a change of fewer dimensions, which is what learns."""

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
