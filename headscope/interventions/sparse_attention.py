"""Let heads of a running model attend by a rule that chooses keys, and count the keys that their rows keep."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from headscope.attention import families
from headscope.attention.backend import AttentionCall, OutputEdit
from headscope.attention.edits import LayerEdit, TokenSet
from headscope.attention.geometry import Geometry
from headscope.forward.capture import CapturedLayers, capturing
from headscope.interventions.kinds import KeyCount, RuleChoice
from headscope.measures.row_sampling import visible_keys
from headscope.measures.row_tile import RowTile
from headscope.measures.sparse_rules import Rule
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model

HeadsByLayer = Mapping[int, Sequence[int]]
"""Heads by index of their attention layer."""


def all_heads(geometry: Geometry) -> HeadsByLayer:
    """Every head."""
    return {layer: range(heads) for layer, heads in enumerate(geometry.layer_heads)}


class AllKeys(Rule):
    """Every key, also those that an indexer did not choose."""

    name: ClassVar[str] = "dense"
    meaning: ClassVar[str] = "every key"
    is_layer_wide: ClassVar[bool] = False
    needs_log_sums: ClassVar[bool] = False

    def select(self, tile: RowTile) -> Tensor:
        return torch.ones_like(tile.weights[:1], dtype=torch.bool)

    def __str__(self) -> str:
        return self.name


def attend_by_rule(model: Model, layers: CapturedLayers, rule: Rule | None, heads: HeadsByLayer) -> KeyCount:
    """Let heads attend by a rule until the capture ends; returns the count of the keys that their rows keep.

    The rule None keeps every key, also those that an indexer did not choose. Under edits of contexts that are open the
    rule chooses by the logits that they leave.
    """
    count = KeyCount()
    has_indexer = any(True for _ in families.indexers(model.module))
    for layer, members in heads.items():
        if rule is None and not has_indexer:
            layers.edit_output(layer, _counting_visible_keys(count, len(members)))
            continue
        kind = RuleChoice(AllKeys() if rule is None else rule, count)
        label = f"{kind.name} of layer {model.geometry.layer_numbers[layer]}"
        layers.edit(LayerEdit(kind, "logits", tuple(members), TokenSet(), label, layer=layer))
    return count


def _counting_visible_keys(count: KeyCount, heads: int) -> OutputEdit:
    def edit(z: Tensor, call: AttentionCall) -> Tensor:
        last = call.first_key + call.k.shape[2]
        visible = visible_keys(np.arange(last - z.shape[2], last), call.variant.window, call.variant.chunk_size)
        count.add(len(z) * heads * torch.tensor(float(visible.sum()), dtype=torch.float64), len(z) * heads * z.shape[2])
        return z

    return edit


@contextmanager
def attending_by(model: Model, rule: Rule | None, heads: HeadsByLayer | None = None) -> Iterator[KeyCount]:
    """Let heads, by default all, attend by a rule, under the position scheme and without gradients."""
    with attached(model), evaluating(model), capturing(model) as layers, torch.no_grad():
        yield attend_by_rule(model, layers, rule, all_heads(model.geometry) if heads is None else heads)
