"""What a page shows of runs that lack its data: the runs of the folder that have it, and the command that stores it."""

import shlex
from collections.abc import Collection, Iterator
from itertools import chain, islice

from dashboards.pages import Page
from dashboards.run_store import current_store, run_label
from headscope.base import plugins
from headscope.rendering.blocks import Block, Link, Links, PageContent, TextBlock
from headscope.rendering.explorer_blocks import query_link
from headscope.runs.columns import TableParts
from headscope.runs.run import Run
from headscope.runs.summary import ColumnParts, default_models

MAX_OFFERED_RUNS = 6
"""Runs that an empty page offers, the newest."""
FEWEST_MODELS = {"/heads": 1, "/head": 1, "/compare": 2}
"""Models that a page about the per-head table needs."""
MAX_MODELS = 3
"""Models that a command names."""


def missing_data_page(page: Page, run: Run) -> PageContent:
    """A button for each run of the folder that fills the page, and the command that stores its data for this run."""
    links = [
        Link(f"Open {run_label(name)}", query_link(page.PATH, run=name))
        for name in islice(_runs_with_data(page, run), MAX_OFFERED_RUNS)
    ]
    command = page.missing_command(run)
    blocks: list[Block] = []
    if links:
        reason = "This run has no data for this page. Other runs of this folder have:"
        blocks.append(TextBlock([reason], links=Links(links)))
        blocks.append(TextBlock(["This command stores its data:"], command=command))
    else:
        blocks.append(TextBlock(["This run has no data for this page. This command stores its data:"], command=command))
    return PageContent(page.NAME, "", {"": blocks})


def _runs_with_data(page: Page, run: Run) -> Iterator[str]:
    shown = {part.path.name for part in run.parts}
    for name, other in current_store().list_runs().items():
        if isinstance(other, Run) and name not in shown and _fills(page, other):
            yield name


def _fills(page: Page, run: Run) -> bool:
    """Whether the run has the data of the page, from run.json alone: the tables of many runs take minutes."""
    if page.PATH not in FEWEST_MODELS:
        return not page.missing_command(run)
    names = {
        table.name
        for probe in plugins.probes().values()
        if probe.has(ColumnParts.head_columns)
        for table in plugins.call_part(probe, TableParts.tables)
    }
    return len(run.models) >= FEWEST_MODELS[page.PATH] and not names.isdisjoint(run.tables)


def command_for_run(example: str, run: Run, takes: Collection[str] = ("models", "text", "docs")) -> str:
    """The example command with the models and the texts of the run, as far as the command takes them."""
    if "models" not in takes or not run.models:
        return example
    specs = {model["label"]: model["spec"] for model in run.manifest["models"]}
    models = [("--model", f"{label}={specs[label]}") for label in default_models(run)[:MAX_MODELS]]
    stored = (run.manifest.get("config") or {}).get("texts") or {}
    texts = {"text": stored.get("source"), "docs": stored.get("docs")}
    flags = {f"--{name}": str(value) for name, value in texts.items() if name in takes and value is not None}
    words = _without_flags(iter(shlex.split(example)), {"--model", *flags})
    return shlex.join([*words, *chain(*models, *flags.items())])


def _without_flags(words: Iterator[str], names: Collection[str]) -> Iterator[str]:
    """The words of a command without these flags and their values."""
    for word in words:
        if word in names:
            next(words)
        else:
            yield word
