"""Ablation of retrieval heads: the top heads, or as many random heads of the same layers (after Wu et al. 2024).

Each half of the needles is tested with heads ranked on the other half [ours], or with those of a file.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import pandas as pd

from headscope.attention.geometry import Geometry
from headscope.base.heads import Head
from headscope.interventions.edits import edit_units, edited
from headscope.interventions.heads import Unit, head_unit
from headscope.positions.model import Model
from headscope.results.effects.groups import missing_control, random_controls

NEEDLE_HALVES = 2
HEAD_COLUMNS = ["layer", "head"]


@dataclass(frozen=True)
class AblationWork:
    """One cell: every trial of one half of the needles with one set of heads ablated. Draw 0 is the set of top
    heads."""

    ablation: str
    size: int
    draw: int
    half: int
    prerequisites: tuple[str, ...]
    """The cells that rank the heads, those of the other half; none for the heads of a file."""


def needle_half(needle_index: int) -> int:
    """The half that a needle belongs to."""
    return needle_index % NEEDLE_HALVES


def select_heads(ranking: pd.DataFrame, work: AblationWork, seed: int) -> pd.DataFrame:
    """The heads of a set: rows of `ranking`, which has every head in descending order of score.

    No rows for a random set if the top heads have no control.
    """
    if work.draw == 0:
        return ranking.head(work.size)
    heads = _ranked_heads(ranking)
    controls = random_controls(heads[: work.size], heads, [[seed, work.half, work.size, work.draw]])
    return ranking[[head in chain(*controls) for head in heads]]


def explain_missing_control(ranking: pd.DataFrame, size: int) -> str:
    """Why the top heads of a ranking have no random control; empty if they have one."""
    heads = _ranked_heads(ranking)
    return missing_control(heads[:size], heads)


def _ranked_heads(ranking: pd.DataFrame) -> list[Head]:
    return [*ranking[HEAD_COLUMNS].itertuples(index=False, name=None)]


def heads_to_units(heads: pd.DataFrame, geometry: Geometry) -> list[Unit]:
    """The heads of a table as units; `layer` is the layer number."""
    return [head_unit(geometry, geometry.layer_numbers.index(layer), head) for layer, head in _ranked_heads(heads)]


@contextmanager
def heads_ablated(model: Model, units: Sequence[Unit], kind: Any) -> Iterator[None]:
    """Ablate these heads of the model. Earlier cached prefixes do not include the ablation; do not reuse them."""
    with edited(model, [edit_units(kind, units, model.geometry)]):
        yield
