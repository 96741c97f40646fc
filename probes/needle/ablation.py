"""Does the model still find the needle with its top heads silenced, and with as many random ones of the same layers?

As Wu et al. 2024 ask, but heads are ranked on one half of the needles and silenced while the other half is asked for.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.attention import backend
from headscope.attention.geometry import Geometry
from headscope.attention.record import AttentionRecord
from headscope.forward.capture import capturing
from headscope.forward.interventions import Intervention, Unit, layer_output_edit, zero_ablation
from headscope.forward.logits import finite_hidden_states
from headscope.forward.prefix_cache import TokenIds
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model

NEEDLE_HALVES = 2
HEAD_COLUMNS = ["layer", "head"]


@dataclass(frozen=True)
class AblationTask:
    """One cell: every trial of one half of the needles, with one set of heads silenced. Draw 0 are the top ones."""

    ablation: str
    size: int
    draw: int
    half: int
    prerequisites: tuple[str, ...]
    """The cells that rank the heads: those of the other half."""


def needle_half(needle_index: int) -> int:
    """The half of the needles that one belongs to, by its number."""
    return needle_index % NEEDLE_HALVES


def select_heads(ranking: pd.DataFrame, task: AblationTask, seed: int) -> pd.DataFrame:
    """The heads of a set: rows of `ranked`, which has every head with its score, the highest first."""
    top = ranking.head(task.size)
    if task.draw == 0:
        return top
    rng = np.random.default_rng([seed, task.half, task.size, task.draw])
    drawn = []
    for layer, wanted in top.groupby("layer").size().items():
        mine = ranking[ranking["layer"] == layer].sort_values("head")
        is_top = mine.index.isin(top.index)
        others, rest = (mine.index[mask][rng.permutation(int(mask.sum()))] for mask in (~is_top, is_top))
        drawn += [*others, *rest][:wanted]
    return ranking.loc[sorted(drawn)]


def heads_to_units(heads: pd.DataFrame, geometry: Geometry) -> list[Unit]:
    """The heads of a table, whose layers go by their numbers, as units."""
    places = heads[HEAD_COLUMNS].itertuples(index=False, name=None)
    return [
        Unit(geometry.layer_numbers.index(layer), int(head) // geometry.heads_per_group, int(head))
        for layer, head in places
    ]


@dataclass(frozen=True, eq=False)
class FixedMeanAblation:
    """The heads say the same at every token: their `means`, one [H, dv] a layer. Unlike the mean over a call this holds
    while an answer is written token by token."""

    head_means: Sequence[Tensor]
    geometry: Geometry

    def __call__(self, z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
        mean = self.head_means[unit.layer][unit.head_slice(self.geometry)]
        return mean.to(z.dtype)[None, :, None].expand_as(z)


def make_ablation(ablation: str, model: Model, haystack: TokenIds) -> Intervention:
    """What is done to silenced heads; `haystack` [L] is what their mean is taken over."""
    return (
        zero_ablation if ablation == "zero" else FixedMeanAblation(mean_head_outputs(model, haystack), model.geometry)
    )


def mean_head_outputs(model: Model, ids: TokenIds) -> list[Tensor]:
    """The mean output of every head over these tokens: one [H, dv] a layer, float32."""
    means: dict[int, Tensor] = {}

    def hear(heard: AttentionRecord) -> None:
        means[heard.layer] = heard.z.float().mean(1)

    with attached(model), capturing(model) as layers, evaluating(model), torch.no_grad():
        layers.listen(hear)
        finite_hidden_states(model, torch.from_numpy(ids.astype(np.int64))[None].to(model.device))
    return [means[layer] for layer in sorted(means)]


@contextmanager
def heads_ablated(model: Model, units: Sequence[Unit], intervention: Intervention) -> Iterator[None]:
    """Silence these heads of the model. What was cached before knows nothing of it."""
    with ExitStack() as stack:
        for layer in sorted({unit.layer for unit in units}):
            here = [unit for unit in units if unit.layer == layer]
            stack.enter_context(
                backend.editing_output(
                    model.attention_modules[layer], layer_output_edit(intervention, here, model.geometry)
                )
            )
        yield
