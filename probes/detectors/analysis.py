"""What the detectors say of a head: its columns of the per-head table, and what it is called."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import pandas as pd

from headscope.runs.aggregation import HEAD_KEYS, rows_at_longest_length, plain_types, mean_with_interval
from headscope.runs.column_metadata import Statistic
from headscope.runs.roles import Role
from headscope.runs.run_tables import RunTables

ROLE_THRESHOLD = 0.5
"""Weight on a kind of key above which a head is named after it: more than on all others together [ours]."""

KIND_COLUMNS: Mapping[str, str] = MappingProxyType(
    {kind: f"{kind}_token" for kind in ("previous", "current", "first", "duplicate", "induction")}
)
"""Kind -> the column of the per-head table that holds its score."""

_CONDITIONS = "on random tokens that come twice, at the longest length"

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "previous_token": Statistic(
            "previous-token score", "", f"mean weight on the token before, {_CONDITIONS}", formula="mean αᵢ,ᵢ₋₁"
        ),
        "current_token": Statistic("current-token score", "", f"mean weight on the token itself, {_CONDITIONS}"),
        "first_token": Statistic("first-token score", "", f"mean weight on the first token of all, {_CONDITIONS}"),
        "duplicate_token": Statistic(
            "duplicate-token score",
            "",
            f"mean weight of rows in the second half on the same token in the first, {_CONDITIONS}; missing where no row "
            "sees so far",
            formula="mean αᵢ,ᵢ₋ₘ over the second m tokens",
        ),
        "induction_token": Statistic(
            "induction score",
            "",
            f"mean weight of rows in the second half on the token that followed the same token in the first, {_CONDITIONS}; "
            "missing where no row sees so far",
            formula="mean αᵢ,ᵢ₋ₘ₊₁ over the second m tokens",
        ),
    }
)


def _exceeds_threshold(column: str, heads: pd.DataFrame) -> pd.Series:
    return heads[column] > ROLE_THRESHOLD


TARGET_DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "previous": "the token before",
        "current": "the token itself",
        "first": "the first token",
        "duplicate": "an earlier copy of the token",
        "induction": "what followed an earlier copy of the token",
    }
)
"""Kind -> what such a head looks at."""

ROLES: Mapping[str, Role] = MappingProxyType(
    {
        name if name == "induction" else f"{name}-token": Role(
            f"more than half of the weight on {what}, {_CONDITIONS}", partial(_exceeds_threshold, KIND_COLUMNS[name]), KIND_COLUMNS[name]
        )
        for name, what in TARGET_DESCRIPTIONS.items()
    }
)


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """A column for each kind by (model, layer, head, kv_group), at the model's longest length: the mean over sequences,
    with its interval over them."""
    if "detectors" not in run.tables:
        return None
    rows = rows_at_longest_length(plain_types(run.table("detectors"))).rename(columns={"sequence": "doc"})
    scores = rows.set_index([*HEAD_KEYS, "doc"])["score"]
    blocks = (scores[(rows["kind"] == kind).to_numpy()] for kind in KIND_COLUMNS)
    return pd.concat(
        [mean_with_interval(block, name, 0, 1) for block, name in zip(blocks, KIND_COLUMNS.values(), strict=True) if len(block)],
        axis=1,
    )
