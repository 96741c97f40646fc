"""Results of the attribution of answers: the logit difference, its terms, and the parts that add most to it."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from headscope.base.heads import format_head
from headscope.prompts.pair_sets import PROMPT_SET
from headscope.results.answers import answer_results
from headscope.results.effects.prompts import MAX_SUBSETS, prompts_that_count, rows_that_count
from headscope.results.result import Result
from headscope.results.samples import allow_for_choice, mean_result
from headscope.runs.aggregation import plain_types
from headscope.runs.run import Run
from headscope.runs.run_tables import RunTables
from headscope.runs.summary import default_models
from probes.attribution.answers.declaration import ANSWER_HEADS, ANSWER_PARTS, ANSWER_TOKENS, COUNTED_BY

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


NO_LIMITS = (-math.inf, math.inf)
COMPARED = {True: "that of the wrong answer", False: "the mean logit of the vocabulary"}


def results(run: Run) -> Iterator[Result]:
    """The logit of the answers of each model and set and of each prompt, and the layer that adds most to it."""
    if ANSWER_PARTS.name not in run.tables:
        return
    metrics = run.derived(prompt_metrics)
    yield from answer_results("attribution", metrics, prompts_that_count(metrics))
    heads = run.derived(heads_at_answer)
    tokens = plain_types(run.table(ANSWER_TOKENS.name))
    for model, prompts, parts in sets_of(run.derived(parts_at_answer), default_models(run)):
        place: dict[str, Any] = {"model": model, "where": {"prompts": prompts}}
        has_wrong = bool((tokens.loc[tokens["prompts"] == prompts, "wrong"] != "").all())
        of_set = heads[(heads["model"] == model) & (heads["prompts"] == prompts)]
        yield from _prompt_results(parts, of_set, COMPARED[has_wrong], place)
        yield _logit_result(parts, COMPARED[has_wrong], place)
        yield _layer_result(parts, place)


def _prompt_results(parts: pd.DataFrame, heads: pd.DataFrame, compared: str, place: dict[str, Any]) -> Iterator[Result]:
    """The logit of the answer of every prompt of a small set, and the heads that add most and least to it."""
    logits = parts[parts["part"] == "logit"].set_index("pair")["contribution"]
    if not 1 < len(logits) <= MAX_SUBSETS:
        return
    for pair, logit in logits.items():
        ranked = heads[heads["pair"] == pair].sort_values("contribution", ascending=False, kind="stable")
        details: dict[str, Any] = {"compared": compared}
        for name, (_, head) in zip(("most", "least"), ranked.iloc[[0, -1]].iterrows(), strict=True):
            details[name] = {format_head(head["layer"], head["head"]): float(head["contribution"])}
        where = {**place["where"], "pair": str(pair)}
        yield Result(
            question="attribution.prompt", value=float(logit), model=place["model"], where=where, details=details
        )


def _logit_result(parts: pd.DataFrame, compared: str, place: dict[str, Any]) -> Result:
    terms = parts.groupby(["pair", "part"])["contribution"].sum().unstack("part").fillna(0.0)
    logit = terms["logit"]
    biases = terms.reindex(columns=["bias", "attention_bias", "cap"], fill_value=0.0).sum(axis=1)
    details = {
        "compared": compared,
        "heads": terms["heads"].mean(),
        "mlps": terms.get("other", pd.Series(0.0, terms.index)).mean(),
        "embedding": terms["embedding"].mean(),
        "biases": biases.mean(),
    }
    return mean_result("attribution.answer", logit, details=details, **place)


def _layer_result(parts: pd.DataFrame, place: dict[str, Any]) -> Result:
    """The attention or MLP of a layer that adds most."""
    table = by_stage(parts).drop(index=[START, END], errors="ignore")
    stage = int(table.index[int(table.mean(axis=1).to_numpy().argmax())])
    details = {"component": stage_name(stage).replace(" ", " of layer ")}
    result = mean_result("attribution.answer_layer", pd.Series(table.loc[stage]), details=details, **place)
    return allow_for_choice(result, len(table), NO_LIMITS)
