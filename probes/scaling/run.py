"""Runner of the scaling probe: how a logit scale lambda(L) determines the effective length of a head.

Logits are independent Gaussians with the means of NoPE or RoPE (Proposition 1). For a target ESS*(L), Theorems 4 and 5
give lambda(L). The effective length of sampled rows divided by the target must approach 1 as L grows.
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
from probes.scaling.declaration import ScalingOptions, theorem_case

MEAN_LOGIT, LOGIT_STD, ROPE_BASE = 1.0, 1.0, 10_000.0
"""c and sigma, which set the means and the standard deviation of the logits, and RoPE's base."""
SCHEMES = ("nope", "rope")


def log_ess(logits: Tensor, beta: float) -> Tensor:
    """ln ESS_beta of softmax over the last axis: (beta lse(s) - lse(beta s)) / (beta - 1), float64, beta != 1."""
    s = logits.double()
    return (beta * s.logsumexp(-1) - (beta * s).logsumexp(-1)) / (beta - 1)


def logit_means(scheme: str, length: int) -> Tensor:
    """mu_i of Proposition 1 for distances 0..length-1, float64.

    c for NoPE; for RoPE c times the mean of cos(D b^-x) over x in [0, 1], which is (Ci(D) - Ci(D / b)) / ln b.
    """
    if scheme == "nope":
        return torch.full((length,), MEAN_LOGIT, dtype=torch.float64)
    distance = np.arange(1, length, dtype=np.float64)
    mean_cosine = (sici(distance)[1] - sici(distance / ROPE_BASE)[1]) / math.log(ROPE_BASE)
    return MEAN_LOGIT * torch.from_numpy(np.concatenate(([1.0], mean_cosine)))


def logit_scale(mean_logits: Tensor, exponent: float, beta: float) -> float:
    """lambda(L) for the target L^exponent.

    Cases i and ii solve lambda = sqrt(2 / (beta sigma^2) ln(k ESS_beta(means) / ESS*)), with k = 1 or
    2^(1 / (max(beta, 1 / beta) - 1)); for NoPE, ESS_beta(means) = L and this is Theorem 4; for RoPE it is
    Theorem 5 with its O(...) term written out. Case iii uses ln(L)^3, which grows faster than sqrt(ln L).
    """
    length = len(mean_logits)
    case = theorem_case(exponent, beta)
    if case == "iii":
        return math.log(length) ** 3
    factor = 2 ** (1 / (max(beta, 1 / beta) - 1)) if case == "ii" else 1.0

    def excess(lam: float) -> float:
        log_quotient = float(log_ess(lam * mean_logits, beta)) + math.log(factor) - exponent * math.log(length)
        return lam * lam - 2 / (beta * LOGIT_STD**2) * log_quotient

    return float(brentq(excess, 1e-9, 10 * math.sqrt(math.log(length))))


class ScalingRunner:
    """Cells: one per (scheme, length), with all targets and seeds."""

    def __init__(self, options: ScalingOptions, context: StudyContext):
        self.options, self.seed = options, context.seed

    def cells(self) -> list[Cell]:
        return [
            Cell(f"{scheme} {length} tokens", "", length, (scheme, length))
            for scheme in SCHEMES
            for length in self.options.lengths
        ]

    def compute_rows(self, cell: Cell[tuple[str, int]], model: None) -> Mapping[str, Rows]:
        scheme, length = cell.work
        mu = logit_means(scheme, length)
        records = []
        for beta in self.options.betas:
            for exponent in self.options.exponents:
                lam = logit_scale(mu, exponent, beta)
                for seed in range(self.seed, self.seed + self.options.seeds):
                    generator = torch.Generator().manual_seed(seed)
                    s = mu + LOGIT_STD * torch.randn(length, generator=generator, dtype=torch.float64)
                    log_ratio = float(log_ess(lam * s, beta)) - exponent * math.log(length)
                    records.append(
                        {
                            "scheme": scheme,
                            "regime": theorem_case(exponent, beta),
                            "exponent": exponent,
                            "beta": beta,
                            "context_length": length,
                            "seed": seed,
                            "scale": lam,
                            "target": length**exponent,
                            "ess": math.exp(log_ratio) * length**exponent,
                            "ratio": math.exp(log_ratio),
                        }
                    )
        return {"scaling": {name: [record[name] for record in records] for name in records[0]}}
