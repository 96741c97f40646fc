"""The command `bundle`: exports the app as a static website that needs no Python."""

import json
import os
import signal
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headscope.base import plugins
from headscope.base.output_files import Output
from headscope.cli.flags import EXAMPLES, Quiet, example_maps, example_run
from headscope.errors import BrokenProbe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from headscope.cli.site_pages import Address, SitePages

    Addresses = Sequence[Address]

BUNDLE = Output("a bundle", "headscope-bundle.json")
VIEWS_PER_BATCH = 8
"""Views that a process writes at a time; at least a page. A page that has a view for every model has as many views."""
MAX_VIEWS_IN_ONE_PROCESS = 64
"""Up to this many views, one process is faster than starting others."""
MAX_PROCESSES = 8


def bundle(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN", show_default="the shipped example", help="Run directories. Several are combined."
        ),
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder to write; an older bundle there is replaced.")] = Path(
        "site"
    ),
    quiet: Quiet = False,
) -> None:
    """Export the app as a static website: every page and every head, readable without Python.

    Serve the folder with any web server, or open index.html in a browser. The pages make no network requests.
    """
    from headscope.rendering.static_site import shared_files
    from headscope.study.progress import console_progress

    runs = runs or [example_run(), *(EXAMPLES / name for name in example_maps())]
    progress = console_progress(quiet, can_resume=False)
    with BUNDLE.draft(out) as draft:
        draft.mkdir()
        site = _open_site(tuple(runs))
        for name, text in shared_files(site.heads).items():
            (draft / name).write_text(text, encoding="utf-8")
        addresses = site.addresses()
        progress.start(len(addresses), 0)
        try:
            for written_addresses in _write_in_batches(runs, draft, addresses):
                progress.advance(len(written_addresses))
                progress.set_activity(written_addresses[-1].path)
        finally:
            progress.stop()
        marker = json.dumps({"runs": [part.name for part in site.run.parts]})
        (draft / str(BUNDLE.mark)).write_text(marker, encoding="utf-8")
        size = sum(file.stat().st_size for file in draft.rglob("*") if file.is_file())
    print(f"Bundle: {out / 'index.html'} ({len(addresses)} pages, {size / 1e6:.1f} MB)")


def _write_in_batches(runs: Sequence[Path], draft: Path, addresses: "Addresses") -> "Iterator[Addresses]":
    """Write the pages in batches, with one process per core; yields the addresses of the written pages."""
    models = len(_open_site(tuple(runs)).run.models)
    view_counts = [models if address.is_per_model else 1 for address in addresses]
    size = max(1, VIEWS_PER_BATCH // max(view_counts))
    parts = [addresses[start : start + size] for start in range(0, len(addresses), size)]
    if sum(view_counts) <= MAX_VIEWS_IN_ONE_PROCESS:
        yield from (_write_pages(tuple(runs), draft, part)[0] for part in parts)
        return
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from multiprocessing import active_children, get_context

    # Spawned, not forked: arrow's threads are running.
    count = min(os.cpu_count() or 1, MAX_PROCESSES)
    with ProcessPoolExecutor(count, get_context("spawn"), _init_worker) as pool:
        try:
            for future in as_completed(pool.submit(_write_pages, tuple(runs), draft, part) for part in parts):
                written_addresses, complaints = future.result()
                for line in complaints:
                    plugins.report_broken(BrokenProbe(line))
                yield written_addresses
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in active_children():
                child.terminate()
            raise


def _init_worker() -> None:
    """Set up a worker process: only the main process handles signals and reports broken probes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    plugins.log.disabled = True


def _write_pages(runs: tuple[Path, ...], draft: Path, addresses: "Addresses") -> "tuple[Addresses, list[str]]":
    """Write these pages; return their addresses and the problems of probes."""
    from headscope.rendering.static_site import render_page

    site = _open_site(runs)
    for address in addresses:
        file = draft / address.file
        file.parent.mkdir(parents=True, exist_ok=True)
        text = render_page(site.page(address), site.pages, [part.name for part in site.run.parts])
        file.write_text(text, encoding="utf-8")
    return addresses, plugins.reported_problems()


@cache
def _open_site(runs: tuple[Path, ...]) -> "SitePages":
    """The site of the combined runs, with every table checked; opened once per process."""
    from headscope.cli.site_pages import SitePages
    from headscope.runs.run import combine_runs, open_runs

    run = combine_runs(open_runs(runs))
    run.check()
    return SitePages(run)
