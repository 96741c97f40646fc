"""A run that summarises itself, and several read as one."""

import os
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa

from headscope.errors import BadInput, BadRun
from headscope.runs import summary
from headscope.runs.schema import all_tables
from headscope.runs.stored import Stored


class Run(Stored):
    """A finished run, read-only: every table by name, and `run.heads`, the wide one.

    `manifest` is its run.json, `models` the labels in the order of the study, `tables` the names of what is stored,
    `parts` the runs that are read as one (only itself, unless `concatenate` made it).
    """

    @cached_property
    def heads(self) -> pd.DataFrame:
        """One row per (model, layer, head): see `headscope.runs.summary.heads`."""
        return summary.heads(self)


class JoinedRun(Run):
    """Several runs read as one; see `concatenate`. `path` is the first run's."""

    def __init__(self, runs: Sequence[Run]) -> None:
        models = {model["label"]: model for run in reversed(runs) for model in run.manifest["models"]}
        labels = dict.fromkeys(label for run in runs for label in run.models)
        rows = {
            name: {"rows": sum(run.manifest["tables"].get(name, {"rows": 0})["rows"] for run in runs)}
            for name in all_tables()
            if any(name in run.tables for run in runs)
        }
        super().__init__(runs[0].path, {"models": [models[label] for label in labels], "tables": rows})
        self.name = " + ".join(run.name for run in runs)
        self.parts = list(runs)

    def stored(self, name: str) -> pa.Table:
        """The table as every run has it, one after the other."""
        return pa.concat_tables([run.stored(name) for run in self.parts if name in run.tables]).unify_dictionaries()

    def _read(self, name: str) -> pd.DataFrame:
        return super()._read(name).drop_duplicates(all_tables()[name].keys, ignore_index=True)


def concatenate(runs: Sequence[Run]) -> Run:
    """Read several runs as one; of rows with the same key the first run's is kept.

    Raises BadInput when one label names two different models (by weights or by scheme).
    """
    seen: dict[str, tuple[Run, dict[str, Any]]] = {}
    for run in runs:
        for model in run.manifest["models"]:
            other, known = seen.setdefault(model["label"], (run, model))
            for what in ("weights_sha256", "scheme"):
                if model[what] != known[what]:
                    raise BadInput(
                        f"model '{model['label']}' has {what} {known[what]} in {other.name} but {model[what]} "
                        f"in {run.name}: give one another label, or read the runs apart"
                    )
    return runs[0] if len(runs) == 1 else JoinedRun(runs)


def runs(directory: Path | str) -> list[tuple[Path, Run | BadRun]]:
    """The finished runs in `directory`, newest first; one that cannot be read comes with the reason."""
    found: list[tuple[Path, Run | BadRun]] = []
    for file in sorted(Path(directory).glob("[!.]*/run.json"), reverse=True):
        try:
            found.append((file.parent, Run.open(file.parent)))
        except BadRun as reason:
            found.append((file.parent, reason))
    return found


def unfinished(directory: Path | str) -> dict[str, int]:
    """Stored cells of each run in `directory` that was interrupted or is still going on, by its future name."""
    counted: dict[str, int] = {}
    for cells in sorted(Path(directory).glob(".*.partial/cells")):
        with suppress(OSError):  # it was committed just now
            counted[cells.parent.stem[1:]] = len(os.listdir(cells))
    return counted
