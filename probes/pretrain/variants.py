"""The variants by name: the position scheme that a model is trained under, and what of it learns."""

from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import resolve
from headscope.positions.checkpoint_scheme import LEARNED
from headscope.positions.model import Model
from headscope.positions.schedule import Fixed
from probes.adapt.variants import VARIANT_SETUPS

REFERENCE_LENGTH = 64
"""L_ref of AdaScale (paper, Detailed Setting)."""
FIXED_SCHEMES = {"rope": "base", "prope": "prope", "alibi": "alibi", "nope": "nope"}
"""Variants that learn nothing of their positions -> their scheme."""


def initial_positions(variant: str, model: Model) -> Fixed | AdaRoPE:
    """The positions that a training of this variant starts under; AdaRoPE's are RoPE's to begin with."""
    if variant in FIXED_SCHEMES:
        positions = resolve(model, FIXED_SCHEMES[variant])
        assert isinstance(positions, Fixed)
        return positions
    adarope = AdaRoPE.untrained(model, resolve(model, "base"), REFERENCE_LENGTH)
    VARIANT_SETUPS["full" if variant == "adarope" else variant](adarope)
    return adarope.to(model.device)


def stored_scheme_name(variant: str) -> str | None:
    """What the config of a checkpoint says of its positions; None where they are its family's own."""
    if variant == "rope":
        return None
    return FIXED_SCHEMES.get(variant, LEARNED)
