"""Columns of the per-head table from circuits, and the strongest compositions."""

from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from headscope.runs.aggregation import HEAD_KEYS, mean_with_interval, plain_types, rows_at_longest_length
from headscope.runs.column_metadata import Statistic
from headscope.runs.run_tables import RunTables

INPUTS = ("q", "k", "v")
COMPOSITION_COLUMNS: Mapping[str, str] = MappingProxyType({kind: f"{kind}_composition" for kind in INPUTS})
"""What the later head reads with -> column of the per-head table."""
POSITIONAL_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "effective_length": "positional_effective_length",
        "preferred_distance": "positional_distance",
        "spread": "positional_spread",
    }
)
"""Column of the table `positional_summary` -> column of the per-head table."""

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "ov_copying": Statistic(
            "OV copying score",
            "",
            "share of the OV circuit's eigenvalue mass that raises the attended token's own logit: 1 copies, -1 "
            "suppresses; from the weights, on token embeddings without context",
            formula="Σ Re λ / Σ |λ| of W_U W_OV W_E",
            number_format="+.3f",
        ),
        "ov_norm": Statistic("norm of W_OV", "", "Frobenius norm of W_O W_V, norm gains folded in", log_scale=True),
        "qk_norm": Statistic(
            "norm of W_QK", "", "Frobenius norm of W_Qᵀ W_K at distance 0, norm gains folded in", log_scale=True
        ),
        **{
            column: Statistic(
                f"{kind.upper()}-composition",
                "",
                "largest composition score with an earlier head, minus the mean of random matrices; heads of the first "
                "layer have none",
                formula="‖W_A W_B‖ / (‖W_A‖ ‖W_B‖) − random",
                number_format="+.3f",
            )
            for kind, column in COMPOSITION_COLUMNS.items()
        },
        "positional_effective_length": Statistic(
            "positional effective length",
            "tokens",
            "effective length of the last query if its logits depended on distance alone (mean query with mean key, "
            "rotated), at the longest length",
            log_scale=True,
        ),
        "positional_distance": Statistic(
            "preferred distance",
            "tokens",
            "distance at which the mean query has its largest logit with the mean key, at the longest length",
        ),
        "positional_spread": Statistic(
            "positional spread",
            "logits",
            "largest minus smallest logit of the mean query with the mean key over all distances, at the longest "
            "length",
        ),
    }
)


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """Statistics by (model, layer, head, kv_group); a statistic is missing where its part was not measured."""
    blocks = []
    if "head_circuits" in run.tables:
        rows = plain_types(run.table("head_circuits")).set_index(HEAD_KEYS)
        blocks.append(rows.rename(columns={"copying": "ov_copying"}))
    if "head_composition" in run.tables:
        best = strongest_inputs(run)
        wide = best.pivot_table(index=HEAD_KEYS, columns="input", values="excess", observed=True)
        blocks.append(wide.rename(columns=dict(COMPOSITION_COLUMNS)).rename_axis(columns=None))
    if "positional_summary" in run.tables:
        rows = rows_at_longest_length(plain_types(run.table("positional_summary")))
        by_document = rows.set_index([*HEAD_KEYS, "doc"])
        blocks += [
            mean_with_interval(by_document[name], column, 1.0 if name == "effective_length" else 0.0)
            for name, column in POSITIONAL_COLUMNS.items()
        ]
    return pd.concat(blocks, axis=1) if blocks else None


def strongest_inputs(run: RunTables) -> pd.DataFrame:
    """For each head and input, the earlier head of the largest score: the rows of `head_composition`, with `excess`."""
    rows = plain_types(run.table("head_composition"))
    rows = rows.assign(excess=rows["score"] - rows["baseline"])
    best = rows.groupby([*HEAD_KEYS, "input"], observed=True)["excess"].idxmax()
    return rows.loc[best].reset_index(drop=True)


def strongest_paths(rows: pd.DataFrame, count: int) -> pd.DataFrame:
    """The rows of the largest excess over random matrices of one model's `head_composition`, largest first."""
    rows = rows.assign(excess=rows["score"] - rows["baseline"])
    return rows.nlargest(count, "excess")


def rank_correlation(x: pd.Series, y: pd.Series) -> tuple[float, int]:
    """Spearman's correlation of two columns over heads with both values, and their number."""
    both = pd.DataFrame({"x": x, "y": y}).dropna()
    if len(both) < 3 or both["x"].nunique() < 2 or both["y"].nunique() < 2:
        return float("nan"), len(both)
    return float(np.corrcoef(both["x"].rank(), both["y"].rank())[0, 1]), len(both)
