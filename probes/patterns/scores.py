"""The score of attention patterns: the top far weight of each head."""

import pandas as pd

from headscope.results.questions import Question
from headscope.results.scores import Score
from headscope.runs.aggregation import HEAD_KEYS, plain_types, rows_at_longest_length
from headscope.runs.column_metadata import Statistic
from headscope.runs.run_tables import RunTables


def _far_weights(run: RunTables) -> pd.DataFrame | None:
    """The mean largest weight on one far token by head and document, at the longest length of each model."""
    if "far_keys" not in run.tables:
        return None
    keys = [*HEAD_KEYS, "context_length", "doc"]
    rows = rows_at_longest_length(run.table("far_keys")[[*keys, "weight"]])
    # There are millions of rows, so only the means get plain types.
    means = rows.astype({"weight": "float64"}).groupby(keys, observed=True)["weight"].mean()
    return plain_types(means.rename("value").reset_index())


SCORES = (
    Score(
        column="far_weight",
        statistic=Statistic(
            "top far weight",
            "",
            "mean over rows of the largest weight on a token that is neither the first nor within 32 tokens, at the "
            "longest context length [ours]; high if the head singles out one token far back",
            formula="mean max αᵢⱼ over j > 0, i − j ≥ 32",
        ),
        rows=_far_weights,
        limits=(0, 1),
        top=Question(
            name="patterns.far_weight",
            sentence="In {model}, {unit} attends most to single tokens far back: its top far weight is {value}; that "
            "of the median head is {median:number}",
            headline="{unit} attends most to single tokens far back: top far weight {value}",
            samples="documents",
            level="headline",
        ),
        heading="Attention to single tokens far back",
    ),
)
