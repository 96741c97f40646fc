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
from probes.needle.analysis import HIDDEN, modes, success
from probes.needle.tables import NEEDLES

TITLE = "Needle trials"
MOST = 24
"""Heads that are named at one step."""


def trials(shown: RenderContext, asked: Mapping[str, str]) -> PageContent:
    """The trials of the cell that is asked for; what is asked in vain takes a default, which is told."""
    table = shown.table("needles")
    every = None if table is None else table[(table["model"] == shown.selected_model) & (table["mode"] != CONTROL)]
    if every is None or every.empty:
        return PageContent(TITLE, f"No needle was hidden from {shown.selected_model}: choose another model.", {})
    notes: list[str] = []
    mode = choice_or_default("mode", modes(every), asked, notes)
    every = every[every["mode"] == mode].assign(at=every["depth"].map(_depth))
    lengths = [str(length) for length in sorted(every["context_length"].unique())]
    depths = [_depth(depth) for depth in sorted(every["depth"].unique())]
    length = choice_or_default("length", lengths, asked, notes)
    depth = choice_or_default("depth", depths, asked, notes)
    cell = every[(every["context_length"] == int(length)) & (every["at"] == depth)].reset_index(drop=True)
    number = choice_or_default("trial", [str(at) for at in range(1, len(cell) + 1)], asked, notes)
    trial = cell.iloc[int(number) - 1]
    where = f"{int(length):,} tokens, depth {float(depth):.0%}"
    sections: dict[str, list[Block]] = {
        "": [*_modes(shown, mode), *([TextBlock(notes)] if notes else []), _map(every, length, depth)],
        f"Trials of {where}": [_listed(cell, int(number)), _steps(int(number), len(cell))],
        f"Needle {trial['needle']} in {trial['doc']}": [*_one(shown, trial)],
    }
    found = int(every["success"].sum())
    lead = f"{shown.selected_model} finds {found} of {len(every)} {HIDDEN[mode]}. Choose a cell of the map, then one of its trials."
    return PageContent(TITLE, lead, sections)


def cell_link(model: str, mode: str, length: int, depth: float) -> str:
    """The way to the trials of a cell of the needle map."""
    return query_link(PROBE.explorer_path, model=model, mode=mode, length=length, depth=_depth(depth), trial=1)


def _depth(depth: float) -> str:
    return f"{depth:.4f}"


def _modes(shown: RenderContext, mode: str) -> Iterator[LinkChoice]:
    table = shown.run.table("needles")
    known = modes(table[table["model"] == shown.selected_model])
    if len(known) > 1:
        yield LinkChoice(
            [Link(HIDDEN[name], f"?mode={name}&trial=1") for name in known], "What is hidden", known.index(mode)
        )


def _map(every: pd.DataFrame, length: str, depth: str) -> Block:
    """Share of trials that succeed, each cell a way to its trials."""
    counted = success(every).assign(at=lambda found: found["depth"].map(_depth))
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
                else _share(seen, int(each), str(at), (str(each), str(at)) == (length, depth))
            )
            told.append([token])
        cells.append(told)
    names = ["depth", *(f"{each:,} tokens" for each in lengths)]
    return passage_table(
        "Share of trials in which the needle is found. A click on a cell opens its trials.", names, cells
    )


def _share(seen: pd.Series, length: int, depth: str, chosen: bool) -> Token:
    hint = f"{int(seen['successes'])} of {int(seen['trials'])} trials"
    href = f"?length={length}&depth={depth}&trial=1"
    return Token(f"{seen['share']:.0%}", float(seen["share"]), href, is_marked=chosen, tooltip=hint)


def _listed(cell: pd.DataFrame, number: int) -> Block:
    cells: list[list[TextCell]] = []
    for at, row in enumerate(cell.to_dict("records"), start=1):
        name = [Token(str(row["needle"]), href=f"?trial={at}", is_marked=at == number)]
        said = [Token(to_visible_line(str(row["answer"])) or " ")]
        cells.append(["found" if row["success"] else "missed", name, str(row["doc"]), f"{row['recall']:.2f}", said])
    return passage_table("Click a needle to open its trial.", ("", "needle", "haystack", "recall", "answer"), cells)


def _steps(number: int, count: int) -> KeyLinks:
    ways = [(Link("← Trial before", f"?trial={number - 1}"), "ArrowLeft")] if number > 1 else []
    ways += [(Link("Trial after →", f"?trial={number + 1}"), "ArrowRight")] if number < count else []
    return KeyLinks([link for link, _ in ways], [key for _, key in ways])


def _one(shown: RenderContext, trial: pd.Series) -> Iterator[Block]:
    """The prompt around the needle, and the answer step by step; without their tables, how to store them."""
    if "needle_tokens" not in shown.run.tables or (read := _of(shown, "needle_tokens", trial)).empty:
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
    written = _of(shown, "needle_steps", trial).sort_values("step")
    if written.empty:
        yield TextBlock(["The model said nothing."])
        return
    copies = _of(shown, "needle_copies", trial) if "needle_copies" in shown.run.tables else read.iloc[:0]
    cells: list[list[TextCell]] = []
    for step, piece in written[["step", "piece"]].itertuples(index=False, name=None):
        some = copies[copies["step"] == step] if len(copies) else copies
        token = Token(to_visible_token(to_visible_line(str(piece))), is_marked=len(some) > 0)
        cells.append([f"{step + 1}", [token], [*_heads(some, copies)]])
    caption = "Each token of the answer, and the heads whose largest weight lay on that very token of the needle."
    yield passage_table(caption, ("step", "written", "copied by"), cells)


def _of(shown: RenderContext, name: str, trial: pd.Series) -> pd.DataFrame:
    """The rows of a table that are of this trial."""
    rows = shown.run.table(name)
    for key in NEEDLES.keys:
        rows = rows[rows[key] == trial[key]]
    return rows


def _heads(some: pd.DataFrame, copies: pd.DataFrame) -> Iterator[Token]:
    """The heads that copied at one step, those first that copied most in the trial."""
    if some.empty:
        yield Token("no head")
        return
    counts = copies.groupby(["layer", "head"]).size().rename("times")
    order = some.join(counts, on=["layer", "head"]).sort_values("times", ascending=False, kind="stable")
    first = order[["layer", "head", "key", "times"]].head(MOST)
    for layer, head, key, times in first.itertuples(index=False, name=None):
        hint = f"from token {key:,}; {times} copies in this trial"
        yield Token(f"L{layer}H{head}", times / counts.max() / 2, f"/head/{layer}.{head}", tooltip=hint)
        yield Token(" ")
    if len(order) > MOST:
        yield Token(f"and {len(order) - MOST} more")
