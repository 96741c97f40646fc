"""Names of heads, KV groups, paths, sweeps and effects in sentences and titles."""

import numpy as np
import pandas as pd

from headscope.heads import format_head
from headscope.runs.aggregation import MIN_DOCUMENTS
from probes.patching.analysis import SweepKey
from probes.patching.paths.analysis import SweepKey as PathSweepKey
from probes.patching.paths.schema import LOGITS
from probes.patching.schema import ACTIVATION_LABELS, WHOLE_GROUP


def unit_noun_plural(units: pd.DataFrame) -> str:
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
    exact, noun = int((units["method"] == "exact").sum()), unit_noun_plural(units)
    if exact == len(units):
        return f"all {exact} {noun} patched exactly"
    if not exact:
        return f"{len(units)} {noun} estimated"
    return f"{exact} of {len(units)} {noun} patched exactly, the others estimated"


def path_name(path: pd.Series) -> str:
    """Name of a path: "L23H3 to v of L29H1" or "L23H3 to the logits"."""
    sender = format_head(path["sender_layer"], path["sender_head"])
    if path["receiver_layer"] == LOGITS:
        return f"{sender} to the logits"
    return f"{sender} to {path['through']} of {format_head(path['receiver_layer'], path['receiver_head'])}"


def describe_path_sweep(key: PathSweepKey) -> str:
    """Text naming a sweep: "Path patching, denoising"."""
    return f"Path patching, {key[3]}" + (", norms recomputed" if key[4] == "recomputed" else "")


def describe_path_methods(paths: pd.DataFrame) -> str:
    """Text with the number of exact and estimated paths."""
    exact = int((paths["method"] == "exact").sum())
    if exact == len(paths):
        return f"all {exact:,} paths patched exactly"
    if not exact:
        return f"{len(paths):,} paths estimated"
    return f"{exact:,} of {len(paths):,} paths patched exactly, the others estimated"


def describe_significance(effects: pd.DataFrame, noun: str) -> str:
    """How many of the exact effects differ significantly from zero, or why that cannot be said; `noun` is the plural
    of what a row of `effects` is, such as "heads"."""
    exact = effects[effects["method"] == "exact"]
    if exact.empty:
        return "Estimates do not decide whether an effect is real"
    if effects["pairs"].max() < MIN_DOCUMENTS:
        return "Too few pairs for a significance test"
    count, rows = int((exact["p_adjusted"] < 0.05).sum()), f"{len(effects):,} {noun}"
    return f"{count} of {len(exact)} exact effects differ from zero (false discovery rate 5 % over {rows})"


def describe_unmeasured(effects: pd.DataFrame, largest_error: float, noun: str) -> str:
    """A sentence that says whether a row that was only estimated may have a larger effect than all exact ones; "" if
    every row is exact. `noun` is the plural of what a row of `effects` is."""
    is_exact = effects["method"] == "exact"
    if is_exact.all():
        return ""
    top = effects.loc[is_exact, "effect"].abs().max()
    candidates = int((effects.loc[~is_exact, "effect"].abs() + largest_error > top).sum())
    others = f"of the {int((~is_exact).sum()):,} other {noun}, which were only estimated,"
    error = f"if its estimate were off by the largest measured error, {largest_error:.2f}"
    if candidates:
        return (
            f" Whether one {others} has a larger effect than these is not known: {candidates:,} could have one {error}."
        )
    return f" None {others} would have a larger effect than these {error}."


def format_effect(effect: pd.Series) -> str:
    """Text such as "+0.45 (95 % confidence interval +0.40 to +0.50, exact)"; `effect` is a row of a unit or a path."""
    interval = f"95 % confidence interval {effect['low']:+.2f} to {effect['high']:+.2f}, "
    bounds = "" if np.isnan(effect["low"]) else interval
    return f"{effect['effect']:+.2f} ({bounds}{'exact' if effect['method'] == 'exact' else 'an estimate'})"
