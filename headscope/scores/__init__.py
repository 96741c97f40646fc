"""Scores of heads as data: taken from a run, written in the file formats of other tools, read back from them."""

from headscope.scores.export import FORMATS, export_scores
from headscope.scores.file_reader import read
from headscope.scores.head_scores import HeadScores, belong_to_other_model, match_heads, model_heads

__all__ = ["FORMATS", "HeadScores", "belong_to_other_model", "export_scores", "match_heads", "model_heads", "read"]
