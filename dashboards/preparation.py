"""The first page's data, computed by another process while this one imports the libraries of the app.

Both take more than a second; on two cores they take it at the same time.
"""

import multiprocessing
import pickle
import sys
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING

from headscope.errors import HeadscopeError

if TYPE_CHECKING:
    from headscope.runs.run import Run


def start_preparation(path: Path, combined_with: Sequence[str]) -> Connection:
    """Start the process for the runs that the app shows first; `finish_preparation` takes what this returns."""
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else None)  # no second start of Python
    receiver, sender = context.Pipe(duplex=False)
    context.Process(target=_compute, args=(sender, path, combined_with), daemon=True).start()
    sender.close()
    return receiver


def finish_preparation(receiver: Connection, run: "Run") -> None:
    """Give the run what the process has computed; nothing if it failed, so that the page says why."""
    with suppress(EOFError, OSError), receiver:
        names, heads, values = receiver.recv()
        if names == [part.path.name for part in run.parts]:
            run.adopt(heads, {pickle.loads(key): pickle.loads(value) for key, value in values})


def _compute(sender: Connection, path: Path, combined_with: Sequence[str]) -> None:
    from dashboards.run_store import RunStore
    from headscope.rendering import assembly

    with suppress(HeadscopeError, OSError, KeyboardInterrupt), sender:
        run = RunStore(path, True, combined_with).open_combined([])
        heads = run.heads
        for _ in assembly.overview_cards(assembly.render_context(run)):
            pass  # the cards keep what they compute with the run
        sender.send(([part.path.name for part in run.parts], heads, [*_pickled(run)]))


def _pickled(run: "Run") -> list[tuple[bytes, bytes]]:
    """The values derived from the run with their keys, as far as they can be sent."""
    values = []
    for key, value in run.derived_values().items():
        with suppress(pickle.PicklingError, TypeError, AttributeError):
            values.append((pickle.dumps(key), pickle.dumps(value)))
    return values
