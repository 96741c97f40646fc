"""Names of sweeps and paths in titles."""

import pandas as pd

from headscope.effects.sweep import Effects
from headscope.heads import format_head
from headscope.prompts.token_positions import ALL_TOKENS
from probes.patching.paths.schema import LOGITS, TOGETHER
from probes.patching.schema import ACTIVATION_LABELS, LAYER_ACTIVATION_LABELS

RECOMPUTED = (("norms", "norms"), ("mlps", "MLPs"))
"""Keys of a sweep that say what is recomputed, and their nouns."""


def describe_sweep(effects: Effects) -> str:
    """Text naming what is patched: "Denoising of the head output z"."""
    labels = {**ACTIVATION_LABELS, **LAYER_ACTIVATION_LABELS}
    return f"{effects.key['direction'].capitalize()} of the {labels[effects.key['intervention']]}"


def describe_path_sweep(effects: Effects) -> str:
    """Text naming a sweep: "Path patching, denoising"."""
    recomputed = "".join(f", {noun} recomputed" for name, noun in RECOMPUTED if effects.key[name] == "recomputed")
    return f"Path patching, {effects.key['direction']}{recomputed}"


def describe_methods(effects: Effects, nouns: str) -> str:
    """Text with the number of units that were patched exactly and estimated; `nouns` says what they are."""
    exact, units = int(effects.is_exact.sum()), len(effects.units)
    if exact == units:
        return f"all {exact:,} {nouns} patched exactly"
    if not exact:
        return f"{units:,} {nouns} estimated"
    return f"{exact:,} of {units:,} {nouns} patched exactly, the others estimated"


def path_name(path: pd.Series) -> str:
    """Name of a path: "L23H3 to v of L29H1", "L23H3@last to the logits" with the positions of the sender."""
    sender_at, receiver_at = (
        "" if path[f"{end}_positions"] == ALL_TOKENS else f"@{path[f'{end}_positions']}"
        for end in ("sender", "receiver")
    )
    sender = format_head(path["sender_layer"], path["sender_head"]) + sender_at
    if path["receiver_layer"] == LOGITS:
        return f"{sender} to the logits"
    if path["receiver_layer"] == TOGETHER:
        return f"{sender} to {path['through']} of the named receivers together{receiver_at and f' ({receiver_at})'}"
    receiver = format_head(path["receiver_layer"], path["receiver_head"])
    return f"{sender} to {path['through']} of {receiver}{receiver_at}"
