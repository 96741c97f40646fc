"""Results of the detectors probe that no single score has: the top heads of each prompt, and those about one head."""

from collections.abc import Iterator
from typing import Any

import pandas as pd

from headscope.base.heads import format_head
from headscope.results.effects.prompts import MAX_SUBSETS
from headscope.results.questions import Question
from headscope.results.result import Result
from headscope.results.samples import allow_for_choice, mean_result
from headscope.runs.aggregation import plain_types, rows_at_longest_length
from headscope.runs.run import Run
from headscope.runs.summary import default_models
from probes.detectors.declaration import TARGETS

LINE_KINDS = 4
"""Kinds of key that the line of a prompt has room for; its sentence has all."""
PROMPT_ORDER = ("own", "induction", "duplicate", "previous", "current", "first")
"""Kinds of key, those that depend most on the prompt first."""

QUESTIONS = (
    Question(
        name="prompt_detectors.prompt",
        sentence="In prompt {prompt}, the heads of {model} with the most weight on each kind of key are {heads:.2f}",
        headline="Prompt {prompt}: {first_heads:.2f}",
        level="row",
    ),
    Question(
        name="detectors.largest_score",
        sentence="On a repeated random token sequence, {context_length:,} tokens in all, {value} of its weight in "
        "{model} is on {target}[; chance is {chance:percent1}]",
        number="percent",
        samples="sequences",
    ),
)


def results(run: Run) -> Iterator[Result]:
    """The head with the highest score for each kind of key in every prompt, if there are several but not many."""
    if "prompt_detectors" not in run.tables:
        return
    rows = plain_types(run.table("prompt_detectors"))
    for label in default_models(run):
        yield from _single_prompts(rows[rows["model"] == label], label)


def _single_prompts(rows: pd.DataFrame, model: str) -> Iterator[Result]:
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
        details={"target": TARGETS[kind], "chance": float(rows[rows["kind"] == kind]["chance"].mean())},
    )
    yield allow_for_choice(score, scores.shape[1], (0, 1))
