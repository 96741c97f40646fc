"""Trial explorer: the trials of one cell of the success map, and the prompt and answer of one trial.

The URL query selects the kind of needle (`mode`), the cell (`length`, `depth`) and the trial in the cell (`trial`).
"""

from collections.abc import Iterator, Mapping

import pandas as pd

from headscope.prompts.needle_grid import CONTROL
from headscope.report.blocks import Block, Link, PageContent, RenderContext, TextBlock
from headscope.report.explorer_blocks import (
    KeyLinks,
    LinkChoice,
    TextCell,
    Token,
    choice_or_default,
    passage_table,
    query_link,
)
from headscope.report.text import format_percent, to_visible_line, to_visible_token
from probes.needle import PROBE
from probes.needle.analysis import MODE_LABELS, present_modes, success_by_cell
from probes.needle.schema import NEEDLES

PAGE_TITLE = "Needle trials"
MAX_HEADS_PER_STEP = 24
"""Largest number of heads listed for one answer token."""


def trials_page(context: RenderContext, url_query: Mapping[str, str]) -> PageContent:
    """The success table, the trials of the selected cell, and the selected trial.

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
    notes: list[str] = []
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
            _success_table(trials, length, depth),
        ],
        f"Trials at {cell_title}": [_trial_list(cell, int(number)), _trial_links(int(number), len(cell))],
        f"Needle {trial['needle']} in {trial['doc']}": [*_trial_blocks(context, trial)],
    }
    lead = (
        f"{context.selected_model} retrieves {int(trials['success'].sum())} of {len(trials)} {MODE_LABELS[mode]}. "
        "Choose a cell, then one of its trials."
    )
    return PageContent(PAGE_TITLE, lead, sections)


def cell_link(model: str, mode: str, length: int, depth: float) -> str:
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


def _success_table(trials: pd.DataFrame, length: str, depth: str) -> Block:
    """Share of successful trials by depth and context length; each cell links to its trials."""
    cell_counts = success_by_cell(trials).assign(depth_text=lambda rows: rows["depth"].map(_format_depth))
    lengths = sorted(cell_counts["context_length"].unique())
    cells: list[list[TextCell]] = []
    for depth_text, rows in cell_counts.groupby("depth_text", sort=True):
        by_length = rows.set_index("context_length")
        row: list[TextCell] = [format_percent(float(str(depth_text)))]
        for cell_length in lengths:
            is_selected = (str(cell_length), str(depth_text)) == (length, depth)
            token = (
                _share_token(by_length.loc[cell_length], int(cell_length), str(depth_text), is_selected)
                if cell_length in by_length.index
                else Token("–")
            )
            row.append([token])
        cells.append(row)
    header = ["depth", *(f"{cell_length:,} tokens" for cell_length in lengths)]
    return passage_table("Share of successful trials. Click a cell to open its trials.", header, cells)


def _share_token(counts: pd.Series, length: int, depth: str, is_selected: bool) -> Token:
    tooltip = f"{int(counts['successes'])} of {int(counts['trials'])} trials"
    href = f"?length={length}&depth={depth}&trial=1"
    return Token(format_percent(counts["share"]), float(counts["share"]), href, is_marked=is_selected, tooltip=tooltip)


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
    if "needle_tokens" not in context.run.tables or (prompts := _rows_of_trial(context, "needle_tokens", trial)).empty:
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
    steps = _rows_of_trial(context, "needle_steps", trial).sort_values("step")
    if steps.empty:
        yield TextBlock(["The answer is empty."])
        return
    copies = (
        _rows_of_trial(context, "needle_copies", trial) if "needle_copies" in context.run.tables else steps.iloc[:0]
    )
    cells: list[list[TextCell]] = []
    for step, text_added in steps[["step", "text"]].itertuples(index=False, name=None):
        step_copies = copies[copies["step"] == step] if len(copies) else copies
        token = Token(to_visible_token(to_visible_line(str(text_added))), is_marked=len(step_copies) > 0)
        cells.append([f"{step + 1}", [token], [*_head_tokens(step_copies, copies)]])
    caption = "Answer tokens and the heads that copied them: their largest attention weight was on that needle token."
    yield passage_table(caption, ("step", "token", "copied by"), cells)


def _rows_of_trial(context: RenderContext, table_name: str, trial: pd.Series) -> pd.DataFrame:
    """The rows of a stored table that belong to `trial`."""
    rows = context.run.table(table_name)
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
