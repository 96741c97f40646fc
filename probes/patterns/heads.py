"""What reading says of a head: a column of the per-head table."""

from collections.abc import Mapping
from types import MappingProxyType

import pandas as pd

from headscope.runs.aggregation import HEAD_KEYS, at_longest, plain, with_interval
from headscope.runs.column_metadata import Statistic
from headscope.runs.run_tables import Stored

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "far_weight": Statistic(
            "weight on one far token",
            "",
            "mean over rows of the largest weight on a token that is neither the first nor within 32 tokens, at the "
            "longest length [ours]: high where a head picks out one token far back",
            formula="mean max αᵢⱼ over j > 0, i − j ≥ 32",
        )
    }
)


def head_statistics(run: Stored) -> pd.DataFrame | None:
    """`far_weight` by (model, layer, head, kv_group), at the longest length, with its interval over documents."""
    if "far_reads" not in run.tables:
        return None
    rows = at_longest(plain(run.table("far_reads")))
    return with_interval(rows.groupby([*HEAD_KEYS, "doc"])["weight"].mean(), "far_weight", 0, 1)
