"""Reads the position parameters of every model, without a forward pass."""

from typing import Any

import torch
from torch import Tensor

from headscope.attention.record import stack_layers
from headscope.positions.model import Model
from headscope.positions.schedule import FixedSchedule, frequencies_by_layer, pad_frequencies
from headscope.study.cells import Cell
from headscope.study.context import StudyContext


class PositionsRunner:
    """Cells: each model."""

    def __init__(self, options: None, context: StudyContext):
        self.context = context

    def cells(self) -> list[Cell]:
        return [Cell(f"{label}: positions", label, 0.0) for label in self.context.labels]

    def compute_rows(self, cell: Cell, model: Model) -> dict[str, dict[str, Any]]:
        assert cell.model is not None
        return position_tables(cell.model, model)


def position_tables(label: str, model: Model) -> dict[str, dict[str, Any]]:
    """Columns of the tables `positions` and `scales` of one model, by table; empty for a model without rotation."""
    if not model.geometry.pairs:
        return {}
    with torch.no_grad():
        tables = {"positions": _positions(model), "scales": _scales(model)}
    return {
        table: {"model": label, **{name: column.reshape(-1).numpy() for name, column in columns.items()}}
        for table, columns in tables.items()
    }


def _positions(model: Model) -> dict[str, Tensor]:
    schedule = model.schedule
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
        "log_theta_base": frequencies_by_layer(model, FixedSchedule.of_checkpoint(model)).log(),
    }
    groups, head_dims = torch.tensor(model.geometry.layer_kv_groups), torch.tensor(model.geometry.layer_head_dims)
    exists = (group < groups[layer]) & (pair < head_dims[layer] // 2)
    return {name: column[exists] for name, column in columns.items()}


def _scales(model: Model) -> dict[str, Tensor]:
    schedule, geometry, checkpoint_schedule = model.schedule, model.geometry, FixedSchedule.of_checkpoint(model)
    layers = range(geometry.layers)
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
    logit_scale = (
        torch.tensor([schedule.attention_factor(n) / checkpoint_schedule.attention_factor(n) for n in layers])[
            :, None
        ].expand_as(tau)
        ** 2
    )
    if schedule.scales_queries:
        at_reference = torch.full((1, 1), schedule.reference_length)
        scales = [
            schedule.query_scale(n, at_reference)[0, :, 0].cpu().expand(heads)
            for n, heads in enumerate(geometry.layer_heads)
        ]
        logit_scale = logit_scale * stack_layers(scales, 1)
    return {
        "layer": torch.tensor(geometry.layer_numbers)[layer],
        "head": head,
        "kv_group": group,
        "tau": tau[layer, head],
        "gamma": gamma[layer, head],
        "reference_length": torch.full_like(layer, schedule.reference_length),
        "logit_scale": logit_scale[layer, head],
        "effective_base": base[layer, group],
        "mean_log_theta": mean_log[layer, group],
    }


def _grid(*sizes: int) -> tuple[Tensor, ...]:
    return torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
