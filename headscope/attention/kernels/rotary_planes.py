"""Rotary pairs inside a kernel: which two dimensions of a head form a pair. See `measures.rotary_pairs`."""

from typing import Any

import triton
import triton.language as tl

from headscope.attention.geometry import Geometry


@triton.jit
def pair_dimensions(f, PAIRS: tl.constexpr, START: tl.constexpr, DIM: tl.constexpr, INTERLEAVED: tl.constexpr):
    """The two dimensions of pairs f: the rotary pairs first, then the other dimensions, paired in the same layout."""
    other = f - PAIRS
    if INTERLEAVED:
        first, second = START + 2 * f, START + 2 * f + 1
        other_first, other_second = 2 * other, 2 * other + 1
    else:
        first, second = START + f, START + f + PAIRS
        other_first, other_second = other, other + (DIM - 2 * PAIRS) // 2
    if 2 * PAIRS < DIM:  # the other dimensions are those before and after the rotary ones
        other_first = tl.where(other_first < START, other_first, other_first + 2 * PAIRS)
        other_second = tl.where(other_second < START, other_second, other_second + 2 * PAIRS)
        first = tl.where(f < PAIRS, first, other_first)
        second = tl.where(f < PAIRS, second, other_second)
    return first, second


def pair_constants(geometry: Geometry) -> dict[str, Any]:
    """The arguments of `pair_dimensions` for the geometry of a layer (`Geometry.at_layer`)."""
    return {
        "PAIRS": geometry.pairs,
        "START": geometry.rotary_start,
        "DIM": geometry.head_dim,
        "INTERLEAVED": geometry.rotary_layout == "interleaved",
    }
