"""Ablation of retrieval heads: the top heads, or as many random heads of the same layers (after Wu et al. 2024).

Each half of the needles is tested with heads ranked on the other half [ours], or with those of a file.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from headscope.attention import backend
from headscope.attention.record import AttentionRecord, Geometry
from headscope.forward.capture import capturing
from headscope.forward.interventions import (
    Intervention,
    Unit,
    head_unit,
    layer_output_edit,
    uniform_attention,
    zero_ablation,
)
from headscope.forward.logits import finite_hidden_states
from headscope.forward.prefix_cache import TokenIds
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model

NEEDLE_HALVES = 2
HEAD_COLUMNS = ["layer", "head"]


@dataclass(frozen=True)
class AblationWork:
    """One cell: every trial of one half of the needles with one set of heads ablated. Draw 0 is the set of top
    heads."""

    ablation: str
    size: int
    draw: int
    half: int
    prerequisites: tuple[str, ...]
    """The cells that rank the heads, those of the other half; none for the heads of a file."""


def needle_half(needle_index: int) -> int:
    """The half that a needle belongs to."""
    return needle_index % NEEDLE_HALVES


def select_heads(ranking: pd.DataFrame, work: AblationWork, seed: int) -> pd.DataFrame:
    """The heads of a set: rows of `ranking`, which has every head in descending order of score."""
    top = ranking.head(work.size)
    if work.draw == 0:
        return top
    rng = np.random.default_rng([seed, work.half, work.size, work.draw])
    sample = []
    for layer, count in top.groupby("layer").size().items():
        layer_heads = ranking[ranking["layer"] == layer].sort_values("head")
        is_top = layer_heads.index.isin(top.index)
        preferred, rest = (layer_heads.index[mask][rng.permutation(int(mask.sum()))] for mask in (~is_top, is_top))
        sample += [*preferred, *rest][:count]
    return ranking.loc[sorted(sample)]


def heads_to_units(heads: pd.DataFrame, geometry: Geometry) -> list[Unit]:
    """The heads of a table as units; `layer` is the layer number."""
    rows = heads[HEAD_COLUMNS].itertuples(index=False, name=None)
    return [head_unit(geometry, geometry.layer_numbers.index(layer), int(head)) for layer, head in rows]


@dataclass(frozen=True, eq=False)
class FixedMeanAblation:
    """Set the outputs of heads to `head_means`, one [H, dv] per layer.

    Unlike the mean over a call, they are the same when an answer is generated token by token.
    """

    head_means: Sequence[Tensor]
    geometry: Geometry

    def __call__(self, z: Tensor, call: backend.AttentionCall, unit: Unit) -> Tensor:
        mean = self.head_means[unit.layer][unit.head_slice(self.geometry)]
        return mean.to(z.dtype)[None, :, None].expand_as(z)


def make_ablation(ablation: str, model: Model, haystack: TokenIds) -> Intervention:
    """The intervention of an ablation; the mean is over the tokens of `haystack` [L]."""
    if ablation == "mean":
        return FixedMeanAblation(mean_head_outputs(model, haystack), model.geometry)
    return {"zero": zero_ablation, "uniform": uniform_attention}[ablation]


def mean_head_outputs(model: Model, ids: TokenIds) -> list[Tensor]:
    """The mean output of every head over these tokens: one [H, dv] per layer, float32."""
    means: dict[int, Tensor] = {}

    def add_means(record: AttentionRecord) -> None:
        means[record.layer] = record.z.float().mean(1)

    with attached(model), capturing(model) as layers, evaluating(model), torch.no_grad():
        layers.listen(add_means)
        finite_hidden_states(model, torch.from_numpy(ids.astype(np.int64))[None].to(model.device))
    return [means[layer] for layer in sorted(means)]


@contextmanager
def heads_ablated(model: Model, units: Sequence[Unit], intervention: Intervention) -> Iterator[None]:
    """Ablate these heads of the model. Earlier cached prefixes do not include the ablation; do not reuse them."""
    with ExitStack() as stack:
        for layer in sorted({unit.layer for unit in units}):
            layer_units = [unit for unit in units if unit.layer == layer]
            stack.enter_context(
                backend.editing_output(
                    model.attention_modules[layer], layer_output_edit(intervention, layer_units, model.geometry)
                )
            )
        yield
