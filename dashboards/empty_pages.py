"""What a page shows of runs that lack its data: the runs of the folder that have it, and the command that stores it."""

from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

from dashboards.pages import Page
from dashboards.run_store import current_store, run_label
from headscope.errors import BadRun
from headscope.rendering.blocks import Block, Link, Links, PageContent, TextBlock
from headscope.rendering.explorer_blocks import query_link
from headscope.runs.run import Run

MAX_OFFERED_RUNS = 6
"""Runs that an empty page offers, the newest."""


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
        with suppress(BadRun):  # a table of it is damaged; opening that run says which
            if isinstance(other, Run) and name not in shown and not page.missing_command(other):
                yield name
