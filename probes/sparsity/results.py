"""Results of the sparsity probe: keys that heads need, shared sets, the worst heads and the best rules."""

import math
from collections.abc import Iterator
from typing import Any

import pandas as pd

from headscope.base.heads import format_head
from headscope.results.result import Result
from headscope.results.samples import allow_for_choice, mean_result
from headscope.runs.aggregation import confidence_interval
from headscope.runs.column_metadata import exceeds
from headscope.runs.run import Run
from headscope.runs.summary import default_models
from probes.sparsity.analysis import (
    answer_changes,
    best_families,
    costs_by_head,
    longest_rows,
    loss_changes,
    loss_changes_at_equal_cost,
    recall_at_equal_cost,
    shared_pair,
    shown_rule,
    shown_rules,
    usable_families,
    whole_model_rules,
)
from probes.sparsity.declaration import ANSWER, BEST, PUBLISHED

FEW_KEYS = 64
"""Heads that need at most this many keys are counted."""


def results(run: Run) -> Iterator[Result]:
    """For each model: keys needed, shared sets, best rule at equal cost, rules in the whole model, worst heads, answer
    rows, a pattern file."""
    if not {"sparse_keys", "sparse_rows"} <= {*run.tables}:
        return
    keys, rows, answers = (
        longest_rows(run, "sparse_keys"),
        longest_rows(run, "sparse_rows"),
        longest_rows(run, "sparse_keys", ANSWER),
    )
    for model in default_models(run):
        of_model, of_rules = keys[keys["model"] == model], rows[rows["model"] == model]
        if of_model.empty:
            continue
        yield keys_result(model, of_model)
        yield from _shared_results(run, model, of_rules)
        yield from _best_rule(run, model)
        yield from _whole_model_results(run, model)
        for rule in shown_rules(run):
            yield from _worst_heads(model, rule, of_rules[of_rules["rule"] == rule])
        if len(of_answers := answers[answers["model"] == model]):
            medians = of_answers.groupby("doc")["keys_95"].median()
            details = {"text": float(of_model.groupby("doc")["keys_95"].median().mean())}
            yield mean_result("sparsity.answer_rows", medians, (1, float("inf")), model=model, details=details)
        yield from _pattern_file(run, model, of_rules)


def head_results(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """The keys that the head needs, and its best rule."""
    if "sparse_keys" not in run.tables:
        return

    def values(rows_of: Any) -> pd.Series:
        rows = rows_of[(rows_of["model"] == model) & (rows_of["layer"] == layer) & (rows_of["head"] == head)]
        by_document: pd.Series = rows.set_index("doc")["keys_95"]
        return by_document

    if not len(needed := values(longest_rows(run, "sparse_keys"))):
        return
    details: dict[str, Any] = {}
    if len(answers := values(longest_rows(run, "sparse_keys", ANSWER))):
        details["answer"] = float(answers.mean())
    if (layer, head) in (best := run.derived(best_families, model)).index:
        family = best[layer, head]
        recall = float(run.derived(recall_at_equal_cost, model).loc[(layer, head), family])
        details |= {"family": family, "recall": recall, "cost": float(costs_by_head(run, model)[layer, head])}
    yield mean_result("sparsity.head", needed, (1, float("inf")), model=model, layer=layer, head=head, details=details)


def keys_result(model: str, rows: pd.DataFrame) -> Result:
    by_head = rows.groupby(["layer", "head"])["keys_95"].mean()
    details = {
        "length": int(rows["context_length"].iloc[0]),
        "heads": len(by_head),
        "limit": FEW_KEYS,
        "below": int((~exceeds(by_head, FEW_KEYS)).sum()),
        "top": format_head(*map(int, by_head.idxmax())),  # type: ignore[call-overload]
        "most": float(by_head.max()),
    }
    medians = rows.groupby("doc")["keys_95"].median()
    return mean_result("sparsity.keys", medians, (1, float("inf")), model=model, details=details)


def _shared_results(run: Run, model: str, rows: pd.DataFrame) -> Iterator[Result]:
    if (pair := shared_pair(run)) is None:
        return
    means = {rule: of_rule.groupby("doc")["recall"].mean() for rule, of_rule in rows.groupby("rule")}
    details = {"own": float(means[pair[0]].mean())}
    if (group := f"group-{pair[0]}") in means:
        details["group"] = float(means[group].mean())
    where = {"size": pair[0].partition(":")[2]}
    yield mean_result("sparsity.shared_set", means[pair[1]], (0, 1), model=model, where=where, details=details)


def _best_rule(run: Run, model: str) -> Iterator[Result]:
    counts, costs = run.derived(best_families, model).value_counts(), costs_by_head(run, model)
    if len(counts):
        details: dict[str, Any] = {"family": str(counts.index[0]), "cost": float(costs.mean())}
        if (missing := len(costs) - int(counts.sum())) > 0:
            details["missing"] = missing
        if len(counts) > 1:
            details |= {"second": str(counts.index[1]), "second_heads": int(counts.iloc[1])}
        yield Result(
            question="sparsity.best_rule", value=int(counts.iloc[0]), n=int(counts.sum()), model=model, details=details
        )


def _whole_model_results(run: Run, model: str) -> Iterator[Result]:
    """The change of the loss and of the answers about needles under each rule, the smallest of usable rules first."""
    changes, rules = _of_model(run.derived(loss_changes), model), whole_model_rules(run)
    losses = {}
    for rule in [rule for rule in rules if rule in changes.index]:
        rows: Any = changes.loc[rule]
        details = {"kept": rows["kept"].mean(), "length": int(rows["context_length"].iloc[0]), **_means(rows)}
        losses[rule] = mean_result("sparsity.loss", rows["change"], model=model, where={"rule": rule}, details=details)
    if len(changes):
        yield from _lowest_loss(run, model, losses[shown_rule(run)].details["kept"])
    if (own := f"{BEST}:{shown_rule(run)}") in losses:
        yield from _own_rules(run, model, losses[own])
    yield from losses.values()
    answers, answer_losses = (_of_model(answer_changes(run, column), model) for column in ("success", "nll"))
    for rule in [rule for rule in rules if rule in answers.index]:
        rows = answers.loc[rule]
        details = {"kept": rows["kept"].mean(), "loss": answer_losses.loc[rule]["change"].mean(), **_means(rows)}
        yield mean_result(
            "sparsity.answers", rows["change"], (-1, 1), model=model, where={"rule": rule}, details=details
        )


def _lowest_loss(run: Run, model: str, cost: float) -> Iterator[Result]:
    """The family of usable rules with the lowest loss at equal cost, beside the best one that needs dense weights."""
    changes, families = (
        loss_changes_at_equal_cost(run, model, shown_rule(run)),
        usable_families(run.table("sparse_rows")),
    )
    usable = [family for family in changes if family in families]
    bounds = [family for family in changes if family not in {*families, PUBLISHED, BEST}]
    if not usable:
        return
    best = str(changes[usable].mean().idxmin())
    details: dict[str, Any] = {"family": best, "cost": cost}
    if len(usable) > 1:
        details["families"] = len(usable)
    if bounds:
        bound = str(changes[bounds].mean().idxmin())
        details |= {"bound": bound, "bound_change": float(changes[bound].mean())}
    if missing := len(families - {*usable}):
        details["missing"] = missing
    lowest = mean_result("sparsity.lowest_loss", changes[best], model=model, details=details)
    yield allow_for_choice(lowest, len(usable), (-math.inf, math.inf))


def _own_rules(run: Run, model: str, loss: Result) -> Iterator[Result]:
    """The loss under each head's own best rule minus that under the best rule for all heads, at equal cost."""
    changes = loss_changes_at_equal_cost(run, model, str(loss.where["rule"]))
    usable = [family for family in changes if family in usable_families(run.table("sparse_rows"))]
    if not usable:
        return
    best = str(changes[usable].mean().idxmin())
    details: dict[str, Any] = {"family": best, "cost": loss.details["kept"], "own": loss.value}
    details |= {
        "one": float(changes[best].mean()),
        **({"others": len(changes) - 1} if len(changes) > 1 else {"same": 1}),
    }
    difference = mean_result("sparsity.own_rules", changes[BEST] - changes[best], model=model, details=details)
    yield allow_for_choice(difference, len(usable), (-math.inf, math.inf))


def _of_model(changes: pd.DataFrame, model: str) -> pd.DataFrame:
    """The changes of one model by rule and sample."""
    return changes[changes.index.get_level_values("model") == model].droplevel("model")


def _means(changes: pd.DataFrame) -> dict[str, float]:
    """Mean values under a rule and under dense attention."""
    return {"sparse": changes["value"].mean(), "dense": (changes["value"] - changes["change"]).mean()}


def _worst_heads(model: str, rule: str, rows: pd.DataFrame) -> Iterator[Result]:
    """The head of the smallest recall under a rule; its parts are the worst heads of every layer."""
    if rows.empty:
        return
    recall = rows.pivot(index=["layer", "head"], columns="doc", values="recall")
    parts = [
        _worst("sparsity.worst_in_layer", recall.loc[[layer]], model, {"rule": rule, "in_layer": int(layer)})
        for layer in recall.index.unique("layer")
    ]
    details = {"mean": float(rows["recall"].mean()), "kept": float(rows["kept"].mean())}
    yield _worst("sparsity.worst_head", recall, model, {"rule": rule}, details=details, parts=parts)


def _worst(question: str, recall: pd.DataFrame, model: str, where: dict[str, Any], **fields: Any) -> Result:
    """The smallest mean of recalls [heads, documents]; its interval allows for the choice among these heads."""
    worst = recall.iloc[[int(recall.mean(axis=1).to_numpy().argmin())]]
    low, high = confidence_interval(worst.to_numpy(float), choices=len(recall)).clip(0, 1).ravel().tolist()
    ((layer, head),) = worst.index
    by_sample = {str(name): float(value) for name, value in worst.iloc[0].items()}
    return Result(
        question=question,
        value=float(worst.to_numpy().mean()),
        low=low,
        high=high,
        n=recall.shape[1],
        model=model,
        layer=int(layer),
        head=int(head),
        where=where,
        selected_from=len(recall),
        by_sample=by_sample,
        **fields,
    )


def _pattern_file(run: Run, model: str, rows: pd.DataFrame) -> Iterator[Result]:
    published = rows[rows["rule"] == PUBLISHED]
    if published.empty:
        return
    mean_size = float(published["kept"].mean())
    details = {"kept": mean_size}
    recall = recall_at_equal_cost(run, model, mean_size)
    if "vertical-slash" in recall and recall["vertical-slash"].notna().all():
        details["own"] = float(recall["vertical-slash"].mean())
    means = published.groupby("doc")["recall"].mean()
    yield mean_result("sparsity.patterns", means, (0, 1), model=model, details=details)
