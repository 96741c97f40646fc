"""Runner of direct logit attribution: one shared pass over each document, or a pass over each prompt with an answer."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headscope.decomposition.logit_attribution import LogitAttribution
from headscope.forward.observe import FinishedPass
from headscope.measures.logit_attribution import AttributionByPosition
from headscope.positions.model import Model
from headscope.runs.arrow import Rows
from headscope.study.cells import Cell, PassCell, TextPass, document_of, pass_cost
from headscope.study.context import StudyContext
from headscope.study.prompts import ProbeTexts
from probes.attribution.answers.run import AnswerRunner
from probes.attribution.declaration import AttributionOptions


class AttributionRunner:
    """Cells: each (model, context length, document), whose passes are shared with other probes; or each prompt with an
    answer, which has passes of its own."""

    def __init__(self, options: AttributionOptions, context: StudyContext):
        self.answers = AnswerRunner(options, context) if options.has_answers else None
        self.texts = ProbeTexts(options, options.lengths, context)
        self.context = context

    def cells(self) -> list[Cell]:
        if self.answers is not None:
            return self.answers.cells()
        return [
            PassCell(
                f"{label}: {length} tokens, document {number}",
                label,
                1.5 * pass_cost(length),
                text_pass=TextPass.over(document.ids[:length], number),
            )
            for label in self.context.labels
            for length in self.texts.lengths(label)
            for number, document in enumerate(self.texts.documents(label))
        ]

    def compute_rows(self, cell: Cell, model: Model) -> Mapping[str, Rows]:
        assert self.answers is not None
        return self.answers.compute_rows(cell, model)

    def token_ids(self, cell: PassCell) -> Sequence[int]:
        document, length = document_of(cell, self.texts.documents)
        return document.ids[:length]

    def observer(self, cell: PassCell, model: Model, ids: Tensor) -> "AttributionObserver":
        document, length = document_of(cell, self.texts.documents)
        keys = {"model": cell.model, "context_length": length, "doc": document.name}
        return AttributionObserver(model, ids, keys, by_token=self.texts.is_prompt)


class AttributionObserver(LogitAttribution):
    """The terms of the next token's logit, means over bins of positions or by token; `keys` are the first columns."""

    def __init__(self, model: Model, ids: Tensor, keys: Mapping[str, Any], by_token: bool = False):
        super().__init__(model, ids)
        self.keys, self.bins = keys, AttributionByPosition(ids.shape[1], by_token)

    def tables(self, finished_pass: FinishedPass) -> dict[str, Rows]:
        super().tables(finished_pass)
        geometry, bins = self.geometry, self.bins
        layers, heads = np.nonzero(np.arange(geometry.heads) < np.array(geometry.layer_heads)[:, None])
        head_columns = {"layer": np.array(geometry.layer_numbers)[layers], "head": heads}
        head_columns["kv_group"] = geometry.kv_group(layers, heads)
        part_columns = {
            "part": np.array([name for name, _ in self.part_terms]),
            "layer": np.array([layer for _, layer in self.part_terms]),
        }
        parts = torch.stack([*self.part_terms.values()])
        return {
            "attribution": {**self.keys, **bins.table_columns(self.head_terms[layers, heads], **head_columns)},
            "attribution_parts": {**self.keys, **bins.table_columns(parts, **part_columns)},
        }
