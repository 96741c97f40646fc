"""Reads the position parameters of every model, without a forward pass."""

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from headscope.attention.geometry import stack_layers
from headscope.errors import UnsupportedModel
from headscope.positions.model import Model
from headscope.positions.rope_scaling import own_softmax_factors, schedule_at_length
from headscope.positions.schedule import (
    FixedSchedule,
    Schedule,
    frequencies_by_layer,
    pad_frequencies,
    rotates_whole_head,
)
from headscope.study.cells import Cell
from headscope.study.context import StudyContext

log = logging.getLogger("headscope")


class PositionsRunner:
    """Cells: each model, with the context lengths at which it is measured."""

    def __init__(self, options: None, context: StudyContext):
        self.context = context

    def cells(self) -> list[Cell]:
        lengths = self.context.measured_lengths
        return [Cell(f"{label}: positions", label, 0.0, lengths.get(label, ())) for label in self.context.labels]

    def compute_rows(self, cell: Cell, model: Model) -> dict[str, dict[str, Any]]:
        return position_tables(cell.model, model, cell.work)


def position_tables(label: str, model: Model, lengths: Sequence[int] = ()) -> dict[str, dict[str, Any]]:
    """Columns of the tables `positions` and `scales` of one model, by table; empty for a model without rotation.

    A checkpoint whose own frequencies depend on the length has rows for each of these context lengths, or for the
    longest text with its original frequencies.
    """
    if not model.geometry.pairs:
        return {}
    blocks: dict[str, list[dict[str, Tensor]]] = {"positions": [], "scales": []}
    with torch.no_grad():
        for length, schedule, own_schedule in _schedules(model, lengths):
            for table, columns in (
                ("positions", _positions(model, schedule, own_schedule)),
                ("scales", _scales(model, schedule, own_schedule)),
            ):
                rows = len(columns["layer"])
                blocks[table].append({"context_length": torch.full((rows,), length), **columns})
    return {
        table: {"model": label, **{name: torch.cat([part[name] for part in parts]).numpy() for name in parts[0]}}
        for table, parts in blocks.items()
        if parts
    }


def _schedules(model: Model, lengths: Sequence[int]) -> Iterator[tuple[int, Schedule, Schedule]]:
    """(context length, the model's schedule, the checkpoint's own) for every length at which they may differ.

    The length is 0 for a model whose frequencies depend on no length. A length is left out, with a warning, if the
    checkpoint's code does not rotate by the frequencies of its config.
    """
    own, limit = FixedSchedule.of_checkpoint(model), model.rotation.frequency_change_length
    if limit is None or model.schedule.replaces_rotation:
        yield 0, model.schedule, own
        return
    for length in sorted({*lengths}) or [limit]:
        try:
            yield length, schedule_at_length(model, model.schedule, length), schedule_at_length(model, own, length)
        except UnsupportedModel as error:
            log.warning("position parameters at %s tokens are left out: %s", f"{length:,}", error)


def _positions(model: Model, schedule: Schedule, own_schedule: Schedule) -> dict[str, Tensor]:
    theta = frequencies_by_layer(model, schedule)
    layer, group, pair = _grid(*theta.shape)
    inits = [schedule.log_theta_init(layer).exp() for layer in range(model.geometry.layers)]
    columns = {
        "layer": torch.tensor(model.geometry.layer_numbers)[layer],
        "kv_group": group,
        "pair": pair,
        "theta": theta,
        "log_theta": theta.log(),
        "log_theta_init": pad_frequencies(model, inits).log(),
        "log_theta_base": frequencies_by_layer(model, own_schedule).log(),
    }
    groups, head_dims = torch.tensor(model.geometry.layer_kv_groups), torch.tensor(model.geometry.layer_head_dims)
    exists = (group < groups[layer]) & (pair < head_dims[layer] // 2)
    return {name: column[exists] for name, column in columns.items()}


def _scales(model: Model, schedule: Schedule, own_schedule: Schedule) -> dict[str, Tensor]:
    geometry = model.geometry
    layer, head = _grid(geometry.layers, geometry.heads)
    exists = head < torch.tensor(geometry.layer_heads)[layer]
    layer, head = layer[exists], head[exists]
    group = geometry.kv_group(layer, head)
    tau, gamma = (t.detach().cpu() for t in schedule.tau_and_gamma())
    by_layer = zip(frequencies_by_layer(model, schedule), geometry.layer_pairs, strict=True)
    # float64: a product of many frequencies loses the base's last digits in float32.
    mean_log = torch.stack([theta[:, :pairs].double().log().mean(-1) for theta, pairs in by_layer])
    pairs = torch.tensor(geometry.layer_pairs)[:, None]
    # The frequency of a single pair does not depend on the base.
    base = torch.where(pairs > 1, torch.exp(-4 * pairs / (2 * pairs - 2) * mean_log), torch.inf)
    layers = range(geometry.layers)
    factors = torch.tensor([schedule.attention_factor(n) for n in layers])
    own_factors = torch.tensor([own_schedule.attention_factor(n) for n in layers])
    query_scale = _query_scales(model, schedule)
    rotates_whole = torch.tensor([rotates_whole_head(geometry, n) for n in layers])
    logit_scale = query_scale * torch.where(rotates_whole, (factors / own_factors) ** 2, 1.0)[:, None]
    softmax_factor = query_scale * torch.tensor(own_softmax_factors(model))[:, None]
    return {
        "layer": torch.tensor(geometry.layer_numbers)[layer],
        "head": head,
        "kv_group": group,
        "tau": tau[layer, head],
        "gamma": gamma[layer, head],
        "reference_length": torch.full_like(layer, schedule.reference_length),
        "logit_scale": logit_scale[layer, head],
        "attention_factor": factors[layer],
        "softmax_factor": softmax_factor[layer, head],
        "effective_base": base[layer, group],
        "mean_log_theta": mean_log[layer, group],
    }


def _query_scales(model: Model, schedule: Schedule) -> Tensor:
    """The factor on each head's queries up to L_ref, [layers, H]."""
    geometry = model.geometry
    if not schedule.scales_queries:
        return torch.ones(geometry.layers, geometry.heads)
    at_reference = torch.full((1, 1), schedule.reference_length)
    scales = [
        schedule.query_scale(n, at_reference)[0, :, 0].cpu().expand(heads)
        for n, heads in enumerate(geometry.layer_heads)
    ]
    return stack_layers(scales, 1)


def _grid(*sizes: int) -> tuple[Tensor, ...]:
    return torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
