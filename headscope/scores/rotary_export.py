"""Rotary pairs and frequencies of a model in the terms of other tools."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.errors import BadInput
from headscope.runs.run_tables import RunTables
from headscope.runs.summary import model_identity
from headscope.scores.head_scores import choose_model

PAIR_SCORES = ("mean_abs", "rms", "norm_product")


def rotary_pair_ranks(run: RunTables, score: str, model: str | None) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
    """Rank of every rotary pair, 0 for the highest score: [layers, KV groups, pairs]; and where the ranks come from.

    The score of a pair is its mean over documents at the longest context length, summed over the heads of a KV group.
    """
    label = choose_model(run, model)
    if "pairs" not in run.tables:
        raise BadInput(f"{run.name} has no table pairs. Measure it with headscope run --tables attention,pairs")
    if score not in PAIR_SCORES:
        raise BadInput(f"no score '{score}' of rotary pairs. Use one of: {', '.join(PAIR_SCORES)}")
    rows = run.table("pairs")
    rows = rows[rows["model"] == label]
    rows = rows[rows["context_length"] == rows["context_length"].max()]
    per_head = rows.groupby(["layer", "head", "kv_group", "pair"])[score].mean()
    sums = per_head.groupby(level=["layer", "kv_group", "pair"]).sum().unstack("pair")
    counts = sums.groupby(level="layer").size()
    if counts.nunique() != 1 or sums.isna().any(axis=None):
        raise BadInput(
            f"layers of {label} differ in KV heads or rotary pairs, which mha2mla cannot hold. Export another model"
        )
    values = sums.to_numpy().reshape(len(counts), counts.iloc[0], -1)
    if values.shape[-1] > np.iinfo(np.uint8).max + 1:
        raise BadInput(f"{label} has {values.shape[-1]} rotary pairs; mha2mla holds at most 256. Export another model")
    ranks = (-values).argsort(axis=-1, kind="stable").argsort(axis=-1, kind="stable").astype(np.uint8)
    return ranks, {
        "score": f"{score} of rotary pairs, mean over documents, sum over the heads of a KV group",
        "model": label,
        "run": run.name,
        **model_identity(run, label).weights.to_record(),
    }


def longrope_parameters(run: RunTables, model: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """`rope_parameters` of type longrope with the frequencies and temperature of the model, and where they come from.

    In a config.json they replace the checkpoint's own `rope_parameters`. The factor of a pair is the frequency of
    plain RoPE over that of the model. Raises BadInput if heads differ in frequencies or temperature, or if these depend
    on the length: the type has one set for all heads.
    """
    label = choose_model(run, model)
    entry = next(entry for entry in run.manifest["models"] if entry["label"] == label)
    positions, scales = (rows[rows["model"] == label] for rows in (run.table("positions"), run.table("scales")))
    if (positions["context_length"] != 0).any():
        raise BadInput(
            f"the frequencies of {label} depend on the length of the text, which its config.json already describes. "
            "Export it under a position scheme"
        )
    pairs = _rotary_pairs(entry["geometry"], label)
    thetas = positions.pivot(index=["layer", "kv_group"], columns="pair", values="theta").to_numpy(dtype=np.float64)
    if not np.isclose(thetas, thetas[0], rtol=1e-6, atol=0).all():
        raise BadInput(f"the heads of {label} differ in their frequencies; longrope has one set. Export another model")
    theta = thetas[0, :pairs]
    if (theta <= 0).any():
        raise BadInput(f"some rotary pairs of {label} do not rotate, which longrope cannot hold. Export another model")
    attention_factor = _attention_factor(scales, entry, label)
    base = _rope_base(positions)
    factors = [float(factor) for factor in base ** (-np.arange(pairs) / pairs) / theta]
    native = entry["geometry"].get("native_context")
    if not native:
        raise BadInput(f"{run.name} does not record the native context of {label}. Measure it again")
    parameters = {
        "rope_type": "longrope",
        "rope_theta": base,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": int(entry["geometry"].get("original_context", native)),
        "attention_factor": attention_factor,
        **_partial_rotation(entry["geometry"], pairs),
    }
    return parameters, {
        "model": label,
        "run": run.name,
        **model_identity(run, label).weights.to_record(),
        "scheme": entry["scheme"],
    }


def _rotary_pairs(geometry: Mapping[str, Any], label: str) -> int:
    """The number of rotary pairs of every head. Raises BadInput if layers differ in it."""
    if "layer_pairs" in geometry or "layer_head_dims" in geometry:
        raise BadInput(
            f"the layers of {label} differ in their heads; longrope has one set of frequencies. Export another model"
        )
    return int(geometry["pairs"])


def _attention_factor(scales: pd.DataFrame, entry: Mapping[str, Any], label: str) -> float:
    """The factor on cos and sin that gives the model's temperature.

    Raises BadInput if the temperature is not recorded, differs by head or length, or scales other dimensions than the
    rotated ones.
    """
    factors, multipliers = (scales[name].to_numpy(dtype=np.float64) for name in ("attention_factor", "softmax_factor"))
    if (factors == 0).any():
        raise BadInput(f"the run of {label} does not record the factor on cos and sin. Measure it again")
    depends_on_length = (scales["gamma"] != 0).any() or entry["scheme_name"] == "logn"
    if depends_on_length or np.ptp(factors) > 1e-6 or np.ptp(multipliers) > 1e-6:
        raise BadInput(f"the temperature of {label} differs by head or length; longrope has one. Export another model")
    factor, multiplier = float(factors[0]), float(multipliers[0])
    if abs(multiplier - 1) < 1e-6:
        return factor
    if 2 * entry["geometry"]["pairs"] != entry["geometry"]["head_dim"]:
        raise BadInput(
            f"the temperature of {label} scales all dimensions of a head; longrope scales those that rotate. "
            "Export another model"
        )
    return factor * math.sqrt(multiplier)


def _rope_base(positions: pd.DataFrame) -> float:
    """The base of the checkpoint's own frequencies; where they have none, that of its two fastest pairs.

    Any base would do, because the factors are relative to it.
    """
    log_theta = positions.pivot(index=["layer", "kv_group"], columns="pair", values="log_theta_base").to_numpy()[0]
    log_theta = log_theta[np.isfinite(log_theta)]
    return float(np.exp((log_theta[0] - log_theta[1]) * len(log_theta))) if len(log_theta) > 1 else 10_000.0


def _partial_rotation(geometry: Mapping[str, Any], pairs: int) -> dict[str, float]:
    """The share of a head that rotates, where the rotary dimensions come first. In latent attention they are last, and
    config.json gives their number."""
    if geometry.get("rotary_start", 0) or 2 * pairs == geometry["head_dim"]:
        return {}
    return {"partial_rotary_factor": 2 * pairs / geometry["head_dim"]}
