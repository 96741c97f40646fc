"""The keys that the rules of sparse selections choose, row by row, from dense weights."""

import torch
from torch import Tensor


def dense_sets(rule: str, alpha: Tensor, q: Tensor, k: Tensor) -> Tensor:
    """The set of every row, bool [H, L, L], from dense weights, row by row. q [H, L, d]; k [G, L, d]."""
    name, *sizes = rule.split(":")
    heads, length, _ = alpha.shape
    chosen = torch.zeros_like(alpha, dtype=torch.bool)
    first, size = int(sizes[0]), int(sizes[-1])
    groups = {"group-top": heads // len(k), "layer-top": heads}.get(name, 1)
    k = k.repeat_interleave(heads // len(k), 0)
    last = alpha[:, -64:]
    for h in range(heads):
        of_unit = alpha[h // groups * groups : h // groups * groups + groups].sum(0)
        columns = last[h].sum(0).argsort(descending=True)[:first].tolist()
        by_distance = torch.stack([last[h].diagonal(length - last.shape[1] - d).sum() for d in range(length)])
        diagonals = by_distance.argsort(descending=True)[:size].tolist()
        for i in range(length):
            seen = alpha[h, i].nonzero()[:, 0].tolist()
            if name.endswith("top"):
                keys = of_unit[i].argsort(descending=True)[:size].tolist()
            elif name == "streaming":
                keys = [j for j in seen if j < first or i - j < size]
            elif name == "vertical-slash":
                keys = [j for j in seen if j in columns or i - j in diagonals]
            else:
                own = slice(i // first * first, (i // first + 1) * first)
                query = q[h, own].mean(0) if name == "block-sparse" else q[h, i]
                scores = {
                    b: block_score(name, query, *(t[b * first : (b + 1) * first] for t in (k[h], alpha[h, i])))
                    for b in range(i // first)
                    if alpha[h, i, b * first : (b + 1) * first].any()
                }
                best = [i // first, *sorted(scores, key=scores.__getitem__, reverse=True)][:size]
                keys = [j for j in seen if j // first in best]
            chosen[h, i, [j for j in keys if j in seen]] = True
    return chosen


def block_score(rule: str, query: Tensor, keys: Tensor, mass: Tensor) -> float:
    """The score of a block with these keys [B, d], which get this mass [B]."""
    if rule == "block":
        return float(mass.sum())
    if rule in ("block-mean", "block-sparse"):
        return float(query @ keys.mean(0))
    return float(torch.maximum(query * keys.amin(0), query * keys.amax(0)).sum())
