"""Rotary pairs and frequencies of a model in the terms of other tools."""

from typing import Any

import numpy as np
import numpy.typing as npt

from headscope.errors import BadInput
from headscope.runs.run_tables import RunTables
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
    digest = next(entry["weights_sha256"] for entry in run.manifest["models"] if entry["label"] == label)
    return ranks, {
        "score": f"{score} of rotary pairs, mean over documents, sum over the heads of a KV group",
        "model": label,
        "run": run.name,
        "weights_sha256": digest,
    }


def longrope_parameters(run: RunTables, model: str | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """`rope_parameters` of type longrope with the frequencies of the model, and where they come from.

    The factor of a pair is theta of the checkpoint's own scheme over theta of the model. Raises BadInput if heads
    differ in frequencies or temperature, or the temperature depends on the length: the type has one set for all heads.
    """
    label = choose_model(run, model)
    positions, scales = (rows[rows["model"] == label] for rows in (run.table("positions"), run.table("scales")))
    thetas = positions.pivot(index=["layer", "kv_group"], columns="pair", values="theta").to_numpy(dtype=np.float64)
    if not np.isclose(thetas, thetas[0], rtol=1e-6, atol=0).all():
        raise BadInput(f"the heads of {label} differ in their frequencies; longrope has one set. Export another model")
    if (scales["gamma"] != 0).any() or np.ptp(scales["logit_scale"].to_numpy()) > 1e-6:
        raise BadInput(f"the temperature of {label} differs by head or length; longrope has one. Export another model")
    if (thetas[0] <= 0).any():
        raise BadInput(f"some rotary pairs of {label} do not rotate, which longrope cannot hold. Export another model")
    log_base = positions.pivot(index=["layer", "kv_group"], columns="pair", values="log_theta_base").to_numpy()[0]
    pairs = np.arange(len(log_base))
    if not np.allclose(log_base, log_base[1] * pairs, rtol=1e-5, atol=1e-6):
        raise BadInput(
            f"the checkpoint of {label} has frequencies of no single base, which longrope needs. Export another model"
        )
    factors = [float(factor) for factor in np.exp(log_base) / thetas[0]]
    entry = next(entry for entry in run.manifest["models"] if entry["label"] == label)
    native = entry["geometry"].get("native_context")
    if not native:
        raise BadInput(f"{run.name} does not record the native context of {label}. Measure it again")
    parameters = {
        "rope_type": "longrope",
        "rope_theta": float(np.exp(-log_base[1] * len(pairs))),
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": int(native),
        "attention_factor": float(np.sqrt(scales["logit_scale"].iloc[0])),
    }
    return parameters, {
        "model": label,
        "run": run.name,
        "weights_sha256": entry["weights_sha256"],
        "scheme": entry["scheme"],
    }
