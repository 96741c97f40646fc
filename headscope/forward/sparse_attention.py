"""Let heads of a running model attend by a rule that chooses keys, so that its effects add up over the layers."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from headscope.attention.backend import AttentionCall, OutputEdit
from headscope.attention.kernel import attend
from headscope.attention.record import AttentionRecord, Geometry
from headscope.errors import BadInput
from headscope.forward.capture import CapturedLayers, capturing
from headscope.measures.row_sampling import visible_keys
from headscope.measures.sparse_outputs import sparse_outputs
from headscope.measures.sparse_rules import Rule
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model

HeadsByLayer = Mapping[int, Sequence[int]]
"""Heads by index of their attention layer."""


def all_heads(geometry: Geometry) -> HeadsByLayer:
    """Every head."""
    return {layer: range(heads) for layer, heads in enumerate(geometry.layer_heads)}


class SparseAttention:
    """Lets heads attend by a rule and counts the keys that their rows keep.

    The rule None keeps every key, also those that an indexer did not choose.
    """

    def __init__(self, rule: Rule | None):
        self.rule = rule
        self._rows = 0
        self._kept: dict[torch.device, Tensor] = {}

    @property
    def mean_kept(self) -> float:
        """Mean number of kept keys over the heads and rows of all passes."""
        return sum(map(float, self._kept.values())) / self._rows

    def listen(self, layers: CapturedLayers, heads: HeadsByLayer) -> None:
        """Change these heads until the capture ends."""
        for layer, members in heads.items():
            layers.edit_output(layer, self.output_edit(layer, members))

    def output_edit(self, layer: int, heads: Sequence[int]) -> OutputEdit:
        """An output edit for the attention backend that lets these heads of one layer attend by the rule.

        The pass raises BadInput if the rule needs tokens that the pass does not have, or if gradients are needed.
        """

        def edit(z: Tensor, call: AttentionCall) -> Tensor:
            self._rows += len(z) * len(heads) * z.shape[2]
            if self.rule is None:
                last = call.first_key + call.k.shape[2]
                visible = visible_keys(np.arange(last - z.shape[2], last), call.variant.window, call.variant.chunk_size)
                self._count(len(z) * len(heads) * torch.tensor(float(visible.sum()), dtype=torch.float64))
                if call.variant.chosen is None:
                    return z
            output, index = z.clone(), [*heads]
            for sequence, record in enumerate(_records(layer, z, call)):
                if self.rule is None:
                    output[sequence, index] = record.z[index]
                    continue
                _check(self.rule, record)
                outputs, kept = sparse_outputs(record, self.rule)  # of all heads: a rule may choose for a whole layer
                output[sequence, index] = outputs[index]
                self._count(kept[index].double().sum())
            return output

        return edit

    def _count(self, kept: Tensor) -> None:
        """Add kept keys, a scalar, on their device: a GPU is not waited for."""
        self._kept[kept.device] = self._kept.get(kept.device, 0) + kept


@contextmanager
def attending_by(model: Model, rule: Rule | None, heads: HeadsByLayer | None = None) -> Iterator[SparseAttention]:
    """Let heads, by default all, attend by a rule, under the position scheme and without gradients."""
    sparse = SparseAttention(rule)
    with attached(model), evaluating(model), capturing(model) as layers, torch.no_grad():
        sparse.listen(layers, all_heads(model.geometry) if heads is None else heads)
        yield sparse


def _records(layer: int, z: Tensor, call: AttentionCall) -> Iterator[AttentionRecord]:
    """The record of dense attention of each sequence of a call; z is that of the call, unless an indexer chose keys."""
    variant = replace(call.variant, chosen=None)
    dense, lse = attend(call.q, call.k, call.v, None, variant, 0.0, True, call.first_key)
    assert lse is not None
    if call.variant.chosen is not None:
        z = dense
    for sequence, tensors in enumerate(zip(call.q, call.k, call.v, z, lse, strict=True)):
        yield AttentionRecord(
            layer, sequence, *tensors, variant.scaling, variant.window, call.first_key, variant.chunk_size,
            variant.softcap, variant.sink,
        )  # fmt: skip


def _check(rule: Rule, record: AttentionRecord) -> None:
    """Raise BadInput for a pass in which the rule's choice is not that of a pass over the whole text."""
    queries, tokens = record.q.shape[1], record.first_key + record.k.shape[1]
    if (rule.depends_on_later_queries and queries < tokens) or (rule.needs_whole_text and record.first_key > 0):
        raise BadInput(
            f"rule '{rule}' chooses keys by the whole text, and this pass reads {queries:,} of {tokens:,} tokens after "
            "a cache. Pass use_cache=False, or use another rule"
        )
    if record.z.requires_grad:
        raise BadInput(f"attention by rule '{rule}' has no gradient. Run the model inside torch.no_grad()")
