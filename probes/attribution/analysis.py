"""The per-head statistic of direct logit attribution."""

from collections.abc import Mapping
from types import MappingProxyType

import pandas as pd

from headscope.runs.aggregation import HEAD_KEYS, mean_with_interval, plain_types, rows_at_longest_length
from headscope.runs.column_metadata import Statistic
from headscope.runs.run_tables import RunTables

STATISTIC_NAME = "next_token_attribution"

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        STATISTIC_NAME: Statistic(
            "direct logit attribution (next token)",
            "logits",
            "what the head adds directly to the logit of the next token, minus the mean over the vocabulary, averaged "
            "over positions at the longest length; negative if the head lowers the logit",
            formula="(z_h W_h) · g ∘ (U_y − mean U) / scale of the final norm",
            number_format="+.3f",
        )
    }
)


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """`next_token_attribution` by (model, layer, head, kv_group) at the longest length, with its interval."""
    if "attribution" not in run.tables:
        return None
    rows = rows_at_longest_length(plain_types(run.table("attribution")))
    return mean_with_interval(mean_over_positions(rows, *HEAD_KEYS, "doc"), STATISTIC_NAME)


def mean_over_positions(rows: pd.DataFrame, *group_columns: str) -> pd.Series:
    """Mean of `contribution` over all positions, in logits, by these columns."""
    weighted = rows.assign(contribution=rows["contribution"] * rows["tokens"])
    sums = weighted.groupby([*group_columns], observed=True)[["contribution", "tokens"]].sum()
    means: pd.Series = sums["contribution"] / sums["tokens"]
    return means
