"""What may stand in a file of learned positions: numbers that a training can leave, notes of the right kind."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headscope import user_input
from headscope.errors import BadInput

LARGEST = 2**31
"""Tokens or steps."""
ABOVE_ZERO = ("tau", "tau_init", "rotary_factor")
BOUNDS = {
    "xi": (-100.0, math.log(1000.0)),
    "theta_init": (0.0, 1000.0),
    "tau": (1e-3, 1e3),
    "gamma": (-30.0, 30.0),
    "rotary_factor": (1e-3, 1e3),
}
"""What a training can leave, with room: theta = exp(xi) in rad/token (a turn is 6.3), factors of logits, and the power
of a logarithm of lengths. Beyond them rotations and logits are rounding errors or infinite."""


def refuse_unsound(tensor: Tensor, name: str, where: str, theta: Tensor | None = None) -> None:
    """Refuse parameters that no training leaves: not real, not finite, not positive where that is meant, absurd.

    Where the frequency `theta` [T, G, P] that learning started from is 0, its logarithm is not looked at.
    """
    hint = "it is damaged, so learn it again"
    if not tensor.is_floating_point():
        raise BadInput(f"{where}: {name} holds {str(tensor.dtype).removeprefix('torch.')}, not real numbers; {hint}")
    logarithm = name.startswith("xi")
    looked_at = tensor[theta != 0] if logarithm and theta is not None else tensor
    odd = looked_at[~looked_at.isfinite()]
    if len(odd):
        raise BadInput(f"{where}: {name} holds {float(odd.flatten()[0]):g}, {len(odd)} numbers are not finite; {hint}")
    if (name in ABOVE_ZERO and (tensor <= 0).any()) or (name == "theta_init" and (tensor < 0).any()):
        raise BadInput(f"{where}: {name} holds {float(tensor.min()):g}, where numbers above 0 are meant; {hint}")
    low, high = BOUNDS[name if name in BOUNDS else name.removesuffix("_init")]
    absurd = looked_at[(looked_at < low) | (looked_at > high)]
    if len(absurd):
        raise BadInput(
            f"{where}: {name} holds {float(absurd.flatten()[0]):g}, outside what a training leaves "
            f"({low:g} to {high:.3g}); {hint}"
        )


def metadata(text: str, path: Path, wanted: str) -> dict[str, Any]:
    """An adapter file's metadata, which must be of the format `wanted`."""
    try:
        notes = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"'{path}' is not an AdaRoPE adapter: its metadata is not JSON ({error})") from error
    found = notes.get("format", "none") if isinstance(notes, dict) else "none"
    if found != wanted:
        raise BadInput(f"'{path}' is not an AdaRoPE adapter of format {wanted} (found {found})")
    return dict(notes)


def refuse_odd(notes: Mapping[str, Any], where: str) -> None:
    """Refuse metadata whose values are of the wrong kind."""
    length, step, digest = (notes.get(name) for name in ("reference_length", "step", "weights_sha256"))
    whole = {"reference_length": length} | ({} if step is None else {"step": step})
    for name, value in whole.items():
        least = name == "reference_length"
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST:
            raise BadInput(f"{where}: its {name} is {user_input.quote(value)}, no length or count; learn it again")
    if not isinstance(digest, str | None):
        raise BadInput(f"{where}: its weights_sha256 is {user_input.quote(digest)}, no digest; learn it again")
