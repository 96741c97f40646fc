"""The trial browser: a cell of the needle map, its trials, and one of them as it was read and answered.

The address tells what was hidden (`mode`), the cell (`length`, `depth`) and the number of the trial in it (`trial`).
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
from headscope.report.text import to_visible_line, to_visible_token
from probes.needle import PROBE
from probes.needle.analysis import MODE_LABELS, present_modes, success_by_cell
from probes.needle.tables import NEEDLES

PAGE_TITLE = "Needle trials"
MAX_HEADS_PER_STEP = 24
"""Heads that are named at one step."""


def trials_page(context: RenderContext, url_query: Mapping[str, str]) -> PageContent:
    """The trials of the cell that is asked for; what is asked in vain takes a default, which is told."""
    table = context.table("needles")
    every = None if table is None else table[(table["model"] == context.selected_model) & (table["mode"] != CONTROL)]
    if every is None or every.empty:
        return PageContent(PAGE_TITLE, f"No needle was hidden from {context.selected_model}: choose another model.", {})
    notes: list[str] = []
    mode = choice_or_default("mode", present_modes(every), url_query, notes)
    every = every[every["mode"] == mode].assign(at=every["depth"].map(_format_depth))
    lengths = [str(length) for length in sorted(every["context_length"].unique())]
    depths = [_format_depth(depth) for depth in sorted(every["depth"].unique())]
    length = choice_or_default("length", lengths, url_query, notes)
    depth = choice_or_default("depth", depths, url_query, notes)
    cell = every[(every["context_length"] == int(length)) & (every["at"] == depth)].reset_index(drop=True)
    number = choice_or_default("trial", [str(at) for at in range(1, len(cell) + 1)], url_query, notes)
    trial = cell.iloc[int(number) - 1]
    where = f"{int(length):,} tokens, depth {float(depth):.0%}"
    sections: dict[str, list[Block]] = {
        "": [
            *_mode_choice(context, mode),
            *([TextBlock(notes)] if notes else []),
            _success_table(every, length, depth),
        ],
        f"Trials of {where}": [_trial_list(cell, int(number)), _trial_links(int(number), len(cell))],
        f"Needle {trial['needle']} in {trial['doc']}": [*_trial_blocks(context, trial)],
    }
    found = int(every["success"].sum())
    lead = (
        f"{context.selected_model} finds {found} of {len(every)} {MODE_LABELS[mode]}. "
        "Choose a cell of the map, then one of its trials."
    )
    return PageContent(PAGE_TITLE, lead, sections)


def cell_link(model: str, mode: str, length: int, depth: float) -> str:
    """The way to the trials of a cell of the needle map."""
    return query_link(PROBE.explorer_path, model=model, mode=mode, length=length, depth=_format_depth(depth), trial=1)


def _format_depth(depth: float) -> str:
    return f"{depth:.4f}"


def _mode_choice(context: RenderContext, mode: str) -> Iterator[LinkChoice]:
    table = context.run.table("needles")
    known = present_modes(table[table["model"] == context.selected_model])
    if len(known) > 1:
        yield LinkChoice(
            [Link(MODE_LABELS[name], f"?mode={name}&trial=1") for name in known], "What is hidden", known.index(mode)
        )


def _success_table(trial_rows: pd.DataFrame, length: str, depth: str) -> Block:
    """Share of trials that succeed, each cell a way to its trials."""
    counted = success_by_cell(trial_rows).assign(at=lambda found: found["depth"].map(_format_depth))
    lengths = sorted(counted["context_length"].unique())
    cells: list[list[TextCell]] = []
    for at, row in counted.groupby("at", sort=True):
        by_length = row.set_index("context_length")
        told: list[TextCell] = [f"{float(str(at)):.0%}"]
        for each in lengths:
            seen = by_length.loc[each] if each in by_length.index else None
            token = (
                Token("–")
                if seen is None
                else _share_token(seen, int(each), str(at), (str(each), str(at)) == (length, depth))
            )
            told.append([token])
        cells.append(told)
    names = ["depth", *(f"{each:,} tokens" for each in lengths)]
    return passage_table(
        "Share of trials in which the needle is found. A click on a cell opens its trials.", names, cells
    )


def _share_token(counts: pd.Series, length: int, depth: str, is_selected: bool) -> Token:
    hint = f"{int(counts['successes'])} of {int(counts['trials'])} trials"
    href = f"?length={length}&depth={depth}&trial=1"
    return Token(f"{counts['share']:.0%}", float(counts["share"]), href, is_marked=is_selected, tooltip=hint)


def _trial_list(cell: pd.DataFrame, trial_number: int) -> Block:
    cells: list[list[TextCell]] = []
    for at, row in enumerate(cell.to_dict("records"), start=1):
        name = [Token(str(row["needle"]), href=f"?trial={at}", is_marked=at == trial_number)]
        said = [Token(to_visible_line(str(row["answer"])) or " ")]
        cells.append(["found" if row["success"] else "missed", name, str(row["doc"]), f"{row['recall']:.2f}", said])
    return passage_table("Click a needle to open its trial.", ("", "needle", "haystack", "recall", "answer"), cells)


def _trial_links(trial_number: int, trial_count: int) -> KeyLinks:
    ways = [(Link("← Trial before", f"?trial={trial_number - 1}"), "ArrowLeft")] if trial_number > 1 else []
    ways += [(Link("Trial after →", f"?trial={trial_number + 1}"), "ArrowRight")] if trial_number < trial_count else []
    return KeyLinks([link for link, _ in ways], [key for _, key in ways])


def _trial_blocks(context: RenderContext, trial: pd.Series) -> Iterator[Block]:
    """The prompt around the needle, and the answer step by step; without their tables, how to store them."""
    if "needle_tokens" not in context.run.tables or (read := _rows_of_trial(context, "needle_tokens", trial)).empty:
        yield TextBlock([f"This run does not hold what was read and answered. One that does: {PROBE.example}"])
        return
    row = read.iloc[0]
    text = [
        *(Token(f"… {row['before']}"), Token(row["given"], 0.15), Token(row["scored"], 0.5, is_marked=True)),
        *(Token(f"{row['after']} … "), Token(row["asked"], 0.05)),
    ]
    how = (
        f"The prompt around the needle, {trial['prompt_tokens']:,} tokens in all; what is scored stands at "
        f"{trial['span_start']:,} to {trial['span_end'] - 1:,}."
    )
    yield passage_table(how, ("",), [[[token for token in text if token.text]]])
    written = _rows_of_trial(context, "needle_steps", trial).sort_values("step")
    if written.empty:
        yield TextBlock(["The model said nothing."])
        return
    copies = _rows_of_trial(context, "needle_copies", trial) if "needle_copies" in context.run.tables else read.iloc[:0]
    cells: list[list[TextCell]] = []
    for step, piece in written[["step", "piece"]].itertuples(index=False, name=None):
        some = copies[copies["step"] == step] if len(copies) else copies
        token = Token(to_visible_token(to_visible_line(str(piece))), is_marked=len(some) > 0)
        cells.append([f"{step + 1}", [token], [*_head_tokens(some, copies)]])
    caption = "Each token of the answer, and the heads whose largest weight lay on that very token of the needle."
    yield passage_table(caption, ("step", "written", "copied by"), cells)


def _rows_of_trial(context: RenderContext, table_name: str, trial: pd.Series) -> pd.DataFrame:
    """The rows of a table that are of this trial."""
    rows = context.run.table(table_name)
    for key in NEEDLES.keys:
        rows = rows[rows[key] == trial[key]]
    return rows


def _head_tokens(step_copies: pd.DataFrame, copies: pd.DataFrame) -> Iterator[Token]:
    """The heads that copied at one step, those first that copied most in the trial."""
    if step_copies.empty:
        yield Token("no head")
        return
    counts = copies.groupby(["layer", "head"]).size().rename("times")
    order = step_copies.join(counts, on=["layer", "head"]).sort_values("times", ascending=False, kind="stable")
    first = order[["layer", "head", "key", "times"]].head(MAX_HEADS_PER_STEP)
    for layer, head, key, times in first.itertuples(index=False, name=None):
        hint = f"from token {key:,}; {times} copies in this trial"
        yield Token(f"L{layer}H{head}", times / counts.max() / 2, f"/head/{layer}.{head}", tooltip=hint)
        yield Token(" ")
    if len(order) > MAX_HEADS_PER_STEP:
        yield Token(f"and {len(order) - MAX_HEADS_PER_STEP} more")
