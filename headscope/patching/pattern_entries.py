"""Patching of single entries of attention patterns: the weight of one query (destination) on one key (source).

The row of the query is not normalised again, as in `get_act_patch_attn_head_pattern_dest_src_pos` of TransformerLens.
An estimate is the gradient with respect to the head's output, times the change of the weight, times the key's value.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from headscope.attention import backend
from headscope.forward.free_memory import runs_per_batch
from headscope.forward.interventions import Unit
from headscope.patching.activation_patching import Direction, PatchingReplay

Entry = tuple[int, int]
"""Destination and source, counted from the first aligned position."""


class PatternEntries:
    """Patches and estimates of the entries of a `PatchingReplay` with prompts of equal length, in its `capturing`.

    Memory holds the patterns [H, L, L] of one layer in both runs.
    """

    def __init__(self, replay: PatchingReplay):
        self.replay = replay
        self.entries: list[Entry] = [(query, key) for query in range(replay.pair.aligned) for key in range(query + 1)]

    def patch(self, direction: Direction, units: Sequence[Unit]) -> Iterator[tuple[Unit, list[float]]]:
        """The metric with one entry of one head patched at a time, in the order of `entries`."""
        run, _ = self.replay.run_and_source(direction)
        first = self.replay.pair.aligned_positions(run.ids).start
        batch_size = runs_per_batch(self.replay.model, run.ids.shape[1])
        for unit in units:
            z, call = run.attention(unit.layer)
            change = self._change(direction, unit.layer, call)[unit.head]
            values = call.v[0, unit.kv_group]
            metrics: list[float] = []
            remaining = iter(self.entries)
            while batch := [*islice(remaining, batch_size)]:
                variants = z.repeat(len(batch), 1, 1, 1)
                for number, (query, key) in enumerate(batch):
                    added = change[query, key].to(values) * values[first + key]
                    variants[number, unit.head, first + query] += added
                metrics += [self.replay.value(logits) for logits in run.target_logits_of(unit.layer, variants)]
            yield unit, metrics

    def estimate(self, direction: Direction) -> list[Tensor]:
        """The estimated change of the metric by every entry of every head, [H, entries] float64 by layer."""
        run, _ = self.replay.run_and_source(direction)
        objectives, combine = self.replay.expansion(direction)
        positions = self.replay.pair.aligned_positions(run.ids)
        rows = slice(positions.start, positions.start + self.replay.pair.aligned)
        queries, keys = torch.tensor(self.entries).T
        estimates = [torch.empty(0)] * self.replay.model.geometry.layers

        def add_layer(layer: int, z: Tensor, call: backend.AttentionCall, gradients: list[Tensor]) -> None:
            change = self._change(direction, layer, call)
            values = call.v[0].repeat_interleave(len(change) // call.v.shape[1], 0)[:, rows].double()
            derivatives = torch.stack([change * (gradient[0, :, rows].double() @ values.mT) for gradient in gradients])
            estimates[layer] = combine(derivatives[..., queries, keys]).cpu()

        run.backpropagate(objectives, add_layer)
        return estimates

    def _change(self, direction: Direction, layer: int, call: backend.AttentionCall) -> Tensor:
        """The weights of the source minus those of the patched run, [H, n, n] float64, of the aligned positions."""
        run, source = self.replay.run_and_source(direction)
        weights = []
        for replay, own_call in ((run, call), (source, source.attention(layer)[1])):
            first = self.replay.pair.aligned_positions(replay.ids).start
            rows = slice(first, first + self.replay.pair.aligned)
            weights.append(_weights(own_call)[:, rows, rows].double())
        return weights[1] - weights[0]


def _weights(call: backend.AttentionCall) -> Tensor:
    """All attention weights [H, L, L] of a call: its outputs for unit vectors as values."""
    length, width = call.v.shape[2:]
    units = torch.nn.functional.pad(torch.eye(length), (0, -length % width)).to(call.v)
    parts = [units[:, first : first + width].expand(*call.v.shape).contiguous() for first in range(0, length, width)]
    return torch.cat([call.attend(call.q, call.k, part) for part in parts], -1)[0, ..., :length]
