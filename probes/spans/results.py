"""Results of the spans probe: the heads with most mass between the shown spans, and what separates two groups."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pandas as pd

from headscope.prompts.answers import LEAST_PROBABILITY_TEXT
from headscope.results.answers import MAX_NAMES
from headscope.results.effects.groups import CHOSEN_UNITS, SPLITS, auroc_interval
from headscope.results.effects.prompts import MAX_SUBSETS, rows_that_count
from headscope.results.effects.sweep import rows_of_sweep
from headscope.results.head_results import top_head_result
from headscope.results.result import Result
from headscope.results.samples import Limits, extreme_head_result, mean_result
from headscope.runs.aggregation import SIGNIFICANCE, plain_types
from headscope.runs.head_names import HEADS_OF_WEIGHTS, parse_heads_of_weights
from headscope.runs.run import Run
from headscope.runs.summary import default_models
from probes.spans.analysis import (
    group_names,
    head_scores,
    held_out,
    named_spans_of,
    prompts_of,
    second_group,
    shown_pairs,
    shown_rows,
)
from probes.spans.declaration import LEAD, LOGPROB

STEERING_QUESTIONS: Mapping[str, str] = MappingProxyType({LOGPROB: "spans.steered", LEAD: "spans.steered_choice"})
"""Metric of steering -> the question about its mean change."""
STEERING_WORDS: Mapping[str, tuple[str, str, str]] = MappingProxyType(
    {
        LOGPROB: (
            "log-probability",
            "nats/token",
            f"the continuation's probability is below {LEAST_PROBABILITY_TEXT} per token",
        ),
        LEAD: ("lead", "nats", "the wrong continuation is at least as probable"),
    }
)
"""Metric of steering -> its name, its unit, and why a prompt does not count."""


def results(run: Run) -> Iterator[Result]:
    """For each model: steering, the head with the largest mass, the comparison of two groups, the lookback ratio."""
    yield from _steering_results(run)
    if not {"spans", "span_prompts"} <= {*run.tables}:
        return
    pairs = shown_pairs(run)
    seen = {*run.derived(shown_rows)["model"]}
    for model in (label for label in default_models(run) if label in pairs and label not in seen):
        yield Result(
            question="spans.missing", model=model, details=dict(zip(("query", "key"), pairs[model], strict=True))
        )
    if "spans_mass" not in run.heads:
        return
    for model in (label for label in default_models(run) if label in pairs):
        where = dict(zip(("query", "key"), pairs[model], strict=True))
        yield from _incomplete(run, model, where)
        if len(scores := head_scores(run, model)):
            yield from top_heads(run, [model])
            yield from _group_results(run, model, scores, where)
        heads = run.heads[run.heads["model"] == model]
        if "lookback_ratio" in heads and heads["lookback_ratio"].notna().any():
            texts = run.table("span_lookback").query("model == @model")["doc"].nunique()
            details = {"median": float(heads["lookback_ratio"].median())}
            yield extreme_head_result("spans.lookback", heads, "lookback_ratio", texts, (0.0, 1.0), details=details)


def head_results(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """The head's mass between the shown spans."""
    if "spans" not in run.tables:
        return
    rows = run.derived(shown_rows)
    rows = rows[(rows["model"] == model) & (rows["layer"] == layer) & (rows["head"] == head)]
    if len(rows):
        yield mean_result(
            "spans.head",
            rows.set_index("doc")["mass"],
            (0, 1),
            model=model,
            layer=layer,
            head=head,
            where=dict(zip(("query", "key"), shown_pairs(run)[model], strict=True)),
            details={"chance": float(rows["chance"].mean())},
        )


def _steering_results(run: Run) -> Iterator[Result]:
    """For each model: the prompts that means leave out, each prompt, how steering changes the continuation, and the
    choice between two."""
    if "span_steering" not in run.tables:
        return
    rows = plain_types(run.table("span_steering")).rename(columns={"doc": "pair"})
    rows["prompts"] = rows["key"]  # a set of prompts by the span that heads are steered to
    counted = rows_that_count(rows)
    groups: Any = rows.groupby(["model", "key"], sort=False)
    for (model, key), of_model in groups:
        keys = {"model": model, "key": key}
        place: dict[str, Any] = {"model": model, "where": {"key": key}}
        details = {"alpha": float(of_model["alpha"].iloc[0]), "heads": _steered_heads(run)}
        if 1 < of_model["pair"].nunique() <= MAX_SUBSETS:
            yield from _steered_prompts(of_model, place, details)
        for metric, members in of_model.groupby("metric", sort=False):
            own = rows_of_sweep(counted, {**keys, "metric": metric})
            yield from _failing_prompts(members, own, place)
            if metric == LEAD:
                is_ahead = members.set_index("pair")[["plain", "steered"]] > 0
                yield _change("spans.steered_share", is_ahead.astype("float64"), place, details, (-1, 1))
            if len(own):
                left_out = {"left_out": len(members) - len(own) or None}
                values = own.set_index("pair")[["plain", "steered"]].astype("float64")
                yield _change(STEERING_QUESTIONS[str(metric)], values, place, details | left_out)


def _change(
    question: str,
    values: pd.DataFrame,
    place: Mapping[str, Any],
    details: Mapping[str, Any],
    limits: Limits = (-math.inf, math.inf),
) -> Result:
    """The mean change from `plain` to `steered` by prompt (the index)."""
    means = {name: float(values[name].mean()) for name in ("plain", "steered")}
    return mean_result(question, values["steered"] - values["plain"], limits, **place, details={**details, **means})


def _failing_prompts(members: pd.DataFrame, counted: pd.DataFrame, place: dict[str, Any]) -> Iterator[Result]:
    """A warning that names the prompts that the mean of a metric leaves out, or that it leaves out all."""
    metric = str(members["metric"].iloc[0])
    failing = members[~members["is_counted"]].set_index("pair")["plain"].astype("float64")
    if failing.empty and len(counted):
        return
    label, unit, reason = STEERING_WORDS[metric]
    details: dict[str, Any] = {
        "label": label,
        "label_unit": unit,
        "reason": reason,
        "names": failing[:MAX_NAMES].to_dict(),
        "more": len(failing) - MAX_NAMES if len(failing) > MAX_NAMES else None,
    }
    where = {**place["where"], "metric": metric}
    if len(counted):
        yield Result(
            question="spans.steering_failing",
            value=len(failing),
            n=len(members),
            model=place["model"],
            where=where,
            details=details,
        )
        return
    details |= {"failing": len(failing), "every": "every model" if len(failing) < len(members) else ""}
    yield Result(
        question="spans.steering_uncounted", n=len(members), model=place["model"], where=where, details=details
    )


def _steered_prompts(rows: pd.DataFrame, place: dict[str, Any], details: Mapping[str, Any]) -> Iterator[Result]:
    """The continuation of every prompt without and with steering, also of those that means leave out."""
    for prompt, members in rows.groupby("pair", sort=False):
        by_metric = members.set_index("metric")
        values: Any = by_metric[["plain", "steered"]].astype("float64").to_dict("index")
        of_prompt: dict[str, Any] = dict(values[LOGPROB])
        of_prompt |= {f"{name}_lead": value for name, value in values.get(LEAD, {}).items()}
        failing = [f"the mean {STEERING_WORDS[metric][0]}" for metric in by_metric.index[~by_metric["is_counted"]]]
        of_prompt["left_out"] = "both means" if len(failing) == len(STEERING_WORDS) else "".join(failing)
        yield Result(
            question="spans.steered_prompt",
            value=of_prompt["steered"] - of_prompt["plain"],
            model=place["model"],
            where={**place["where"], "prompt": str(prompt)},
            details={**details, **of_prompt},
        )


def _steered_heads(run: Run) -> str:
    """The heads that a run steers, as its options name them."""
    names = run.manifest.get("config", {}).get("spans", {}).get("heads") or ["all"]
    if names == ["all"]:
        return "all heads"
    shown = [f"{parse_heads_of_weights(name)}" if name.startswith(HEADS_OF_WEIGHTS) else name for name in names]
    return ("the heads " if any(":" in name for name in shown) else "") + ", ".join(shown)


def _incomplete(run: Run, model: str, where: dict[str, str]) -> Iterator[Result]:
    """A warning if texts lack the shown pair, or if heads lack it in a text that has it."""
    rows = run.derived(shown_rows).query("model == @model")
    texts = len(prompts_of(run, model))
    heads = int((run.heads["model"] == model).sum())
    lacking, left_out = texts - rows["doc"].nunique(), heads - len(head_scores(run, model))
    if len(rows) and (lacking or left_out):
        details = {"left_out": left_out, "heads": heads}
        yield Result(question="spans.incomplete", value=lacking, n=texts, model=model, where=where, details=details)


def top_heads(run: Run, models: Iterable[str]) -> Iterator[Result]:
    """The head with the largest mass between the shown spans, in each of the models that has one."""
    for model in models:
        if len(scores := head_scores(run, model)):
            yield _top_head(run, model, scores, dict(zip(("query", "key"), shown_pairs(run)[model], strict=True)))


def _top_head(run: Run, model: str, scores: pd.DataFrame, where: dict[str, str]) -> Result:
    rows = run.derived(shown_rows)
    details: dict[str, Any] = {"median": float(scores.mean(axis=1).median())}
    names = named_spans_of(run, model)
    if where["key"] in names and len(names) > 1:
        details |= {"spans": len(names), "other": next(name for name in names if name != where["key"])}
    top = top_head_result("spans.top_head", scores, 0, 1, model=model, where=where, details=details)
    chance = rows[(rows["model"] == model) & (rows["layer"] == top.layer) & (rows["head"] == top.head)]["chance"].mean()
    return replace(top, details={**top.details, "chance": float(chance)})


def _group_results(run: Run, model: str, scores: pd.DataFrame, where: dict[str, str]) -> Iterator[Result]:
    heads = run.heads[run.heads["model"] == model]
    if "spans_auroc" not in heads or not (compared := heads.dropna(subset=["spans_auroc"])).shape[0]:
        return
    first, second = group_names(run, model)
    is_second = second_group(run, model, scores)
    names, sizes = {"first": first, "second": second}, (int((~is_second).sum()), int(is_second.sum()))
    if compared["spans_p"].notna().any():
        yield Result(
            question="spans.groups",
            value=int((compared["spans_p"] < SIGNIFICANCE).sum()),
            n=len(compared),
            model=model,
            where=where,
            details={**names, "prompts": sum(sizes)},
        )
    best = compared.iloc[int((compared["spans_auroc"] - 0.5).abs().to_numpy().argmax())]
    low, high = (float(end) for end in auroc_interval(best["spans_auroc"], *sizes, choices=len(compared)))
    yield Result(
        question="spans.separating_head",
        value=float(best["spans_auroc"]),
        low=low,
        high=high,
        n=sum(sizes),
        model=model,
        layer=int(best["layer"]),
        head=int(best["head"]),
        p_adjusted=float(best["spans_p"]),
        where=where,
        details=names,
        selected_from=len(compared),
    )
    if (judged := run.derived(held_out, model)) is not None:
        ends = {"lowest": float(judged.aurocs.min()), "highest": float(judged.aurocs.max())}
        details = {**names, **ends, "chosen": min(CHOSEN_UNITS, len(scores)), "splits": SPLITS}
        yield Result(
            question="spans.held_out", value=judged.auroc, n=sum(sizes), model=model, where=where, details=details
        )
