"""Analysis of the attribution of answers: terms in the last row, and their sums along the residual stream.

Means are over the prompts that count (`is_counted`) in every model.
"""

from collections.abc import Iterator

import pandas as pd

from headscope.effects.prompts import rows_that_count
from headscope.prompts.pair_sets import PROMPT_SET
from headscope.runs.aggregation import plain_types
from headscope.runs.run_tables import RunTables
from probes.attribution.answers.schema import ANSWER_HEADS, ANSWER_PARTS, COUNTED_BY

SET_KEYS = ["model", "prompts"]
START, END = -1, 1_000_000
"""Stages of the residual stream before the first layer and after the last one, which have 2 l and 2 l + 1."""


def last_rows(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows at the last position of each prompt, which predicts the answer, with the column `metric`."""
    last = rows.groupby([*SET_KEYS, "pair"], observed=True)["position"].transform("max")
    return plain_types(rows[rows["position"] == last]).assign(metric=COUNTED_BY)


def heads_at_answer(run: RunTables) -> pd.DataFrame:
    """The contribution of every head in the last row of each prompt that counts."""
    return rows_that_count(last_rows(run.table(ANSWER_HEADS.name)))


def parts_at_answer(run: RunTables) -> pd.DataFrame:
    """All terms in the last row of each prompt that counts, with the column `stage` (`add_stages`)."""
    return add_stages(rows_that_count(last_rows(run.table(ANSWER_PARTS.name))))


def prompt_metrics(run: RunTables) -> pd.DataFrame:
    """One row per prompt of every model and set of pairs: model, prompts, metric, pair, is_counted, and `metric_clean`,
    the logit difference."""
    parts = run.table(ANSWER_PARTS.name)
    rows = last_rows(parts[(parts["part"] == "logit") & (parts["prompts"] != PROMPT_SET)])
    return rows[[*SET_KEYS, "metric", "pair", "is_counted", "contribution"]].rename(
        columns={"contribution": "metric_clean"}
    )


def add_stages(parts: pd.DataFrame) -> pd.DataFrame:
    """Rows of parts with the stage of the residual stream that adds each.

    The attention of layer l has 2 l, its MLP 2 l + 1. The embedding has START, and biases at the end and a soft cap
    have END.
    """
    stage = 2 * parts["layer"].astype(int) + (parts["part"] == "other")
    stage = stage.mask(parts["part"] == "embedding", START).mask(parts["part"].isin(["bias", "cap"]), END)
    return parts.assign(stage=stage)


def stage_name(stage: int) -> str:
    """The name of a stage, such as "attention 3"."""
    if stage in (START, END):
        return "embedding" if stage == START else "biases"
    return f"{'MLP' if stage % 2 else 'attention'} {stage // 2}"


def sets_of(parts: pd.DataFrame, models: list[str]) -> Iterator[tuple[str, str, pd.DataFrame]]:
    """(model, set of prompts, its rows), sets in their order and models in that of the run."""
    for prompts in parts["prompts"].unique():
        for model in models:
            rows = parts[(parts["prompts"] == prompts) & (parts["model"] == model)]
            if len(rows):
                yield model, prompts, rows


def by_stage(parts: pd.DataFrame, column: str = "pair") -> pd.DataFrame:
    """What each stage (index, in the order of the residual stream) adds, by pair or another column, in logits.

    Without biases at the end there is no END.
    """
    terms = parts[(parts["part"] != "logit") & ((parts["stage"] != END) | (parts["contribution"] != 0))]
    return terms.groupby(["stage", column])["contribution"].sum().unstack(column).fillna(0.0)


def accumulated(parts: pd.DataFrame, column: str = "pair") -> pd.DataFrame:
    """The logit that the residual stream has after each stage (index), by pair or another column, in logits."""
    return by_stage(parts, column).cumsum()
