"""Numbers for the keys of rows, so that large tables are compared, sorted and checked without objects."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa

MAX_CODE = 2**62


def key_codes(rows: pa.Table, names: Sequence[str]) -> npt.NDArray[np.int64]:
    """A number for each row, equal for two rows if their values in these columns are equal.

    It grows with the first column, then with the second, and so on: with a number itself, with a label in order of
    appearance. Only if the columns could have more than MAX_CODE values, the order is lost.
    """
    codes = np.zeros(rows.num_rows, np.int64)
    if rows.num_rows == 0:
        return codes
    largest = 0
    for name in names:
        values = _numbers(rows[name])
        least = int(values.min())
        span = int(values.max()) - least + 1
        if (largest + 1) * span > MAX_CODE:
            codes, distinct = pd.factorize(codes)
            largest = len(distinct) - 1
        codes *= span
        codes += values
        codes -= least
        largest = (largest + 1) * span - 1
    return codes


def count_repeated(codes: npt.NDArray[np.int64]) -> int:
    """Number of rows that have the code of another row before them."""
    steps = np.diff(codes)
    return 0 if (steps > 0).all() else len(codes) - len(np.unique(codes))


def _numbers(column: pa.ChunkedArray) -> npt.NDArray[np.integer]:
    """The values of a column of whole numbers, or the index of each label, text or flag in order of appearance."""
    if not pa.types.is_integer(column.type):
        if not pa.types.is_dictionary(column.type):
            column = column.dictionary_encode()
        column = pa.chunked_array([chunk.indices for chunk in column.unify_dictionaries().chunks], pa.int32())
    numbers: npt.NDArray[np.integer] = column.to_numpy()
    return numbers
