"""Finished runs, and several of them combined into one."""

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import combinations
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd
import pyarrow as pa

from headscope.base.head_set import HeadSet
from headscope.base.model_identity import ModelIdentity
from headscope.base.public_functions import checked_methods
from headscope.errors import BadInput, BadRun
from headscope.runs import arrays, hub, summary
from headscope.runs.columns import all_tables, shareable_table_names
from headscope.runs.io import read_json
from headscope.runs.row_reader import Values
from headscope.runs.run_tables import NO_VALUES, RunTables

log = logging.getLogger("headscope")

PLAN_FILE = "plan.json"
"""File of an unfinished run with the number of its cells."""


@checked_methods
class Run(RunTables):
    """A finished run as it is stored; `headscope.run.Run` adds its results, charts and exports."""

    @cached_property
    def heads(self) -> pd.DataFrame:
        """One row per (model, layer, head): see `headscope.runs.summary.head_table`."""
        return summary.head_table(self)

    def array(self, table: str, column: str = "", axes: Sequence[str] = (), **where: Any) -> arrays.LabelledArray:
        """A table as an array with named axes, such as `run.array("attention", "ess2", model="base")`.

        `values` holds the `column`, by default the effect; stored maps of attention are decoded, with a last axis
        `key_block`. `where` chooses rows by the values of columns. `axes` are key columns in order, by default those
        with more than one value, without the KV group of a head. `labels` maps each axis to its labels. Cells without
        a row are nan. Raises BadInput if several rows fall into one cell.
        """
        return arrays.table_array(self, table, column, axes, **where)

    @property
    def conflicting_row_counts(self) -> Mapping[str, int]:
        """Rows by table that are hidden because an earlier run has other values for the same key."""
        return {}

    def top_heads(self, statistic: str, count: int, model: str | None = None) -> HeadSet:
        """The `count` heads of the largest `statistic`, a column of `run.heads`, in `model` (needed if there are
        several). Measured values come before estimates; a warning says if estimates enter the list or could change
        it, or if fewer heads have a value."""
        label = self.models[0] if model is None and len(self.models) == 1 else model
        heads = HeadSet.top(self.heads, statistic, count, label)
        heads = replace(heads, model_digests=summary.model_identity(self, str(label)).weights)
        if len(heads) < count:
            log.warning("only %d of the top %d heads: '%s' has no value in others", len(heads), count, statistic)
        if "estimates" in heads.source:
            log.warning("%s. Measure with method exact, or a larger verify_top", heads.source)
        return heads

    def push_to_hub(self, repository: str, *, private: bool = True, token: str | None = None) -> str:
        """Upload the run to the dataset repository ORG/NAME on the Hugging Face hub and return its URL.

        It becomes a folder with the name of the run, beside runs that are there already. Combined runs are refused.
        """
        if len(self.parts) > 1:
            raise BadInput(f"{len(self.parts)} combined runs cannot be uploaded as one. Upload each run")
        return hub.push(self.path, self.path.name, repository, private, token)

    @classmethod
    def from_hub(
        cls, repository: str, name: str | None = None, *, revision: str | None = None, token: str | None = None
    ) -> Self:
        """Download and open a run from the dataset repository ORG/NAME; `name` may be left out if it holds one run."""
        return cls.open(hub.fetch(repository, name, revision, token))


class CombinedRun(Run):
    """Several runs combined by `combine_runs`. `path` is the first run's."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._labels = _combined_labels(runs)
        models = [
            {**model, "label": new_labels[model["label"]]}
            for run, new_labels in zip(runs, self._labels, strict=True)
            for model in run.manifest["models"]
        ]
        rows = {
            name: {"rows": sum(run.manifest["tables"].get(name, {"rows": 0})["rows"] for run in runs)}
            for name in all_tables()
            if any(name in run.tables for run in runs)
        }
        entries: dict[str, dict[str, Any]] = {}
        for model in models:
            entry = entries.setdefault(model["label"], model)
            for name in ("documents_sha256", "texts_sha256"):
                entry[name] = {**(model.get(name) or {}), **(entry.get(name) or {})}
            if "prompt_tokens" in model and "prompt_tokens" in entry:
                entry["prompt_tokens"] = sorted({*entry["prompt_tokens"], *model["prompt_tokens"]})
            else:  # a run of an earlier version does not say how long its prompts are
                entry.pop("prompt_tokens", None)
        super().__init__(runs[0].path, {"models": [*entries.values()], "tables": rows})
        self.name = " + ".join(run.name for run in runs)
        self.parts = list(runs)

    def arrow_table(self, name: str, values: Values = NO_VALUES, columns: Sequence[str] | None = None) -> pa.Table:
        """The rows of all runs, one run after the other, with the labels of the combined models."""
        self._require(name)
        parts = [part for part in zip(self.parts, self._labels, strict=True) if name in part[0].tables]
        tables = [
            _relabel(run.arrow_table(name, _own_values(values, new_labels), columns), new_labels)
            for run, new_labels in parts
        ]
        return pa.concat_tables(tables).unify_dictionaries()

    def part_tables(self, index: int) -> dict[str, pd.DataFrame]:
        """The tables of one of the parts, with the labels of the combination.

        Rows that several parts may have come with the first part that has the table.
        """
        part, tables = self.parts[index], {}
        for name in (name for name in part.tables if name in self.tables):
            if not self._may_repeat(name):
                tables[name] = _relabel(part.arrow_table(name), self._labels[index]).to_pandas()
            elif not any(name in earlier.tables for earlier in self.parts[:index]):
                tables[name] = self.table(name)
        return tables

    def _read(self, name: str, values: Values = NO_VALUES, columns: Sequence[str] | None = None) -> pd.DataFrame:
        if not self._may_repeat(name):
            return super()._read(name, values, columns)
        frame = super()._read(name, values).drop_duplicates(all_tables()[name].keys, ignore_index=True)
        return frame if columns is None else frame[[*columns]]

    def _layer_range(self, name: str) -> tuple[int, int] | None:
        bounds = [run._layer_range(name) for run in self.parts if name in run.tables]
        complete = [own for own in bounds if own is not None]
        if len(complete) < len(bounds):
            return None
        return min(first for first, _ in complete), max(last for _, last in complete)

    @cached_property
    def conflicting_row_counts(self) -> dict[str, int]:
        """Rows by table that are hidden because an earlier run has other values for the same key.

        Tables without a model may repeat each other, and an adapter may have been trained again under its old name.
        """
        row_counts = {}
        for name in filter(self._may_repeat, self.tables):
            rows, table = self.arrow_table(name).to_pandas().drop_duplicates(), all_tables()[name]
            pairs = rows.merge(rows.drop_duplicates(table.keys), on=table.keys, suffixes=("", " first"))
            differs = np.zeros(len(pairs), bool)
            for column in table.values:
                value, first = pairs[column].to_numpy(), pairs[f"{column} first"].to_numpy()
                # Versions of headscope round differently in the last digits.
                is_number = pairs[column].dtype.kind == "f"
                equal = np.isclose(value, first, rtol=1e-5, atol=0, equal_nan=True) if is_number else value == first
                differs |= ~equal
            if count := int(differs.sum()):
                row_counts[name] = count
        return row_counts

    def _may_repeat(self, name: str) -> bool:
        """Whether two runs can have rows with the same key. A model that was measured twice became two models."""
        return name in shareable_table_names() and sum(name in run.tables for run in self.parts) > 1


def combine_runs(runs: Sequence[Run]) -> Run:
    """Combine several runs into one.

    A label that several runs share stays one model if weights, positions, configuration, dtype and tokenizer are equal,
    documents of one name are the same text, and no table was measured twice.
    Otherwise it becomes one model per run, "base \u00b7 first" and "base \u00b7 second".
    """
    return runs[0] if len(runs) == 1 else CombinedRun(runs)


def open_runs(folders: Sequence[Path]) -> list[Run]:
    """Open the runs in these folders. Raises BadInput for a run that is named twice."""
    places = [os.path.realpath(folder) for folder in folders]
    if twice := [folder for folder, place in zip(folders, places, strict=True) if places.count(place) > 1]:
        raise BadInput(f"run '{twice[0]}' is named twice. Name each run once")
    return [Run.open(folder) for folder in folders]


def short_names(names: Sequence[str]) -> list[str]:
    """The shortest distinct names of runs: the slug, with the time, with the hash, or the whole name, numbered if
    needed."""
    matches = [re.fullmatch(r"\d{4}(\d\d)(\d\d)T(\d\d)(\d\d)\d\dZ-(.+)-([0-9a-f]{8})", name) for name in names]
    if all(matches):
        for template in (r"\5", r"\5 \1-\2 \3:\4", r"\5 \6"):
            short = [match.expand(template) for match in matches if match]
            if len({*short}) == len(short):
                return short
    return [f"{name} ({number})" if names.count(name) > 1 else name for number, name in enumerate(names, 1)]


def _combined_labels(runs: Sequence[Run]) -> list[dict[str, str]]:
    """For each run, its model labels and their names in the combined run."""
    entries_by_label: dict[str, list[tuple[Run, dict[str, Any]]]] = {}
    for run in runs:
        for model in run.manifest["models"]:
            entries_by_label.setdefault(model["label"], []).append((run, model))
    ambiguous_labels = {label for label, entries in entries_by_label.items() if not _is_same_model(entries)}
    short_run_names = short_names([run.name for run in runs])
    return [
        {label: f"{label} \u00b7 {run_name}" if label in ambiguous_labels else label for label in run.models}
        for run, run_name in zip(runs, short_run_names, strict=True)
    ]


def _is_same_model(entries: Sequence[tuple[Run, dict[str, Any]]]) -> bool:
    """Whether the runs measured the same model without measuring any table twice.

    Facts that a run does not record, such as the tokenizer in runs of early versions, are not compared.
    """
    identities = [ModelIdentity.from_manifest(model) for _, model in entries]
    is_same = not any(first.compare(second).differences for first, second in combinations(identities, 2))
    tokenizers = {model.get("tokenizer_sha256") for _, model in entries} - {None}
    documents = {item for _, model in entries for item in (model.get("documents_sha256") or {}).items()}
    has_same_texts = len(tokenizers) < 2 and len(documents) == len({name for name, _ in documents})
    measured = [name for run, _ in entries for name in run.tables if name not in shareable_table_names()]
    return is_same and has_same_texts and len(measured) == len(set(measured))


def _own_values(values: Values, new_labels: Mapping[str, str]) -> Values:
    """The values to look for in a run whose models have new labels."""
    if "model" not in values:
        return values
    return {**values, "model": [label for label, new_label in new_labels.items() if new_label in values["model"]]}


def _relabel(table: pa.Table, new_labels: Mapping[str, str]) -> pa.Table:
    index = table.schema.get_field_index("model")
    if index < 0 or all(old == new for old, new in new_labels.items()):
        return table
    chunks = [
        pa.DictionaryArray.from_arrays(
            chunk.indices, pa.array([new_labels.get(x, x) for x in chunk.dictionary.to_pylist()], pa.string())
        )
        for chunk in table["model"].chunks
    ]
    field = table.schema.field(index)
    return table.set_column(index, field, pa.chunked_array(chunks, field.type))


def list_runs(directory: Path | str) -> list[tuple[Path, Run | BadRun]]:
    """The finished runs in `directory`, newest first; a run that cannot be read comes with its error."""
    entries: list[tuple[Path, Run | BadRun]] = []
    files = [file for name in ("[!.]*/run.json", "[0-9]*T[0-9]*Z-*/*.parquet") for file in Path(directory).glob(name)]
    for folder in sorted({file.parent for file in files}, reverse=True):
        try:
            entries.append((folder, Run.open(folder)))
        except BadRun as reason:
            entries.append((folder, reason))
    return entries


@dataclass(frozen=True)
class RunProgress:
    """An unfinished run: its future name, stored and planned jobs (None if it does not say), and the time in seconds
    since the last one was stored."""

    name: str
    stored_jobs: int
    planned_jobs: int | None
    seconds_since: float

    def describe(self) -> str:
        """The progress in a sentence without its end."""
        planned = "" if self.planned_jobs is None else f" of {self.planned_jobs:,}"
        noun = "work item" if not planned and self.stored_jobs == 1 else "work items"
        minutes = self.seconds_since / 60
        ago = f"{self.seconds_since:.0f} s" if minutes < 2 else f"{minutes:,.0f} minutes"
        return f"{self.stored_jobs:,}{planned} {noun} stored; last change {ago} ago"


def run_progress(directory: Path | str) -> list[RunProgress]:
    """The progress of each interrupted or running run in `directory`."""
    progress = []
    for cells in sorted(Path(directory).glob(".*.partial/cells")):
        with suppress(OSError):  # the run was committed just now
            count, seconds = len(os.listdir(cells)), time.time() - cells.stat().st_mtime
            try:
                planned = read_json(cells.parent / PLAN_FILE).get("cells")
            except BadRun:
                planned = None
            planned = planned if isinstance(planned, int) else None
            progress.append(RunProgress(cells.parent.stem[1:], count, planned, max(0.0, seconds)))
    return progress


def unfinished_runs(directory: Path | str) -> dict[str, int]:
    """Number of stored jobs of each interrupted or running run in `directory`, by its future name."""
    return {run.name: run.stored_jobs for run in run_progress(directory)}
