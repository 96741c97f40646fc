"""Names of paths and effects in sentences and plots."""

import numpy as np
import pandas as pd

from headscope.heads import format_head
from probes.patching.paths.analysis import SweepKey
from probes.patching.paths.schema import LOGITS


def path_name(path: pd.Series) -> str:
    """Name of a path: "L23H3 to v of L29H1" or "L23H3 to the logits"."""
    sender = format_head(path["sender_layer"], path["sender_head"])
    if path["receiver_layer"] == LOGITS:
        return f"{sender} to the logits"
    return f"{sender} to {path['through']} of {format_head(path['receiver_layer'], path['receiver_head'])}"


def describe_sweep(key: SweepKey) -> str:
    """Text naming a sweep: "Path patching, denoising"."""
    return f"Path patching, {key[3]}" + (", norms recomputed" if key[4] == "recomputed" else "")


def describe_methods(paths: pd.DataFrame) -> str:
    """Text with the number of exact and estimated paths."""
    exact = int((paths["method"] == "exact").sum())
    if exact == len(paths):
        return f"all {exact:,} paths exact"
    return (
        f"{exact:,} of {len(paths):,} paths exact, the others estimated" if exact else f"{len(paths):,} paths estimated"
    )


def format_effect(path: pd.Series) -> str:
    """The effect with its interval and method: "+0.45 (95 % confidence interval +0.40 to +0.50, exact)"."""
    bounds = "" if np.isnan(path["low"]) else f"95 % confidence interval {path['low']:+.2f} to {path['high']:+.2f}, "
    return f"{path['effect']:+.2f} ({bounds}{'exact' if path['method'] == 'exact' else 'an estimate'})"
