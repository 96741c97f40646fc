"""Weight matrices of one head as arrays: OV and QK circuits, copying scores, singular directions.

Gains of norms are folded in; scales of norms and biases are left out, as in the copying scores of runs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from headscope.attention.geometry import Geometry
from headscope.base.public_functions import checked, checked_methods
from headscope.base.user_input import check_index, quote
from headscope.decomposition.head_circuits import LayerCircuits, TokenEmbeddings
from headscope.decomposition.head_weights import ModelWeights, inspect_head_weights
from headscope.decomposition.token_pairs import refuse_distance_bias, rotation_phases
from headscope.errors import BadInput
from headscope.measures.circuits import copying_scores
from headscope.measures.rotary_pairs import pair_coordinates
from headscope.positions.model import Model

TokenIds = Tensor | Sequence[int]
SAMPLED_TOKENS = 2048
"""Tokens of the vocabulary over which `copying_accuracy` is measured by default."""
TOKENS_PER_PRODUCT = 512
"""Tokens whose logits over the whole vocabulary are in memory at once."""


@checked_methods
@dataclass(frozen=True, eq=False)
class HeadMatrices:
    """The weights of query head `head` of layer number `layer`, float32: `query` and `key` [d, D] (W_Q, W_K), `value`
    [dv, D] (W_V) and `output` [D, dv] (W_O). D is the width of the residual stream.

    With grouped-query attention `key` and `value` are those of the head's KV group.
    """

    model: Model
    layer: int
    head: int
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor
    _weights: ModelWeights
    _layer_index: int

    @property
    def ov(self) -> Tensor:
        """W_OV = W_O W_V, [D, D]: what attending to a key adds to the stream, from the key's normed stream."""
        return self.output @ self.value

    def qk(self, distance: int = 0) -> Tensor:
        """The bilinear form [D, D] of the logit of a query with a key `distance` tokens before it.

        x^T M y is the logit of normed streams x (query) and y (key), under the model's position scheme with its
        rotation, its factor on the logits and the layer's scaling. Raises UnsupportedModel for a distance bias (ALiBi).
        """
        if distance < 0:
            raise BadInput(f"invalid distance {distance}. Give 0 or more")
        refuse_distance_bias(self.model, "QK matrices are")
        geometry, schedule = self.model.geometry.at_layer(self._layer_index), self.model.schedule
        q, k = (_head_planes(weight, geometry) for weight in (self.query, self.key))
        group = self.head // (geometry.heads // geometry.kv_groups)
        phases = rotation_phases(self.model, schedule, self._layer_index, torch.tensor([distance]))[group, :, 0]
        matrix = torch.einsum("fx,fy->xy", q * phases.to(q.device)[:, None], k.conj()).real
        scale = torch.tensor(self._weights.scalings[self._layer_index], dtype=torch.float64)
        if schedule.scales_queries:
            visible = torch.tensor([[distance + 1]], device=self.model.device)
            by_head = schedule.query_scale(self._layer_index, visible)[0, :, 0]
            scale = scale * by_head[self.head if len(by_head) > 1 else 0].double().cpu()
        return (float(scale) * matrix).float()

    def copying_score(self, *, centred: bool = True) -> float:
        """Sum of the real parts of the eigenvalues of W_U W_OV W_E over the sum of their moduli, -1..1.

        Centred: the mean of W_U over the vocabulary is subtracted, as in direct logit attribution, since it moves all
        logits alike. Not centred: as TransformerLens counts without `center_unembed`. 0 for a head whose weights are 0.
        """
        vocabulary_map = self._embeddings().vocabulary_map(self._layer_index, centred=centred)
        score = copying_scores(self.value[None], self.output[None], vocabulary_map.to(self.value.device))
        return float(score.nan_to_num(0).clamp(-1, 1)[0])

    def token_logits(self, sources: TokenIds, targets: TokenIds | None = None) -> Tensor:
        """The full OV circuit: what attending to each of tokens `sources` [n] adds to the logits of `targets` [m],
        [n, m], minus the mean over the vocabulary. All tokens are targets by default.
        """
        embedded = self._weights.embed(self._token_ids(sources, "source"))
        decomposition = self._weights.decomposition
        unembedding = decomposition.unembedding
        rows = torch.arange(len(unembedding)) if targets is None else self._token_ids(targets, "target")
        written = (embedded.to(self.value.device) @ self.value.T) @ self.output.T
        directions = self._weights.final_norm.linear(written.to(self._weights.final_norm.gain.device))
        directions = decomposition.logit_factor * directions.to(unembedding.device)
        mean = directions @ decomposition.unembedding_mean.to(directions)
        logits = [directions @ part.float().T for part in torch.split(unembedding[rows.to(unembedding.device)], 2**15)]
        return torch.cat(logits, 1) - mean[:, None]

    def copying_accuracy(self, tokens: int | TokenIds | None = None, *, top: int = 1, seed: int = 0) -> float:
        """Share of tokens whose own logit the head raises most of all (is among the `top` most raised), 0..1.

        A logit that equals the own one counts as larger, so that a head whose weights are 0 scores 0, unless `top` is
        the whole vocabulary.
        `tokens` are token ids, or the size of a sample drawn from the vocabulary with `seed`, by default 2,048 of it.
        """
        count = min(len(self._weights.embedding), len(self._weights.decomposition.unembedding))
        if tokens is None or isinstance(tokens, int):
            size = SAMPLED_TOKENS if tokens is None else tokens
            if size < 1:
                raise BadInput(f"a sample of {size} tokens. Use at least 1")
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randperm(count, generator=generator)[: min(size, count)]
        else:
            ids = self._token_ids(tokens, "sampled")
        if not 1 <= top <= count:
            raise BadInput(f"top={top} is not a number of tokens. Use 1 to {count}")
        hits = 0
        for part in torch.split(ids, TOKENS_PER_PRODUCT):
            logits = self.token_logits(part)
            own = logits.gather(1, part.to(logits.device)[:, None])
            hits += int(((logits >= own).sum(1) <= top).sum())
        return hits / len(ids)

    def singular_directions(self) -> tuple[Tensor, Tensor, Tensor]:
        """Singular value decomposition of W_OV without the [D, D] product: written directions [D, r], singular values
        [r], descending, and read directions [D, r], with W_OV = written diag(values) read^T; r is the value dimension.
        """
        left, left_factor = torch.linalg.qr(self.output.double())
        right, right_factor = torch.linalg.qr(self.value.double().T)
        inner, values, inner_read = torch.linalg.svd(left_factor @ right_factor.T)
        return (left @ inner).float(), values.float(), (right @ inner_read.T).float()

    def top_tokens(self, directions: int = 4, top: int = 8) -> pd.DataFrame:
        """The tokens that fit the first singular directions best: rows direction, singular_value, side, sign, rank,
        token, text and value.

        side: `written`, the logits of the written direction, minus their mean over the vocabulary, or `read`, the
        product of token embeddings with the read direction. sign: + for the largest values, - for the smallest. The
        sign of a direction is free, but + of both sides belong together: reading + writes +.
        """
        written, values, read = self.singular_directions()
        if not 1 <= directions <= len(values):
            raise BadInput(f"directions={directions}. Use 1 to {len(values)}")
        if top < 1:
            raise BadInput(f"top={top} is not a number of tokens. Use at least 1")
        decomposition, embedding = self._weights.decomposition, self._weights.embedding
        outputs = self._weights.final_norm.linear(written.T[:directions].to(self._weights.final_norm.gain.device))
        unembedding = decomposition.unembedding.float()
        logits = decomposition.logit_factor * (unembedding - decomposition.unembedding_mean) @ outputs.T.to(unembedding)
        products = self._weights.embedding_factor * embedding.float() @ read[:, :directions].to(embedding.device)
        rows: list[tuple[Any, ...]] = []
        for side, by_token in (("written", logits), ("read", products)):
            for sign in "+-":
                extremes = by_token.topk(min(top, len(by_token)), dim=0, largest=sign == "+")
                for number in range(directions):
                    column = zip(extremes.indices[:, number].tolist(), extremes.values[:, number].tolist(), strict=True)
                    for rank, (token, value) in enumerate(column):
                        text = self._text(token)
                        rows.append((number, float(values[number]), side, sign, rank, token, text, value))
        names = ["direction", "singular_value", "side", "sign", "rank", "token", "text", "value"]
        return pd.DataFrame(rows, columns=names)

    def _embeddings(self) -> TokenEmbeddings:
        return TokenEmbeddings(self.model, self._weights)

    def _token_ids(self, tokens: TokenIds, noun: str) -> Tensor:
        ids = torch.as_tensor(tokens).flatten().cpu()
        if len(ids) and (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool):
            raise BadInput(f"the {noun} tokens are {quote(tokens)}. Use a list of token ids")
        ids = ids.long()
        limit = min(len(self._weights.embedding), len(self._weights.decomposition.unembedding))
        if not len(ids):
            raise BadInput(f"no {noun} token. Give at least one token id")
        if wrong := [token for token in ids.tolist() if not 0 <= token < limit]:
            raise BadInput(f"no {noun} token {wrong[0]}. Use token ids from 0 to {limit - 1}")
        return ids

    def _text(self, token: int) -> str:
        return "" if self.model.tokenizer is None else str(self.model.tokenizer.decode([token]))


def _head_planes(weight: Tensor, geometry: Geometry) -> Tensor:
    """The columns of a head's weight [d, D] as coordinates of rotary pairs: [F, D], complex128."""
    x, y = pair_coordinates(weight.T[None].contiguous(), geometry)[:, 0].double()  # each [D, F]
    return torch.complex(x, y).T


@checked
@torch.no_grad()
def head_matrices(model: Model, layer: int, head: int) -> HeadMatrices:
    """The weight matrices of query head `head` of layer number `layer`.

    Raises BadInput for a head that the model does not have, and UnsupportedModel, with the reason, for a model whose
    heads are not linear maps of the residual stream.
    """
    geometry = model.geometry
    if layer not in geometry.layer_numbers:
        numbers = ", ".join(map(str, geometry.layer_numbers))
        raise BadInput(f"no attention layer {layer}. Use one of: {numbers}")
    index = geometry.layer_numbers.index(layer)
    check_index(head, geometry.layer_heads[index], "head", f" in layer {layer}")
    weights = inspect_head_weights(model)
    circuits = LayerCircuits.of_layer(weights.layers[index])
    matrices = (circuits.query[head], circuits.key[head], circuits.value[head], circuits.output[head])
    return HeadMatrices(model, layer, head, *matrices, weights, index)
