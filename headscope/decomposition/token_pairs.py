"""Logits of token pairs by distance and rotary pair, from the weights alone: S_h(a, b, D).

The query is token a at position D, the key token b at position 0. Both are read from the token embeddings through the
layer's own input norm, so that the logits of the first layer are those of any text; deeper layers then see tokens
without their context.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from headscope.base.public_functions import checked
from headscope.decomposition.head_circuits import TokenEmbeddings
from headscope.decomposition.head_weights import inspect_head_weights
from headscope.errors import BadInput, UnsupportedModel
from headscope.measures.rotary_pairs import planes_by_head, rotary_planes
from headscope.positions.model import Model
from headscope.positions.schedule import Schedule


@checked
def token_pair_logits(
    model: Model, query_tokens: Sequence[int], key_tokens: Sequence[int], distances: Sequence[int], layer: int = 0
) -> Tensor:
    """Contribution of each rotary pair to the logit of token pairs in one layer: [H, n, distances, F], float32.

    `query_tokens` and `key_tokens` are n token ids each; `layer` is the number of a layer. Sums over F, the rotary
    pairs and the unrotated dimensions as further pairs, are logits under the model's position scheme, before any
    soft cap. Raises BadInput for unknown tokens, distances or layers, UnsupportedModel for heads that are not linear
    maps."""
    if layer not in model.geometry.layer_numbers:
        raise BadInput(f"no attention layer {layer}. Use one of: {_numbers(model)}")
    if len(query_tokens) != len(key_tokens) or not query_tokens:
        raise BadInput(f"{len(query_tokens)} query tokens and {len(key_tokens)} key tokens. Give equal numbers of both")
    if not distances or min(distances) < 0:
        raise BadInput(f"invalid distances {list(distances)[:8]}. Give at least one distance; each must be 0 or more")
    embeddings = TokenEmbeddings(model, inspect_head_weights(model))
    for token in (*query_tokens, *key_tokens):
        if not 0 <= token < len(embeddings.weights.embedding):
            raise BadInput(f"no token {token}. Use token ids from 0 to {len(embeddings.weights.embedding) - 1}")
    queries, keys = (torch.tensor(list(tokens)) for tokens in (query_tokens, key_tokens))
    layer_index = model.geometry.layer_numbers.index(layer)
    return pair_logits(embeddings, queries, keys, torch.tensor(list(distances)), layer_index)


@torch.no_grad()
def pair_logits(embeddings: TokenEmbeddings, queries: Tensor, keys: Tensor, distances: Tensor, layer: int) -> Tensor:
    """`token_pair_logits` of tokens `queries` and `keys` [n] at `distances` [m], in a layer given by its index."""
    model, weights = embeddings.model, embeddings.weights.layers[layer]
    schedule, geometry = model.schedule, model.geometry.at_layer(layer)
    refuse_distance_bias(model, "logits of token pairs are")
    if bool(embeddings.weights.embedding_offset.any()):
        raise UnsupportedModel(
            f"logits of token pairs are not possible for {model.spec}: it adds an embedding of every position, so they "
            "depend on both positions and not on the distance alone. Use a rotary scheme"
        )
    q, k = (
        projection.vectors(weights.apply_input_norm(embeddings.residual_input(tokens, layer)))
        for projection, tokens in ((weights.query, queries), (weights.key, keys))
    )
    planes = [
        torch.complex(*rotary_planes(t, geometry).double().unbind(0)) for t in (q.contiguous(), k.contiguous())
    ]  # [G x F, heads of a group, n]
    products = planes[0] * planes[1].conj()
    phases = rotation_phases(model, schedule, layer, distances).flatten(0, 1).to(products.device)
    rotated = torch.einsum("phn,pm->phnm", products, phases).real
    scaling = embeddings.weights.scalings[layer]
    by_head = torch.stack(
        [
            planes_by_head(rotated[..., n, m].contiguous(), geometry)
            for n in range(len(queries))
            for m in range(len(distances))
        ],
        1,
    ).view(geometry.heads, len(queries), len(distances), geometry.all_pairs)
    if schedule.scales_queries:
        scale = schedule.query_scale(layer, distances[None].to(model.device) + 1)[0].double()  # [1|H, m]
        by_head = by_head * scale.to(by_head.device)[:, None, :, None]
    return (scaling * by_head).float()


def rotation_phases(model: Model, schedule: Schedule, layer: int, distances: Tensor) -> Tensor:
    """What the rotation multiplies q_f conj(k_f) by at distances [m]: [G, F, m], complex128, on the CPU.

    Angle theta_f D and modulus attention factor squared; 1 for unrotated pairs. `layer` is an index.
    """
    geometry = model.geometry.at_layer(layer)
    theta = torch.zeros(geometry.kv_groups, geometry.all_pairs)
    factor = torch.ones(geometry.all_pairs, dtype=torch.float64)
    if model.geometry.layer_rotates[layer]:
        theta[:, : geometry.pairs] = geometry.rotation_direction * schedule.theta(layer).detach().float().cpu()
        factor[: geometry.pairs] = schedule.attention_factor(layer) ** 2
    angles = (theta[..., None] * distances.float().cpu()).double()
    return torch.polar(factor[:, None].expand_as(angles).contiguous(), angles)


def refuse_distance_bias(model: Model, analysis: str) -> None:
    """Raise UnsupportedModel if logits depend on the distance by more than a rotation; `analysis` ends in a verb."""
    if model.schedule.slopes is not None or "ALiBi" in model.rotation.no_pairs_reason:
        raise UnsupportedModel(
            f"{analysis} not possible for {model.spec}: its position scheme adds a distance bias (ALiBi) to the "
            "logits. Use a rotary scheme"
        )


def _numbers(model: Model) -> str:
    return ", ".join(map(str, model.geometry.layer_numbers))
