"""Results of the detectors probe: the heads with each role, and what one head attends to."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from headscope.effects.prompts import MAX_SUBSETS
from headscope.heads import format_head
from headscope.results.head_results import kept_role_results, role_results, top_head_result
from headscope.results.result import Result, Scalar
from headscope.results.samples import allow_for_choice, mean_result
from headscope.runs.aggregation import plain_types, rows_at_longest_length
from headscope.runs.run import Run
from headscope.runs.summary import default_models
from probes.detectors.analysis import (
    KIND_COLUMNS,
    PROMPT_TARGETS,
    ROLE_AREAS,
    ROLE_THRESHOLD,
    TARGET_DESCRIPTIONS,
    longest_rows,
)

LINE_KINDS = 4
"""Kinds of key that the line of a prompt has room for; its sentence has all."""
PROMPT_ORDER = ("own", "induction", "duplicate", "previous", "current", "first")
"""Kinds of key, those that depend most on the prompt first."""


def results(run: Run) -> Iterator[Result]:
    """For each kind of key: the number of heads with its role, and the head with the highest score.

    For induction heads also how many of the first model keep the role in each other model.
    """
    yield from _prompt_results(run)
    if "detectors" not in run.tables:
        return
    models, rows = default_models(run), run.derived(longest_rows)
    yield from induction_results(run, run.heads, models)
    for kind, area in ROLE_AREAS.items():
        if kind != "induction":
            yield from role_results(area, run.heads, _conditions(run, models), KIND_COLUMNS[kind], ROLE_THRESHOLD)
        for label in models:
            block = rows[(rows["kind"] == kind) & (rows["model"] == label)]
            if len(block):
                yield _top_head(block)


def induction_results(run: Run, heads: pd.DataFrame, models: Sequence[str]) -> Iterator[Result]:
    """The number of induction heads of each model, and how many of the first keep the role, by the per-head table."""
    for answer in (role_results, kept_role_results):
        yield from answer(
            ROLE_AREAS["induction"], heads, _conditions(run, models), KIND_COLUMNS["induction"], ROLE_THRESHOLD
        )


def _conditions(run: Run, models: Sequence[str]) -> dict[str, dict[str, Scalar]]:
    """The longest context length of each model, at which its heads have a score."""
    lengths = run.derived(longest_rows).groupby("model")["context_length"].first()
    return {label: {"context_length": int(lengths[label])} for label in models if label in lengths}


def _prompt_results(run: Run) -> Iterator[Result]:
    """The head with the highest score for each model and kind of key: in each of the user's prompts, and in all."""
    if "prompt_detectors" not in run.tables:
        return
    rows = plain_types(run.table("prompt_detectors"))
    for label in default_models(run):
        yield from _single_prompts(rows[rows["model"] == label], label)
        for kind, target in PROMPT_TARGETS.items():
            block = rows[(rows["model"] == label) & (rows["kind"] == kind)]
            if block.empty:
                continue
            scores = block.pivot(index=["layer", "head"], columns="prompt", values="score").dropna()
            if scores.empty:
                continue
            where: dict[str, Scalar] = {"kind": kind}
            top = top_head_result("prompt_detectors.top_head", scores, 0, 1, model=label, where=where)
            of_head = block[(block["layer"] == top.layer) & (block["head"] == top.head)]
            yield replace(top, details={**top.details, "target": target, "chance": float(of_head["chance"].mean())})


def _single_prompts(rows: pd.DataFrame, model: str) -> Iterator[Result]:
    """The head with the highest score for each kind of key in every prompt, if there are several but not many."""
    if not 1 < rows["prompt"].nunique() <= MAX_SUBSETS:
        return
    groups: Any = rows.groupby("prompt")
    for number, members in groups:
        top = members.loc[members.groupby("kind")["score"].idxmax()].set_index("kind")
        heads = {
            f"{kind} {format_head(int(top['layer'][kind]), int(top['head'][kind]))}": float(top["score"][kind])
            for kind in PROMPT_ORDER
            if kind in top.index
        }
        yield Result(
            question="prompt_detectors.prompt",
            model=model,
            where={"prompt": int(number)},
            details={"heads": heads, "first_heads": dict([*heads.items()][:LINE_KINDS])},
        )


def _top_head(rows: pd.DataFrame) -> Result:
    """The head with the highest score, from the rows of one model and kind of key."""
    first = rows.iloc[0]
    scores = rows.pivot(index=["layer", "head"], columns="sequence", values="score")
    where = {"context_length": int(first["context_length"])}
    top = top_head_result(f"{ROLE_AREAS[first['kind']]}.top_head", scores, 0, 1, model=first["model"], where=where)
    chance = rows.loc[(rows["layer"] == top.layer) & (rows["head"] == top.head), "chance"].mean()
    return replace(top, details={**top.details, "chance": float(chance)})


def head_results(run: Run, model: str, layer: int, head: int) -> Iterator[Result]:
    """The kind of key with most of the head's weight, compared with chance."""
    if "detectors" not in run.tables:
        return
    rows = rows_at_longest_length(plain_types(run.rows("detectors", model=model, layer=layer, head=head)))
    if rows.empty:
        return
    scores = rows.pivot(index="sequence", columns="kind", values="score")
    kind = str(scores.mean().idxmax())
    score = mean_result(
        "detectors.largest_score",
        scores[kind],
        (0, 1),
        model=model,
        layer=layer,
        head=head,
        where={"context_length": int(rows["context_length"].iloc[0])},
        details={"target": TARGET_DESCRIPTIONS[kind], "chance": float(rows[rows["kind"] == kind]["chance"].mean())},
    )
    yield allow_for_choice(score, scores.shape[1], (0, 1))
