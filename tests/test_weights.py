"""Circuits from weights: equal to dense references on tiny models of several families and to transformer-lens."""

from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import families
from support.dense_circuits import FAMILIES, dense_composition, dense_copying_score, dense_heads
from support.refusals import refuses

import headscope as hs
from headscope.decomposition.head_circuits import LayerCircuits, TokenEmbeddings, effective_embeddings, ov_logits
from headscope.decomposition.head_weights import ModelWeights, inspect_head_weights
from headscope.errors import UnsupportedModel
from headscope.measures import circuits
from headscope.positions.model import Model


@cache
def opened(name: str) -> tuple[Model, ModelWeights]:
    model = hs.load((families.SPECS | families.OTHERS)[name].build())
    return model, inspect_head_weights(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_ov_and_qk_circuits_equal_dense_products(name: str) -> None:
    model, weights = opened(name)
    vocabulary_map = TokenEmbeddings(model, weights).vocabulary_map(0)
    for layer, heads in zip(weights.layers, dense_heads(model.module), strict=True):
        matrices = LayerCircuits.of_layer(layer)
        ov_norms, qk_norms = matrices.ov_norms(), matrices.qk_norms()
        scores = matrices.copying_scores(vocabulary_map)
        for number, head in enumerate(heads):
            assert float(ov_norms[number]) == pytest.approx(float(head.ov.norm()), rel=1e-5)
            assert float(qk_norms[number]) == pytest.approx(float(head.qk.norm()), rel=1e-5)
            assert float(scores[number]) == pytest.approx(dense_copying_score(model.module, head), abs=1e-5)


@pytest.mark.parametrize("name", FAMILIES)
def test_composition_equals_dense_products(name: str) -> None:
    model, weights = opened(name)
    dense, matrices = dense_heads(model.module), [LayerCircuits.of_layer(layer) for layer in weights.layers]
    senders = circuits.sender_factors(matrices[0].value, matrices[0].output)
    last = matrices[-1]
    receivers = {
        "q": circuits.receiver_factors(last.query, last.key),
        "k": circuits.receiver_factors(last.key, last.query),
        "v": circuits.receiver_factors(last.value, last.output.transpose(1, 2)),
    }
    for kind, factors in receivers.items():
        scores = circuits.composition_scores(factors, senders)
        expected = [[dense_composition(r, s, kind) for s in dense[0]] for r in dense[-1]]
        torch.testing.assert_close(scores.double(), torch.tensor(expected).double(), atol=1e-5, rtol=0)


def test_transformer_lens_factored_matrices_agree() -> None:
    factored_matrix = pytest.importorskip("transformer_lens").FactoredMatrix
    model, weights = opened("llama-gqa")
    vocabulary_map = TokenEmbeddings(model, weights).vocabulary_map(0)
    unembedding = weights.final_norm.pull_back(model.module.get_output_embeddings().weight.detach())
    unembedding = unembedding - unembedding.mean(0)
    embedding = model.module.get_input_embeddings().weight.detach()
    first, last = (LayerCircuits.of_layer(weights.layers[n]) for n in (0, -1))
    # transformer-lens multiplies row vectors from the left: OV = W_V W_O, QK = W_Q W_K^T.
    ov_first = factored_matrix(first.value.transpose(1, 2), first.output.transpose(1, 2))
    ov_last = factored_matrix(last.value.transpose(1, 2), last.output.transpose(1, 2))
    qk_last = factored_matrix(last.query.transpose(1, 2), last.key)
    torch.testing.assert_close(last.ov_norms().float(), ov_last.norm().flatten(), rtol=1e-5, atol=0)
    eigenvalues = (embedding @ ov_last @ unembedding.T).eigenvalues
    scores = eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)
    torch.testing.assert_close(last.copying_scores(vocabulary_map).float(), scores, atol=1e-5, rtol=0)
    senders = circuits.sender_factors(first.value, first.output)
    # composition_scores(left, right) of transformer-lens: the sender on the left, in its q, k and v sense.
    for factors, right in (
        (circuits.receiver_factors(last.query, last.key), qk_last),
        (circuits.receiver_factors(last.key, last.query), qk_last.T),
        (circuits.receiver_factors(last.value, last.output.transpose(1, 2)), ov_last),
    ):
        ours = circuits.composition_scores(factors, senders)
        for number in range(4):
            product = ov_first @ right[number]
            theirs = product.norm() / (ov_first.norm() * right[number].norm())
            torch.testing.assert_close(ours[number], theirs.flatten(), atol=1e-5, rtol=0)


@given(st.integers(0, 10**6))
def test_composition_laws(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    value, query = torch.randn(1, 3, 12, generator=generator), torch.randn(1, 4, 12, generator=generator)
    output, key = torch.randn(1, 12, 3, generator=generator), torch.randn(1, 4, 12, generator=generator)
    score = circuits.composition_scores(circuits.receiver_factors(key, query), circuits.sender_factors(value, output))
    scaled = circuits.composition_scores(
        circuits.receiver_factors(3 * key, query / 7), circuits.sender_factors(2 * value, output)
    )
    assert 0 <= float(score) <= 1 + 1e-6
    torch.testing.assert_close(score, scaled, rtol=1e-4, atol=1e-6)


def test_random_composition_is_near_one_over_root_width_and_repeats() -> None:
    baseline = circuits.random_composition(8, 8, 256, 0)
    assert baseline == circuits.random_composition(8, 8, 256, 0)
    assert baseline == pytest.approx(256**-0.5, rel=0.1)


def random_factors(seed: int, heads: int = 16, width: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Receiver and sender factors of random heads with large norms in the same few dimensions of the stream."""
    generator = torch.Generator().manual_seed(seed)
    gains = 1 + 4 * (torch.rand(width, generator=generator) < 0.1)
    query, key, value = (gains * torch.randn(heads, 4, width, generator=generator) for _ in range(3))
    output = gains[:, None] * torch.randn(heads, width, 4, generator=generator)
    return circuits.receiver_factors(query, key), circuits.sender_factors(value, output)


def test_heads_that_compose_by_their_norms_alone_do_not_exceed_chance() -> None:
    exceeding, baseline = 0, circuits.random_composition(4, 4, 64, 0)
    for seed in range(60):
        receivers, senders = random_factors(seed)
        scores = circuits.composition_scores(receivers, senders)
        assert float(scores.mean()) > 1.2 * baseline  # random matrices of the same shapes are no null
        null = circuits.CompositionNull()
        null.update("q", receivers, senders)
        columns = null.compute()
        assert columns["mean"][0] == pytest.approx(float(scores.mean()), rel=0.1)
        exceeding += float(scores.max()) > columns["bound"][0]
    assert exceeding <= 6  # 5 % of 60 on average


def test_a_head_that_reads_what_another_writes_exceeds_chance() -> None:
    receivers, senders = random_factors(0)
    direction = torch.randn(64, generator=torch.Generator().manual_seed(1))
    direction /= direction.norm()
    receivers[3], senders[5] = 0, 0
    receivers[3, 0], senders[5, :, 0] = direction, direction
    null = circuits.CompositionNull()
    null.update("k", receivers[:8], senders)
    null.update("k", receivers[8:], senders)
    columns = null.compute()
    scores = circuits.composition_scores(receivers, senders)
    assert columns["pairs"][0] == scores.numel()
    assert (scores > columns["bound"][0]).nonzero().tolist() == [[3, 5]]


def test_copying_score_is_one_for_a_head_that_copies_and_minus_one_for_its_negative() -> None:
    embedding = torch.randn(40, 6, generator=torch.Generator().manual_seed(0))
    value = torch.eye(6)[None, :3]
    for sign in (1.0, -1.0):
        score = circuits.copying_scores(value, sign * value.transpose(1, 2), embedding.T @ embedding)
        assert float(score) == pytest.approx(sign)


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "gpt_neox"])
def test_effective_embedding_is_the_first_layer_without_its_heads(name: str) -> None:
    model, _ = opened(name)
    tokens = torch.tensor([3, 77])
    expected = []
    for token in tokens:
        with hs.ablated(model, [(0, head) for head in range(4)], "zero"):
            states = model.module(token[None, None], output_hidden_states=True).hidden_states
        expected.append(states[1][0, 0])
    torch.testing.assert_close(effective_embeddings(model, tokens), torch.stack(expected), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("uses_first_mlp", [False, True])
def test_ov_logits_and_copying_scores_leave_out_learned_positions(uses_first_mlp: bool) -> None:
    results = []
    for offset in (0.0, 3.0):
        model = hs.load(families.OTHERS["gpt2"].build())
        model.module.transformer.wpe.weight += offset * torch.arange(64)
        embeddings = TokenEmbeddings(model, inspect_head_weights(model), uses_first_mlp)
        (logits,) = ov_logits(embeddings, 1, torch.tensor([5]))
        results.append((logits, embeddings.vocabulary_map(1)))
    for before, after in zip(*results, strict=True):
        torch.testing.assert_close(before, after, atol=1e-3, rtol=1e-3)


@torch.no_grad()
def test_ov_logits_equal_the_logits_of_what_the_head_writes() -> None:
    model, weights = opened("llama-gqa")
    attention, inner = model.module.model.layers[1], model.module.model
    (logits,) = ov_logits(TokenEmbeddings(model, weights), 1, torch.tensor([5]))
    values = attention.self_attn.v_proj(attention.input_layernorm(inner.embed_tokens.weight[5])).view(2, -1)
    for head in range(4):
        z = torch.zeros(4, values.shape[1])
        z[head] = values[head // 2]
        expected = model.module.lm_head(attention.self_attn.o_proj(z.flatten()) * inner.norm.weight)
        torch.testing.assert_close(logits[head], expected - expected.mean(), atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("olmo", "clip_qkv"),
        ("deepseek_v3", "latent"),
        ("qwen3_next", "gate"),
        ("hunyuan", "rotation"),
    ],
)
def test_families_whose_heads_are_not_linear_maps_are_refused_by_name(name: str, reason: str) -> None:
    model = hs.load((families.SPECS | families.OTHERS)[name].build())
    with refuses(UnsupportedModel, model.name, reason):
        inspect_head_weights(model)
