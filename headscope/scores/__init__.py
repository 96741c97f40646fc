"""Scores of heads as data: taken from a run, written in the file formats of other tools, read back from them."""

from headscope.scores.export import FORMATS, export_scores
from headscope.scores.head_scores import HeadScores, match_heads, model_heads, read, refuse_other_model

__all__ = ["FORMATS", "HeadScores", "export_scores", "match_heads", "model_heads", "read", "refuse_other_model"]
