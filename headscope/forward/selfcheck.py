"""Whether this machine measures what eager attention says: every measure against plain formulas over all L x L weights.

The formulas take q, k and v as the kernel got them and are evaluated in float64, so that what differs is the kernel and
the measure alone, not the rounding of the layers before.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from headscope.attention import backend
from headscope.attention.kernel import AttentionRule, attend, blockwise_attention
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput
from headscope.forward.capture import capturing
from headscope.forward.logits import compute_loss_by_position, last_hidden_states
from headscope.measures.attention_rows import LOCAL_DISTANCE, row_statistics
from headscope.measures.distance_profile import log_spaced_distances, profile_sums
from headscope.measures.rotary_pairs import mean_abs_by_row, pair_moment_sums
from headscope.measures.rotary_planes import planes_by_head, rotary_planes
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model

TOLERANCES = {
    "attention output": (1e-4, 2e-2),
    "log-sum-exp, fused": (1e-4, 5e-3),
    "log-sum-exp, in blocks": (1e-4, 5e-3),
    "rows of attention": (1e-3, 2e-2),
    "rotary pairs": (1e-4, 1e-4),
    "distance profile": (1e-4, 1e-4),
    "loss": (1e-3, 3e-2),
    "cached keys": (1e-4, 2e-2),
    "a window": (1e-4, 2e-2),
    "chunks": (1e-4, 2e-2),
    "a cap": (1e-4, 2e-2),
    "a sink": (1e-4, 2e-2),
}
"""What each may differ by, in float32 and in bfloat16, whose kernels round the weights (not q and k, which both get).

Nats for log-sum-exp and loss; of the output a share of its largest value, of rows of a value where it is above 1, of
pairs and distances of what was added up. The last are what attention knows beyond what every model asks of it, tried
on random heads: the larger difference of output and log-sum-exp.
"""
RANDOM_KEY_COUNT, RANDOM_QUERY_COUNTS = 150, (150, 40, 1)
"""Of random heads: a whole pass, some tokens after cached ones, and one."""
RULE_CASES = {
    "cached keys": AttentionRule(1.0),
    "a window": AttentionRule(1.0, window=30),
    "chunks": AttentionRule(1.0, chunk=64),
    "a cap": AttentionRule(1.0, cap=3.0),
    "a sink": AttentionRule(1.0, sink=torch.tensor(1.5)),
}


@dataclass(frozen=True)
class CheckResult:
    """The largest difference that was found, and what is allowed."""

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
    """Every measure of ids [L], which must be short: memory is O(L^2 x head_dim).

    Raises BadInput for a model that its family's eager attention or the plain formulas are not those of: one under a
    scheme, or whose weights are capped, shared with a sink or kept within a window or chunk. RULES try those.
    """
    if model.scheme != "base":
        raise BadInput(f"'{model.name}' is under {model.scheme}, which eager attention knows nothing of: leave it out")
    worst: dict[str, float] = defaultdict(float)

    def listen(heard: AttentionRecord) -> None:
        hides = bool((heard.visible_counts <= heard.query_key_index).any())
        if hides or heard.cap is not None or heard.sink is not None:
            raise BadInput(f"'{model.name}' attends by more than q . k, or not to every key: check another checkpoint")
        for what, difference in _layer_differences(model, heard):
            worst[what] = max(worst[what], difference if math.isfinite(difference) else math.inf)

    ids = ids.to(model.device)[None]
    with attached(model), evaluating(model), capturing(model) as layers:
        layers.listen(listen)
        measured = compute_loss_by_position(model, ids, last_hidden_states(model, ids))
    loss = float(measured.sums.sum() / measured.counts.sum())
    worst["loss"] = abs(loss - _eager_loss(model, ids)) if math.isfinite(loss) else math.inf
    worst |= dict(_rule_differences(model))
    rounded = model.module.dtype.itemsize < 4
    dtype = str(model.module.dtype).removeprefix("torch.")
    for what, allowed in TOLERANCES.items():
        yield CheckResult(what, dtype, ids.shape[1], worst[what], allowed[rounded])


def _rule_differences(model: Model) -> Iterator[tuple[str, float]]:
    """The largest difference under each rule of attention, of heads shaped like the model's."""
    geometry, chance = model.geometry, torch.Generator().manual_seed(0)
    scaling = geometry.head_dim**-0.5
    for what, asked in RULE_CASES.items():
        found = 0.0
        for queries in RANDOM_QUERY_COUNTS:
            shapes = (
                (geometry.heads, queries),
                (geometry.kv_groups, RANDOM_KEY_COUNT),
                (geometry.kv_groups, RANDOM_KEY_COUNT),
            )
            drawn = (torch.randn(1, *shape, geometry.head_dim, generator=chance) for shape in shapes)
            q, k, v = (t.to(model.device, model.module.dtype) for t in drawn)
            sink = None if asked.sink is None else asked.sink.expand(geometry.heads).to(q)
            rule = replace(asked, scaling=scaling, sink=sink)
            out, lse = attend(q, k, v, None, rule, 0.0, True)
            keys, values = (_expand_to_query_heads(t[0], geometry.heads) for t in (k, v))
            expected, exact = _exact_attention(q[0].double(), keys, values, rule)
            assert lse is not None
            differences = _max_abs(out[0] - expected) / _max_abs(expected), _max_abs(lse[0] - exact)
            found = max([found, *(each if math.isfinite(each) else math.inf for each in differences)])
        yield what, found


def _exact_attention(q: Tensor, k: Tensor, v: Tensor, rule: AttentionRule) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp under a rule, from all weights."""
    at = torch.arange(k.shape[1], device=q.device)
    query = at[len(at) - q.shape[1] :, None]
    hidden = at > query
    if rule.window is not None:
        hidden = hidden | (at <= query - rule.window)
    if rule.chunk is not None:
        hidden = hidden | (at // rule.chunk != query // rule.chunk)
    logits = rule.scaling * q @ k.mT
    logits = logits if rule.cap is None else rule.cap * torch.tanh(logits / rule.cap)
    logits = logits.masked_fill(hidden, -torch.inf)
    if rule.sink is not None:
        logits = torch.cat((logits, rule.sink.double()[:, None, None].expand(-1, q.shape[1], 1)), -1)
    return logits.softmax(-1)[..., : k.shape[1]] @ v, logits.logsumexp(-1)


def _eager_loss(model: Model, ids: Tensor) -> float:
    """Mean loss under the family's own eager attention."""
    with backend.using_attention_implementation(model.module, "eager"), evaluating(model):
        logits = model.module(ids, use_cache=False).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits.double(), ids[0, 1:]))


def _layer_differences(model: Model, record: AttentionRecord) -> Iterator[tuple[str, float]]:
    """The largest difference of each measure in one layer."""
    heads = record.q.shape[0]
    q, k, v = record.q.double(), _expand_to_query_heads(record.k, heads), _expand_to_query_heads(record.v, heads)
    distance = record.query_key_index[:, None] - record.query_key_index
    hidden = distance < 0
    logits = record.scaling * q @ k.mT
    seen = logits.masked_fill(hidden, -torch.inf)
    lse, alpha = seen.logsumexp(-1), seen.softmax(-1)
    out = alpha @ v
    yield "attention output", _max_abs(record.z - out) / max(_max_abs(out), 1e-12)
    yield "log-sum-exp, fused", _max_abs(record.lse - lse)
    _, blocks = blockwise_attention(record.q[None], record.k[None], record.v[None], record.scaling, True)
    yield "log-sum-exp, in blocks", _max_abs(blocks[0] - lse)
    rows = torch.arange(record.q.shape[1], device=q.device)
    expected = _exact_row_statistics(alpha, distance)
    yield "rows of attention", _max_abs((row_statistics(record, rows) - expected) / expected.abs().clamp(min=1))
    geometry = model.geometry
    qp, kp = rotary_planes(record.q, geometry), rotary_planes(record.k, geometry)
    visible = record.visible_counts
    moments = torch.stack([planes_by_head(t, geometry) for t in pair_moment_sums(qp, kp, visible)])
    means = mean_abs_by_row(qp, kp, rows, visible).double()
    sums = torch.stack(
        [planes_by_head(t, geometry) for t in profile_sums(qp, kp, log_spaced_distances(len(rows))).unbind(-1)], -1
    )
    absolute = planes_by_head((means * visible[:, None, None]).sum(0), geometry)
    at = log_spaced_distances(len(rows))
    for head in range(geometry.heads):
        q, k = _head_planes(head, qp, kp, model)
        c = torch.einsum("xfi,xfj->fij", q, k)
        inside = c.masked_fill(hidden, 0)
        signed, size, squares = inside.sum((1, 2)), inside.abs().sum((1, 2)), inside.square().sum((1, 2))
        yield "rotary pairs", _relative_difference(moments[0, head], signed, size)
        yield "rotary pairs", _relative_difference(moments[1, head], squares, squares)
        yield "rotary pairs", _relative_difference(absolute[head], size, size)
        added_up = torch.einsum("xfi,xfj->fij", q.abs(), k.abs())
        yield "distance profile", _relative_difference(sums[head], _diagonal_sums(c, at), _diagonal_sums(added_up, at))


def _exact_row_statistics(alpha: Tensor, distance: Tensor) -> Tensor:
    """The statistics of `row_statistics`, in its order, from the weights [H, L, L]."""
    ess2 = 1 / alpha.square().sum(-1)
    entropy = -torch.special.xlogy(alpha, alpha).sum(-1)
    local = ((distance >= 0) & (distance < LOCAL_DISTANCE)).double()
    far = (alpha * distance).sum(-1)
    sums = (alpha * local).sum(-1)
    return torch.stack([ess2, ess2.log(), entropy.exp(), alpha.amax(-1), alpha[..., 0], sums, far])


def _head_planes(head: int, q_planes: Tensor, k_planes: Tensor, model: Model) -> tuple[Tensor, Tensor]:
    """The rotary pairs of one head's queries and keys, both [2, F, L], float64."""
    geometry = model.geometry
    group, within = divmod(head, geometry.heads_per_group)
    pairs = slice(group * geometry.all_pairs, (group + 1) * geometry.all_pairs)
    return q_planes[:, pairs, within].double(), k_planes[:, pairs, 0].double()


def _diagonal_sums(contributions: Tensor, offsets: Tensor) -> Tensor:
    """Sums of c [F, L, L] over all queries and the keys that many tokens before them, [F, D]."""
    return torch.stack([contributions.diagonal(-int(distance), 1, 2).sum(-1) for distance in offsets], -1)


def _expand_to_query_heads(t: Tensor, heads: int) -> Tensor:
    """Keys or values [G, L, d] for every query head, float64."""
    return t.double().repeat_interleave(heads // t.shape[0], 0)


def _max_abs(t: Tensor) -> float:
    return float(t.abs().max())


def _relative_difference(measured: Tensor, expected: Tensor, magnitude: Tensor) -> float:
    """The largest difference as a share of what was added up."""
    return _max_abs((measured.double() - expected) / magnitude.clamp(min=1e-12))
