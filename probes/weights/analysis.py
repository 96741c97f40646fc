"""Columns of the per-head table from the weights of heads, and the strongest compositions."""

from collections.abc import Iterable, Mapping
from types import MappingProxyType

import numpy as np
import pandas as pd

from headscope.runs.aggregation import (
    HEAD_KEYS,
    last_octave_means,
    mean_with_interval,
    plain_types,
    rows_at_longest_length,
)
from headscope.runs.column_metadata import Statistic, columns_by_length, roles, statistics
from headscope.runs.run_tables import RunTables
from probes.weights.declaration import ALL_OTHERS

INPUTS = ("q", "k", "v")
COMPOSITION_COLUMNS: Mapping[str, str] = MappingProxyType({kind: f"{kind}_composition" for kind in INPUTS})
"""Input of the later head -> column of the per-head table."""
POSITIONAL_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "effective_length": "positional_effective_length",
        "preferred_distance": "positional_distance",
        "spread": "positional_spread",
    }
)
"""Column of the table `positional_summary` -> column of the per-head table."""
VALUE_COLUMNS: Mapping[str, str] = MappingProxyType(
    {
        "log_ess2": "key_effective_length",
        "value_log_ess2": "value_effective_length",
        "sink_share": "key_sink_mass",
        "value_sink_share": "value_sink_mass",
    }
)
"""Column of the table `value_attention` -> column of the per-head table."""

STATISTICS: Mapping[str, Statistic] = MappingProxyType(
    {
        "ov_copying": Statistic(
            "OV copying score",
            "",
            "share of the OV circuit's eigenvalue mass that raises the attended token's own logit above the mean "
            "logit: 1 copies, -1 suppresses; from the weights, on token embeddings without context",
            formula="Σ Re λ / Σ |λ| of (W_U − mean) W_OV W_E",
            number_format="+.3f",
        ),
        "ov_copying_uncentred": Statistic(
            "OV copying score, not centred",
            "",
            "the same without subtracting the mean of all logits, as TransformerLens counts without center_unembed",
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
            "effective length of a query that sees all distances if its logits depended on distance alone (mean query "
            "with mean key, rotated), at the longest length; geometric mean over documents",
            log_scale=True,
        ),
        "positional_distance": Statistic(
            "preferred distance",
            "tokens",
            "distance at which the mean query has its largest logit with the mean key, at the longest length",
        ),
        "key_effective_length": Statistic(
            "effective length in the same rows",
            "tokens",
            "exp of the mean ln ESS2 of the plain weights of the keys, over the same rows as the value-weighted one",
            log_scale=True,
            formula="ESS₂(i) = 1 / Σⱼ αᵢⱼ²",
        ),
        "value_effective_length": Statistic(
            "value-weighted effective length",
            "tokens",
            "effective length of weights times the norms of what the keys' values add to the residual stream, over "
            "sampled rows in the last octave of visible keys at the longest length",
            log_scale=True,
            formula="1 / Σⱼ wᵢⱼ², wᵢⱼ ∝ αᵢⱼ ‖W_O vⱼ‖",
        ),
        "key_sink_mass": Statistic(
            "weight of the first key in the same rows",
            "",
            "mean plain weight of the first key, over the same rows as the value-weighted one, those that see it",
            formula="αᵢ₀",
        ),
        "value_sink_mass": Statistic(
            "value-weighted weight of the first key",
            "",
            "mean weight of the first key over the rows that see it, with weights times the norms of what the keys' "
            "values add to the residual stream: near 0 for a sink whose value adds almost nothing",
            formula="wᵢ₀, wᵢⱼ ∝ αᵢⱼ ‖W_O vⱼ‖",
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
        copying = {name: f"ov_{name}" for name in ("copying", "copying_uncentred")}
        blocks.append(rows.drop(columns="is_centred").rename(columns=copying))
    if "head_composition" in run.tables:
        best = strongest_inputs(run)
        wide = best.pivot_table(index=HEAD_KEYS, columns="input", values="excess", observed=True)
        blocks.append(wide.rename(columns=dict(COMPOSITION_COLUMNS)).rename_axis(columns=None))
    if "positional_summary" in run.tables:
        rows = rows_at_longest_length(plain_types(run.table("positional_summary")))
        by_document = rows.set_index([*HEAD_KEYS, "doc"])
        blocks += [
            mean_with_interval(np.log(by_document[name]), column, 0.0, is_logarithmic=True)
            if name == "effective_length"
            else mean_with_interval(by_document[name], column, 0.0)
            for name, column in POSITIONAL_COLUMNS.items()
        ]
    if "value_attention" in run.tables:
        rows = rows_at_longest_length(plain_types(run.table("value_attention")))
        names = [*VALUE_COLUMNS]
        sinks = [name for name in names if name.endswith("sink_share")]
        means = last_octave_means(rows, names)
        means[sinks] = last_octave_means(rows, sinks, "sink_population")
        means = means.droplevel("context_length")
        for name, column in VALUE_COLUMNS.items():
            is_log = name.endswith("ess2")
            blocks.append(mean_with_interval(means[name], column, 0, np.inf if is_log else 1, is_logarithmic=is_log))
    return pd.concat(blocks, axis=1) if blocks else None


def measured_effective_length(columns: Iterable[str]) -> str | None:
    """The column of the effective length that the positional one is compared with, None without any."""
    names = [*map(str, columns)]
    lengths = columns_by_length(names, "ess2")
    if lengths:
        return lengths[-1]
    return "key_effective_length" if "key_effective_length" in names else None


def strongest_inputs(run: RunTables) -> pd.DataFrame:
    """For each head and input, the earlier head of the largest score: the rows of `head_composition`, with `excess`.

    Cached: do not modify it.
    """
    return run.derived(_compute_strongest_inputs)


def _compute_strongest_inputs(run: RunTables) -> pd.DataFrame:
    rows = plain_types(run.table("head_composition"))
    rows = rows.assign(excess=rows["score"] - rows["baseline"])
    best = rows.groupby([*HEAD_KEYS, "input"], observed=True)["excess"].idxmax()
    return rows.loc[best].reset_index(drop=True)


def mean_contributions(components: pd.DataFrame) -> pd.DataFrame:
    """Mean contribution of each component on each side over the top far rows of `qk_components`: component by side.

    A component that no row has on one side counts as 0 there, and both columns sum to the mean logit.
    """
    rows = plain_types(components)
    n_rows = len(rows[["doc", "context_length", "query", "key"]].drop_duplicates())
    wide = rows.pivot_table(index="component", columns="side", values="contribution", aggfunc="sum") / n_rows
    return wide.reindex(columns=["query", "key"]).fillna(0.0)


def strongest_component_pairs(pairs: pd.DataFrame, count: int) -> pd.DataFrame:
    """Pairs of components of the largest mean contribution over the top far rows of `qk_pairs`, by absolute value.

    Columns query_component, key_component, contribution (logits). A pair that is not stored for a row counts as 0
    there; the other pairs are left out.
    """
    rows = plain_types(pairs)
    n_rows = len(rows[["doc", "context_length", "query", "key"]].drop_duplicates())
    sums = rows[rows["query_component"] != ALL_OTHERS].groupby(["query_component", "key_component"])["contribution"]
    means = (sums.sum() / n_rows).sort_values(key=abs, ascending=False).head(count)
    return means.reset_index()


def attributed_heads(rows: pd.DataFrame) -> list[tuple[str, int, int]]:
    """(model, layer, head) of every head with rows in `qk_rows`, in the order of the run."""
    return [*plain_types(rows)[["model", "layer", "head"]].drop_duplicates().itertuples(index=False, name=None)]


def strongest_paths(rows: pd.DataFrame, count: int, chance: float | None = None) -> pd.DataFrame:
    """The rows of the largest excess over random matrices of one model's `head_composition`, largest first.

    Only rows that exceed chance: a score, or the mean of random matrices if it is None.
    """
    rows = rows.assign(excess=rows["score"] - rows["baseline"])
    is_above = rows["excess"] > 0 if chance is None else rows["score"] > chance
    return rows[is_above].nlargest(count, "excess")


def chance_score(run: RunTables, model: str, kind: str) -> float:
    """The bound of composition scores of a model by chance, from `composition_null`."""
    rows = run.table("composition_null")
    return float(rows.loc[(rows["model"] == model) & (rows["input"] == kind), "bound"].iloc[0])


def rows_of_head(run: RunTables, table: str, model: str, layer: int, head: int) -> pd.DataFrame:
    """The rows of one head and model in a table."""
    return run.rows(table, model=model, layer=layer, head=head)


def head_score_columns(heads: pd.DataFrame) -> list[str]:
    """Scores of other probes that name a head, such as the top retrieval head, and the induction score."""
    columns = [name for name, declared in statistics().items() if declared.best_head_name and name in heads]
    role = roles().get("induction")
    if role is not None and role.order_by in heads:
        columns.append(role.order_by)
    return [name for name in columns if heads[name].notna().any()]
