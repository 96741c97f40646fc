"""An example of a score from another package: the mean length of the values that each head reads."""

import math

from headscope.plugin_api import AttentionScoreProbe


class ValueNorms(AttentionScoreProbe):
    """The declaration. The function `head_scores` in `run.py` computes the score."""

    name = "value_norms"
    command = "value-norms"
    title = "Value norms"
    summary = "Measure the mean length of the values that each head reads."
    example = "headscope value-norms --model base=smollm2-135m --lengths 256"
    column = "value_norm"
    label = "value norm"
    meaning = "mean length of the values of the head's KV group"
    limits = (0.0, math.inf)
    parts = "head_scores=run.head_scores"


PROBE = ValueNorms()
