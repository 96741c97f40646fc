"""Measures: pure functions of attention records, and accumulators with `update`, `merge` and `compute`.

They do not depend on models or files: never on transformers, pandas or stored runs.
"""

from headscope.measures.attention_rows import AttentionRows, LearnedSink
from headscope.measures.binned_means import LossByPosition
from headscope.measures.distance_profile import DistanceProfile
from headscope.measures.max_logit import MaxLogit
from headscope.measures.rotary_pairs import RotaryPairs

__all__ = ["AttentionRows", "DistanceProfile", "LearnedSink", "LossByPosition", "MaxLogit", "RotaryPairs"]
