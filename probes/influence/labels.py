"""Names of changes, methods and context lengths in sentences and titles."""

import pandas as pd

from headscope.ablation_names import describe_ablation
from headscope.effects.units import unit_nouns
from probes.influence import bands
from probes.influence.head_columns import COMPONENT_DESCRIPTIONS

TARGET_DESCRIPTIONS = {"init": "the start of training", "base": "the checkpoint's own"}
"""Text for the values to which parameters are reset."""
ESTIMATE_LABELS = {"estimate": "first-order", "second-order": "second-order", "damped": "damped second-order"}


def describe_methods(units: pd.DataFrame) -> str:
    """A clause with the methods of a sweep's units."""
    methods = units["method"].value_counts()
    orders = " and ".join(label for name, label in ESTIMATE_LABELS.items() if name in methods)
    if "exact" not in methods:
        return f"all changes are {orders} estimates"
    if not orders:
        return "all changes are exact"
    exact = int(methods["exact"])
    verb = "was" if exact == 1 else "were"
    return f"{exact} of {len(units)} {unit_nouns(units)} {verb} evaluated exactly, the others estimated ({orders})"


def unit_noun(units: pd.DataFrame) -> str:
    """What one unit of a sweep is: "KV group", "head", or either."""
    is_group = units["head"] < 0
    return "KV group" if is_group.all() else "head or KV group" if is_group.any() else "head"


def _describe_component(component: str) -> str:
    if bands.is_band(component):
        return bands.describe_band(component)
    return COMPONENT_DESCRIPTIONS.get(component) or describe_ablation(component)


def describe_change(component: str, target: str, objective: str = "text") -> str:
    """Name of a change, e.g. "frequencies reset to the start of training". For answers it also names the loss."""
    text = _describe_component(component)
    text = text if target == "none" else f"{text} reset to {TARGET_DESCRIPTIONS[target]}"
    return text if objective == "text" else f"{text} (loss of the answer)"


def describe_context_length(length: int, objective: str) -> str:
    """Text with the context length of a sweep."""
    return f"{'up to ' if objective == 'answer' else ''}{length:,} tokens"
