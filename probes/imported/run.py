"""Reads the file and gives each score to the heads of the model."""

from typing import Any

from headscope.plugin_api import Cell, Model, StudyContext
from headscope.scores import match_heads, read, refuse_other_model
from probes.imported.declaration import IMPORTED, ImportedOptions


class ImportedRunner:
    """Cells: each model. The file is read once, before any model is opened."""

    def __init__(self, options: ImportedOptions, context: StudyContext):
        self.options, self.context, self.scores = options, context, read(options.file, options.column)
        rows = self.scores.table[["layer", "head", "score"]].to_csv(index=False)
        context.record_input(f"the scores in '{options.file}'", [rows])

    def cells(self) -> list[Cell]:
        return [Cell(f"{label}: imported scores", label, 0.0) for label in self.context.labels]

    def compute_rows(self, cell: Cell, model: Model) -> dict[str, Any]:
        label, weights = cell.model, self.options.weights
        if refuse_other_model(self.scores, model.identity, label, model.name, weights):
            origin = self.scores.model_digests.label or self.scores.model
            self.context.record_other_weights(label, f"the scores in '{self.options.file}'", origin)
        rows = match_heads(self.scores, model.geometry, cell.model)
        return {IMPORTED.name: rows.assign(model=cell.model)}
