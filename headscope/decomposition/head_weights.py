"""Weights of attention heads: the linear maps from the residual stream to q, k and v, and back to the stream.

No family's names are assumed. In a short pass, the output of every linear module of an attention layer is replaced by
random numbers. Position 0 is not rotated, so q, k and v repeat these numbers there, and each number identifies the row
of the weight that it comes from. A norm of q or k is found in the same way. A layer whose q, k or v is not one
projection of its normed input, followed by at most one norm, is refused by name.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attention.record import AttentionRecord
from headscope.decomposition.residual_decomposition import (
    AttentionBranch,
    DecompositionError,
    Norm,
    ResidualDecomposition,
    is_close,
)
from headscope.decomposition.residual_inspection import decompose_residual_stream, input_norms, weight_matrix
from headscope.errors import UnsupportedModel
from headscope.forward.backbone import decoder_layers, separately_runnable_layers
from headscope.forward.capture import capturing
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model

ANALYSIS = "reading the weights of heads"
RANDOM_ROWS = 6
"""Sequences of one random token each: enough random numbers to tell all rows of a bfloat16 weight apart."""
MATCH_TOLERANCE = 1e-2
"""Largest distance of two equal columns of random numbers; unequal ones are apart by more than 0.1."""
ROWS_PER_CHUNK = 512
"""Rows of a weight that are compared at once with all rows of a module."""
MAX_TOKENS = 8
"""Tokens of the pass that inspects the residual stream."""


@dataclass(frozen=True, eq=False)
class HeadProjection:
    """The map from a layer's normed input to q, k or v of its heads: rows of one linear module, then perhaps a norm.

    `rows` [heads, d] are the rows of the module's weight. `norm` is a norm of the heads' vectors: over the numbers of
    each head or, if `norm_spans_heads`, over those of all heads.
    """

    module: nn.Module
    rows: Tensor
    norm: Norm | None = None
    norm_spans_heads: bool = False

    def weight(self) -> Tensor:
        """The weight [heads, d, D], float32."""
        matrix = weight_matrix(self.module)
        assert matrix is not None
        return matrix[self.rows.to(matrix.device)].float()

    def bias(self) -> Tensor:
        """The bias [heads, d], float32; 0 without one."""
        bias: Tensor | None = getattr(self.module, "bias", None)
        if bias is None:
            return torch.zeros(self.rows.shape)
        return bias.detach()[self.rows.to(bias.device)].float()

    def folded_weight(self, input_norm: Norm | None) -> Tensor:
        """The weight [heads, d, D] with the gains of both norms folded in; the scales of the norms are left out."""
        weight = self.weight()
        if input_norm is not None:
            weight = input_norm.pull_back(weight)
        return weight if self.norm is None else self._over_normed_numbers(weight, self.norm.linear)

    def vectors(self, normed: Tensor) -> Tensor:
        """The heads' vectors [heads, n, d] before rotation, for normed inputs [n, D]."""
        weight, bias = self.weight(), self.bias()
        vectors = (
            torch.einsum("nd,hed->hen", normed.to(weight.device).float(), weight) + bias.to(weight.device)[..., None]
        )
        if self.norm is not None:
            vectors = self._over_normed_numbers(vectors, partial(run_norm, self.norm))
        return vectors.transpose(1, 2)

    def norm_scales(self, normed: Tensor) -> Tensor:
        """The divisor of the projection's own norm for normed inputs [n, D]: [heads, n], 1 without a norm."""
        if self.norm is None:
            return normed.new_ones(len(self.rows), len(normed))
        before, after = replace(self, norm=None).vectors(normed), self.vectors(normed)
        if not self.norm_spans_heads:
            return self.norm.scales(before.flatten(0, 1), after.flatten(0, 1)).view(before.shape[:2])
        rows = [vectors.transpose(0, 1).flatten(1) for vectors in (before, after)]
        return self.norm.scales(*rows).expand(before.shape[:2])

    def _over_normed_numbers(self, columns: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        """Apply a function of vectors [.., width] to the numbers that the norm joins: axis 1 of [heads, d, n]."""
        groups = columns.reshape(1, -1, columns.shape[2]) if self.norm_spans_heads else columns
        return function(groups.transpose(1, 2)).transpose(1, 2).reshape(columns.shape)


def run_norm(norm: Norm, vectors: Tensor) -> Tensor:
    """The output of a norm for vectors [1, n, width] or [heads, n, width], float32."""
    parameter = next(norm.module.parameters(), None)
    output: Tensor = norm.module(vectors if parameter is None else vectors.to(parameter)).float()
    return output


@dataclass(frozen=True, eq=False)
class LayerWeights:
    """The weights of one attention layer, by its index; `input_norm` is None where attention reads the stream."""

    layer: int
    input_norm: Norm | None
    query: HeadProjection
    key: HeadProjection
    value: HeadProjection
    branch: AttentionBranch

    def output(self) -> Tensor:
        """What each number of z adds to the residual stream: [H, D, dv], with the gain of a norm after o_proj."""
        return self.branch.output_matrices(len(self.query.rows))

    def apply_input_norm(self, stream: Tensor) -> Tensor:
        """The layer's normed input [n, D] of residual stream vectors [n, D]."""
        if self.input_norm is None:
            return stream
        return run_norm(self.input_norm, stream[None])[0]


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """The weights of all heads of a model, and how token embeddings enter and leave the residual stream.

    `scalings` multiply the logits of each layer, 1 / sqrt(d) in most families.
    The first layer reads `embedding_factor` E[token] + `embedding_offset` (a learned embedding of position 0, if any).
    """

    layers: tuple[LayerWeights, ...]
    scalings: tuple[float, ...]
    embedding: Tensor
    embedding_factor: float
    embedding_offset: Tensor
    decomposition: ResidualDecomposition

    def embed(self, tokens: Tensor) -> Tensor:
        """What the first layer reads for tokens [n], without the embedding of a position: [n, D], float32."""
        return self.embedding_factor * self.embedding[tokens.to(self.embedding.device)].float()

    @property
    def final_norm(self) -> Norm:
        return self.decomposition.final_norm


@torch.no_grad()
def inspect_head_weights(model: Model) -> ModelWeights:
    """Find the weights of every head. Raises UnsupportedModel, with the reason, where heads are not linear maps."""
    config = model.module.config.get_text_config()
    if getattr(config, "clip_qkv", None) is not None:
        raise _unsupported(model, "it clips q, k and v (clip_qkv)")
    if getattr(model.schedule, "lora_folder", None) is not None:
        raise _unsupported(model, "its adapter has a LoRA, which changes the weights")
    layers = separately_runnable_layers(model)
    tokens = _inspected_tokens(model)
    with attached(model, "base"), evaluating(model):
        with capturing(model) as captured:
            decomposition = decompose_residual_stream(model, captured, tokens[None], ANALYSIS)
        try:
            branches = [layer.attention_branch for layer in decomposition.layers if layer.attention_branch is not None]
            if any(branch.is_gated for branch in branches):
                raise DecompositionError("its heads' outputs are multiplied by a gate before the projection")
            norms = [*input_norms(model, layers, tokens[None])]
            scalings = _logit_scalings(model, tokens[None])
            projections = [*_trace_projections(model, tokens[:RANDOM_ROWS, None])]
            has_norms = any(projection.norm is not None for layer in projections for projection in layer)
            rotation = model.rotation
            if has_norms and (not rotation.factor_scales_logits or "after the rotation" in rotation.no_pairs_reason):
                raise DecompositionError("it norms q and k after the rotation")
            factor, offset = _embedding_map(model, tokens)
        except DecompositionError as error:
            raise _unsupported(model, str(error)) from error
    layer_weights = tuple(
        LayerWeights(index, norms[index], *projections[index], branch) for index, branch in enumerate(branches)
    )
    embedding = model.module.get_input_embeddings().weight.detach()
    return ModelWeights(layer_weights, scalings, embedding, factor, offset, decomposition)


def _inspected_tokens(model: Model) -> Tensor:
    """Tokens from all over the vocabulary, [n]; padding has an embedding of 0, which no norm can divide."""
    embedding = model.module.get_input_embeddings().weight
    spread = torch.linspace(0, len(embedding) - 1, 4 * MAX_TOKENS, dtype=torch.int64, device=embedding.device)
    return spread[embedding[spread].float().norm(dim=-1) > 0][::3][:MAX_TOKENS]


def _unsupported(model: Model, reason: str) -> UnsupportedModel:
    return UnsupportedModel(f"{ANALYSIS} is not possible for '{model.name}': {reason}. Use another model")


@dataclass(frozen=True, eq=False)
class _LeafCall:
    """The call of a module without submodules in an attention layer; `replacement` [n, r] is what it returned.

    `is_projection`: its own output was its weight times the input of the attention layer, plus its bias.
    """

    module: nn.Module
    inputs: Tensor
    output: Tensor
    replacement: Tensor
    is_projection: bool


@dataclass(frozen=True, eq=False)
class _TracedLayer:
    """q, k and v [n, heads, d] of one layer, and the calls whose outputs were replaced by random numbers."""

    vectors: tuple[Tensor, Tensor, Tensor]
    calls: list[_LeafCall]


def _trace_projections(model: Model, ids: Tensor) -> Iterator[tuple[HeadProjection, HeadProjection, HeadProjection]]:
    """The projections to q, k and v of each attention layer. ids are [n, 1]."""
    plain = _run_with_random_outputs(model, ids, replaces_norms=False)
    normed = _run_with_random_outputs(model, ids, replaces_norms=True)
    for layer, (of_linears, of_norms) in enumerate(zip(plain, normed, strict=True)):
        factor = model.rotation.factors[layer]
        q, k, v = (
            _find_projection(name, of_linears, of_norms, index, factor) for index, name in enumerate(("q", "k", "v"))
        )
        yield q, k, v


def _find_projection(
    name: str, of_linears: _TracedLayer, of_norms: _TracedLayer, index: int, factor: float
) -> HeadProjection:
    """The projection to q, k or v: of a linear module or, if that has no match, of a linear module and a norm."""
    vectors = of_linears.vectors[index]
    if (match := _match(vectors, [call for call in of_linears.calls if call.is_projection], factor)) is not None:
        call, rows = match
        return HeadProjection(call.module, rows)
    vectors = of_norms.vectors[index]
    heads, width = vectors.shape[1:]
    match = _match(vectors, [call for call in of_norms.calls if weight_matrix(call.module) is None], factor)
    if match is not None:
        norm_call, columns = match
        norm_width = norm_call.inputs.shape[-1]
        in_order = torch.arange(width) + (columns[:, :1] // width) * width
        if norm_width in (width, heads * width) and torch.equal(columns, in_order):
            inputs = norm_call.inputs.flatten(1)[:, columns]
            if (match := _match(inputs, [call for call in of_norms.calls if call.is_projection], 1.0)) is not None:
                norm = Norm.from_module(norm_call.module, norm_call.inputs.reshape(1, -1, norm_width))
                norm.scales(norm_call.inputs.reshape(-1, norm_width), norm_call.output.reshape(-1, norm_width))
                return HeadProjection(match[0].module, match[1], norm, norm_width != width or heads == 1)
    raise DecompositionError(
        f"its {name} is not one linear map of the layer's normed input (as with latent attention, keys of another "
        "layer, or an active LoRA)"
    )


def _match(vectors: Tensor, calls: Sequence[_LeafCall], factor: float) -> tuple[_LeafCall, Tensor] | None:
    """The call whose random output contains all numbers of vectors [n, heads, d], and their columns [heads, d].

    Rotated numbers are multiplied by `factor`.
    """
    targets = vectors.flatten(1).T.float()
    for call in calls:
        candidates = call.replacement.T.float()
        columns, distances = _nearest(targets, candidates)
        if factor != 1:
            scaled_columns, scaled_distances = _nearest(targets / factor, candidates)
            is_scaled = scaled_distances < distances
            columns = torch.where(is_scaled, scaled_columns, columns)
            distances = torch.where(is_scaled, scaled_distances, distances)
        if float(distances.max()) < MATCH_TOLERANCE:
            return call, columns.view(vectors.shape[1:]).cpu()
    return None


def _nearest(targets: Tensor, candidates: Tensor) -> tuple[Tensor, Tensor]:
    """For each target [m, n] the index of the nearest candidate [r, n], and the distance."""
    nearest = [
        torch.cdist(rows, candidates, compute_mode="donot_use_mm_for_euclid_dist").min(1)
        for rows in torch.split(targets, ROWS_PER_CHUNK)
    ]
    return torch.cat([chunk.indices for chunk in nearest]), torch.cat([chunk.values for chunk in nearest])


def _run_with_random_outputs(model: Model, ids: Tensor, *, replaces_norms: bool) -> list[_TracedLayer]:
    """Run ids [n, 1] with random numbers as output of the linear modules, and perhaps the norms, of the attention."""
    generator = torch.Generator().manual_seed(0)
    layers = [_TracedLayer((torch.empty(0),) * 3, []) for _ in model.attention_modules]
    vectors: list[list[tuple[Tensor, ...]]] = [[] for _ in layers]

    def record_vectors(record: AttentionRecord) -> None:
        width = model.geometry.layer_head_dims[record.layer]
        vectors[record.layer].append((record.q[:, 0, :width], record.k[:, 0, :width], record.v[:, 0]))

    with ExitStack() as stack:
        captured = stack.enter_context(capturing(model))
        captured.listen(record_vectors)
        for layer, attention in zip(layers, model.attention_modules, strict=True):
            replace = _OutputReplacement(layer.calls, replaces_norms, generator)
            stack.callback(attention.register_forward_pre_hook(replace.record_layer_inputs, with_kwargs=True).remove)
            for module in attention.modules():
                if not [*module.children()]:
                    captured.hook(module, replace)
        model.module(ids, use_cache=False)
    stacked = [tuple(torch.stack(parts) for parts in zip(*rows, strict=True)) for rows in vectors]
    return [_TracedLayer((q, k, v), layer.calls) for (q, k, v), layer in zip(stacked, layers, strict=True)]


class _OutputReplacement:
    """A forward hook that replaces the outputs of the modules of one attention layer by random numbers."""

    def __init__(self, calls: list[_LeafCall], replaces_norms: bool, generator: torch.Generator):
        self.calls, self.replaces_norms, self.generator = calls, replaces_norms, generator
        self.layer_inputs: list[Tensor] = []

    def record_layer_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.layer_inputs = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Tensor | None:
        matrix = weight_matrix(module)
        inputs = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if inputs is None or not isinstance(output, Tensor) or not output.is_floating_point():
            return None
        if matrix is None and (not self.replaces_norms or output.shape != inputs.shape):
            return None
        replacement = torch.randn(output.shape, generator=self.generator).to(output)
        is_projection = matrix is not None and any(
            value.shape == inputs.shape and torch.equal(value, inputs) for value in self.layer_inputs
        )
        if is_projection:
            assert matrix is not None
            bias = getattr(module, "bias", None)
            is_projection = matrix.is_floating_point() and inputs.shape[-1] == matrix.shape[1]
            if is_projection:
                product = inputs.float() @ matrix.float().T + (0 if bias is None else bias.float())
                is_projection = is_close(product, output.float(), output.dtype)
        rows = len(inputs)
        self.calls.append(_LeafCall(module, inputs, output, replacement.reshape(rows, -1), is_projection))
        return replacement


def _logit_scalings(model: Model, ids: Tensor) -> tuple[float, ...]:
    """The factor on the logits of each attention layer."""
    scalings: dict[int, float] = {}
    with capturing(model) as captured:
        captured.listen(lambda record: scalings.update({record.layer: record.scaling}))
        model.module(ids, use_cache=False)
    return tuple(scalings[layer] for layer in range(model.geometry.layers))


def _embedding_map(model: Model, tokens: Tensor) -> tuple[float, Tensor]:
    """Factor and offset [D] of the first layer's input, from the embeddings of tokens [n] at position 0."""
    first = decoder_layers(model)[0]
    inputs: list[Tensor] = []

    def record(module: nn.Module, args: Any, kwargs: Any) -> None:
        inputs.append((args[0] if args else kwargs["hidden_states"])[:, 0].float())

    with ExitStack() as stack:
        stack.callback(first.register_forward_pre_hook(record, with_kwargs=True).remove)
        model.module(tokens[:, None], use_cache=False)
    rows = model.module.get_input_embeddings().weight[tokens].float().to(inputs[0].device)
    if rows.shape != inputs[0].shape:
        raise DecompositionError("its token embeddings are projected before the first layer")
    centred, read = rows - rows.mean(0), inputs[0] - inputs[0].mean(0)
    factor = float((centred * read).sum() / centred.square().sum())
    if not is_close(factor * centred, read, model.module.dtype):
        raise DecompositionError("its first layer does not read a multiple of the token embeddings")
    factor = 1.0 if abs(factor - 1) < 1e-3 else factor
    return factor, inputs[0].mean(0) - factor * rows.mean(0)
