"""The variants by name: the position scheme that a model is trained under, and what of it learns."""

from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import resolve
from headscope.positions.checkpoint_scheme import LEARNED
from headscope.positions.model import Model
from headscope.positions.schedule import Fixed
from probes.adapt.variants import VARIANTS

REFERENCE_LENGTH = 64
"""L_ref of AdaScale (paper, Detailed Setting)."""
FIXED = {"rope": "base", "prope": "prope", "alibi": "alibi", "nope": "nope"}
"""Variants that learn nothing of their positions -> their scheme."""


def schedule(variant: str, model: Model) -> Fixed | AdaRoPE:
    """The positions that a training of this variant starts under; AdaRoPE's are RoPE's to begin with."""
    if variant in FIXED:
        positions = resolve(model, FIXED[variant])
        assert isinstance(positions, Fixed)
        return positions
    adarope = AdaRoPE.untrained(model, resolve(model, "base"), REFERENCE_LENGTH)
    VARIANTS["full" if variant == "adarope" else variant](adarope)
    return adarope.to(model.device)


def told(variant: str) -> str | None:
    """What the config of a checkpoint says of its positions; None where they are its family's own."""
    if variant == "rope":
        return None
    return FIXED.get(variant, LEARNED)
