"""Reads the file and gives each score to the heads of the model."""

from typing import Any

import pandas as pd

from headscope.plugin_api import BadInput, Cell, Model, StudyContext
from headscope.scores import HeadScores, read
from probes.imported.schema import IMPORTED, ImportedOptions


class ImportedRunner:
    """Cells: each model. The file is read once, before any model is opened."""

    def __init__(self, options: ImportedOptions, context: StudyContext):
        self.context, self.scores = context, read(options.file)
        rows = self.scores.table[["layer", "head", "score"]].to_csv(index=False)
        context.record_input(f"the scores in '{options.file}'", [rows])

    def cells(self) -> list[Cell]:
        return [Cell(f"{label}: imported scores", label, 0.0) for label in self.context.labels]

    def rows(self, cell: Cell, model: Model) -> dict[str, dict[str, Any]]:
        assert cell.model is not None
        return {IMPORTED.name: {"model": cell.model, **scores_of_heads(self.scores, model, cell.model)}}


def scores_of_heads(scores: HeadScores, model: Model, label: str) -> dict[str, Any]:
    """Columns layer, head, kv_group and score; a KV group's score goes to each of its query heads.

    Raises BadInput for a layer or head that the model does not have, and for the scores of a smaller model.
    """
    geometry, unit = model.geometry, "kv_group" if scores.per_group else "head"
    heads = pd.DataFrame(
        [
            (number, head, geometry.kv_group(layer, head))
            for layer, number in enumerate(geometry.layer_numbers)
            for head in range(geometry.layer_heads[layer])
        ],
        columns=["layer", "head", "kv_group"],
    )
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
    rows = heads.merge(table)
    return {name: rows[name].to_numpy() for name in ("layer", "head", "kv_group", "score")}
