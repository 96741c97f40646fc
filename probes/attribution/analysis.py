"""Columns of the per-head table: direct logit attribution of the next token and of answers."""

import pandas as pd

from headscope.runs.aggregation import HEAD_KEYS, mean_with_interval, plain_types, rows_at_longest_length
from headscope.runs.run_tables import RunTables
from probes.attribution.answers.analysis import heads_at_answer
from probes.attribution.answers.schema import ANSWER_HEADS, ANSWER_STATISTIC
from probes.attribution.schema import STATISTIC_NAME, mean_over_positions


def head_statistics(run: RunTables) -> pd.DataFrame | None:
    """`next_token_attribution` at the longest length and `answer_attribution`, where they were measured.

    By (model, layer, head, kv_group), each with its interval over documents or pairs that count.
    """
    columns = []
    if "attribution" in run.tables:
        rows = rows_at_longest_length(plain_types(run.table("attribution")))
        columns.append(mean_with_interval(mean_over_positions(rows, *HEAD_KEYS, "doc"), STATISTIC_NAME))
    if ANSWER_HEADS.name in run.tables and len(rows := heads_at_answer(run)):
        values = rows.assign(doc=rows["prompts"] + "/" + rows["pair"]).set_index([*HEAD_KEYS, "doc"])["contribution"]
        columns.append(mean_with_interval(values, ANSWER_STATISTIC))
    return pd.concat(columns, axis=1) if columns else None
