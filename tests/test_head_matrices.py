"""Matrices of a head equal dense products of the weights, and give the logits of the first layer at any distance."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import dense_circuits, families
from support.dense_circuits import DenseHead, dense_heads
from support.refusals import refuses
from support.tiny_studies import tokenizer
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM

import headscope as hs
from headscope.decomposition.head_circuits import LayerCircuits
from headscope.decomposition.head_weights import inspect_head_weights
from headscope.errors import BadInput, UnsupportedModel
from headscope.models.loading import locate
from headscope.positions.model import Model

IDS = [5, 9, 2, 7, 7, 3, 8, 4]


def tiny(family: str) -> Model:
    return hs.load((families.SPECS | families.OTHERS)[family].build(), device="cpu")


def full_ov(module: object, head: DenseHead, *, centred: bool) -> Tensor:
    """W_E W_OV^T W_U as a dense [vocabulary, vocabulary] matrix by source and target, with the final norm's gain."""
    final = next(
        norm for name in ("norm", "ln_f", "final_layer_norm") if (norm := getattr(module.base_model, name, None))
    )
    unembedding = module.get_output_embeddings().weight.double() * (
        final.weight.double() + ("Gemma" in type(final).__name__)
    )
    if getattr(final, "bias", None) is not None:
        unembedding = unembedding - unembedding.mean(1, keepdim=True)
    if centred:
        unembedding = unembedding - unembedding.mean(0)
    return module.get_input_embeddings().weight.double() @ head.ov.T @ unembedding.T


def scaled(module: object) -> float:
    """The factors of embeddings and logits of Gemma and Granite."""
    config = module.config
    factor = getattr(config, "embedding_multiplier", 1.0) / getattr(config, "logits_scaling", 1.0)
    return factor * (config.hidden_size**0.5 if "gemma" in config.model_type else 1.0)


@pytest.mark.parametrize("family", dense_circuits.FAMILIES)
@torch.no_grad()
def test_matrices_and_scores_equal_dense_products(family: str) -> None:
    model = tiny(family)
    dense = dense_heads(model.module)
    for layer, head in ((0, 0), (1, len(dense[1]) - 1)):
        matrices, reference = hs.head_matrices(model, layer, head), dense[layer][head]
        torch.testing.assert_close(matrices.ov.double(), reference.ov, atol=1e-5, rtol=1e-4)
        for centred in (True, False):
            circuit = full_ov(model.module, reference, centred=centred)
            eigenvalues = torch.linalg.eigvals(circuit)
            expected = float(eigenvalues.real.sum() / eigenvalues.abs().sum())
            assert matrices.copying_score(centred=centred) == pytest.approx(expected, abs=2e-3)
        circuit = full_ov(model.module, reference, centred=True)
        own_logits = matrices.token_logits(range(len(circuit)))
        np.testing.assert_allclose(
            own_logits, scaled(model.module) * circuit, atol=1e-4 * float(own_logits.abs().max())
        )
        part = matrices.token_logits([3, 5], [1, 2, 3])
        np.testing.assert_allclose(part, own_logits[[3, 5]][:, [1, 2, 3]], rtol=1e-5, atol=1e-4)
        ranks = (own_logits >= own_logits.diag()[:, None]).sum(1) - 1  # ties count against the token itself
        everything = range(len(circuit))
        assert matrices.copying_accuracy(everything) == pytest.approx(float((ranks < 1).double().mean()))
        assert matrices.copying_accuracy(everything, top=5) == pytest.approx(float((ranks < 5).double().mean()))
        assert not matrices.ov.requires_grad


def test_a_head_without_weights_copies_nothing() -> None:
    matrices = hs.head_matrices(tiny(dense_circuits.FAMILIES[0]), 0, 0)
    zero = replace(matrices, value=torch.zeros_like(matrices.value))
    assert zero.copying_score() == 0
    assert zero.copying_accuracy() == 0
    assert zero.copying_accuracy([3, 5], top=5) == 0


@pytest.mark.parametrize("family", dense_circuits.FAMILIES)
def test_singular_directions_are_those_of_the_dense_matrix(family: str) -> None:
    matrices = hs.head_matrices(tiny(family), 1, 1)
    written, values, read = matrices.singular_directions()
    np.testing.assert_allclose(written * values @ read.T, matrices.ov, atol=1e-5)
    expected = torch.linalg.svdvals(matrices.ov.double())[: len(values)]
    np.testing.assert_allclose(values, expected, rtol=1e-4, atol=1e-6)
    for directions in (written, read):
        np.testing.assert_allclose(directions.T @ directions, np.eye(len(values)), atol=1e-5)


@pytest.mark.parametrize("scheme", ["base", "yarn:factor=4"])
@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding", "phi3", "granite"])
@torch.no_grad()
def test_qk_with_the_normed_inputs_gives_the_logits_of_the_first_layer(family: str, scheme: str) -> None:
    """For layers without biases and without a norm of q and k, whose scale the matrix leaves out."""
    model = tiny(family)
    if scheme != "base":
        model = model.with_scheme(scheme)
    attention = model.attention_modules[0]
    normed, logits = [], []
    with hs.attached(model), hs.capturing(model) as layers:
        layers.listen(
            lambda record: (
                logits.append(record.masked_logits(*[torch.arange(len(IDS))] * 2)) if not record.layer else None
            )
        )
        handle = attention.register_forward_pre_hook(
            lambda module, args, kwargs: normed.append(kwargs.get("hidden_states", args[0] if args else None)),
            with_kwargs=True,
        )
        model.module(torch.tensor([IDS]), use_cache=False)
        handle.remove()
    gain = input_gain(model)
    for head in (0, model.geometry.heads - 1):
        matrices = hs.head_matrices(model, 0, head)
        for query, key in ((5, 5), (5, 2), (7, 0)):
            x, y = (normed[0][0, row].float() / gain for row in (query, key))  # the gain is folded in
            assert float(x @ matrices.qk(query - key) @ y) == pytest.approx(
                float(logits[0][head, query, key]), abs=1e-4
            )


def composed_logits(model: Model, sender: tuple[int, int], receiver: tuple[int, int], tokens: Tensor) -> Tensor:
    """Logits [n, n] of queries that read tokens with keys that read what a head writes for tokens, by the modules."""
    layers, embedded = model.module.base_model.layers, model.module.get_input_embeddings()(tokens)
    heads, dim = model.geometry.heads, model.geometry.head_dim
    first, second = layers[sender[0]], layers[receiver[0]]
    values = first.self_attn.v_proj(first.input_layernorm.weight * embedded).view(len(tokens), -1, dim)
    outputs = torch.zeros(len(tokens), heads, dim)
    outputs[:, sender[1]] = values[:, sender[1] * values.shape[1] // heads]
    written = first.self_attn.o_proj(outputs.flatten(1))
    keys = second.self_attn.k_proj(second.input_layernorm.weight * written).view(len(tokens), -1, dim)
    queries = second.self_attn.q_proj(second.input_layernorm.weight * embedded).view(len(tokens), heads, dim)
    return queries[:, receiver[1]] @ keys[:, receiver[1] * keys.shape[1] // heads].T / dim**0.5


@torch.no_grad()
def check_composition(model: Model, sender: tuple[int, int], receiver: tuple[int, int], tokens: Tensor) -> None:
    """The line of the page from-transformer-lens."""
    embedding = model.module.get_input_embeddings().weight[tokens]
    line = embedding @ hs.head_matrices(model, *receiver).qk(0) @ hs.head_matrices(model, *sender).ov @ embedding.T
    expected = composed_logits(model, sender, receiver, tokens)
    np.testing.assert_allclose(line, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["llama-gqa", "mistral-sliding", "smollm3"])
def test_k_composition_over_the_vocabulary_equals_the_modules(family: str) -> None:
    model = tiny(family)
    check_composition(model, (0, 3), (1, 1), torch.arange(model.module.config.vocab_size))


@pytest.mark.model
def test_k_composition_of_smollm2_equals_the_modules(smollm2: Model) -> None:
    check_composition(smollm2, (8, 2), (16, 0), torch.arange(200))


def input_gain(model: Model) -> Tensor:
    layer = model.module.base_model.layers[0]
    return layer.input_layernorm.weight + ("Gemma" in type(layer).__name__)


@pytest.mark.slow
@given(st.integers(0, 3), st.integers(0, 40))
def test_qk_at_distance_zero_is_the_product_of_the_weights(head: int, distance: int) -> None:
    matrices = hs.head_matrices(LLAMA, 0, head)
    product = matrices.query.T @ matrices.key / LLAMA.geometry.head_dim**0.5
    np.testing.assert_allclose(matrices.qk(0), product, atol=1e-6)
    singular = [np.linalg.svd(matrices.qk(d), compute_uv=False)[0] for d in (0, distance)]
    assert singular[1] <= np.linalg.norm(matrices.query, 2) * np.linalg.norm(matrices.key, 2)


LLAMA = tiny("llama-gqa")


def test_top_tokens_are_those_of_the_directions() -> None:
    model = hs.load(families.MEASURABLE["llama-gqa"](), device="cpu", tokenizer=tokenizer())
    matrices = hs.head_matrices(model, 1, 2)
    written, values, read = matrices.singular_directions()
    table = matrices.top_tokens(2, 3)
    assert len(table) == 2 * 2 * 2 * 3
    unembedding = model.module.get_output_embeddings().weight.detach()
    logits = (unembedding - unembedding.mean(0)) @ (written[:, 1] * model.module.base_model.norm.weight.detach())
    rows = table[(table["direction"] == 1) & (table["side"] == "written") & (table["sign"] == "+")]
    assert [*rows["token"]] == logits.topk(3).indices.tolist()
    np.testing.assert_allclose(rows["value"], logits.topk(3).values, rtol=1e-4)
    products = model.module.get_input_embeddings().weight.detach() @ read[:, 0]
    rows = table[(table["direction"] == 0) & (table["side"] == "read") & (table["sign"] == "-")]
    assert [*rows["token"]] == (-products).topk(3).indices.tolist()
    assert set(table.loc[table["direction"] == 0, "singular_value"]) == {float(values[0])}


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: hs.head_matrices(LLAMA, 9, 0), ("layer 9", 0)),
        (lambda: hs.head_matrices(LLAMA, 0, 99), ("head 99", "layer 0")),
        (lambda: hs.head_matrices(LLAMA, 0, 0).qk(-1), ("distance -1", 0)),
        (lambda: hs.head_matrices(LLAMA, 0, 0).token_logits([10**6]), ("token 1000000",)),
        (lambda: hs.head_matrices(LLAMA, 0, 0).token_logits([]), ("token",)),
        (lambda: hs.head_matrices(LLAMA, 0, 0).copying_accuracy(0), ("sample", "0 tokens", 1)),
        (lambda: hs.head_matrices(LLAMA, 0, 0).copying_accuracy(top=0), ("top=0", 1)),
        (lambda: hs.head_matrices(LLAMA, 0, 0).top_tokens(0), ("directions=0", 1)),
    ],
)
def test_unusable_arguments_are_named(call: Callable[[], object], named: tuple[str | int, ...]) -> None:
    with refuses(BadInput, *named):
        call()


def test_qk_with_a_distance_bias_is_refused() -> None:
    with refuses(UnsupportedModel, "ALiBi"):
        hs.head_matrices(LLAMA.with_scheme("alibi"), 0, 0).qk()


@pytest.mark.model
def test_copying_scores_of_smollm2_equal_those_of_transformer_lens(smollm2: Model, tmp_path: object) -> None:
    """All heads and layers: with and without centring of the unembedding, norms folded in."""
    run = hs.weights(smollm2, parts=["weights"], out=tmp_path, quiet=True)
    for column, centre in (("ov_copying", True), ("ov_copying_uncentred", False)):
        module = AutoModelForCausalLM.from_pretrained(locate("smollm2-135m")[0], dtype=torch.float32)
        lens = TransformerBridge.boot_transformers("any", hf_model=module, tokenizer=smollm2.tokenizer)
        lens.enable_compatibility_mode(disable_warnings=True, center_unembed=centre)
        core = lens.W_U.double() @ lens.W_E.double()
        heads = run.heads.set_index(["layer", "head"])[column]
        groups = lens.W_V.shape[1]
        for layer in range(30):
            value = lens.W_V[layer].double().repeat_interleave(9 // groups, 0)
            eigenvalues = torch.linalg.eigvals(lens.W_O[layer].double() @ core @ value)
            expected = eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1)
            np.testing.assert_allclose(heads[layer], expected.detach(), atol=1e-3)


@pytest.mark.model
def test_ov_and_qk_matrices_of_smollm2_equal_those_of_transformer_lens(smollm2: Model) -> None:
    """Relative to the largest entry, with products in float64: the weights of both are float32."""
    module = AutoModelForCausalLM.from_pretrained(locate("smollm2-135m")[0], dtype=torch.float32)
    lens = TransformerBridge.boot_transformers("any", hf_model=module, tokenizer=smollm2.tokenizer)
    lens.enable_compatibility_mode(disable_warnings=True)
    stacked = {name: getattr(lens, name).detach().double() for name in ("W_Q", "W_K", "W_V", "W_O")}
    weights = inspect_head_weights(smollm2)  # what `hs.head_matrices` reads, once for all heads
    ours = hs.head_matrices(smollm2, 16, 5)
    torch.testing.assert_close(ours.query, LayerCircuits.of_layer(weights.layers[16]).query[5], rtol=0, atol=0)
    for layer in range(30):
        circuits = LayerCircuits.of_layer(weights.layers[layer])
        query, key, value, output = (
            tensors[layer].repeat_interleave(9 // tensors.shape[1], 0) for tensors in stacked.values()
        )  # [H, D, d] and [H, d, D]; keys and values by KV group
        for actual, expected in (
            (circuits.output.double() @ circuits.value.double(), (value @ output).mT),
            (circuits.query.double().mT @ circuits.key.double(), query @ key.mT),
        ):
            largest = expected.abs().amax((1, 2))
            assert float(((actual - expected).abs().amax((1, 2)) / largest).max()) <= 1e-5
