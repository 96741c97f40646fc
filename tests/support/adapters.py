"""Adapters as learning might leave them: YaRN's start plus seeded noise, without any training."""

from collections.abc import Sequence

import torch

from headscope.interventions.heads import Unit
from headscope.interventions.position_kinds import Component
from headscope.positions import AdaRoPE, resolve_schedule
from headscope.positions.model import Model
from headscope.positions.schedule import Schedule


def noisy(model: Model, size: float = 0.3, seed: int = 1, start: str = "yarn:factor=8") -> AdaRoPE:
    """An adapter whose log-frequencies, ln tau and gamma all moved by about `size` from `start`."""
    adapter = AdaRoPE.from_schedule(model, resolve_schedule(model, start))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        adapter.xi += size * torch.randn(adapter.xi.shape, generator=generator)
        adapter.tau *= torch.exp(size * torch.randn(adapter.tau.shape, generator=generator))
        adapter.gamma += size * torch.randn(adapter.gamma.shape, generator=generator)
    return adapter


def reset_adapter(
    model: Model, adapter: AdaRoPE, component: Component, units: Sequence[Unit], target: Schedule
) -> AdaRoPE:
    """The adapter with the parameters of whole units overwritten by those of `target`: brute force, without edits."""
    twin = adapter.untrained_copy()
    temperatures = target.tau_and_gamma()
    with torch.no_grad():
        for name in ("xi", "tau", "gamma"):
            getattr(twin, name).copy_(getattr(adapter, name))
        for unit in units:
            if component != "scale":
                theta = target.theta(unit.layer)
                xi = theta[unit.kv_group if len(theta) > 1 else 0].log()
                twin.xi[unit.layer, unit.kv_group, : len(xi)] = xi
            if component != "freq":
                heads = unit.head_slice(model.geometry)
                for parameter, value in zip((twin.tau, twin.gamma), temperatures, strict=True):
                    parameter[unit.layer, heads] = value[unit.layer, heads]
    return twin
