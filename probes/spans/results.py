"""Results of the spans probe: the heads with most mass between the shown spans, and what separates two groups."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import pandas as pd

from headscope.effects.groups import CHOSEN_UNITS, SPLITS, auroc_interval
from headscope.results.head_results import top_head_result
from headscope.results.result import Result
from headscope.results.samples import extreme_head_result, mean_result
from headscope.runs.aggregation import SIGNIFICANCE, plain_types
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
    """For each model: how steering changes the continuation, and the choice between two."""
    if "span_steering" not in run.tables:
        return
    heads = run.manifest.get("config", {}).get("spans", {}).get("heads") or []
    for (model, metric, key), rows in plain_types(run.table("span_steering")).groupby(["model", "metric", "key"]):
        values = rows.set_index("doc")[["plain", "steered"]].astype("float64")
        is_choice = metric == "lead"
        averages = (values > 0 if is_choice else values).mean()
        details = {"alpha": float(rows["alpha"].iloc[0]), "heads": ", ".join(heads) or "all heads"}
        yield mean_result(
            "spans.steered_choice" if is_choice else "spans.steered",
            values["steered"] - values["plain"],
            model=str(model),
            where={"key": str(key)},
            details={**details, **{name: float(averages[name]) for name in ("plain", "steered")}},
        )


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
