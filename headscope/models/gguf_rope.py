"""Rotary settings of a GGUF file, as `rope_parameters` of a transformers configuration.

llama.cpp defines what the keys mean. Frequency i of n rotary dimensions is theta^(-2i/n), divided by the scaling factor
(linear), blended by wavelength (yarn), and divided by a tensor of factors (Llama 3.1, LongRoPE).
"""

import math
from typing import Any

import torch
from torch import Tensor

from headscope.models.gguf_file import GgufFile

DEFAULT_THETA = 10_000.0
"""llama.cpp's base where a file states none; also that of Gemma's sliding-window layers."""
LOCAL_BASES = ("rope.freq_base_swa", "rope.local.freq_base")
"""The base of layers with a window, as llama.cpp and Ollama write it."""
YARN_KEYS = ("yarn_log_multiplier", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow")
LLAMA3_BANDS = (1.0, 4.0, 8192.0)
"""Low and high frequency factor and original length of all published Llama 3.1 to 3.3 checkpoints."""


def rope_theta(file: GgufFile, *, local: bool = False) -> float:
    """The base of the frequencies; with `local`, that of layers with a sliding window."""
    names = LOCAL_BASES if local else ("rope.freq_base", "rope.global.freq_base")
    return float(file.setting(*names, default=DEFAULT_THETA))


def rope_parameters(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """The rotation of all layers, or of the full-attention layers where a file has two kinds.

    Raises UnsupportedModel for a combination of settings that transformers cannot express.
    """
    rope: dict[str, Any] = {"rope_theta": rope_theta(file), **_scaling(file)}
    dims = file.settings.get("rope.dimension_count", head_dim)
    if any(len(divisors) != dims // 2 for divisors in file.divisors.values()):
        raise file.unsupported_error("rope.dimension_count", "does not match the tensors of rotary factors")
    rope["partial_rotary_factor"] = rotary_share(dims, head_dim)
    return rope


def rotary_share(dims: int, head_dim: int) -> float:
    """The share of a head that rotates; transformers multiplies and rounds down, which must give `dims` again."""
    share = dims / head_dim
    return share if int(share * head_dim) == dims else math.nextafter(share, math.inf)


def scaling_type(file: GgufFile) -> str:
    """The type of scaling: none, linear, yarn, longrope, or divisors (a tensor of factors, as Llama 3.1 has)."""
    kind = file.settings.get("rope.scaling.type")
    if kind is None and "rope_factors_long.weight" in file.divisors:
        kind = "longrope"
    if kind is None:
        kind = "none" if scaling_factor(file) == 1 else "linear"
    if kind not in ("none", "linear", "yarn", "longrope"):
        raise file.unsupported_error("rope.scaling.type", "is not a type that headscope reads")
    if "rope_freqs.weight" not in file.divisors:
        return str(kind)
    if kind != "none":
        raise file.unsupported_error("rope.scaling.type", "cannot be combined with the factors in rope_freqs.weight")
    return "divisors"


def scaling_factor(file: GgufFile) -> float:
    """The factor of linear scaling and YaRN; 0 means none in llama.cpp."""
    return float(file.setting("rope.scaling.factor", "rope.scale_linear", default=1.0)) or 1.0


def original_length(file: GgufFile) -> int:
    """The length before scaling."""
    return int(file.settings.get("rope.scaling.original_context_length") or file.settings["context_length"])


def attention_factor(file: GgufFile) -> float:
    """The factor on cos and sin. `yarn_attn_factor` is absolute; `attn_factor` multiplies the default of the type."""
    settings, kind = file.settings, scaling_type(file)
    multiplier = float(settings.get("rope.scaling.attn_factor", 1.0))
    if kind == "longrope":
        return multiplier
    if kind != "yarn":
        if multiplier != 1:
            raise file.unsupported_error("rope.scaling.attn_factor", f"does not apply to RoPE of type {kind}")
        return 1.0
    if "rope.scaling.yarn_attn_factor" in settings:
        if multiplier != 1:
            raise file.unsupported_error("rope.scaling.attn_factor", "contradicts yarn_attn_factor")
        return float(settings["rope.scaling.yarn_attn_factor"])
    log_factor = 0.1 * math.log(max(scaling_factor(file), 1.0))
    log_multiplier = float(settings.get("rope.scaling.yarn_log_multiplier", 0.0))
    return multiplier * (1 + log_factor) / (1 + log_multiplier * log_factor)


def _scaling(file: GgufFile) -> dict[str, Any]:
    kind, settings = scaling_type(file), file.settings
    stated = [f"rope.scaling.{name}" for name in YARN_KEYS if f"rope.scaling.{name}" in settings]
    if kind != "yarn" and stated:
        raise file.unsupported_error(stated[0], f"does not apply to RoPE of type {kind}")
    if settings.get("rope.scaling.yarn_ext_factor", 1.0) not in (1.0, -1.0):  # -1 is llama.cpp's default, which is 1
        raise file.unsupported_error(
            "rope.scaling.yarn_ext_factor", "is not 1: transformers always blends frequencies in full"
        )
    if kind in ("longrope", "divisors") and scaling_factor(file) != 1:
        raise file.unsupported_error("rope.scaling.factor", "cannot be combined with a tensor of rotary factors")
    attention = attention_factor(file)
    match kind:
        case "linear":
            return {"rope_type": "linear", "factor": scaling_factor(file)}
        case "yarn":
            return {
                "rope_type": "yarn",
                "factor": scaling_factor(file),
                "original_max_position_embeddings": original_length(file),
                "attention_factor": attention,
                "beta_fast": float(settings.get("rope.scaling.yarn_beta_fast", 32.0)),
                "beta_slow": float(settings.get("rope.scaling.yarn_beta_slow", 1.0)),
            }
        case "longrope":
            if missing := {"rope_factors_long.weight", "rope_factors_short.weight"} - {*file.divisors}:
                raise file.unsupported_error(
                    "rope.scaling.type", f"needs the tensor {min(missing)}, which is not there"
                )
            return _longrope(file, "rope_factors_short.weight", "rope_factors_long.weight")
        case "divisors":
            divisors = file.divisors["rope_freqs.weight"]
            return llama3_parameters(divisors, rope_theta(file)) or _longrope(file, *2 * ("rope_freqs.weight",))
    return {"rope_type": "default"}


def _longrope(file: GgufFile, short: str, long: str) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": file.divisors[short].tolist(),
        "long_factor": file.divisors[long].tolist(),
        "original_max_position_embeddings": original_length(file),
        "attention_factor": attention_factor(file),
    }


def proportional_parameters(file: GgufFile, head_dim: int) -> dict[str, Any]:
    """The rotation of Gemma 4's full-attention layers: frequencies over the whole head, 0 for the slowest pairs.

    A file marks these pairs by a divisor of 1e30.
    """
    divisors = file.divisors.get("rope_freqs.weight", torch.ones(head_dim // 2))
    rotating = int((divisors == 1).sum())
    if len(divisors) != head_dim // 2 or not ((divisors[:rotating] == 1).all() and (divisors[rotating:] > 1e20).all()):
        raise file.unsupported_error("rope_freqs.weight", "does not divide the frequencies of whole pairs by 1 or 1e30")
    share = rotary_share(2 * rotating, head_dim)
    return {"rope_type": "proportional", "rope_theta": rope_theta(file), "partial_rotary_factor": share}


def llama3_parameters(divisors: Tensor, theta: float) -> dict[str, Any] | None:
    """The `rope_parameters` of type llama3 that give these divisors [pairs] of the frequencies, None if none do.

    A file holds the divisors only. The published parameters come first; else they are fitted: 1 / divisor is linear in
    the frequency between the bands, and of parameters with equal divisors those with low_freq_factor 1 are taken.
    """
    factor = float(divisors.max())
    frequencies = theta ** (-torch.arange(len(divisors)).double() / len(divisors)) / (2 * math.pi)
    between = (divisors > 1) & (divisors < factor)
    bands = [LLAMA3_BANDS]
    if between.sum() >= 2:
        smooth = (1 / divisors[between].double() - 1 / factor) / (1 - 1 / factor)
        slope, intercept = (
            torch.linalg.lstsq(torch.stack((frequencies[between], torch.ones_like(smooth)), 1), smooth[:, None])
            .solution.flatten()
            .tolist()
        )
        if intercept < 0:
            bands.append((1.0, 1 - 1 / intercept, float(round(-slope / intercept))))
    for low, high, original in bands:
        smooth = ((original * frequencies - low) / (high - low)).clamp(0, 1)
        if torch.allclose(1 / ((1 - smooth) / factor + smooth), divisors.double(), rtol=1e-6):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": int(original),
            }
    return None
