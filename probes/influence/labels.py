"""Names of components, heads and KV groups, and changes of the loss with their uncertainty, in sentences and titles."""

import numpy as np
import pandas as pd

from headscope.runs.aggregation import MIN_DOCUMENTS
from headscope.runs.column_metadata import capitalise
from headscope.streaming import StreamingWindow, is_streaming
from probes.influence import bands
from probes.influence.effect_rows import TEXT_NOUNS
from probes.influence.heads import COMPONENT_DESCRIPTIONS

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


def unit_label(unit: pd.Series) -> str:
    """Name of a unit, e.g. "layer 3, head 1"."""
    name = f"KV group {unit['kv_group']}" if unit["head"] < 0 else f"head {unit['head']}"
    return f"layer {unit['layer']}, {name}"


def unit_noun(units: pd.DataFrame) -> str:
    """What one unit of a sweep is: "KV group", "head", or either."""
    is_group = units["head"] < 0
    return "KV group" if is_group.all() else "head or KV group" if is_group.any() else "head"


def unit_nouns(units: pd.DataFrame) -> str:
    """What the units of a sweep are, in the plural: "KV groups", "heads", or both."""
    noun = unit_noun(units)
    return "heads and KV groups" if noun == "head or KV group" else f"{noun}s"


def _describe_component(component: str) -> str:
    if bands.is_band(component):
        return bands.describe_band(component)
    if is_streaming(component):
        return StreamingWindow.parse(component).description
    return COMPONENT_DESCRIPTIONS.get(component, component)


def describe_change(component: str, target: str, objective: str = "text") -> str:
    """Name of a change, e.g. "frequencies reset to the start of training". For answers it also names the loss."""
    text = _describe_component(component)
    text = text if target == "none" else f"{text} reset to {TARGET_DESCRIPTIONS[target]}"
    return text if objective == "text" else f"{text} (loss of the answer)"


def describe_sweep(component: str, target: str, noun: str) -> str:
    """What a sweep does to its units, each a `noun`, e.g. "Zero ablation of one head at a time"."""
    is_edit = component not in COMPONENT_DESCRIPTIONS and not is_streaming(component)
    words = f"edit '{component}'" if is_edit else _describe_component(component)
    if target != "none":
        return f"Resetting the {words} of one {noun} at a time to {TARGET_DESCRIPTIONS[target]}"
    return f"{capitalise(words)} {'in' if component == 'uniform' else 'of'} one {noun} at a time"


def describe_context_length(length: int, objective: str) -> str:
    """Text with the context length of a sweep."""
    return f"{'up to ' if objective == 'answer' else ''}{length:,} tokens"


def format_change(change: float) -> str:
    """A change of the loss with its sign and two significant digits: "+2.0"."""
    return f"{change:+#.2g}".removesuffix(".")


def describe_highest(unit: pd.Series, name: str) -> str:
    """Text for the unit with the highest change of a sweep: the loss "rises most for layer 3, head 1, by +0.012
    nats/token (one document)", or "falls least for ..." if it falls for all units. `name` is that of the unit."""
    return f"{'rises most' if unit['delta'] >= 0 else 'falls least'} for {name}, by {_describe_size(unit)}"


def describe_lowest(unit: pd.Series, name: str) -> str:
    """Text for the unit with the lowest change of a sweep: the loss "falls most for ..." or "rises least for ..."."""
    return f"{'rises least' if unit['delta'] >= 0 else 'falls most'} for {name}, by {_describe_size(unit)}"


def _describe_size(unit: pd.Series) -> str:
    """Text with the size of a rise or fall of the loss and its uncertainty: a rise "+0.012 nats/token (estimated, one
    document)", a fall without a sign."""
    if unit["delta"] >= 0:
        return f"{format_change(unit['delta'])} nats/token{describe_uncertainty(unit)}"
    results = {"delta": -unit["delta"], "low": -unit["high"], "high": -unit["low"]}
    results |= {"minimum": -unit["maximum"], "maximum": -unit["minimum"]}
    fall = unit.copy()
    for name, value in results.items():
        fall[name] = value
    return f"{format_change(fall['delta'])} nats/token{describe_uncertainty(fall)}".replace("+", "")


def describe_uncertainty(unit: pd.Series) -> str:
    """Text with the uncertainty of an effect: whether it is an estimate, or its 95 % confidence interval.

    Two documents have no interval, so the text has both values.
    """
    estimated = "" if unit["method"] == "exact" else "estimated, "
    if estimated and unit["documents"] >= MIN_DOCUMENTS:
        return " (estimated)"
    if not np.isnan(unit["low"]):
        interval = f"95 % confidence interval {format_change(unit['low'])} to {format_change(unit['high'])}"
        return f" ({interval})"
    noun = TEXT_NOUNS[unit["objective"]]
    if unit["documents"] == 1:
        return f" ({estimated}one {noun})"
    return f" ({estimated}two {noun}s: {format_change(unit['minimum'])} and {format_change(unit['maximum'])})"


def format_q_value(unit: pd.Series) -> str:
    """Text with the q-value of a unit; "" below three documents."""
    return "" if np.isnan(unit["p_adjusted"]) else f", q = {unit['p_adjusted']:.2g}"
