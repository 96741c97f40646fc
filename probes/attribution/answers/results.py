"""Results of the attribution of answers: the logit difference, its terms, and the parts that add most to it."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd

from headscope.prompts.answers import ANSWER_CRITERIA, gives_answer
from headscope.results.answers import answered_result
from headscope.results.result import Result
from headscope.results.samples import allow_for_choice, extreme_head_result, mean_result
from headscope.runs.aggregation import HEAD_KEYS, mean_with_interval, plain_types
from headscope.runs.run import Run
from headscope.runs.summary import default_models
from probes.attribution.answers.analysis import (
    END,
    START,
    by_stage,
    heads_at_answer,
    parts_at_answer,
    sets_of,
    stage_name,
)
from probes.attribution.answers.schema import ANSWER_PARTS, ANSWER_STATISTIC, ANSWER_TOKENS

NO_LIMITS = (-math.inf, math.inf)
COMPARED = {True: "that of the wrong answer", False: "the mean logit of the vocabulary"}
DOUBT = "Answer and wrong answer may be exchanged"


def results(run: Run) -> Iterator[Result]:
    """The logit of the answers of each model and set, and the heads and layers that add most and least to it."""
    if ANSWER_PARTS.name not in run.tables:
        return
    heads = run.derived(heads_at_answer)
    tokens = plain_types(run.table(ANSWER_TOKENS.name))
    for model, prompts, parts in sets_of(run.derived(parts_at_answer), default_models(run)):
        place: dict[str, Any] = {"model": model, "where": {"prompts": prompts}}
        has_wrong = bool((tokens.loc[tokens["prompts"] == prompts, "wrong"] != "").all())
        yield from _logit_results(parts, has_wrong, place)
        yield _layer_result(parts, place)
        yield from _head_results(heads[(heads["model"] == model) & (heads["prompts"] == prompts)], prompts)


def _logit_results(parts: pd.DataFrame, has_wrong: bool, place: dict[str, Any]) -> Iterator[Result]:
    terms = parts.groupby(["pair", "part"])["contribution"].sum().unstack("part").fillna(0.0)
    logit = terms["logit"]
    biases = terms.reindex(columns=["bias", "attention_bias", "cap"], fill_value=0.0).sum(axis=1)
    details = {
        "compared": COMPARED[has_wrong],
        "heads": terms["heads"].mean(),
        "mlps": terms.get("other", pd.Series(0.0, terms.index)).mean(),
        "embedding": terms["embedding"].mean(),
        "biases": biases.mean(),
    }
    yield mean_result("attribution.answer", logit, details=details, **place)
    if has_wrong and len(logit) > 1:
        is_answered = pd.Series(gives_answer("logit_diff", logit.to_numpy(np.float64)), logit.index)
        unanswered = int((~is_answered).sum())
        criterion = ANSWER_CRITERIA["logit_diff"]
        yield answered_result("attribution.answered", criterion, is_answered, unanswered, DOUBT, **place)


def _layer_result(parts: pd.DataFrame, place: dict[str, Any]) -> Result:
    """The attention or MLP of a layer that adds most."""
    table = by_stage(parts).drop(index=[START, END], errors="ignore")
    stage = int(table.index[int(table.mean(axis=1).to_numpy().argmax())])
    details = {"component": stage_name(stage).replace(" ", " of layer ")}
    result = mean_result("attribution.answer_layer", pd.Series(table.loc[stage]), details=details, **place)
    return allow_for_choice(result, len(table), NO_LIMITS)


def _head_results(rows: pd.DataFrame, prompts: str) -> Iterator[Result]:
    values = rows.rename(columns={"pair": "doc"}).set_index([*HEAD_KEYS, "doc"])["contribution"]
    heads = mean_with_interval(values, ANSWER_STATISTIC).reset_index()
    for which in ("highest", "lowest"):
        where = {"prompts": prompts, "which": which}
        yield extreme_head_result(
            "attribution.answer_extreme",
            heads,
            ANSWER_STATISTIC,
            rows["pair"].nunique(),
            NO_LIMITS,
            which == "lowest",
            where=where,
        )
