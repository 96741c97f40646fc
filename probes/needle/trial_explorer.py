"""Trial explorer: the trials of one cell of the success map, and the prompt and answer of one trial.

The URL query selects the kind of needle (`mode`), the cell (`length`, `depth`), the trial in the cell (`trial`), and
the answer token (`step`, from 1) and head (`layer`, `head`) whose attention is shown.
"""

import json
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import pandas as pd

from headscope.base.heads import Head
from headscope.prompts.needle_grid import CONTROL
from headscope.rendering.blocks import Block, Chart, Link, PageContent, RenderContext, TextBlock
from headscope.rendering.explorer_blocks import (
    KeyLinks,
    LinkChoice,
    TextCell,
    Token,
    choice_or_default,
    passage_table,
    query_link,
)
from headscope.rendering.text import format_percent, to_visible_line, to_visible_token
from headscope.rendering.token_spans import TokenizedText, context_spans, mark_token, shaded_tokens
from headscope.results.words import count_nouns
from headscope.runs.run import Run
from probes.needle import PROBE, plots
from probes.needle.analysis import MODE_LABELS, present_modes
from probes.needle.declaration import NEEDLES

PAGE_TITLE = "Needle trials"
MAX_HEADS_PER_STEP = 24
"""Largest number of heads listed for one answer token."""
KEY_CONTEXT = (12, 8)
"""Tokens before and after an attended key."""


def trials_page(context: RenderContext, url_query: Mapping[str, str]) -> PageContent:
    """The success map, the trials of the selected cell, and the selected trial.

    Defaults replace invalid values of the query, and a note says so.
    """
    needles = context.table("needles")
    trials = (
        None
        if needles is None
        else needles[(needles["model"] == context.selected_model) & (needles["mode"] != CONTROL)]
    )
    if trials is None or trials.empty:
        return PageContent(PAGE_TITLE, f"No needle trials of {context.selected_model}. Choose another model.", {})
    run, notes = context.run, list[str]()
    mode = choice_or_default("mode", present_modes(trials), url_query, notes)
    trials = trials[trials["mode"] == mode].assign(depth_text=trials["depth"].map(_format_depth))
    lengths = [str(length) for length in sorted(trials["context_length"].unique())]
    depths = [_format_depth(depth) for depth in sorted(trials["depth"].unique())]
    length = choice_or_default("length", lengths, url_query, notes)
    depth = choice_or_default("depth", depths, url_query, notes)
    cell = trials[(trials["context_length"] == int(length)) & (trials["depth_text"] == depth)].reset_index(drop=True)
    number = choice_or_default("trial", [str(count) for count in range(1, len(cell) + 1)], url_query, notes)
    trial = cell.iloc[int(number) - 1]
    cell_title = f"{int(length):,} tokens, depth {format_percent(float(depth))}"
    sections: dict[str, list[Block]] = {
        "": [
            *_mode_choice(context, mode),
            *([TextBlock(notes)] if notes else []),
            *_cell_choices(lengths, depths, length, depth),
            success_map_chart(trials, context.selected_model, mode),
        ],
        f"Trials at {cell_title}": [_trial_list(cell, int(number)), _trial_links(int(number), len(cell))],
        f"Needle {trial['needle']} in {trial['doc']}": [*_trial_blocks(context, trial)],
    }
    if len(steps := steps_of_trial(run, trial)):
        sections["What a head attends to at an answer token"] = [*_attention_blocks(run, trial, steps, url_query)]
    lead = (
        f"{context.selected_model} retrieves {int(trials['success'].sum())} of {len(trials)} {MODE_LABELS[mode]}. "
        "Choose a cell, then one of its trials."
    )
    return PageContent(PAGE_TITLE, lead, sections)


def _cell_link(model: str, mode: str, length: int, depth: float) -> str:
    """App link to the first trial of a cell of the success map."""
    return query_link(PROBE.explorer_path, model=model, mode=mode, length=length, depth=_format_depth(depth), trial=1)


def _format_depth(depth: float) -> str:
    return f"{depth:.4f}"


def _mode_choice(context: RenderContext, mode: str) -> Iterator[LinkChoice]:
    needles = context.run.table("needles")
    modes = present_modes(needles[needles["model"] == context.selected_model])
    if len(modes) > 1:
        yield LinkChoice(
            [Link(MODE_LABELS[name], f"?mode={name}&trial=1") for name in modes], "Kind of needle", modes.index(mode)
        )


def _cell_choices(lengths: Sequence[str], depths: Sequence[str], length: str, depth: str) -> Iterator[LinkChoice]:
    """Lists of the context lengths and depths; each links to the first trial of the cell."""
    length_links = [Link(f"{int(item):,}", query_link(length=item, trial=1)) for item in lengths]
    depth_links = [Link(format_percent(float(item)), query_link(depth=item, trial=1)) for item in depths]
    yield LinkChoice(length_links, "Context length", lengths.index(length))
    yield LinkChoice(depth_links, "Depth", depths.index(depth))


def success_map_chart(needles: pd.DataFrame, model: str, mode: str) -> Chart:
    """Success by context length and depth; each cell links to its trials."""
    trials = needles[(needles["model"] == model) & (needles["mode"] == mode)]
    lengths, depths = (sorted(trials[name].unique()) for name in ("context_length", "depth"))
    return Chart(
        plots.plot_success_map(needles, model, mode),
        "One cell per context length and depth. A trial succeeds if its answer contains more than half of the "
        "needle's words.",
        half_width=True,
        cell_links=[[_cell_link(model, mode, length, depth) for length in lengths] for depth in depths],
    )


def _trial_list(cell: pd.DataFrame, trial_number: int) -> Block:
    cells: list[list[TextCell]] = []
    for number, row in enumerate(cell.to_dict("records"), start=1):
        needle = [Token(str(row["needle"]), href=f"?trial={number}", is_marked=number == trial_number)]
        answer = [Token(to_visible_line(str(row["answer"])) or " ")]
        outcome = "success" if row["success"] else "failure"
        cells.append([outcome, needle, str(row["doc"]), f"{row['recall']:.2f}", answer])
    return passage_table("Click a needle to open its trial.", ("", "needle", "haystack", "recall", "answer"), cells)


def _trial_links(trial_number: int, trial_count: int) -> KeyLinks:
    links = [(Link("← Previous trial", f"?trial={trial_number - 1}"), "ArrowLeft")] if trial_number > 1 else []
    links += [(Link("Next trial →", f"?trial={trial_number + 1}"), "ArrowRight")] if trial_number < trial_count else []
    return KeyLinks([link for link, _ in links], [key for _, key in links])


def _trial_blocks(context: RenderContext, trial: pd.Series) -> Iterator[Block]:
    """The prompt around the needle and the answer token by token; if they are not stored, how to store them."""
    prompts = _rows_of_trial(context.run, "needle_tokens", trial)
    if prompts is None or prompts.empty:
        yield TextBlock([f"This run does not contain prompts and answers. To store them, run: {PROBE.example}"])
        return
    row = prompts.iloc[0]
    text = [
        *(Token(f"… {row['before']}"), Token(row["cue"], 0.15), Token(row["scored"], 0.5, is_marked=True)),
        *(Token(f"{row['after']} … "), Token(row["question"], 0.05)),
    ]
    caption = (
        f"The prompt around the needle ({trial['prompt_tokens']:,} tokens in total). Scored tokens: "
        f"{trial['span_start']:,}–{trial['span_end'] - 1:,}."
    )
    yield passage_table(caption, ("",), [[[token for token in text if token.text]]])
    steps = steps_of_trial(context.run, trial)
    if steps.empty:
        yield TextBlock(["The answer is empty."])
        return
    copies = _rows_of_trial(context.run, "needle_copies", trial)
    if copies is None:
        copies = steps.iloc[:0]
    cells: list[list[TextCell]] = []
    for step, text_added in steps[["step", "text"]].itertuples(index=False, name=None):
        step_copies = copies[copies["step"] == step] if len(copies) else copies
        visible, href = to_visible_token(to_visible_line(str(text_added))), query_link(step=step + 1)
        token = Token(visible, href=href, is_marked=len(step_copies) > 0)
        cells.append([f"{step + 1}", [token], [*_head_tokens(step_copies, copies)]])
    caption = (
        "Answer tokens and the heads that copied them: the largest attention weight of such a head is on that token in "
        "the needle. Click a token to see below what any head attends to there."
    )
    yield passage_table(caption, ("step", "token", "copied by"), cells)


def _attention_blocks(run: Run, trial: pd.Series, steps: pd.DataFrame, url_query: Mapping[str, str]) -> Iterator[Block]:
    """The keys of the selected head at the selected answer token, in the prompt; without them, how to store them."""
    keys, prompts = (_rows_of_trial(run, name, trial) for name in ("needle_keys", "needle_prompts"))
    if keys is None or prompts is None or prompts.empty:
        yield TextBlock(
            [
                "This run was stored without what heads attend to at answer tokens. Repeat its command to store that, "
                f"or measure fewer trials, for example: {PROBE.example}"
            ]
        )
        return
    notes: list[str] = []
    numbers = [step + 1 for step in steps["step"]]
    step = int(choice_or_default("step", numbers, url_query, notes)) - 1
    layer, head, choices = _head_choice(run, trial, step, url_query, notes)
    yield answer_token_choice(steps, step)
    yield from choices
    yield KeyLinks([Link("Page of this head", f"/head/{layer}.{head}")], [""])
    if notes:
        yield TextBlock(notes)
    yield attention_block(run, trial, steps, step, (layer, head))


def answer_token_choice(steps: pd.DataFrame, step: int) -> LinkChoice:
    """The answer tokens of a trial as a list; the URL counts them from 1."""
    rows = [*steps[["step", "text"]].itertuples(index=False, name=None)]
    links = [
        Link(f"{number + 1}: {to_visible_token(to_visible_line(str(text)))}", query_link(step=number + 1))
        for number, text in rows
    ]
    return LinkChoice(links, "Answer token", [number for number, _ in rows].index(step))


def attention_block(run: Run, trial: pd.Series, steps: pd.DataFrame, step: int, unit: Head) -> Block:
    """The prompt and answer around the keys with at least 15 % of the weight of a head at one answer token."""
    keys, prompts = (_rows_of_trial(run, name, trial) for name in ("needle_keys", "needle_prompts"))
    assert keys is not None
    assert prompts is not None
    layer, head = unit
    answer_token = str(steps.set_index("step")["text"][step])
    tokens = [*json.loads(prompts["tokens"].iloc[0]), *map(str, steps["text"])]
    text = TokenizedText(np.array(tokens, dtype=object), np.zeros(len(tokens), bool))
    rows = keys[(keys["step"] == step) & (keys["layer"] == layer) & (keys["head"] == head)]
    weights = {int(key): float(weight) for key, weight in zip(rows["key"], rows["weight"], strict=True)}
    name = f"L{layer}H{head} at the query that outputs “{to_visible_token(to_visible_line(answer_token))}”"
    if not weights:
        return TextBlock([f"{name}: no key other than the first token holds 15 % of the weight."])
    scored = range(int(trial["span_start"]), int(trial["span_end"]))
    cells: list[list[TextCell]] = [
        [f"{span.start:,}–{span.stop - 1:,}", shaded_tokens(text, span, weights, weights.keys() & {*scored})]
        for span in context_spans(dict.fromkeys(weights, KEY_CONTEXT), len(tokens))
    ]
    top = max(weights, key=weights.__getitem__)
    caption = (
        f"{name}: {weights[top]:.2f} of its weight on “{mark_token(text, top, 3, 2)}”. Shaded: keys with at least "
        f"15 % of the weight, {sum(weights.values()):.2f} together; outlined: tokens of the needle. The first token "
        "is left out."
    )
    return passage_table(caption, ("tokens", "text"), cells)


def _head_choice(
    run: Run, trial: pd.Series, step: int, url_query: Mapping[str, str], notes: list[str]
) -> tuple[int, int, list[LinkChoice]]:
    """The layer and head that the URL names, by default a head that copies at this step, and lists of both."""
    heads = run.heads[run.heads["model"] == trial["model"]][["layer", "head"]].drop_duplicates()
    copies = _rows_of_trial(run, "needle_copies", trial)
    default = tuple(heads.iloc[0])
    if copies is not None and len(copies):
        counts = copies.groupby(["layer", "head"]).size().reset_index(name="count")
        at_step = copies[copies["step"] == step][["layer", "head"]]
        candidates = counts.merge(at_step) if len(at_step) else counts
        default = tuple(candidates.sort_values("count", ascending=False, kind="stable")[["layer", "head"]].iloc[0])
    layers = sorted(heads["layer"].unique())
    layer = int(choice_or_default("layer", layers, url_query, notes, default[0]))
    numbers = sorted(heads[heads["layer"] == layer]["head"])
    head = int(choice_or_default("head", numbers, url_query, notes, default[1] if layer == default[0] else None))
    lists = [
        LinkChoice([Link(str(value), query_link(**{name: value})) for value in values], label, values.index(chosen))
        for label, name, values, chosen in (("Layer", "layer", layers, layer), ("Head", "head", numbers, head))
    ]
    return layer, head, lists


def steps_of_trial(run: Run, trial: pd.Series) -> pd.DataFrame:
    """The answer of the trial token by token; empty if it is not stored."""
    steps = _rows_of_trial(run, "needle_steps", trial)
    return pd.DataFrame() if steps is None else steps.sort_values("step")


def _rows_of_trial(run: Run, table_name: str, trial: pd.Series) -> pd.DataFrame | None:
    """The rows of a stored table that belong to `trial`; None if the run lacks the table."""
    if table_name not in run.tables:
        return None
    rows = run.table(table_name)
    for key in NEEDLES.keys:
        rows = rows[rows[key] == trial[key]]
    return rows


def _head_tokens(step_copies: pd.DataFrame, copies: pd.DataFrame) -> Iterator[Token]:
    """The heads that copied at one step, in descending order of their copies in the trial."""
    if step_copies.empty:
        yield Token("no head")
        return
    counts = copies.groupby(["layer", "head"]).size().rename("count")
    ranked = step_copies.join(counts, on=["layer", "head"]).sort_values("count", ascending=False, kind="stable")
    top_rows = ranked[["layer", "head", "key", "count"]].head(MAX_HEADS_PER_STEP)
    for layer, head, key, count in top_rows.itertuples(index=False, name=None):
        tooltip = f"from token {key:,}; copies in this trial: {count}"
        yield Token(f"L{layer}H{head}", count / counts.max() / 2, f"/head/{layer}.{head}", tooltip=tooltip)
        yield Token(" ")
    if len(ranked) > MAX_HEADS_PER_STEP:
        yield Token(f"and {len(ranked) - MAX_HEADS_PER_STEP} more")


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
