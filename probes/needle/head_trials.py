"""What one head attends to at the answer of a trial that the reader chooses, for the page of a head.

The URL query selects the trial (`trial`, from 1, in the order of the table) and the answer token (`step`, from 1).
"""

from collections.abc import Iterator, Mapping, Sequence

import pandas as pd

from headscope.prompts.needle_grid import CONTROL
from headscope.rendering.blocks import Block, Link, TextBlock
from headscope.rendering.explorer_blocks import LinkChoice, choice_or_default, query_link
from headscope.rendering.text import format_percent
from headscope.results.words import count_nouns
from headscope.runs.run import Run
from probes.needle.analysis import MODE_LABELS, present_modes
from probes.needle.schema import NEEDLES
from probes.needle.trial_explorer import answer_token_choice, attention_block, steps_of_trial


def trial_blocks(run: Run, model: str, layer: int, head: int, url_query: Mapping[str, str]) -> Iterator[Block]:
    """Lists of the trials and of the answer tokens of one, and the keys of the head there.

    The default is the first answer token that the head copied. Without stored keys of the model there is no block.
    """
    trials = _trials(run, model)
    if "needle_keys" not in run.tables or trials.empty:
        return
    notes: list[str] = []
    copied = _copied_steps(run, trials, layer, head)
    names = [str(index + 1) for index in trials.index]
    first_copied = next((index for index, steps in copied.items() if steps), 0)
    number = int(choice_or_default("trial", names, url_query, notes, first_copied + 1)) - 1
    trial = trials.iloc[number]
    labels = [_describe_trial(trials.iloc[index], len(copied[index])) for index in range(len(trials))]
    first_steps = _first_steps(run, trials, copied)
    links = [
        Link(label, query_link(trial=name, step=step))
        for label, name, step in zip(labels, names, first_steps, strict=True)
    ]
    yield LinkChoice(links, "Trial", number)
    steps = steps_of_trial(run, trial)
    if steps.empty:
        yield TextBlock(["The answer of this trial is empty or not stored. Choose another trial."])
        return
    numbers = [int(step) + 1 for step in steps["step"]]
    step = int(choice_or_default("step", numbers, url_query, notes, first_steps[number])) - 1
    yield answer_token_choice(steps, step)
    if notes:
        yield TextBlock(notes)
    yield attention_block(run, trial, steps, step, (layer, head))


def _trials(run: Run, model: str) -> pd.DataFrame:
    """The trials of a model whose prompts are stored, without controls, by kind, length and depth."""
    if not {"needles", "needle_prompts"} <= {*run.tables}:
        return pd.DataFrame()
    needles = run.table("needles")
    needles = needles[(needles["model"] == model) & (needles["mode"] != CONTROL)]
    trials = needles.merge(run.table("needle_prompts")[[*NEEDLES.keys]].drop_duplicates())
    kinds = {mode: index for index, mode in enumerate(present_modes(trials))}
    order = trials.assign(kind=trials["mode"].astype(str).map(kinds))
    return order.sort_values(["kind", "context_length", "depth"], kind="stable").reset_index(drop=True)


def _copied_steps(run: Run, trials: pd.DataFrame, layer: int, head: int) -> dict[int, list[int]]:
    """The answer steps that the head copied from the needle, by trial."""
    copies = run.table("needle_copies")
    copies = copies[(copies["layer"] == layer) & (copies["head"] == head)]
    copied_steps = trials[[*NEEDLES.keys]].reset_index(names="number").merge(copies)
    return {number: sorted(copied_steps.loc[copied_steps["number"] == number, "step"]) for number in trials.index}


def _first_steps(run: Run, trials: pd.DataFrame, copied: Mapping[int, Sequence[int]]) -> list[int]:
    """The answer token of each trial that is shown by default, from 1: the first visible one that the head copied."""
    if "needle_steps" not in run.tables:
        return [1] * len(trials)
    steps = trials[[*NEEDLES.keys]].reset_index(names="number").merge(run.table("needle_steps"))
    steps = steps[steps["text"].astype(str).str.strip() != ""]
    visible = {*steps[["number", "step"]].itertuples(index=False, name=None)}
    return [next((step + 1 for step in copied[number] if (number, step) in visible), 1) for number in trials.index]


def _describe_trial(trial: pd.Series, copied: int) -> str:
    outcome = "success" if trial["success"] else "failure"
    copies = f", copies {count_nouns(copied, 'answer tokens')}" if copied else ""
    return (
        f"{trial['needle']}, {int(trial['context_length']):,} tokens, depth {format_percent(float(trial['depth']))}, "
        f"{MODE_LABELS[trial['mode']]}: {outcome}{copies}"
    )
