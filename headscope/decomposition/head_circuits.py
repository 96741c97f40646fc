"""OV and QK circuits of a model's heads: token embeddings through the weights of each head.

`TokenEmbeddings` are what heads read of tokens: the embeddings alone, or with the first layer's MLP ("effective
embedding").
"""

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headscope.attention import backend
from headscope.decomposition.head_weights import LayerWeights, ModelWeights
from headscope.forward.backbone import decoder_layers
from headscope.forward.capture import capturing
from headscope.measures.circuits import copying_scores, product_norms
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model

TOKENS_PER_BATCH = 4096
"""Tokens of the vocabulary that run through the first layer, or through a product, at once."""


class _FirstLayerDone(Exception):
    """Ends a forward pass after the first layer."""


@torch.no_grad()
def effective_embeddings(model: Model, tokens: Tensor, position_embedding: Tensor | float = 0) -> Tensor:
    """The output [n, D] of the first layer for single tokens [n], with the outputs of its heads set to 0.

    That is the embedding, plus the bias of the first layer's attention output if it has one, plus the first MLP's
    output for their sum; float32. `position_embedding` [D], a learned embedding of position 0, is subtracted from the
    layer's input.
    """
    first, blocks = decoder_layers(model)[0], []

    def zero_output(z: Tensor, call: backend.AttentionCall) -> Tensor:
        return torch.zeros_like(z)

    def subtract_position(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        if args:
            return (args[0] - position_embedding, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": kwargs["hidden_states"] - position_embedding}

    def stop(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        blocks.append((output[0] if isinstance(output, tuple) else output)[:, 0].float())
        raise _FirstLayerDone

    with ExitStack() as stack:
        stack.enter_context(attached(model, "base"))
        stack.enter_context(evaluating(model))
        captured = stack.enter_context(capturing(model))
        if model.attention_modules[0] in {*first.modules()}:
            captured.edit_output(0, zero_output)
        captured.hook_inputs(first, subtract_position)
        captured.hook(first, stop)
        for batch in torch.split(tokens, TOKENS_PER_BATCH):
            try:
                model.module(batch[:, None].to(model.device), use_cache=False)
            except _FirstLayerDone:
                continue
    return torch.cat(blocks)


@dataclass(frozen=True, eq=False)
class TokenEmbeddings:
    """What the heads of a model read of its vocabulary; with `uses_first_mlp`, layers after the first read effective
    embeddings. Learned embeddings of positions are left out."""

    model: Model
    weights: ModelWeights
    uses_first_mlp: bool = False

    def residual_input(self, tokens: Tensor, layer: int) -> Tensor:
        """The residual stream [n, D] of tokens [n] that layer (by its index) reads."""
        first_layer = self.model.attention_modules[layer] in {*decoder_layers(self.model)[0].modules()}
        if self.uses_first_mlp and not first_layer:
            return effective_embeddings(self.model, tokens, self.weights.embedding_offset)
        return self.weights.embed(tokens)

    def vocabulary_map(self, layer: int, *, centred: bool = True) -> Tensor:
        """Sum over the vocabulary of embedding x unembedding, [D, D], with the final norm's gain: W_E W_U.

        If `centred`, the mean of the unembedding over the vocabulary is subtracted: it moves every logit alike, so no
        probability.
        """
        unembedding = self.weights.decomposition.unembedding
        mean = self.weights.decomposition.unembedding_mean if centred else 0
        tokens = torch.arange(min(len(unembedding), len(self.weights.embedding)), device=unembedding.device)
        total = torch.zeros(unembedding.shape[1], unembedding.shape[1], device=unembedding.device)
        for batch in torch.split(tokens, TOKENS_PER_BATCH):
            embedded = self.residual_input(batch, layer)
            total += embedded.T @ self.weights.final_norm.pull_back(unembedding[batch].float() - mean)
        return total


@dataclass(frozen=True, eq=False)
class LayerCircuits:
    """The folded matrices of one layer's query heads: W_Q, W_K [H, d, D], W_V [H, dv, D] and W_O [H, D, dv]."""

    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor

    @classmethod
    def of_layer(cls, layer: LayerWeights) -> "LayerCircuits":
        """The matrices with the gains of norms folded in; each query head has the key and value of its KV group."""
        query = layer.query.folded_weight(layer.input_norm)
        key, value = (
            projection.folded_weight(layer.input_norm).repeat_interleave(len(query) // len(projection.rows), 0)
            for projection in (layer.key, layer.value)
        )
        return cls(query, key, value, layer.output().to(query.device))

    def qk_norms(self) -> Tensor:
        """||W_Q^T W_K|| of each head, without the scale of the logits."""
        return product_norms(self.query, self.key)

    def ov_norms(self) -> Tensor:
        """||W_O W_V|| of each head."""
        return product_norms(self.output.transpose(1, 2), self.value)

    def copying_scores(self, vocabulary_map: Tensor) -> Tensor:
        """OV copying score of each head."""
        return copying_scores(self.value, self.output, vocabulary_map.to(self.value.device))


@torch.no_grad()
def ov_logits(embeddings: TokenEmbeddings, layer: int, tokens: Tensor) -> Iterator[Tensor]:
    """For each of tokens [n], what each head of the layer adds to every logit if it attends to that token: [H, V].

    The final norm's scale is left out, the mean over the vocabulary is subtracted.
    """
    weights, layer_weights = embeddings.weights, embeddings.weights.layers[layer]
    normed = layer_weights.apply_input_norm(embeddings.residual_input(tokens, layer))
    value = layer_weights.value.vectors(normed)
    output = layer_weights.output()
    value = value.repeat_interleave(len(output) // len(value), 0)
    written = torch.einsum("hnv,hdv->nhd", value, output.to(value.device))
    unembedding = weights.decomposition.unembedding
    directions = weights.final_norm.linear(written.to(weights.final_norm.gain.device)).to(unembedding.device)
    for of_token in directions:
        logits = torch.cat([of_token @ rows.float().T for rows in torch.split(unembedding, 8 * TOKENS_PER_BATCH)], 1)
        yield weights.decomposition.logit_factor * (logits - logits.mean(1, keepdim=True))
