"""Selfcheck: compare every measure on this machine with plain formulas over all L x L weights.

The formulas take the kernel's own q, k and v and are evaluated in float64. So differences come from the kernel and the
measure alone, not from rounding in earlier layers.
"""

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from headscope.attention import backend, families
from headscope.attention.geometry import Geometry
from headscope.attention.kernel import AttentionVariant, attend, blockwise_attention
from headscope.attention.kernels.runtime import runs_kernels
from headscope.attention.record import LOCAL_DISTANCE, AttentionRecord, RowSums
from headscope.attention.row_sums import attend_with_row_sums
from headscope.errors import BadInput
from headscope.forward.capture import capturing
from headscope.forward.logits import compute_loss_by_position, last_hidden_states
from headscope.measures.attention_rows import row_statistics, statistics_of_sums
from headscope.measures.distance_profile import log_spaced_distances, profile_sums
from headscope.measures.pooled_map import add_block_sums
from headscope.measures.rotary_pairs import mean_abs_by_row, pair_moment_sums, planes_by_head, rotary_planes
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model

log = logging.getLogger("headscope")

P = ParamSpec("P")
T = TypeVar("T")

TOLERANCES = {
    "attention output": (1e-4, 2e-2),
    "log-sum-exp, fused": (1e-4, 5e-3),
    "log-sum-exp, blockwise": (1e-4, 5e-3),
    "row statistics": (1e-3, 2e-2),
    "rotary pairs": (1e-4, 1e-4),
    "distance profile": (1e-4, 1e-4),
    "pooled maps": (1e-4, 5e-3),
    "row statistics, kernel": (1e-3, 2e-2),
    "rotary pairs, kernel": (1e-4, 1e-4),
    "distance profile, kernel": (1e-4, 1e-4),
    "pooled maps, kernel": (1e-4, 5e-3),
    "loss": (1e-3, 3e-2),
    "cached keys": (1e-4, 2e-2),
    "sliding window": (1e-4, 2e-2),
    "chunked attention": (1e-4, 2e-2),
    "soft cap": (1e-4, 2e-2),
    "learned sink": (1e-4, 2e-2),
}
"""Largest allowed difference of each quantity, in float32 and in bfloat16, whose kernels round the weights.

Log-sum-exp and loss: nats. Attention output: share of its largest value. Row statistics: relative above 1, otherwise
absolute. Rotary pairs and distance profile: share of the sum of absolute terms. Pooled maps: mean weight of a query.
The others are the cases of `VARIANT_CASES` on random heads: the larger difference of output and log-sum-exp. The
quantities of kernels are checked where they run: on a GPU, those of rows and maps also under each variant.
"""
MAP_BLOCK_SIZES = (5, 20, 70)
"""Tokens per block of the maps that are checked: the kernel has tiles of 16, 32 and 64 tokens for them."""
RANDOM_KEY_COUNT, RANDOM_QUERY_COUNTS = 150, (150, 40, 1)
"""Shapes of the random heads: a full pass, several queries after cached keys, and one query."""
VARIANT_CASES = {
    "cached keys": AttentionVariant(1.0),
    "sliding window": AttentionVariant(1.0, window=30),
    "chunked attention": AttentionVariant(1.0, chunk_size=64),
    "soft cap": AttentionVariant(1.0, softcap=3.0),
    "learned sink": AttentionVariant(1.0, sink=torch.tensor(1.5)),
}
"""Variants of attention that not every model has."""


@dataclass(frozen=True)
class CheckResult:
    """The largest difference of one quantity, and the tolerance."""

    quantity: str
    dtype: str
    length: int
    difference: float
    tolerance: float

    @property
    def is_within_tolerance(self) -> bool:
        return self.difference <= self.tolerance


@torch.no_grad()
def run_checks(model: Model, ids: Tensor) -> Iterator[CheckResult]:
    """Check every measure on ids [L], which must be short: memory is O(L^2 x head_dim).

    Raises BadInput if the plain formulas or the family's eager attention do not apply to the model: it has a position
    scheme, a soft cap, a learned sink, a window, chunks, or an indexer that does not choose all keys. `VARIANT_CASES`
    cover these, except the indexer, on random heads.
    """
    if model.scheme != "base":
        raise BadInput(f"'{model.name}' has scheme '{model.scheme}', which eager attention lacks. Omit the scheme")
    largest: dict[str, float] = defaultdict(float)

    def listen(record: AttentionRecord) -> None:
        hides_keys = bool((record.visible_counts <= record.query_key_index).any())
        is_plain = record.softcap is None and record.sink is None and record.chosen is None
        if hides_keys or not is_plain:
            raise BadInput(
                f"'{model.name}' uses a sliding window, chunked attention, a logit soft cap, a learned sink or an "
                "indexer, which selfcheck does not cover. Use another checkpoint"
            )
        for quantity, difference in _layer_differences(model, record):
            largest[quantity] = max(largest[quantity], difference if math.isfinite(difference) else math.inf)

    ids = ids.to(model.device)[None]
    with attached(model), evaluating(model), capturing(model) as layers:
        layers.listen(listen)
        measured = compute_loss_by_position(model, ids, last_hidden_states(model, ids))
    loss = float(measured.sums.sum()) / int(measured.counts.sum())
    largest["loss"] = abs(loss - _eager_loss(model, ids)) if math.isfinite(loss) else math.inf
    for quantity, difference in _rule_differences(model):
        largest[quantity] = max(largest[quantity], difference)
    is_half_precision = model.module.dtype.itemsize < 4
    dtype = str(model.module.dtype).removeprefix("torch.")
    for quantity, tolerances in TOLERANCES.items():
        if quantity in largest:
            yield CheckResult(quantity, dtype, ids.shape[1], largest[quantity], tolerances[is_half_precision])


def _rule_differences(model: Model) -> Iterator[tuple[str, float]]:
    """The largest difference under each variant of attention, on random heads with the model's shape."""
    geometry, generator = model.geometry.at_layer(0), torch.Generator().manual_seed(0)
    scaling = geometry.head_dim**-0.5
    for name, case in VARIANT_CASES.items():
        largest = 0.0
        for queries in RANDOM_QUERY_COUNTS:
            shapes = (
                (geometry.heads, queries),
                (geometry.kv_groups, RANDOM_KEY_COUNT),
                (geometry.kv_groups, RANDOM_KEY_COUNT),
            )
            random_heads = (torch.randn(1, *shape, geometry.head_dim, generator=generator) for shape in shapes)
            q, k, v = (t.to(model.device, model.module.dtype) for t in random_heads)
            sink = None if case.sink is None else case.sink.expand(geometry.heads).to(q)
            variant = replace(case, scaling=scaling, sink=sink)
            out, lse = attend(q, k, v, None, variant, 0.0, True)
            keys, values = (_expand_to_query_heads(t[0], geometry.heads) for t in (k, v))
            alpha, expected_lse = _exact_weights(q[0].double(), keys, variant)
            expected = alpha @ values
            assert lse is not None
            limits = variant.window, 0, variant.chunk_size, variant.softcap, variant.sink
            record = AttentionRecord(0, 0, q[0], k[0], v[0], out[0], lse[0], scaling, *limits)
            if runs_kernels(record):
                yield "row statistics, kernel", _kernel_row_difference(record, alpha)
                yield "pooled maps, kernel", _kernel_map_difference(record, alpha)
            results = [(out[0], lse[0])]
            if q.device.type == "cpu":
                results.append(attend_with_row_sums(q[0], k[0], v[0], variant)[:2])
            for z, z_lse in results:
                differences = _max_abs(z - expected) / _max_abs(expected), _max_abs(z_lse - expected_lse)
                largest = max([largest, *(error if math.isfinite(error) else math.inf for error in differences)])
        yield name, largest


def _kernel_row_difference(record: AttentionRecord, alpha: Tensor) -> float:
    """The largest difference of the statistics of all rows between the GPU's kernel and the weights [H, Lq, Lk]."""
    from headscope.attention.kernels.row_sums import row_sums

    distance = record.query_key_index[:, None] - torch.arange(alpha.shape[-1], device=alpha.device)
    expected = _exact_row_statistics(alpha, record.lse.double(), distance)
    sums = _kernel_output(row_sums, record)
    if sums is None:
        return math.inf
    actual = row_statistics(replace(record, row_sums=sums), torch.arange(alpha.shape[1]))
    difference = _max_abs((actual - expected) / expected.abs().clamp(min=1))
    return difference if math.isfinite(difference) else math.inf


def _kernel_map_difference(record: AttentionRecord, alpha: Tensor) -> float:
    """`_map_difference` of the GPU's kernel."""
    from headscope.attention.kernels.pooled_map import add_pooled_map

    def add_sums(record: AttentionRecord, sums: Tensor, block_size: int) -> Tensor:
        return _values_of_kernel(sums, add_pooled_map, record, sums, block_size)

    return _map_difference(record, alpha, add_sums)


def _map_difference(
    record: AttentionRecord, alpha: Tensor, add_sums: Callable[[AttentionRecord, Tensor, int], Tensor]
) -> float:
    """The largest difference between pooled maps and the weights [H, Lq, Lk] averaged over blocks of queries.

    `add_sums` adds the sums by blocks of tokens, with the signature of `add_block_sums`.
    """
    heads, queries, keys = alpha.shape
    largest = 0.0
    for block_size in MAP_BLOCK_SIZES:
        key_blocks = torch.arange(keys, device=alpha.device) // block_size
        is_in_block = torch.nn.functional.one_hot(key_blocks).double()
        rows = is_in_block[keys - queries :]
        sums = torch.zeros(heads, *[is_in_block.shape[1]] * 2, device=alpha.device)
        difference = add_sums(record, sums, block_size) - rows.mT @ alpha @ is_in_block
        error = _max_abs(difference / rows.sum(0).clamp(min=1)[:, None])
        largest = max(largest, error if math.isfinite(error) else math.inf)
    return largest


def _exact_weights(q: Tensor, k: Tensor, variant: AttentionVariant) -> tuple[Tensor, Tensor]:
    """All weights [H, Lq, Lk] and the log-sum-exp under a variant."""
    key = torch.arange(k.shape[1], device=q.device)
    query = key[len(key) - q.shape[1] :, None]
    hidden = key > query
    if variant.window is not None:
        hidden = hidden | (key <= query - variant.window)
    if variant.chunk_size is not None:
        hidden = hidden | (key // variant.chunk_size != query // variant.chunk_size)
    logits = variant.scaling * q @ k.mT
    logits = logits if variant.softcap is None else variant.softcap * torch.tanh(logits / variant.softcap)
    logits = logits.masked_fill(hidden, -torch.inf)
    if variant.sink is not None:
        logits = torch.cat((logits, variant.sink.double()[:, None, None].expand(-1, q.shape[1], 1)), -1)
    return logits.softmax(-1)[..., : k.shape[1]], logits.logsumexp(-1)


def _eager_loss(model: Model, ids: Tensor) -> float:
    """Mean loss under the family's own eager attention."""
    implementation = families.reference_implementation(model.module)
    with backend.using_attention_implementation(model.module, implementation), evaluating(model):
        logits = model.module(ids, use_cache=False).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits.double(), ids[0, 1:]))


def _layer_differences(model: Model, record: AttentionRecord) -> Iterator[tuple[str, float]]:
    """The largest difference of each measure in one layer."""
    heads = record.q.shape[0]
    q, k, v = record.q.double(), _expand_to_query_heads(record.k, heads), _expand_to_query_heads(record.v, heads)
    distance = record.query_key_index[:, None] - record.query_key_index
    hidden = distance < 0
    logits = record.scaling * q @ k.mT
    logits = logits.masked_fill(hidden, -torch.inf)
    lse, alpha = logits.logsumexp(-1), logits.softmax(-1)
    out = alpha @ v
    yield "attention output", _max_abs(record.z - out) / max(_max_abs(out), 1e-12)
    yield "log-sum-exp, fused", _max_abs(record.lse - lse)
    _, blockwise_lse = blockwise_attention(record.q[None], record.k[None], record.v[None], record.scaling, True)
    yield "log-sum-exp, blockwise", _max_abs(blockwise_lse[0] - lse)
    rows = torch.arange(record.q.shape[1], device=q.device)
    expected = _exact_row_statistics(alpha, lse, distance)
    yield "row statistics", _max_abs((row_statistics(record, rows) - expected) / expected.abs().clamp(min=1))
    yield "pooled maps", _map_difference(record, alpha, add_block_sums)
    if runs_kernels(record):
        yield "row statistics, kernel", _kernel_row_difference(record, alpha)
        yield "pooled maps, kernel", _kernel_map_difference(record, alpha)
    if record.q.device.type == "cpu":
        z, _, row_sums = attend_with_row_sums(record.q, record.k, record.v, AttentionVariant(record.scaling))
        yield "attention output", _max_abs(z - out) / max(_max_abs(out), 1e-12)
        swept = row_statistics(replace(record, row_sums=row_sums), rows)
        yield "row statistics", _max_abs((swept - expected) / expected.abs().clamp(min=1))
    yield from _pair_differences(record, model.geometry.at_layer(record.layer), rows, hidden)


def _pair_differences(
    record: AttentionRecord, geometry: Geometry, rows: Tensor, hidden: Tensor
) -> Iterator[tuple[str, float]]:
    """The largest difference of the sums by rotary pair, from the torch code and, where they run, the kernels."""
    q_planes, k_planes = rotary_planes(record.q, geometry), rotary_planes(record.k, geometry)
    visible, distances = record.visible_counts, log_spaced_distances(len(rows))
    moments = torch.stack([planes_by_head(t, geometry) for t in pair_moment_sums(q_planes, k_planes, visible)])
    means = mean_abs_by_row(q_planes, k_planes, rows, visible)
    profiles = profile_sums(q_planes, k_planes, distances)
    results = [
        (
            "",
            moments,
            torch.stack([planes_by_head(t, geometry) for t in means]),
            torch.stack([planes_by_head(t, geometry) for t in profiles.unbind(-1)], -1),
        )
    ]
    if runs_kernels(record):
        results.append((", kernel", *_kernel_pair_sums(record, geometry, rows, distances, *results[0][1:])))
    for head in range(geometry.heads):
        q, k = _head_planes(head, q_planes, k_planes, geometry)
        c = torch.einsum("xfi,xfj->fij", q, k)
        visible_c = c.masked_fill(hidden, 0)
        signed, size, squares = visible_c.sum((1, 2)), visible_c.abs().sum((1, 2)), visible_c.square().sum((1, 2))
        magnitude = _diagonal_sums(torch.einsum("xfi,xfj->fij", q.abs(), k.abs()), distances)
        for suffix, head_moments, head_means, head_profiles in results:
            absolute = (head_means[:, head].double() * visible[:, None]).sum(0)
            yield f"rotary pairs{suffix}", _relative_difference(head_moments[0, head], signed, size)
            yield f"rotary pairs{suffix}", _relative_difference(head_moments[1, head], squares, squares)
            yield f"rotary pairs{suffix}", _relative_difference(absolute, size, size)
            profile = _relative_difference(head_profiles[head], _diagonal_sums(c, distances), magnitude)
            yield f"distance profile{suffix}", profile


def _kernel_pair_sums(
    record: AttentionRecord, geometry: Geometry, rows: Tensor, distances: Tensor, *torch_outputs: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Moments, means of |q_f . k_f| of rows and sums at distances, by head, from the GPU's kernels.

    `torch_outputs` are those of the torch code.
    """
    from headscope.attention.kernels.distance_sums import distance_sums
    from headscope.attention.kernels.pair_moments import pair_moments
    from headscope.attention.kernels.pair_products import mean_abs_products

    moments, means, sums = torch_outputs
    return (
        _values_of_kernel(moments, pair_moments, record, geometry),
        _values_of_kernel(means, mean_abs_products, record, geometry, rows),
        _values_of_kernel(sums, distance_sums, record, geometry, distances.to(record.q.device)),
    )


def _values_of_kernel(expected: Tensor, kernel: Callable[P, Tensor], *args: P.args, **kwargs: P.kwargs) -> Tensor:
    """The output of a kernel; NaN in the shape of `expected` if it fails."""
    output = _kernel_output(kernel, *args, **kwargs)
    return torch.full_like(expected, torch.nan) if output is None else output


def _kernel_output(kernel: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T | None:
    """The output of a kernel; None if it fails."""
    try:
        return kernel(*args, **kwargs)
    except Exception as error:  # Triton and its compilers raise errors of many types: the check fails, not the command
        _warn_of_kernel(kernel.__name__, " ".join(f"{type(error).__name__}: {error}".split())[:300])
        return None


@cache
def _warn_of_kernel(name: str, reason: str) -> None:
    """Warn once of a kernel that fails in every layer for the same reason."""
    log.warning("the kernel %s fails: %s", name, reason)


def _exact_row_statistics(alpha: Tensor, lse: Tensor, distance: Tensor) -> Tensor:
    """`row_statistics` of all rows, from plain sums over the weights [H, Lq, Lk], in float64.

    `lse` [H, Lq] are the rows' log-sum-exp, `distance` [Lq, Lk] is i - j. Statistics follow from the sums by the
    formulas of `row_statistics`; the tests compare those with others.
    """
    among_keys = alpha / alpha.sum(-1, keepdim=True)  # without the share of a sink
    sums = RowSums(
        max_logit=alpha.amax(-1).log() + lse,
        max_weight=alpha.amax(-1),
        first_weight=alpha[..., 0],
        local_weight=(alpha * ((distance >= 0) & (distance < LOCAL_DISTANCE))).sum(-1),
        squares=among_keys.square().sum(-1),
        neg_entropy=torch.special.xlogy(among_keys, among_keys).sum(-1),
        distance=(among_keys * distance).sum(-1),
    )
    return statistics_of_sums(sums, distance.amax(-1))  # key 0 is the farthest: its distance is the position


def _head_planes(head: int, q_planes: Tensor, k_planes: Tensor, geometry: Geometry) -> tuple[Tensor, Tensor]:
    """The rotary pairs of one head's queries and keys, both [2, F, L], float64; `geometry` is that of the layer."""
    group, within = divmod(head, geometry.heads // geometry.kv_groups)
    pairs = slice(group * geometry.all_pairs, (group + 1) * geometry.all_pairs)
    return q_planes[:, pairs, within].double(), k_planes[:, pairs, 0].double()


def _diagonal_sums(contributions: Tensor, distances: Tensor) -> Tensor:
    """Sums of contributions [F, L, L] over all queries and their keys at each distance, [F, D]."""
    return torch.stack([contributions.diagonal(-int(distance), 1, 2).sum(-1) for distance in distances], -1)


def _expand_to_query_heads(t: Tensor, heads: int) -> Tensor:
    """Keys or values [G, L, d] repeated for every query head, float64."""
    return t.double().repeat_interleave(heads // t.shape[0], 0)


def _max_abs(t: Tensor) -> float:
    return float(t.abs().max())


def _relative_difference(measured: Tensor, expected: Tensor, magnitude: Tensor) -> float:
    """The largest difference as a share of `magnitude`, the sum of absolute terms."""
    return _max_abs((measured.double() - expected) / magnitude.clamp(min=1e-12))
