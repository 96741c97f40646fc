"""Attention weights as bytes: byte n > 0 is the weight 2^((n - 255) / 12), to within 3 %; byte 0 is one below 1e-4."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

LEVELS_PER_OCTAVE = 12
"""Levels of a stored weight between a power of two and the next one."""
MIN_LEVEL = 96
"""Level of the least stored weight, about 1e-4."""


def encode_map(pooled: npt.NDArray[Any]) -> list[bytes]:
    """The rows of a map [blocks, blocks], each up to its diagonal, as they are stored."""
    with np.errstate(divide="ignore"):
        levels = np.round(255 + LEVELS_PER_OCTAVE * np.log2(pooled)).clip(0, 255).astype(np.uint8)
    levels[levels < MIN_LEVEL] = 0
    return [row[: block + 1].tobytes() for block, row in enumerate(levels)]


def decode_map(rows: Sequence[bytes]) -> npt.NDArray[np.float64]:
    """The map [blocks, blocks] from its stored rows."""
    return decode_rows(rows, len(rows))


def decode_rows(rows: Sequence[bytes], width: int) -> npt.NDArray[np.float64]:
    """Weights [rows, width] of stored rows of at most `width` bytes, with zeros after their ends."""
    levels = np.frombuffer(b"".join(row.ljust(width, b"\0") for row in rows), np.uint8).reshape(len(rows), width)
    return np.where(levels, 2.0 ** ((levels - 255.0) / LEVELS_PER_OCTAVE), 0)
