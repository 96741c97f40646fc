"""Match the scores of a file or run to the heads of a model."""

from typing import TYPE_CHECKING

import pandas as pd

from headscope.errors import BadInput
from headscope.scores.head_scores import HeadScores

if TYPE_CHECKING:
    from headscope.attention.record import Geometry


def match_heads(scores: HeadScores, geometry: "Geometry", label: str) -> pd.DataFrame:
    """Columns layer, head, kv_group and score; a KV group's score goes to each of its query heads.

    Heads that a file of selected heads does not name are left out. Raises BadInput for a layer or head that the model
    does not have, and for the scores of a smaller model.
    """
    unit = "kv_group" if scores.per_group else "head"
    heads = model_heads(geometry)
    table = scores.table[["layer", "head", "score"]].rename(columns={"head": unit})
    own_units = heads[["layer", unit]].drop_duplicates()
    layers, units = int(table["layer"].max()) + 1, int(table[unit].max()) + 1
    is_whole_model = scores.per_group or len(table) == layers * units > 1  # other files may select heads
    if len(table.merge(own_units)) < len(table) or (is_whole_model and len(table) < len(own_units)):
        noun, own = ("KV groups", geometry.kv_groups) if scores.per_group else ("heads", geometry.heads)
        raise BadInput(
            f"'{scores.source}' has scores of {layers} layers of {units} {noun}, but model '{label}' has "
            f"{geometry.layers} layers of {own} {noun}. Give the scores of this model"
        )
    return heads.merge(table)


def model_heads(geometry: "Geometry") -> pd.DataFrame:
    """Every query head of a model: layer (its number), head, kv_group."""
    return pd.DataFrame(
        [
            (number, head, geometry.kv_group(layer, head))
            for layer, number in enumerate(geometry.layer_numbers)
            for head in range(geometry.layer_heads[layer])
        ],
        columns=["layer", "head", "kv_group"],
    )
