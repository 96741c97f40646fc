"""Results of the attribution of answers: the logit difference, its terms, and the parts that add most to it."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from headscope.effects.prompts import MAX_SUBSETS, prompts_that_count
from headscope.heads import format_head
from headscope.results.answers import answer_results
from headscope.results.result import Result
from headscope.results.samples import allow_for_choice, mean_result
from headscope.runs.aggregation import plain_types
from headscope.runs.run import Run
from headscope.runs.summary import default_models
from probes.attribution.answers.analysis import (
    END,
    START,
    by_stage,
    heads_at_answer,
    parts_at_answer,
    prompt_metrics,
    sets_of,
    stage_name,
)
from probes.attribution.answers.schema import ANSWER_PARTS, ANSWER_TOKENS

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
