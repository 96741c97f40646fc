"""The rows of a text, and the key of each, whose logits are attributed: of large weight on a far key, or named ones."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from headscope.attention.record import AttentionRecord
from headscope.base.heads import format_head
from headscope.errors import BadInput
from headscope.forward.capture import capturing
from headscope.forward.logits import finite_hidden_states
from headscope.measures.top_keys import MIN_FAR_DISTANCE, find_top_keys
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model


@dataclass(frozen=True, order=True)
class RowAndKey:
    """A row (query position) and a key of one head; `layer` is the number of a layer."""

    layer: int
    head: int
    query: int
    key: int


@torch.no_grad()
def find_top_far_rows(
    model: Model, ids: Tensor, heads: Sequence[tuple[int, int]], count: int
) -> list[tuple[RowAndKey, float]]:
    """The rows of a text, ids [L], in which each head has its largest weights on a far key, and these weights.

    A far key is at least MIN_FAR_DISTANCE tokens back and not the first. At most `count` rows per head, largest weight
    first, one for each key. `heads` are (layer, head) by layer number. Raises BadInput for unknown heads, and for a
    head that sees no far key.
    """
    top_rows = dict[tuple[int, int], list[tuple[RowAndKey, float]]]()

    def select_rows(layer: int, head: int, record: AttentionRecord) -> None:
        top = find_top_keys(record, np.arange(record.q.shape[1]), 1)
        rows: dict[int, tuple[RowAndKey, float]] = {}
        keys, weights = top.far_keys[0].tolist(), top.far_weights[0].tolist()
        for row in top.far_weights[0].nan_to_num(-1).argsort(descending=True, stable=True).tolist():
            key, weight = keys[row], weights[row]
            if len(rows) == count or np.isnan(weight):
                break
            rows.setdefault(key, (RowAndKey(layer, head, row, key), weight))
        top_rows[layer, head] = [*rows.values()]

    _record_heads(model, ids, heads, select_rows)
    for layer, head in heads:
        if not top_rows[layer, head]:
            raise BadInput(
                f"{format_head(layer, head)} sees no key {MIN_FAR_DISTANCE} or more tokens back. Choose another head, "
                "or a longer text"
            )
    return [row for head in heads for row in top_rows[head]]


def find_rows(
    model: Model, ids: Tensor, heads: Sequence[tuple[int, int]], queries: Sequence[int]
) -> list[tuple[RowAndKey, float]]:
    """The key of largest weight in these query rows of each head, and that weight. Raises BadInput for unknown heads,
    and for queries beyond the text, ids [L]."""
    if max(queries) >= len(ids):
        raise BadInput(f"query {max(queries)} is beyond the text of {len(ids)} tokens. Use at most {len(ids) - 1}")
    rows: list[tuple[RowAndKey, float]] = []

    def select_rows(layer: int, head: int, record: AttentionRecord) -> None:
        top = find_top_keys(record, np.array(sorted(queries)), 1)
        rows.extend(
            (RowAndKey(layer, head, query, key), weight)
            for query, key, weight in zip(
                sorted(queries), top.keys[0, :, 0].tolist(), top.weights[0, :, 0].tolist(), strict=True
            )
        )

    _record_heads(model, ids, heads, select_rows)
    return rows


def _record_heads(
    model: Model,
    ids: Tensor,
    heads: Sequence[tuple[int, int]],
    listener: Callable[[int, int, AttentionRecord], None],
) -> None:
    """Call `listener` with layer number, head and record of each head in a pass over ids [L]."""
    geometry = model.geometry
    for layer, head in heads:
        if not geometry.has_head(layer, head):
            raise BadInput(f"'{model.name}' has no head {format_head(layer, head)}. {geometry.suggest_heads(layer)}")

    def listen(record: AttentionRecord) -> None:
        number = geometry.layer_numbers[record.layer]
        for head in sorted({head for layer, head in heads if layer == number}):
            listener(number, head, _one_head(record, head, geometry.kv_group(record.layer, head)))

    with attached(model), evaluating(model), capturing(model) as layers:
        layers.listen(listen, sorted({geometry.layer_numbers.index(layer) for layer, _ in heads}))
        finite_hidden_states(model, torch.as_tensor(ids).to(model.device)[None])


def _one_head(record: AttentionRecord, head: int, group: int) -> AttentionRecord:
    queries, keys = slice(head, head + 1), slice(group, group + 1)
    return replace(
        record,
        q=record.q[queries],
        k=record.k[keys],
        v=record.v[keys],
        z=record.z[queries],
        lse=record.lse[queries],
        sink=None if record.sink is None else record.sink[queries],
        row_sums=None,
        chosen=None if record.chosen is None else record.chosen.for_heads(queries),
    )
