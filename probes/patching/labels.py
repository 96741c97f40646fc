"""Names of heads and KV groups, sweeps and effects in sentences and titles."""

import numpy as np
import pandas as pd

from probes.patching.analysis import SweepKey
from probes.patching.schema import ACTIVATION_LABELS, WHOLE_GROUP


def unit_noun(units: pd.DataFrame) -> str:
    """What the rows of a sweep are, in the plural: "heads" or "KV groups"."""
    return "KV groups" if (units["head"] == WHOLE_GROUP).all() else "heads"


def unit_label(unit: pd.Series) -> str:
    """Name of a unit in a sentence: "layer 3, head 1"."""
    name = f"KV group {unit['kv_group']}" if unit["head"] == WHOLE_GROUP else f"head {unit['head']}"
    return f"layer {unit['layer']}, {name}"


def describe_sweep(key: SweepKey) -> str:
    """Text naming what is patched: "Denoising of the head output z"."""
    return f"{key[4].capitalize()} of the {ACTIVATION_LABELS[key[3]]}"


def describe_methods(units: pd.DataFrame) -> str:
    """Text with the number of heads or KV groups that were patched exactly and estimated."""
    exact, noun = int((units["method"] == "exact").sum()), unit_noun(units)
    if exact == len(units):
        return f"all {exact} {noun} exact"
    return f"{exact} of {len(units)} {noun} exact, the others estimated" if exact else f"{len(units)} {noun} estimated"


def format_effect(unit: pd.Series) -> str:
    """The effect with its interval and method: "+0.45 (95 % confidence interval +0.40 to +0.50, exact)"."""
    bounds = "" if np.isnan(unit["low"]) else f"95 % confidence interval {unit['low']:+.2f} to {unit['high']:+.2f}, "
    return f"{unit['effect']:+.2f} ({bounds}{'exact' if unit['method'] == 'exact' else 'an estimate'})"
