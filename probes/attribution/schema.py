"""Options, stored tables and per-head statistic of the attribution probe."""

from collections.abc import Mapping
from types import MappingProxyType

import pandas as pd
from pydantic import Field

from headscope.runs.aggregation import HEAD_KEYS, mean_with_interval, plain_types, rows_at_longest_length
from headscope.runs.column_metadata import Statistic
from headscope.runs.columns import DOC, GROUP, HEAD, LAYER, LENGTH, MODEL, Column, Table, key
from headscope.runs.run_tables import RunTables
from headscope.study.config import Lengths, PromptOptions


class AttributionOptions(PromptOptions):
    """What each head adds directly to the logit of the next token."""

    lengths: Lengths = Field(default=[2048], description="context lengths in tokens")


POSITION = key("position", "index32", "tokens", "last predicted token of the bin of positions")
CONTRIBUTION_MEANING = (
    "minus the mean over the vocabulary, which changes no probability; norms are frozen at their observed scale, and a "
    "final soft cap is linearised at the observed logits"
)
TOKENS = Column("tokens", "count", "tokens", "predicted tokens in the bin", 1)

ATTRIBUTION = Table(
    "attribution",
    "what each head adds directly to the logit of the next token, by position",
    (
        MODEL,
        LENGTH,
        DOC,
        LAYER,
        HEAD,
        GROUP,
        POSITION,
        Column(
            "contribution",
            "value",
            "logits",
            f"mean contribution to the next token's logit over the bin; {CONTRIBUTION_MEANING}",
        ),
        TOKENS,
    ),
)

ATTRIBUTION_PARTS = Table(
    "attribution_parts",
    "all terms of the next token's logit, the heads of a layer summed, by position",
    (
        MODEL,
        LENGTH,
        DOC,
        key(
            "part",
            "label",
            "",
            "embedding: the input of the first layer; heads: all heads of a layer; bias: biases of projections and "
            "norms, the same for all tokens; other: everything else that a layer adds (its MLP); cap: what the "
            "linearised soft cap leaves out, in models with a final soft cap; logit: the sum",
            None,
        ),
        key("layer", "index16", "", "decoder layer, from 0; 0 for terms of no layer"),
        POSITION,
        Column("contribution", "value", "logits", f"mean over the bin; {CONTRIBUTION_MEANING}"),
        TOKENS,
    ),
)

TABLES = (ATTRIBUTION, ATTRIBUTION_PARTS)


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
