"""Numerical check of the scaling theorems: how a logit scale lambda(L) sets the effective length of a head.

Logits are independent Gaussians with the means of NoPE or RoPE (Proposition 1). For a target ESS*(L), Theorems 4 and 5
give lambda(L); the effective length of sampled rows, divided by the target, must approach 1 as L grows.
"""

import math
from collections.abc import Mapping

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.special import sici
from torch import Tensor

from headscope.runs.arrow import Rows
from headscope.study.cells import Cell
from headscope.study.context import StudyContext
from probes.scaling.options import ScalingOptions, regime

MEAN_LOGIT, LOGIT_STD, ROPE_BASE = 1.0, 1.0, 10_000.0
"""c and sigma of the logits' means and spread, and RoPE's base."""
SCHEMES = ("nope", "rope")


def log_ess(logits: Tensor, beta: float) -> Tensor:
    """ln ESS_beta of softmax over the last axis: (beta lse(s) - lse(beta s)) / (beta - 1), float64, beta != 1."""
    s = logits.double()
    return (beta * s.logsumexp(-1) - (beta * s).logsumexp(-1)) / (beta - 1)


def logit_means(scheme: str, length: int) -> Tensor:
    """mu_i of Proposition 1 for distances 0..length-1, float64: c for NoPE, c times the mean of cos(D b^-x) over
    x in [0, 1] for RoPE, which is (Ci(D) - Ci(D / b)) / ln b."""
    if scheme == "nope":
        return torch.full((length,), MEAN_LOGIT, dtype=torch.float64)
    distance = np.arange(1, length, dtype=np.float64)
    wave = (sici(distance)[1] - sici(distance / ROPE_BASE)[1]) / math.log(ROPE_BASE)
    return MEAN_LOGIT * torch.from_numpy(np.concatenate(([1.0], wave)))


def logit_scale(mean_logits: Tensor, exponent: float, beta: float) -> float:
    """lambda(L) for the target L^exponent.

    Cases i and ii solve lambda = sqrt(2 / (beta sigma^2) ln(k ESS_beta(means) / ESS*)), with k = 1 or
    2^(1 / (max(beta, 1 / beta) - 1)); for NoPE the means' ESS is L and this is Theorem 4 itself, for RoPE it is
    Theorem 5 with its O(...) term written out. Case iii takes ln(L)^3, which grows faster than sqrt(ln L).
    """
    length = len(mean_logits)
    kind = regime(exponent, beta)
    if kind == "iii":
        return math.log(length) ** 3
    factor = 2 ** (1 / (max(beta, 1 / beta) - 1)) if kind == "ii" else 1.0

    def excess(lam: float) -> float:
        wanted = float(log_ess(lam * mean_logits, beta)) + math.log(factor) - exponent * math.log(length)
        return lam * lam - 2 / (beta * LOGIT_STD**2) * wanted

    return float(brentq(excess, 1e-9, 10 * math.sqrt(math.log(length))))


class ScalingRunner:
    """Cells: one (scheme, length), with every target and seed."""

    def __init__(self, options: ScalingOptions, context: StudyContext):
        self.options, self.seed = options, context.seed

    def cells(self) -> list[Cell]:
        return [Cell(f"{s} {n} tokens", None, n, (s, n)) for s in SCHEMES for n in self.options.lengths]

    def rows(self, cell: Cell, model: None) -> Mapping[str, Rows]:
        scheme, length = cell.task
        mu = logit_means(scheme, length)
        found = []
        for beta in self.options.betas:
            for exponent in self.options.exponents:
                lam = logit_scale(mu, exponent, beta)
                for number in range(self.options.seeds):
                    noise = torch.Generator().manual_seed(self.seed + number)
                    s = mu + LOGIT_STD * torch.randn(length, generator=noise, dtype=torch.float64)
                    log_ratio = float(log_ess(lam * s, beta)) - exponent * math.log(length)
                    found.append(
                        {
                            "scheme": scheme,
                            "regime": regime(exponent, beta),
                            "exponent": exponent,
                            "beta": beta,
                            "context_length": length,
                            "seed": self.seed + number,
                            "scale": lam,
                            "target": length**exponent,
                            "ess": math.exp(log_ratio) * length**exponent,
                            "ratio": math.exp(log_ratio),
                        }
                    )
        return {"scaling": {name: [row[name] for row in found] for name in found[0]}}
