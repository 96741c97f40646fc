"""Options and stored table of the detectors probe."""

from typing import Annotated

from pydantic import Field

from headscope.runs.columns import GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table, key
from headscope.study.config import Options, sorted_lengths

MIN_PERIOD = 8
"""For shorter periods the chance level is high and the kinds of key overlap."""

MAX_PERIOD = 2**20
"""A forward pass over two periods must fit into memory."""


class DetectorsOptions(Options):
    """Heads that attend to the previous token, a duplicate or the token after it, on a repeated random token
    sequence."""

    periods: Annotated[list[Annotated[int, Field(le=MAX_PERIOD)]], sorted_lengths(MIN_PERIOD, "period")] = Field(
        default=[128, 512], description="length of the repeated random token sequence; a context is twice as long"
    )
    sequences: int = Field(8, ge=1, le=10_000, description="random sequences per period")


DETECTORS = Table(
    "detectors",
    "mean weight of each head on each kind of key, on a repeated random token sequence",
    (
        MODEL,
        LENGTH,
        key("sequence", "index32", "", "number of the random sequence; the same for all models with one tokenizer"),
        LAYER,
        HEAD,
        GROUP,
        key(
            "kind",
            "label",
            "",
            "key of query row i, in a random sequence of m tokens that is repeated once: previous i - 1, current i, "
            "first 0; in the second half also duplicate i - m and induction i - m + 1. Omitted if no row of the layer "
            "sees such a key, e.g. if the layer's window is shorter than m",
            None,
        ),
        Column("score", "value", "", "mean weight on that key over the rows that see it", 0, 1),
        Column("chance", "value", "", "the score of uniform weights: mean of 1 / visible keys", 0, 1),
        Column("rows", "count", "rows", "query rows in the mean", 1),
    ),
)

TABLES = (DETECTORS,)
