"""Slow, obvious references: every formula of the measures, eager, L x L, in float64.

Knows nothing of headscope. Axes: head H, group G (head h reads key head h // (H / G)), query L, key L, dim d,
pair P. q and k are what the attention function receives: after rotation and QK-norm. Logits are
scaling * q_i . k_j, bounded by softcap * tanh(logit / softcap) where there is a soft cap. Query i sees the keys j with
0 <= i - j < window (window None: all of the past) that lie in its own run of `chunk_size` keys (None: one run). A sink
[H] is one more logit of every row of a head, whose weight is no key's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

LOCAL = 32
"""Keys that count as local, the query's own position included."""


def visible(length: int, window: int | None = None, chunk_size: int | None = None) -> Tensor:
    """Return bool [L, L]: may query i see key j?"""
    distance = _distance(length)
    run = torch.arange(length) // (chunk_size or length)
    return (distance >= 0) & (distance < (length if window is None else window)) & (run[:, None] == run)


def _distance(length: int) -> Tensor:
    """Return i - j as [L, L]."""
    position = torch.arange(length)
    return position[:, None] - position[None, :]


def _keys_per_head(q: Tensor, k: Tensor) -> Tensor:
    """Return k [H, L, d] in float64, each group's keys repeated for the heads that share them."""
    heads, groups = q.shape[0], k.shape[0]
    return torch.stack([k[head // (heads // groups)] for head in range(heads)]).double()


# Rows --------------------------------------------------------------------------------------------------------------


def logits(
    q: Tensor,
    k: Tensor,
    scaling: float,
    window: int | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return s [H, L, L], -inf where key j is invisible. q: [H, L, d], k: [G, L, d]."""
    s = scaling * torch.einsum("hid,hjd->hij", q.double(), _keys_per_head(q, k))
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    return s.masked_fill(~visible(q.shape[1], window, chunk_size), -torch.inf)


def with_sink(s: Tensor, sink: Tensor | None) -> Tensor:
    """Return the logits s [H, L, L] and, as one column more, the sink's [H]."""
    return s if sink is None else torch.cat((s, sink.double()[:, None, None].expand(-1, s.shape[1], 1)), -1)


def weights(
    q: Tensor,
    k: Tensor,
    scaling: float,
    window: int | None = None,
    chunk_size: int | None = None,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """Return alpha [H, L, L]; rows sum to 1, or to what a sink leaves."""
    return with_sink(logits(q, k, scaling, window, chunk_size, softcap), sink).softmax(-1)[..., : q.shape[1]]


def row_statistics(alpha: Tensor) -> dict[str, Tensor]:
    """Return each statistic of each attention row, [H, L], from the weights alpha [H, L, L].

    Where a sink takes a part of the row, effective lengths and distances are of the rest, as shares of it.
    """
    alpha = alpha.double()
    length = alpha.shape[-1]
    among_keys = alpha / alpha.sum(-1, keepdim=True)
    ess2 = 1 / among_keys.square().sum(-1)
    log_alpha = torch.where(among_keys > 0, among_keys, 1).log()  # 0 ln 0 = 0
    local = (_distance(length) >= 0) & (_distance(length) < LOCAL)
    return {
        "ess2": ess2,
        "log_ess2": ess2.log(),
        "ess1": (-(among_keys * log_alpha).sum(-1)).exp(),
        "max_weight": alpha.amax(-1),
        "sink_mass": alpha[:, :, 0],  # an invisible key has weight 0
        "local_mass": (alpha * local).sum(-1),
        "mean_distance": (among_keys * _distance(length)).sum(-1),
    }


def bin_edges(limit: int) -> list[int]:
    """Return the upper edges round(16 * 2^(k/4)), k = 0, 1, ..., up to the first that is at least `limit`."""
    edges = [16]
    while edges[-1] < limit:
        edges.append(round(16 * 2 ** (len(edges) / 4)))
    return edges


def binned(
    statistics: dict[str, Tensor], window: int | None = None, chunk_size: int | None = None
) -> dict[int, dict[str, Any]]:
    """Average rows [H, L] by visible keys: {upper edge: {"rows": int, name: [H]}}; empty bins are left out.

    The sink mass is the mean over the rows that see key 0.
    """
    length = next(iter(statistics.values())).shape[-1]
    mask = visible(length, window, chunk_size)
    bins: dict[int, list[int]] = {}
    for i, visible_count in enumerate(mask.sum(-1).tolist()):
        edge = min(edge for edge in bin_edges(length) if edge >= visible_count)
        bins.setdefault(edge, []).append(i)
    return {edge: average(statistics, rows, mask) for edge, rows in bins.items()}


def average(statistics: dict[str, Tensor], rows: list[int], mask: Tensor) -> dict[str, Any]:
    """Average some rows; the sink mass over those that see key 0 in the mask [L, L]."""
    sink_rows = [i for i in rows if mask[i, 0]]
    means = {
        name: of_rows[:, sink_rows if name == "sink_mass" else rows].mean(-1) for name, of_rows in statistics.items()
    }
    return {"rows": len(rows), "sink_rows": len(sink_rows)} | means


# Rotary pairs ------------------------------------------------------------------------------------------------------


def planes(head_dim: int, rotary_dims: int, layout: str, start: int = 0) -> list[tuple[int, int]]:
    """Return the two dimensions of each pair: rotary pairs first, then the remainder, paired the same way within it.

    The rotary dimensions are those from `start` on.
    """
    rotary = list(range(start, start + rotary_dims))
    other_dims = [dim for dim in range(head_dim) if dim not in rotary]
    pairs = []
    for dims in (rotary, other_dims):
        half = len(dims) // 2
        for f in range(half):
            pairs.append((dims[f], dims[f + half]) if layout == "half" else (dims[2 * f], dims[2 * f + 1]))
    return pairs


def _pairs(q: Tensor, k: Tensor, rotary_dims: int, layout: str, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the two-dimensional q_f and k_f of each pair, both [H, L, 2]."""
    keys = _keys_per_head(q, k)
    for plane in planes(q.shape[-1], rotary_dims, layout, start):
        yield q.double()[..., plane], keys[..., plane]


def contributions(q: Tensor, k: Tensor, scaling: float, rotary_dims: int, layout: str, start: int = 0) -> Tensor:
    """Return c [H, L, L, P] for every (i, j), visible or not; sums over P to the logits before mask and cap."""
    pairs = _pairs(q, k, rotary_dims, layout, start)
    return torch.stack([scaling * torch.einsum("hix,hjx->hij", qf, kf) for qf, kf in pairs], -1)


def pair_statistics(
    q: Tensor,
    k: Tensor,
    scaling: float,
    rotary_dims: int,
    layout: str,
    window: int | None = None,
    chunk_size: int | None = None,
    start: int = 0,
) -> dict[str, Tensor]:
    """Return mean_abs, mean_signed, rms and norm_product [H, P]: expectations over all visible (i, j)."""
    visible_mask = visible(q.shape[1], window, chunk_size)
    c = contributions(q, k, scaling, rotary_dims, layout, start)[:, visible_mask]  # [H, visible pairs, P]
    norms = [
        torch.einsum("hi,hj->hij", qf.norm(dim=-1), kf.norm(dim=-1))[:, visible_mask].mean(-1)
        for qf, kf in _pairs(q, k, rotary_dims, layout, start)
    ]
    return {
        "mean_abs": c.abs().mean(1),
        "mean_signed": c.mean(1),
        "rms": c.square().mean(1).sqrt(),
        "norm_product": abs(scaling) * torch.stack(norms, -1),
    }


def distance_profile(
    q: Tensor,
    k: Tensor,
    scaling: float,
    rotary_dims: int,
    layout: str,
    distance: int,
    chunk_size: int | None = None,
    start: int = 0,
) -> Tensor:
    """Return E_i c_{i, i - D} [H, P], over every i that sees i - D. The window is the caller's: ask for D below it."""
    c = contributions(q, k, scaling, rotary_dims, layout, start)
    visible_mask = visible(q.shape[1], chunk_size=chunk_size)
    return torch.stack(
        [c[:, i, i - distance] for i in range(distance, q.shape[1]) if visible_mask[i, i - distance]]
    ).mean(0)


# Models ------------------------------------------------------------------------------------------------------------


def explicit_weights(
    q: Tensor, k: Tensor, softcap: float | None = None, chunk_size: int | None = None, sink: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """alpha [H, L, L] in float64, which keys are visible [L, L], and the log-sum-exp [H, L], for one key head."""
    s = 0.7 * q.double() @ k[0].double().T
    s = s if softcap is None else softcap * torch.tanh(s / softcap)
    at = torch.arange(q.shape[1])
    visible = at[:, None] >= at
    if chunk_size is not None:
        visible &= at[:, None] // chunk_size == at // chunk_size
    total = s.masked_fill(~visible, -torch.inf).logsumexp(-1)
    if sink is not None:
        total = torch.logaddexp(total, sink.double()[:, None])
    return (s - total[..., None]).exp() * visible, visible, total.float()


NAME = "reference_eager"
"""Attention implementation of `eager_qk`; the name must hold neither "sdpa" nor "flex"."""


@dataclass(frozen=True)
class Layer:
    """What one layer's attention function received: q [H, L, d]; k, v [G, L, d]; mask [L, L], True where visible."""

    q: Tensor
    k: Tensor
    v: Tensor
    scaling: float
    mask: Tensor
    softcap: float | None = None
    sink: Tensor | None = None


Choice = Callable[[Layer], Tensor]
"""A layer -> bool [H, L, L]: the keys that every row attends to."""
_layers: list[Layer] = []
_choices: list[Choice] = []
"""At most one, while `eager_qk` runs."""


def _eager_attention(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor, **options: Any
) -> tuple[Tensor, Tensor]:
    """Record one layer and attend with the dense mask. query [1, H, L, d]; key, value [1, G, L, d]."""
    scaling, softcap, sink = options.get("scaling"), options.get("softcap"), options.get("s_aux")
    scaling = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    _layers.append(Layer(query[0], key[0], value[0], scaling, attention_mask[0, 0] == 0, softcap, sink))
    repeats = query.shape[1] // key.shape[1]
    scores = scaling * query @ key.repeat_interleave(repeats, 1).mT
    scores = (scores if softcap is None else softcap * torch.tanh(scores / softcap)) + attention_mask
    for choose in _choices:
        scores = scores.masked_fill(~choose(_layers[-1]), -torch.inf)
    if sink is not None:
        scores = torch.cat((scores, sink[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
    alpha = scores.float().softmax(-1).to(query.dtype)[..., : key.shape[2]]
    if _choices:
        alpha = alpha.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0)
    return (alpha @ value.repeat_interleave(repeats, 1)).transpose(1, 2).contiguous(), alpha


AttentionInterface.register(NAME, _eager_attention)
AttentionMaskInterface.register(NAME, eager_mask)


def eager_qk(
    model: PreTrainedModel, input_ids: Tensor, choose: Choice | None = None, with_gradients: bool = False
) -> tuple[Tensor, list[Layer]]:
    """Return the logits [1, L, V] and every layer's `Layer`, in order, for one unpadded sequence input_ids [1, L].

    With `choose`, every row attends to the chosen keys only; a row without a key has the output 0.
    """
    before = model.config._attn_implementation
    _layers.clear()
    _choices[:] = [] if choose is None else [choose]
    model.set_attn_implementation(NAME)
    try:
        with torch.set_grad_enabled(with_gradients):
            return model(input_ids, use_cache=False).logits, list(_layers)
    finally:
        model.set_attn_implementation(before)
        _layers.clear()
        _choices.clear()


def layer_weights(layer: Layer) -> Tensor:
    """Dense weights [H, L, L] of what a family's attention received, with the mask that transformers made."""
    repeats = len(layer.q) // len(layer.k)
    scores = layer.scaling * layer.q.double() @ layer.k.double().repeat_interleave(repeats, 0).mT
    scores = scores if layer.softcap is None else layer.softcap * torch.tanh(scores / layer.softcap)
    scores = scores.masked_fill(~layer.mask, -torch.inf)
    if layer.sink is not None:
        scores = torch.cat([scores, layer.sink.detach().double()[:, None, None].expand(-1, len(scores[0]), 1)], -1)
    return scores.softmax(-1)[..., : layer.mask.shape[-1]]


@torch.no_grad()
def nll_reference(model: PreTrainedModel, input_ids: Tensor) -> Tensor:
    """Return next-token losses [L - 1] in nats, float64, for one sequence input_ids [1, L]; entry t predicts t + 1."""
    predictions = model(input_ids).logits[0, :-1].double().log_softmax(-1)
    return -predictions.gather(-1, input_ids[0, 1:, None])[:, 0]
