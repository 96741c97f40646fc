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
from headscope.attention.kernel import Rule, attend, in_blocks
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput
from headscope.forward.capture import capturing
from headscope.forward.logits import last_hidden, loss_by_position
from headscope.measures.attention_rows import LOCAL_KEYS, row_statistics
from headscope.measures.distance_profile import distances, profile_sums
from headscope.measures.rotary_pairs import moment_sums, row_means
from headscope.measures.rotary_planes import by_head, planes
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model

ALLOWED = {
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
KEYS, QUERIES = 150, (150, 40, 1)
"""Of random heads: a whole pass, some tokens after cached ones, and one."""
RULES = {
    "cached keys": Rule(1.0),
    "a window": Rule(1.0, window=30),
    "chunks": Rule(1.0, chunk=64),
    "a cap": Rule(1.0, cap=3.0),
    "a sink": Rule(1.0, sink=torch.tensor(1.5)),
}


@dataclass(frozen=True)
class Check:
    """The largest difference that was found, and what is allowed."""

    what: str
    dtype: str
    length: int
    found: float
    allowed: float

    @property
    def agrees(self) -> bool:
        return self.found <= self.allowed


@torch.no_grad()
def checks(model: Model, ids: Tensor) -> Iterator[Check]:
    """Every measure of ids [L], which must be short: memory is O(L^2 x head_dim).

    Raises BadInput for a model that its family's eager attention or the plain formulas are not those of: one under a
    scheme, or whose weights are capped, shared with a sink or kept within a window or chunk. RULES try those.
    """
    if model.scheme != "base":
        raise BadInput(f"'{model.name}' is under {model.scheme}, which eager attention knows nothing of: leave it out")
    worst: dict[str, float] = defaultdict(float)

    def listen(heard: AttentionRecord) -> None:
        hides = bool((heard.visible <= heard.query_index).any())
        if hides or heard.cap is not None or heard.sink is not None:
            raise BadInput(f"'{model.name}' attends by more than q . k, or not to every key: check another checkpoint")
        for what, difference in _differences(model, heard):
            worst[what] = max(worst[what], difference if math.isfinite(difference) else math.inf)

    ids = ids.to(model.device)[None]
    with attached(model), evaluating(model), capturing(model) as layers:
        layers.listen(listen)
        measured = loss_by_position(model, ids, last_hidden(model, ids))
    loss = float(measured.sums.sum() / measured.counts.sum())
    worst["loss"] = abs(loss - _eager_loss(model, ids)) if math.isfinite(loss) else math.inf
    worst |= dict(_of_rules(model))
    rounded = model.module.dtype.itemsize < 4
    dtype = str(model.module.dtype).removeprefix("torch.")
    for what, allowed in ALLOWED.items():
        yield Check(what, dtype, ids.shape[1], worst[what], allowed[rounded])


def _of_rules(model: Model) -> Iterator[tuple[str, float]]:
    """The largest difference under each rule of attention, of heads shaped like the model's."""
    geometry, chance = model.geometry, torch.Generator().manual_seed(0)
    scaling = geometry.head_dim**-0.5
    for what, asked in RULES.items():
        found = 0.0
        for queries in QUERIES:
            shapes = (geometry.heads, queries), (geometry.kv_groups, KEYS), (geometry.kv_groups, KEYS)
            drawn = (torch.randn(1, *shape, geometry.head_dim, generator=chance) for shape in shapes)
            q, k, v = (t.to(model.device, model.module.dtype) for t in drawn)
            sink = None if asked.sink is None else asked.sink.expand(geometry.heads).to(q)
            rule = replace(asked, scaling=scaling, sink=sink)
            out, lse = attend(q, k, v, None, rule, 0.0, True)
            keys, values = (_of_each(t[0], geometry.heads) for t in (k, v))
            expected, exact = _by_rule(q[0].double(), keys, values, rule)
            assert lse is not None
            differences = _largest(out[0] - expected) / _largest(expected), _largest(lse[0] - exact)
            found = max([found, *(each if math.isfinite(each) else math.inf for each in differences)])
        yield what, found


def _by_rule(q: Tensor, k: Tensor, v: Tensor, rule: Rule) -> tuple[Tensor, Tensor]:
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
    with backend.attending(model.module, "eager"), evaluating(model):
        logits = model.module(ids, use_cache=False).logits[0, :-1]
    return float(torch.nn.functional.cross_entropy(logits.double(), ids[0, 1:]))


def _differences(model: Model, heard: AttentionRecord) -> Iterator[tuple[str, float]]:
    """The largest difference of each measure in one layer."""
    heads = heard.q.shape[0]
    q, k, v = heard.q.double(), _of_each(heard.k, heads), _of_each(heard.v, heads)
    distance = heard.query_index[:, None] - heard.query_index
    hidden = distance < 0
    logits = heard.scaling * q @ k.mT
    seen = logits.masked_fill(hidden, -torch.inf)
    lse, alpha = seen.logsumexp(-1), seen.softmax(-1)
    out = alpha @ v
    yield "attention output", _largest(heard.z - out) / max(_largest(out), 1e-12)
    yield "log-sum-exp, fused", _largest(heard.lse - lse)
    _, blocks = in_blocks(heard.q[None], heard.k[None], heard.v[None], heard.scaling, True)
    yield "log-sum-exp, in blocks", _largest(blocks[0] - lse)
    rows = torch.arange(heard.q.shape[1], device=q.device)
    expected = _row_statistics(alpha, distance)
    yield "rows of attention", _largest((row_statistics(heard, rows) - expected) / expected.abs().clamp(min=1))
    geometry = model.geometry
    qp, kp = planes(heard.q, geometry), planes(heard.k, geometry)
    visible = heard.visible
    moments = torch.stack([by_head(t, geometry) for t in moment_sums(qp, kp, visible)])
    means = row_means(qp, kp, rows, visible).double()
    sums = torch.stack([by_head(t, geometry) for t in profile_sums(qp, kp, distances(len(rows))).unbind(-1)], -1)
    absolute = by_head((means * visible[:, None, None]).sum(0), geometry)
    at = distances(len(rows))
    for head in range(geometry.heads):
        q, k = _planes_of(head, qp, kp, model)
        c = torch.einsum("xfi,xfj->fij", q, k)
        inside = c.masked_fill(hidden, 0)
        signed, size, squares = inside.sum((1, 2)), inside.abs().sum((1, 2)), inside.square().sum((1, 2))
        yield "rotary pairs", _share(moments[0, head], signed, size)
        yield "rotary pairs", _share(moments[1, head], squares, squares)
        yield "rotary pairs", _share(absolute[head], size, size)
        added_up = torch.einsum("xfi,xfj->fij", q.abs(), k.abs())
        yield "distance profile", _share(sums[head], _diagonals(c, at), _diagonals(added_up, at))


def _row_statistics(alpha: Tensor, distance: Tensor) -> Tensor:
    """The statistics of `row_statistics`, in its order, from the weights [H, L, L]."""
    ess2 = 1 / alpha.square().sum(-1)
    entropy = -torch.special.xlogy(alpha, alpha).sum(-1)
    local = ((distance >= 0) & (distance < LOCAL_KEYS)).double()
    far = (alpha * distance).sum(-1)
    sums = (alpha * local).sum(-1)
    return torch.stack([ess2, ess2.log(), entropy.exp(), alpha.amax(-1), alpha[..., 0], sums, far])


def _planes_of(head: int, qp: Tensor, kp: Tensor, model: Model) -> tuple[Tensor, Tensor]:
    """The rotary pairs of one head's queries and keys, both [2, F, L], float64."""
    geometry = model.geometry
    group, within = divmod(head, geometry.heads_per_group)
    pairs = slice(group * geometry.all_pairs, (group + 1) * geometry.all_pairs)
    return qp[:, pairs, within].double(), kp[:, pairs, 0].double()


def _diagonals(c: Tensor, at: Tensor) -> Tensor:
    """Sums of c [F, L, L] over all queries and the keys that many tokens before them, [F, D]."""
    return torch.stack([c.diagonal(-int(distance), 1, 2).sum(-1) for distance in at], -1)


def _of_each(t: Tensor, heads: int) -> Tensor:
    """Keys or values [G, L, d] for every query head, float64."""
    return t.double().repeat_interleave(heads // t.shape[0], 0)


def _largest(t: Tensor) -> float:
    return float(t.abs().max())


def _share(found: Tensor, expected: Tensor, size: Tensor) -> float:
    """The largest difference as a share of what was added up."""
    return _largest((found.double() - expected) / size.clamp(min=1e-12))
