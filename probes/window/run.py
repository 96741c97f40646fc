"""Runner of the window probe: which rotary frequencies does one head need to detect a window of distances?

A sequence of BG tokens contains one NEEDLE at distance D before the final QUERY; the answer is YES if D is within W/2
of the centre c (paper, section "Needle Retrieval from a Window"). With one layer, one head and no inputs but
embeddings, q and the three keys are constants. The logits at every distance therefore have an exact closed form, and
one training step over all distances, schemes and seeds is one small batch.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.runs.arrow import Rows
from headscope.study.cells import Cell
from headscope.study.context import StudyContext
from probes.window.declaration import WindowOptions

SCHEMES = ("fixed", "learned", "partial", "nope")
"""RoPE with base 10,000; trained frequencies that start there; its highest three quarters; no rotation."""
ROPE_BASE = 10_000.0
ROTATED_FRACTION = 0.75
TOKENS = ("NEEDLE", "BG", "QUERY")
LEARNING_RATE, FREQUENCY_LEARNING_RATE, WARMUP_STEPS = 1e-3, 3e-3, 50
"""Adam's learning rates of the weights and of log-frequencies; steps of linear warm-up."""


@dataclass(frozen=True)
class TrainedModels:
    """Trained models of one window width: S schemes, N seeds, F pairs, L distances 1..2c-1.

    accuracy and loss [S, N]; theta, amplitude A_f and phase phi_f [S, N, F]. The needle's logit at distance D is
    sum_f A_f cos(theta_f D + phi_f).
    """

    accuracy: Tensor
    loss: Tensor
    theta: Tensor
    amplitude: Tensor
    phase: Tensor

    @property
    def frequency_mass(self) -> Tensor:
        """M = sum_f a_f theta_f with a_f = A_f / sum_f A_f, [S, N] (Theorem 1)."""
        return (self.amplitude * self.theta).sum(-1) / self.amplitude.sum(-1)

    def pair_logits(self, distances: Tensor) -> Tensor:
        """Contribution of each pair to the needle's logit at each distance, [S, N, F, L]."""
        angles = self.theta[..., None] * distances + self.phase[..., None]
        return self.amplitude[..., None] * angles.cos()


class WindowModels(nn.Module):
    """One-layer, one-head transformers without MLP or norm in closed form: S schemes x N seeds in one batch.

    All schemes start from the same weights: embeddings [3, d], Wq, Wk, Wv, Wo [d, d], and a YES - NO read-out [d, 1].
    """

    def __init__(self, dims: int, seeds: int, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        schemes, pairs = len(SCHEMES), dims // 2

        def weights(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(1, seeds, *shape, generator=generator).repeat(schemes, 1, 1, 1))

        self.embedding = weights(len(TOKENS), dims)
        self.query, self.key, self.value, self.output = (weights(dims, dims) for _ in range(4))
        self.read_out = weights(dims, 1)
        with torch.no_grad():
            for matrix in (self.query, self.key, self.value, self.output, self.read_out):
                matrix.div_(math.sqrt(3 * dims))  # the standard deviation of nn.Linear's default
        self.bias = nn.Parameter(torch.zeros(schemes, seeds, 1))
        rope = ROPE_BASE ** (-torch.arange(pairs) / pairs)
        start = {"partial": rope * (torch.arange(pairs) < round(ROTATED_FRACTION * pairs)), "nope": torch.zeros(pairs)}
        theta = torch.stack([start.get(scheme, rope) for scheme in SCHEMES])
        self.register_buffer("start", theta[:, None].repeat(1, seeds, 1))
        self.register_buffer("learns", torch.tensor([scheme == "learned" for scheme in SCHEMES])[:, None, None])
        self.log_change = nn.Parameter(torch.zeros(schemes, seeds, pairs))

    def theta(self) -> Tensor:
        """Frequencies [S, N, F] in rad/token; only those of the learned scheme change during training."""
        return torch.as_tensor(self.start) * torch.exp(self.log_change * torch.as_tensor(self.learns))

    def logit_coefficients(self) -> tuple[Tensor, Tensor]:
        """Cosine and sine coefficients of each pair's logit for NEEDLE, BG and QUERY, each [S, N, 3, F]."""
        q, k = self.embedding[:, :, 2:] @ self.query, self.embedding @ self.key
        q, k = (t.view(*t.shape[:-1], -1, 2) for t in (q, k))
        scale = 1 / math.sqrt(self.query.shape[-1])
        even = (q * k).sum(-1) * scale
        odd = (q[..., 0] * k[..., 1] - q[..., 1] * k[..., 0]) * scale
        return even, odd

    def forward(self, distances: Tensor) -> Tensor:
        """YES - NO logit for the needle at each distance 1..L, [S, N, L]."""
        even, odd = self.logit_coefficients()
        angles = self.theta()[..., None] * distances
        cos, sin = angles.cos(), angles.sin()
        needle, background = (torch.einsum("snf,snfl->snl", even[:, :, t], cos) for t in (0, 1))
        needle = needle + torch.einsum("snf,snfl->snl", odd[:, :, 0], sin)
        background = background + torch.einsum("snf,snfl->snl", odd[:, :, 1], sin)
        query = even[:, :, 2].sum(-1, keepdim=True).expand_as(needle)
        weights = torch.stack((needle, _log_sum_exp_of_others(background), query), -1).softmax(-1)
        outputs = (self.embedding @ self.value @ self.output @ self.read_out)[..., 0]
        residual = (self.embedding[:, :, 2:] @ self.read_out)[..., 0]
        return (weights @ outputs[..., None])[..., 0] + residual + self.bias


def train_models(width: int, options: WindowOptions, seed: int = 0) -> TrainedModels:
    """Train every scheme and seed on windows of one width: all distances, with YES and NO balanced.

    Deterministic for one seed, machine and thread count.
    """
    distances = torch.arange(1, 2 * options.center).float()
    inside = ((distances - options.center).abs() <= width / 2).float()
    balance = torch.where(inside > 0, 0.5 / inside.sum(), 0.5 / (1 - inside).sum())
    models = WindowModels(options.dims, options.seeds, seed)
    weights = [p for name, p in models.named_parameters() if name != "log_change"]
    groups = [{"params": weights, "lr": LEARNING_RATE}, {"params": [models.log_change], "lr": FREQUENCY_LEARNING_RATE}]
    optimiser = torch.optim.Adam(groups)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda step: _rate_factor(step, options.steps))
    for _ in range(options.steps):
        optimiser.zero_grad()
        torch.autograd.backward(_balanced_losses(models(distances), inside, balance).sum())
        optimiser.step()
        schedule.step()
    with torch.no_grad():
        answers = models(distances)
        even, odd = (coefficients[:, :, 0] for coefficients in models.logit_coefficients())
        return TrainedModels(
            accuracy=(((answers > 0) == (inside > 0)) * balance).sum(-1),
            loss=_balanced_losses(answers, inside, balance),
            theta=models.theta(),
            amplitude=torch.hypot(even, odd),
            phase=-torch.atan2(odd, even),
        )


class WindowRunner:
    """Cells: one per window width."""

    def __init__(self, options: WindowOptions, context: StudyContext):
        self.options, self.seed = options, context.seed

    def cells(self) -> list[Cell]:
        return [Cell(f"width {width}", "", 1.0, width) for width in self.options.widths]

    def compute_rows(self, cell: Cell[int], model: None) -> Mapping[str, Rows]:
        trained = train_models(cell.work, self.options, self.seed)
        distances = torch.arange(1, 2 * self.options.center)
        strongest = trained.amplitude.argmax(-1, keepdim=True)
        scheme, seed_index = _index_grid(*trained.accuracy.shape)
        keys = {"scheme": [SCHEMES[s] for s in scheme.tolist()], "width": cell.work, "seed": seed_index + self.seed}
        window = {
            **keys,
            "center": self.options.center,
            "accuracy": trained.accuracy.reshape(-1),
            "loss": trained.loss.reshape(-1),
            "steps": self.options.steps,
            "frequency_mass": trained.frequency_mass.reshape(-1),
            "dominant_theta": trained.theta.gather(-1, strongest).reshape(-1),
        }
        # Only the first seed is stored: the heatmaps show no other.
        logits = trained.pair_logits(distances.float())[:, 0]
        scheme, pair, distance_index = _index_grid(*logits.shape)
        pairs = {
            "scheme": [SCHEMES[s] for s in scheme.tolist()],
            "width": cell.work,
            "seed": self.seed,
            "pair": pair,
            "distance": distances[distance_index],
            "logit": logits.reshape(-1),
            "theta": trained.theta[:, 0][scheme, pair],
        }
        return {"window": _to_numpy(window), "window_pairs": _to_numpy(pairs)}


def _log_sum_exp_of_others(logits: Tensor) -> Tensor:
    """Log-sum-exp over all other positions, [..., L] -> [..., L]; subtracting one logit from the total would lose
    precision."""
    empty = torch.full_like(logits[..., :1], -1e9)
    before = torch.cat((empty, logits.logcumsumexp(-1)[..., :-1]), -1)
    after = torch.cat((logits.flip(-1).logcumsumexp(-1).flip(-1)[..., 1:], empty), -1)
    return torch.logaddexp(before, after)


def _balanced_losses(answer_logits: Tensor, is_inside: Tensor, distance_weights: Tensor) -> Tensor:
    losses = nn.functional.binary_cross_entropy_with_logits(
        answer_logits, is_inside.expand_as(answer_logits), reduction="none"
    )
    return (losses * distance_weights).sum(-1)


def _rate_factor(step: int, steps: int) -> float:
    """Factor on the learning rates: warm-up, stable, linear decay to a tenth over the last tenth of the steps."""
    return min(1.0, (step + 1) / WARMUP_STEPS) * min(1.0, max(0.1, (steps - step) / (0.1 * steps)))


def _index_grid(*sizes: int) -> tuple[Tensor, ...]:
    return tuple(t.reshape(-1) for t in torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij"))


def _to_numpy(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: c.numpy() if isinstance(c, Tensor) else c for name, c in columns.items()}
