"""Circuits of heads, from their weights: OV copying score, norms, composition, and the positional logit curve.

Every product of weights is computed in factored form: no [D, D] matrix per head, no [vocabulary, vocabulary] matrix.
Axes: H heads, d head dimension, dv value dimension, D width of the residual stream. Matrices of a query head: W_Q
[d, D], W_K [d, D], W_V [dv, D] and W_O [D, dv], so that W_QK = W_Q^T W_K and W_OV = W_O W_V.
"""

import math
from collections import defaultdict

import numpy as np
import torch
from torch import Tensor

TAIL_SCORES = 50
"""Maximum number of largest scores from which the bound of composition by chance is extrapolated."""
BASELINE_DRAWS = 8
"""Pairs of random matrices in the mean that is subtracted from a composition score."""


def copying_scores(value: Tensor, output: Tensor, vocabulary_map: Tensor) -> Tensor:
    """Sum of the real parts of the eigenvalues of W_U W_OV W_E, divided by the sum of their moduli: [H], -1..1.

    `value` [H, dv, D], `output` [H, D, dv], and `vocabulary_map` [D, D] is W_E W_U, summed over the vocabulary. The
    eigenvalues other than 0 are those of W_V W_E W_U W_O, [dv, dv]. NaN for a head whose weights are 0.
    """
    cores = value.double() @ vocabulary_map.double() @ output.double()
    eigenvalues: Tensor = torch.linalg.eigvals(cores)
    return eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)


def product_norms(left: Tensor, right: Tensor) -> Tensor:
    """Frobenius norms of left^T right, without the [D, D] products: [H] for left and right [H, d, D]."""
    grams = [t.double() @ t.double().transpose(1, 2) for t in (left, right)]
    return (grams[0] * grams[1]).sum((1, 2)).clamp(min=0).sqrt()


def sender_factors(value: Tensor, output: Tensor) -> Tensor:
    """Factors [H, D, dv] with the same W W^T as W_OV / ||W_OV||, for the sender of a composition."""
    factors = output @ _half_gram(value)
    return factors / _norms(factors)


def receiver_factors(input_weight: Tensor, partner_weight: Tensor) -> Tensor:
    """Factors [H, d, D] with the same W^T W as W / ||W||, W = partner^T input, for the receiver of a composition.

    Q-composition reads through W_Q (the partner is W_K), K-composition through W_K (the partner is W_Q), V-composition
    through W_V (the partner is W_O, transposed).
    """
    factors = _half_gram(partner_weight).transpose(1, 2) @ input_weight
    return factors / _norms(factors)


def composition_scores(receivers: Tensor, senders: Tensor) -> Tensor:
    """||W_A W_B|| / (||W_A|| ||W_B||) of every receiver with every sender: [R, S].

    `receivers` [R, d, D] are `receiver_factors`, `senders` [S, D, dv] are `sender_factors`.
    """
    products = receivers.flatten(0, 1) @ senders.transpose(0, 1).flatten(1)
    squares = products.square_().view(*receivers.shape[:2], senders.shape[0], senders.shape[2]).sum((1, 3))
    return squares.sqrt()


def random_composition(receiver_width: int, sender_width: int, stream_width: int, seed: int) -> float:
    """Mean composition score of Gaussian random matrices, W_A of rank `receiver_width` with W_B of `sender_width`."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(BASELINE_DRAWS, *shape, generator=generator)

    receivers = receiver_factors(draw(receiver_width, stream_width), draw(receiver_width, stream_width))
    senders = sender_factors(draw(sender_width, stream_width), draw(stream_width, sender_width))
    return float(composition_scores(receivers, senders).mean())


class CompositionNull:
    """Null distribution of the composition scores of one model, by input of the receiver.

    Each dimension of the residual stream that a sender writes to gets a random sign. This keeps all norms and singular
    values of both heads, and their norms in each dimension, but removes the alignment of sender and receiver.
    """

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(0)
        self._counts: dict[str, int] = defaultdict(int)
        self._sums: dict[str, float] = defaultdict(float)
        self._largest: dict[str, Tensor] = defaultdict(lambda: torch.zeros(0))

    def update(self, kind: str, receivers: Tensor, senders: Tensor) -> None:
        """Add every receiver with every sender: `receiver_factors` [R, d, D] and `sender_factors` [S, D, dv]."""
        signs = torch.randint(2, (senders.shape[1], 1), generator=self._generator).to(senders) * 2 - 1
        scores = composition_scores(receivers, senders * signs).flatten().cpu().double()
        self._counts[kind] += len(scores)
        self._sums[kind] += float(scores.sum())
        largest = torch.cat((self._largest[kind], scores))
        self._largest[kind] = largest.topk(min(len(largest), TAIL_SCORES + 1)).values

    def compute(self) -> dict[str, np.ndarray]:
        """Columns input, pairs, mean, and the bound that the largest score exceeds in 5 % of draws of the signs."""
        rows = [(kind, count, self._sums[kind] / count, self._bound(kind)) for kind, count in self._counts.items()]
        columns = zip(*rows, strict=True)
        return {
            name: np.array(column) for name, column in zip(("input", "pairs", "mean", "bound"), columns, strict=True)
        }

    def _bound(self, kind: str) -> float:
        """The bound from an exponential fit to the largest tenth of the scores, at most TAIL_SCORES of them."""
        count = max(1, min(TAIL_SCORES, self._counts[kind] // 10))
        tail, start = self._largest[kind][:count], float(self._largest[kind][: count + 1][-1])
        return start + float(tail.mean() - start) * math.log(count / 0.05)


def _half_gram(t: Tensor) -> Tensor:
    """F [H, d, d] with F F^T = t t^T, for t [H, d, D]."""
    values, vectors = torch.linalg.eigh(t.double() @ t.double().transpose(1, 2))
    factors: Tensor = vectors * values.clamp(min=0).sqrt()[:, None]
    return factors.to(t.dtype)


def _norms(t: Tensor) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(t, dim=(1, 2))
    return norms.clamp(min=torch.finfo(t.dtype).tiny)[:, None, None]


def positional_logits(pair_products: Tensor, theta: Tensor, distances: Tensor) -> Tensor:
    """Logits [H, n] at distances [n] of pairs q_f conj(k_f) [H, F] (complex) that rotate by theta [H, F] rad/token."""
    angles = (theta.double()[:, :, None] * distances.double()).remainder(2 * math.pi)
    return (pair_products.real[:, :, None] * angles.cos() - pair_products.imag[:, :, None] * angles.sin()).sum(1)


def positional_effective_length(logits: Tensor) -> Tensor:
    """ESS_2 of the weights that logits [H, n] of n keys give by softmax: [H], 1..n."""
    return (2 * logits.double().logsumexp(-1) - (2 * logits.double()).logsumexp(-1)).exp()
