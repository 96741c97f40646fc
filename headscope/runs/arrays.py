"""A stored table as an array: one axis per key column, with its labels."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from headscope.errors import BadInput, did_you_mean
from headscope.runs.arrow import decode_rows
from headscope.runs.columns import Table, all_tables
from headscope.runs.run_tables import RunTables


@dataclass(frozen=True, eq=False)
class LabelledArray:
    """An array with named axes: `labels` maps the name of each axis, in order, to the labels along it.

    numpy takes it as `values`; xarray as `xarray.DataArray(array.values, array.labels, array.axes)`.
    """

    values: npt.NDArray[Any]
    labels: Mapping[str, npt.NDArray[Any]]

    @property
    def axes(self) -> list[str]:
        """The names of the axes, in order."""
        return [*self.labels]


def table_array(
    run: RunTables, table_name: str, column: str = "", axes: Sequence[str] = (), **where: Any
) -> LabelledArray:
    """See `Run.array`."""
    rows, table = run.rows(table_name, **where), all_tables()[table_name]
    column = _column(table, column)
    if not len(rows):
        raise BadInput(f"table '{table_name}' has no rows with {where}. Use values that it has")
    names = [*axes] or _default_axes(rows, [name for name in table.keys if name not in where])
    if unknown := next((name for name in names if name not in table.keys), None):
        raise BadInput(f"'{table_name}' has no key '{unknown}'{did_you_mean(unknown, table.keys)}. Use {table.keys}")
    if rows.duplicated(names).any():
        varying = [name for name in table.keys if name not in names and rows[name].nunique() > 1]
        raise BadInput(
            f"the axes {', '.join(names)} do not identify the rows of '{table_name}': {', '.join(varying)} vary. Add "
            "them to the axes, or choose a value of each"
        )
    codes, labels = zip(*(_codes(rows[name]) for name in names), strict=True)
    cells = rows[column].to_numpy()
    kind = next(item.kind for item in table.columns if item.name == column)
    axis_labels = dict(zip(names, labels, strict=True))
    if kind == "bytes":
        width = max(map(len, cells))
        cells = decode_rows([*cells], width)
        axis_labels["key_block"] = np.arange(width)
    is_text = kind in ("label", "text")
    values = np.full([*map(len, axis_labels.values())], "" if is_text else np.nan, object if is_text else np.float64)
    values[codes] = cells
    return LabelledArray(values, axis_labels)


def _column(table: Table, column: str) -> str:
    """The column whose values fill the array: the named one, or `effect`, or the only one beside flags."""
    measured = [other.name for other in table.columns if other.name in table.values and other.kind != "flag"]
    column = column or ("effect" if "effect" in measured else measured[0] if len(measured) == 1 else "")
    if column not in table.values:
        hint = did_you_mean(column, table.values)
        raise BadInput(f"name a column of '{table.name}', not '{column}'{hint}. Use {', '.join(table.values)}")
    return column


def _default_axes(rows: pd.DataFrame, keys: Sequence[str]) -> list[str]:
    """The keys with more than one value, at least one; without the KV group if the others identify the rows."""
    names = [name for name in keys if rows[name].nunique() > 1]
    without_group = [name for name in names if name != "kv_group"]
    if "head" in names and not rows.duplicated(without_group).any():
        names = without_group
    return names or [*keys[:1]]


def _codes(values: pd.Series) -> tuple[npt.NDArray[np.intp], npt.NDArray[Any]]:
    """The position along an axis of each value, and the labels: numbers in order, texts as they first appear."""
    is_number = pd.api.types.is_numeric_dtype(values.dtype)
    codes, labels = pd.factorize(values.to_numpy() if is_number else values.astype(str).to_numpy(), sort=is_number)
    return codes, np.asarray(labels)
