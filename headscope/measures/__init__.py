"""Measures: pure functions on q and k, and small accumulators with `update`, `merge` and `compute`.

They know nothing of models or files: never transformers, pandas or stored runs.
"""

from headscope.measures.attention_rows import AttentionRows
from headscope.measures.distance_profile import DistanceProfile
from headscope.measures.learned_sink import LearnedSink
from headscope.measures.loss_by_position import LossByPosition
from headscope.measures.rotary_pairs import RotaryPairs

__all__ = ["AttentionRows", "DistanceProfile", "LearnedSink", "LossByPosition", "RotaryPairs"]
