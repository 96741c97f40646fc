"""Random controls of a set of heads or KV groups: as many others of each layer, never a unit of the set.

A unit is a tuple that begins with its layer: (layer, head), or (layer, KV group, head).
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from typing import TypeVar

import numpy as np

Unit = TypeVar("Unit", bound=tuple[int, ...])


def random_controls(
    units: Collection[Unit], candidates: Collection[Unit], seeds: Iterable[Sequence[int]]
) -> list[list[Unit]]:
    """A random set for each seed, with as many units of each layer as `units` has there; all others are equally likely.

    The candidates are all units of the same kind, with or without those of the set. Returns no sets if a layer has too
    few others: see `missing_control`.
    """
    if missing_control(units, candidates):
        return []
    counts, by_layer = Counter(layer for layer, *_ in sorted(units)), defaultdict[int, list[Unit]](list)
    for unit in sorted(candidates):
        by_layer[unit[0]].append(unit)
    controls = []
    for seed in seeds:
        generator, control = np.random.default_rng(seed), list[Unit]()
        for layer, count in counts.items():
            order = (by_layer[layer][number] for number in generator.permutation(len(by_layer[layer])))
            control += sorted([unit for unit in order if unit not in units][:count])
        controls.append(control)
    return controls


def missing_control(
    units: Collection[Unit], candidates: Collection[Unit], layer_numbers: Sequence[int] | None = None
) -> str:
    """Why a set has no control: the first layer with fewer others than units of the set. Empty if it has one.

    `layer_numbers` are the numbers of layers that units name by index.
    """
    others = Counter(layer for layer, *_ in {*candidates} - {*units})
    for layer, count in Counter(layer for layer, *_ in sorted(units)).items():
        if others[layer] < count:
            number = layer if layer_numbers is None else layer_numbers[layer]
            return f"layer {number} has {count} of them and {others[layer]} others"
    return ""
