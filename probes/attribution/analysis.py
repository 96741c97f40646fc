"""What writing says of a head: a column of the per-head table."""

from collections.abc import Mapping
from types import MappingProxyType

import pandas as pd

from headscope.runs.aggregation import HEAD_KEYS, at_longest, plain, with_interval
from headscope.runs.column_metadata import Statistic
from headscope.runs.run_tables import Stored

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "next_token_write": Statistic(
            "part of the next token's logit",
            "logits",
            "what the head adds directly to the logit of the token that comes next, less the mean over the vocabulary, "
            "averaged over positions at the longest length; below 0 it takes off",
            formula="(z_h W_h) · g ∘ (U_y − mean U) / scale of the final norm",
            form="+.3f",
        )
    }
)


def head_statistics(run: Stored) -> pd.DataFrame | None:
    """`next_token_write` by (model, layer, head, kv_group), at the longest length, with its interval over documents."""
    if "writes" not in run.tables:
        return None
    return with_interval(
        mean_over_positions(at_longest(plain(run.table("writes"))), *HEAD_KEYS, "doc"), "next_token_write"
    )


def mean_over_positions(rows: pd.DataFrame, *group_columns: str) -> pd.Series:
    """Mean of `write` over all positions, by these columns."""
    sums = (
        rows.assign(write=rows["write"] * rows["tokens"])
        .groupby([*group_columns], observed=True)[["write", "tokens"]]
        .sum()
    )
    means: pd.Series = sums["write"] / sums["tokens"]
    return means
