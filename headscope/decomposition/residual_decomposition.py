"""Decomposition of the residual stream: which modules add to it, through which norms, and how logits follow from it.

`residual_inspection` measures it for a model.
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from headscope.attention.record import soft_cap

NORM_TEST_SCALE = 1024.0
"""Size of the inputs that test a norm, large enough to make its epsilon negligible."""
TOKENS_PER_PRODUCT = 2**15
"""Tokens of the vocabulary in one float32 product with the unembedding."""


class DecompositionError(Exception):
    """The reason why a model's logits cannot be decomposed."""


@dataclass(frozen=True, eq=False)
class Norm:
    """RMSNorm or LayerNorm: gain * (x - its mean, if `is_centred`) / scale + shift."""

    module: nn.Module
    gain: Tensor
    shift: Tensor
    is_centred: bool

    @classmethod
    def from_module(cls, module: nn.Module, example: Tensor) -> "Norm":
        """Measure the gain and shift of a norm module on states with the width and dtype of `example`."""
        width = example.shape[-1]
        signs = torch.ones(1, 1, width, device=example.device, dtype=example.dtype)
        signs[..., width // 2 :] = -1
        zero, plain, raised = (
            module(x)[0, 0].float() for x in (0 * signs, NORM_TEST_SCALE * signs, NORM_TEST_SCALE * (signs + 1))
        )
        close = torch.allclose(plain, raised, rtol=1e-2, atol=1e-2 * float(plain.abs().max()))
        return cls(module, (plain - zero) * signs[0, 0].float(), zero, close)

    def pull_back(self, directions: Tensor) -> Tensor:
        """Pull directions [n, D] after the norm back to directions before it, to be divided by `scales`."""
        pulled_back_directions = directions.to(self.gain.device) * self.gain
        return (
            pulled_back_directions - pulled_back_directions.mean(-1, keepdim=True)
            if self.is_centred
            else pulled_back_directions
        )

    def linear(self, inputs: Tensor) -> Tensor:
        """The linear part of the norm, gain * (x - its mean, if `is_centred`), for x [..., D]."""
        return self.gain * (inputs - inputs.mean(-1, keepdim=True) if self.is_centred else inputs)

    def scales(self, inputs: Tensor, outputs: Tensor) -> Tensor:
        """The divisor of each row of `inputs` [n, D], [n]."""
        scales, error = self.scales_and_error(inputs, outputs)
        self.check_error(error)
        return scales

    def scales_and_error(self, inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """The divisors [n], and their error beyond the tolerance, for `check_error`. Nothing waits for it."""
        x, y = inputs.to(outputs.device).float(), outputs.float() - self.shift
        linear = self.linear(x)
        scales: Tensor = linear.square().sum(-1) / torch.linalg.vecdot(y, linear)
        difference, largest = (linear / scales[:, None] - y).abs().max(), y.abs().max()
        return scales, difference - relative_tolerance(outputs.dtype) * largest

    def check_error(self, error: Tensor | float) -> None:
        """Raise DecompositionError for divisors that do not give the outputs of the norm."""
        if not float(error) <= 0:  # NaN fails, too
            raise DecompositionError(f"its {type(self.module).__name__} is neither RMSNorm nor LayerNorm")


@dataclass(frozen=True, eq=False)
class ResidualBranch:
    """A module of a decoder layer whose output is added to the stream, multiplied by `factor`."""

    module: nn.Module
    factor: float


@dataclass(frozen=True, eq=False)
class AttentionBranch:
    """Path from the heads of one attention layer to the stream: projection, optional norm, `factor`.

    `projected_module` holds the projection. If `is_gated`, each number of the heads' outputs is multiplied by a gate
    before the projection, as in Qwen3-Next; the gate counts with its value in the pass.
    """

    layer_index: int
    projected_module: nn.Module
    is_gated: bool
    projection: Tensor
    bias: Tensor | None
    norm: Norm | None
    factor: float

    def output_matrices(self, heads: int) -> Tensor:
        """What each number of z adds to the residual stream: [H, D, dv], with the gain of a norm after the projection,
        float32."""
        projection = self.projection.float()
        output = projection.view(len(projection), heads, -1).permute(1, 0, 2)
        if self.norm is not None:
            output = self.norm.linear(output.transpose(1, 2)).transpose(1, 2)
        return self.factor * output


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """A decoder layer: its attention branch, None in a layer without attention, and its other branches.

    It returns `stream_factor` times its input plus its branches plus `bias` [D]. The factor is 1 in most families,
    learned in Gemma 4; the bias is None unless the layer itself adds one, as in GPT-NeoX Japanese.
    """

    module: nn.Module
    attention_branch: AttentionBranch | None
    other_branches: tuple[ResidualBranch, ...]
    stream_factor: float = 1.0
    bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class ResidualDecomposition:
    """How logits follow from the residual stream.

    Logits are `logit_factor` times `unembedding` [V, D] applied to the final norm of the stream plus `bias` [V]. With
    `soft_cap` c they are then capped: c tanh(logits / c). Contributions are those to a logit minus the mean over the
    vocabulary; `unembedding_mean` [D] is the mean of the rows. A soft cap is linearised at the logits of the run.
    """

    layers: tuple[DecoderLayer, ...]
    final_norm: Norm
    unembedding: Tensor
    unembedding_mean: Tensor
    bias: Tensor | None
    logit_factor: float
    soft_cap: float | None = None

    @property
    def input_factor(self) -> float:
        """The factor of the first layer's input in the output of the last layer."""
        return math.prod(layer.stream_factor for layer in self.layers)

    def scaled_layers(self) -> tuple[DecoderLayer, ...]:
        """The layers, with the factors of their branches in the output of the last layer."""
        factor, scaled = 1.0, []
        for layer in reversed(self.layers):
            heads, others = layer.attention_branch, layer.other_branches
            heads = None if heads is None else replace(heads, factor=factor * heads.factor)
            others = tuple(replace(branch, factor=factor * branch.factor) for branch in others)
            bias = None if layer.bias is None else factor * layer.bias
            scaled.append(replace(layer, attention_branch=heads, other_branches=others, bias=bias))
            factor *= layer.stream_factor
        return tuple(reversed(scaled))

    def logits(self, normed: Tensor) -> Tensor:
        """Logits [n, V], float32, of outputs of the final norm [n, D]."""
        states = normed.to(self.unembedding.device).float()
        linear = torch.cat([states @ rows.float().T for rows in self._row_blocks()], -1)
        linear = self.logit_factor * (linear if self.bias is None else linear + self.bias.float())
        return soft_cap(linear, self.soft_cap)

    def logit_gradients(self, tokens: Tensor, logits: Tensor | None) -> tuple[Tensor, Tensor]:
        """How the logits of `tokens` [n], minus the mean over the vocabulary, follow from outputs of the final norm.

        Returns their gradients [n, D] and the terms [n] of the bias, both divided by `logit_factor`. `logits` [n, V] of
        the run are needed for a soft cap.
        """
        bias = self.unembedding.new_zeros(()) if self.bias is None else self.bias.float()
        biases = bias.expand(len(self.unembedding))
        if self.soft_cap is None or logits is None:
            return self.unembedding[tokens].float() - self.unembedding_mean, biases[tokens] - biases.mean()
        slopes = 1 - (logits / self.soft_cap).square()
        of_tokens = slopes.gather(1, tokens[:, None])
        blocks = zip(torch.split(slopes, TOKENS_PER_PRODUCT, 1), self._row_blocks(), strict=True)
        mean = torch.stack([block @ rows.float() for block, rows in blocks]).sum(0) / slopes.shape[1]
        gradients = of_tokens * self.unembedding[tokens].float() - mean
        return gradients, of_tokens[:, 0] * biases[tokens] - slopes @ biases.float() / slopes.shape[1]

    def _row_blocks(self) -> tuple[Tensor, ...]:
        """The rows of the unembedding in blocks, since a float32 copy of all would be large."""
        return torch.split(self.unembedding, TOKENS_PER_PRODUCT)


def is_close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> bool:
    """Whether two tensors agree within the tolerance of `dtype`."""
    return float((actual - expected).abs().max()) <= relative_tolerance(dtype) * float(expected.abs().max())


def relative_tolerance(dtype: torch.dtype) -> float:
    return 1e-3 if dtype in (torch.float32, torch.float64) else 3e-2
