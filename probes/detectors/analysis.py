"""Per-head statistics of the detectors probe, and the head roles that follow from them."""

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType

import pandas as pd

from headscope.runs.aggregation import HEAD_KEYS, mean_with_interval, plain_types, rows_at_longest_length
from headscope.runs.column_metadata import Role, Statistic, exceeds
from headscope.runs.run_tables import RunTables

ROLE_THRESHOLD = 0.5
"""Weight on one kind of key above which a head has that role: more than on all other keys together [ours]."""

KIND_COLUMNS: Mapping[str, str] = MappingProxyType(
    {kind: f"{kind}_token" for kind in ("previous", "current", "first", "duplicate", "induction")}
)
"""Kind of key -> column of the per-head table with its score."""

_CONDITIONS = "on a repeated random token sequence, at the longest length"

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "previous_token": Statistic(
            "previous-token score", "", f"mean weight on the previous token, {_CONDITIONS}", formula="mean αᵢ,ᵢ₋₁"
        ),
        "current_token": Statistic("current-token score", "", f"mean weight on the token itself, {_CONDITIONS}"),
        "first_token": Statistic(
            "first-token score", "", f"mean weight on the first token of the context, {_CONDITIONS}"
        ),
        "duplicate_token": Statistic(
            "duplicate-token score",
            "",
            "mean weight of query rows in the second half on the same token in the first half, "
            f"{_CONDITIONS}; missing if no row sees that far back",
            formula="mean αᵢ,ᵢ₋ₘ over the second m tokens",
        ),
        "induction_token": Statistic(
            "induction score",
            "",
            "mean weight of query rows in the second half on the token after the same token in the first half, "
            f"{_CONDITIONS}; missing if no row sees that far back",
            formula="mean αᵢ,ᵢ₋ₘ₊₁ over the second m tokens",
        ),
    }
)


def _exceeds_threshold(column: str, heads: pd.DataFrame) -> pd.Series:
    return exceeds(heads[column], ROLE_THRESHOLD)


TARGET_DESCRIPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "previous": "the previous token",
        "current": "the token itself",
        "first": "the first token",
        "duplicate": "an earlier copy of the token",
        "induction": "the token after an earlier copy",
    }
)
"""Kind of key -> what such a head attends to."""


def role_name(kind: str) -> str:
    """The role of heads that attend to this kind of key, such as "previous-token" or "induction"."""
    return kind if kind == "induction" else f"{kind}-token"


ROLES: Mapping[str, Role] = MappingProxyType(
    {
        role_name(name): Role(
            f"more than half of the weight on {target}, {_CONDITIONS}",
            partial(_exceeds_threshold, KIND_COLUMNS[name]),
            KIND_COLUMNS[name],
        )
        for name, target in TARGET_DESCRIPTIONS.items()
    }
)


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """One column per kind by (model, layer, head, kv_group), at the model's longest length.

    A score is the mean over sequences, with the confidence interval over sequences.
    """
    if "detectors" not in run.tables:
        return None
    rows = rows_at_longest_length(plain_types(run.table("detectors"))).rename(columns={"sequence": "doc"})
    scores = rows.set_index([*HEAD_KEYS, "doc"])["score"]
    by_kind = {column: scores[(rows["kind"] == kind).to_numpy()] for kind, column in KIND_COLUMNS.items()}
    return pd.concat(
        [mean_with_interval(values, column, 0, 1) for column, values in by_kind.items() if len(values)], axis=1
    )
