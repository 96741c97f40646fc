"""The tables of a finished run, read from disk as pandas frames, and checks of its files."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self, TypeVar, TypeVarTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

from headscope.base import user_input
from headscope.base.public_functions import check_argument, checked_methods
from headscope.base.user_input import quote
from headscope.errors import BadInput, BadRun, did_you_mean
from headscope.runs import arrow
from headscope.runs.columns import LAYER, all_tables
from headscope.runs.io import printable_name, sha256
from headscope.runs.manifest import read_manifest
from headscope.runs.memory_cache import CACHE, CachedValues
from headscope.runs.row_reader import Values, check_digest, column_range, read_row_groups, read_rows, select_rows
from headscope.runs.table_checks import table_problems

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")

MAX_WHOLE_ROWS = 2**18
"""Rows up to which a table is read as a whole and cached, whatever part of it is needed."""
ROWS_PER_BLOCK = 2**19
"""Rows of a larger table that are read at a time. A row group may hold layers of several blocks, which all read it."""
NO_VALUES: Values = MappingProxyType({})
HEAD = ("layer", "head")
NO_ROWS = np.empty(0, np.intp)


@checked_methods
class RunTables:
    """The tables of a finished run, read-only: `run.attention` and every other by name.

    `manifest` is its run.json, `models` the labels in the order of the study, `tables` the names of what is
    stored, `parts` the runs that are combined (only itself for a single run). If `shows_all_models`, results are about
    every model, not only about the few that charts show. If `is_drawn_for_all_models`, pages of a head may compute the
    data of all models at once, because every one of them is drawn.
    """

    shows_all_models = False
    is_drawn_for_all_models = False

    def __init__(self, path: Path, manifest: dict[str, Any]) -> None:
        self.path = path
        self.name = printable_name(path.name)
        self.manifest = manifest
        self.models: list[str] = [model["label"] for model in manifest["models"]]
        self.tables: list[str] = list(manifest["tables"])
        self.parts: list[RunTables] = [self]
        self._frames, self._derived = CachedValues(), CachedValues()

    @classmethod
    def open(cls, path: Path | str) -> Self:
        """Open the run in `path`. Raises BadRun if it is not one, unfinished, damaged or of an unsupported format."""
        path = user_input.check_path(path, "run")
        return cls(path, read_manifest(path))

    def with_all_models(self) -> Self:
        """The same run with `shows_all_models`."""
        run = copy.copy(self)
        run.shows_all_models, run._derived = True, CachedValues()
        return run

    def table(self, name: str) -> pd.DataFrame:
        """The table `name`; labels are categoricals in order of first appearance. It is cached: do not modify it.

        Raises BadRun if the run has no such table, or its file is damaged or has another schema.
        """
        self._require(name)
        return CACHE.get(self._frames, name, lambda: self._read(name))

    def rows(self, name: str, columns: Sequence[str] | None = None, /, **values: Any) -> pd.DataFrame:
        """The rows of a table whose columns have these values, such as `run.rows("distance", layer=3, head=[1, 2])`.

        Of a large table only the parts with such rows are read, and only these columns. Raises BadRun like `table`,
        and BadInput for a model that the run lacks.
        """
        self._require_columns(name, [*values, *(columns or ())])
        wanted = {key: _stored_values(name, key, value) for key, value in values.items()}
        for label in wanted.get("model", ()):
            check_model(self, label)
        if self.manifest["tables"][name]["rows"] > MAX_WHOLE_ROWS and name not in self._frames:
            return self._read(name, wanted, columns)
        frame = self.table(name)
        if wanted.keys() >= {*HEAD}:  # pages look up one head after the other
            indices = self.derived(_head_indices, name)
            places = {*product(*(wanted.pop(key) for key in HEAD))} & indices.keys()
            frame = frame.take(np.sort(np.concatenate([indices[place] for place in places] or [NO_ROWS])))
        for key, allowed in wanted.items():
            frame = frame[frame[key].isin(allowed)]
        return frame if columns is None else frame[[*columns]]

    def blocks_of_layers(self, name: str, columns: Sequence[str] | None = None) -> Iterator[pd.DataFrame]:
        """The rows of a table in blocks of whole layers, of at most about ROWS_PER_BLOCK rows unless one layer has
        more; of a small table, or one without layers, all rows at once."""
        self._require_columns(name, columns or ())
        rows = self.manifest["tables"][name]["rows"]
        bounds = self._layer_range(name) if rows > MAX_WHOLE_ROWS else None
        if bounds is None:
            yield self.rows(name, columns)
            return
        first, last = bounds
        count = max(1, (last + 1 - first) * ROWS_PER_BLOCK // rows)
        for start in range(first, last + 1, count):
            yield self.rows(name, columns, layer=range(start, start + count))

    def distinct(self, name: str, columns: Sequence[str]) -> pd.DataFrame:
        """The distinct values of these columns of a table, in order of appearance; labels as strings."""
        if not columns:
            raise BadInput(f"no columns of {quote(name)}. Name at least one")
        blocks = [_plain_labels(block[[*columns]].drop_duplicates()) for block in self.blocks_of_layers(name, columns)]
        return pd.concat(blocks).drop_duplicates(ignore_index=True)

    def derived(self, compute: Callable[[Self, *Arguments], T], *arguments: *Arguments) -> T:
        """`compute(run, *arguments)`, cached with the run. Do not modify it."""
        return CACHE.get(self._derived, (compute, arguments), lambda: compute(self, *arguments))

    def check(self) -> None:
        """Raise BadRun if the file of any declared table is damaged, whether it was read or not."""
        for part in self.parts:
            for name in part.tables:
                if name in all_tables():
                    check_digest(*part._file(name))

    def unreadable_files(self) -> list[str]:
        """Names of the files that are missing or changed, or whose table lacks a declared column."""
        unreadable = []
        for name in self.tables:
            file, digest = self._file(name)
            try:
                check_digest(file, digest)
                self._declared(name, arrow.stored_schema(file).empty_table())
            except BadRun:
                unreadable.append(file.name)
        return [*unreadable, *_changed_files(self)]

    def check_footers(self) -> None:
        """Raise BadRun if the file of a table is missing or not complete. Fast: it reads only the ends of the files."""
        for name in self.tables:
            arrow.check_footer(self._file(name)[0], self.manifest["tables"][name]["rows"])

    def arrow_table(self, name: str, values: Values = NO_VALUES, columns: Sequence[str] | None = None) -> pa.Table:
        """The stored rows with these values by column, by default all, and these columns, by default all.

        Raises BadRun unless the file matches the digest in run.json and the declared schema.
        """
        self._require_columns(name, [*values, *(columns or ())])
        values = {column: _stored_values(name, column, value) for column, value in values.items()}
        file, digest = self._file(name)
        if not values and columns is None:
            return self._declared(name, arrow.read(file, digest))
        check_digest(file, digest)
        if self._has_declared_columns(name):
            return read_rows(file, values, columns)
        return select_rows(self._declared(name, arrow.read(file)), values, columns)

    def _has_declared_columns(self, name: str) -> bool:
        """Whether a table is stored as this version declares it, so that it can be read in parts."""
        return name in all_tables() and bool(arrow.stored_schema(self._file(name)[0]).equals(all_tables()[name].arrow))

    def _declared(self, name: str, rows: pa.Table) -> pa.Table:
        """Stored rows in the declared schema."""
        if (table := all_tables().get(name)) is None:
            return rows
        return arrow.select_declared(table, rows, self._file(name)[0])

    def _layer_range(self, name: str) -> tuple[int, int] | None:
        """The first and last layer in a table; None if it has no layers or the file does not tell."""
        return column_range(self._file(name)[0], LAYER.name) if LAYER.name in all_tables()[name].keys else None

    def _require(self, name: str) -> None:
        if name not in self.tables:
            hint = did_you_mean(name, self.tables)
            raise BadRun(f"{self.name} has no table {quote(name)}{hint}. Use one of: {', '.join(self.tables)}")

    def _require_columns(self, name: str, columns: Collection[str]) -> None:
        """Raise BadRun for a table that the run lacks, and BadInput for columns that the table is not declared with."""
        self._require(name)
        if name in all_tables():
            known = [column.name for column in all_tables()[name].columns]
            if unknown := next((column for column in columns if column not in known), None):
                hint = did_you_mean(unknown, known)
                raise BadInput(f"'{name}' has no column {quote(unknown)}{hint}. Use one of: {', '.join(known)}")

    def _file(self, name: str) -> tuple[Path, str]:
        """The file of a table and its sha256. Raises BadRun for a table that the run lacks."""
        self._require(name)
        return self.path / f"{name}.parquet", self.manifest["tables"][name]["sha256"]

    def _read(self, name: str, values: Values = NO_VALUES, columns: Sequence[str] | None = None) -> pd.DataFrame:
        frame: pd.DataFrame = self.arrow_table(name, values, columns).to_pandas()
        return frame

    def __getattr__(self, name: str) -> pd.DataFrame:
        if name in all_tables():
            return self.table(name)
        raise AttributeError(f"a run has no attribute '{name}'")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self.tables]

    def __repr__(self) -> str:
        return f"<Run {self.name}: {', '.join(self.models)}>"


def check_model(run: RunTables, label: str) -> None:
    """Raise BadInput for a label of no model of the run."""
    if label not in run.models:
        hint = did_you_mean(label, run.models)
        raise BadInput(f"no model '{label}' in {run.name}{hint}. Use one of: {', '.join(run.models)}")


def _stored_values(name: str, column: str, value: Any) -> list[Any]:
    """One value or several, as a column of a table stores them: floats have 32 bits.

    Raises BadInput for values of another type than the column's.
    """
    columns = all_tables()[name].columns if name in all_tables() else ()
    kind = next((item.kind for item in columns if item.name == column), None)
    if kind in ("label", "text"):
        value = check_argument(str | Iterable[str], value, column)
    elif kind in ("index16", "index32", "count", "value"):
        value = check_argument(float | Iterable[float], value, column)
    allowed: list[Any] = [value] if np.isscalar(value) or not isinstance(value, Iterable) else [*value]
    return [np.float32(item) for item in allowed] if kind == "value" else allowed


def _head_indices(run: RunTables, name: str) -> dict[tuple[int, int], npt.NDArray[np.intp]]:
    """The rows of each head (layer, head) in a table."""
    groups: Any = run.table(name).groupby([*HEAD], sort=False)
    return dict(groups.indices)


def _plain_labels(frame: pd.DataFrame) -> pd.DataFrame:
    """Labels as strings: frames of different rows have different categories."""
    return frame.astype(dict.fromkeys(frame.select_dtypes("category"), "str"))


def validate(run: RunTables) -> list[str]:
    """Problems of a run's files, one line each: digests, row counts, schemas, NaN, bounds, duplicate keys.

    A table is read in parts, so memory does not grow with it.
    """
    problems = [
        f"{name}: no installed probe has this table. Install its package, or a newer headscope"
        for name in run.tables
        if name not in all_tables()
    ]
    for name, facts in run.manifest["tables"].items():
        if name in all_tables():
            problems += _problems_of_table(run, name, facts)
    return [*problems, *(f"{name}: missing or changed" for name in _changed_files(run))]


def _changed_files(run: RunTables) -> list[str]:
    """Names of the files of a run, other than tables, that are missing or changed."""
    return [name for name, digest in run.manifest.get("files", {}).items() if _digest(run.path / name) != digest]


def _problems_of_table(run: RunTables, name: str, facts: Mapping[str, Any]) -> list[str]:
    file, digest = run._file(name)
    table = all_tables()[name]
    try:
        stored_rows = arrow.stored_rows(file)
        is_unchanged = sha256(file) == digest
        values = table_problems(table, lambda: read_row_groups(file))
        if not values and "model" in table.keys:
            values = _unknown_models(run, name, file)
    except (BadRun, OSError) as reason:
        return [str(reason)]
    except (pa.ArrowException, ValueError) as error:
        values = [f"{name}: its values cannot be read: {' '.join(str(error).split())[:200]}"]
    changed = [] if is_unchanged else [f"{name}: sha256 differs from run.json"]
    missing = [] if stored_rows == facts["rows"] else [f"{name}: {stored_rows} rows, run.json says {facts['rows']}"]
    return [*changed, *missing, *values]


def _unknown_models(run: RunTables, name: str, file: Path) -> list[str]:
    labels = {label for rows in read_row_groups(file, ["model"]) for label in rows["model"].unique().to_pylist()}
    return [f"{name}: run.json has no model '{label}'" for label in sorted(labels - {*run.models})]


def _digest(file: Path) -> str | None:
    try:
        return sha256(file)
    except (OSError, ValueError):
        return None
