"""Validation of adapter files: parameter values that training can produce, and metadata of the right types."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from headscope.base import user_input
from headscope.errors import BadInput

MAX_COUNT = 2**31
"""Upper bound on tokens and steps."""
POSITIVE_PARAMETERS = ("tau", "tau_init", "rotary_factor")
PARAMETER_BOUNDS = {
    "xi": (-100.0, math.log(1000.0)),
    "theta_init": (0.0, 1000.0),
    "tau": (1e-3, 1e3),
    "gamma": (-30.0, 30.0),
    "rotary_factor": (1e-3, 1e3),
}
"""Values that training can produce, with a wide margin: theta = exp(xi) in rad/token (a full turn is 6.3), factors on
logits, and the exponent of a logarithm of lengths. Beyond them rotations and logits are rounding errors or infinite.
"""


def validate_parameter(tensor: Tensor, name: str, source: str, theta_init: Tensor | None = None) -> None:
    """Raise BadInput unless the parameter `name` holds real, finite numbers within its bounds.

    xi is not checked where the initial frequency `theta_init` [T, G, P] is 0: its logarithm is -inf. `source` names the
    tensor's origin in messages.
    """
    damaged = f"{source} is damaged: {name}"
    if not tensor.is_floating_point():
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise BadInput(f"{damaged} holds {dtype}, not floating-point numbers. Download it again, or retrain it")
    checked = tensor[theta_init != 0] if name.startswith("xi") and theta_init is not None else tensor
    not_finite = checked[~checked.isfinite()]
    if len(not_finite):
        value = float(not_finite.flatten()[0])
        raise BadInput(
            f"{damaged} holds {value:g}; {len(not_finite)} numbers are not finite. Download it again, or retrain it"
        )
    if (name in POSITIVE_PARAMETERS and (tensor <= 0).any()) or (name == "theta_init" and (tensor < 0).any()):
        raise BadInput(
            f"{damaged} holds {float(tensor.min()):g}, but must be positive. Download it again, or retrain it"
        )
    low, high = PARAMETER_BOUNDS[name if name in PARAMETER_BOUNDS else name.removesuffix("_init")]
    out_of_bounds = checked[(checked < low) | (checked > high)]
    if len(out_of_bounds):
        value = float(out_of_bounds.flatten()[0])
        raise BadInput(
            f"{damaged} holds {value:g}, outside the valid range {low:g} to {high:.3g}. Download it again, or "
            "retrain it"
        )


def parse_metadata(text: str, path: Path, expected_format: str) -> dict[str, Any]:
    """Metadata of an adapter file, from JSON. Raises BadInput unless its format is `expected_format`."""
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadInput(f"'{path}' is not an AdaRoPE adapter: its metadata is not JSON. Check adapter=PATH") from error
    file_format = metadata.get("format", "none") if isinstance(metadata, dict) else "none"
    if file_format != expected_format:
        raise BadInput(
            f"'{path}' is not an AdaRoPE adapter: its format is {user_input.quote(file_format)}, not "
            f"{expected_format}. Check adapter=PATH"
        )
    return dict(metadata)


def validate_metadata(metadata: Mapping[str, Any], source: str) -> None:
    """Raise BadInput unless reference_length, step, weights_sha256 and weights have the right types and ranges."""
    length, step, digest = (metadata.get(name) for name in ("reference_length", "step", "weights_sha256"))
    counts = {"reference_length": length} | ({} if step is None else {"step": step})
    for name, value in counts.items():
        least = int(name == "reference_length")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= MAX_COUNT:
            raise BadInput(
                f"{source} is damaged: its {name} is {user_input.quote(value)}, not an integer of at least {least}. "
                "Download it again, or retrain it"
            )
    if not isinstance(digest, str | None):
        raise BadInput(
            f"{source} is damaged: its weights_sha256 is {user_input.quote(digest)}, not a digest. Download it "
            "again, or retrain it"
        )
    digests = metadata.get("weights")
    is_mapping = isinstance(digests, dict) and all(isinstance(value, str) for value in digests.values())
    if digests is not None and not is_mapping:
        raise BadInput(
            f"{source} is damaged: its weights entry is {user_input.quote(digests)}, not digests by name. Download it "
            "again, or retrain it"
        )
