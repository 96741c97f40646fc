"""A user's detection pattern: a file, a matrix, or a function from token ids to a matrix."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headscope import user_input
from headscope.errors import BadInput, ResourceMissing

Matrix = npt.NDArray[np.float64]


def describe_pattern(pattern: Any) -> str | None:
    """The pattern as a run stores it: the path, the name of the function, or shape and digest of the matrix."""
    if pattern is None or isinstance(pattern, str):
        return pattern
    if callable(pattern):
        return f"function {getattr(pattern, '__name__', type(pattern).__name__)}"
    matrix = np.asarray(pattern, np.float64)
    return f"matrix {' x '.join(map(str, matrix.shape))}, sha256 {hashlib.sha256(matrix.tobytes()).hexdigest()[:12]}"


def pattern_source(pattern: Any) -> Callable[[Sequence[int]], Any]:
    """A function from the token ids of a prompt to its matrix. Raises ResourceMissing or BadInput for a file."""
    if callable(pattern):
        return pattern  # type: ignore[no-any-return]
    matrix = _read_matrix(pattern) if isinstance(pattern, str) else pattern
    return lambda ids: matrix


def _read_matrix(name: str) -> Any:
    file = user_input.expand_path(name, "pattern file")
    if not file.is_file():
        raise ResourceMissing(f"no pattern file {user_input.quote(name)}. Check the path")
    try:
        return (
            np.load(file)
            if file.suffix == ".npy"
            else np.loadtxt(file, delimiter="," if "," in file.read_text() else None)
        )
    except (ValueError, OSError) as error:
        raise BadInput(
            f"pattern file {user_input.quote(name)} holds no matrix of numbers. Write one row per query, or save it "
            "with numpy.save"
        ) from error


def pattern_matrix(source: Callable[[Sequence[int]], Any], ids: Sequence[int]) -> Matrix:
    """The pattern [L, L] for a prompt, by query and key, without the keys after each query.

    Raises BadInput unless it is L x L with values from 0 to 1 and at least one of them above 0 where a query sees the
    key.
    """
    value = source(list(ids))
    try:
        matrix = np.asarray(value.detach().cpu() if hasattr(value, "detach") else value, np.float64)
    except (TypeError, ValueError) as error:
        raise BadInput(f"the pattern is a {type(value).__name__}. Give a matrix of numbers") from error
    if matrix.shape != (len(ids), len(ids)):
        shape = " x ".join(map(str, matrix.shape)) or "a single number"
        raise BadInput(
            f"the pattern is {shape}, but a prompt has {len(ids)} tokens. Give {len(ids)} x {len(ids)} values"
        )
    if not ((matrix >= 0) & (matrix <= 1)).all():
        wrong = matrix[~((matrix >= 0) & (matrix <= 1))][0]
        raise BadInput(f"the pattern has the value {wrong:g}. Use weights from 0 to 1")
    visible = np.tril(matrix)
    if not visible.any():
        raise BadInput(
            "the pattern has no weight on a key that a query sees. Use entries [query, key] with key <= query"
        )
    return visible
