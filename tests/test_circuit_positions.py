"""QK circuits with rotation: logits of token pairs equal those of real texts; the positional logit curve."""

from dataclasses import replace

import pytest
import torch
from support import families
from support.refusals import refuses
from zoo.build import tiny

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.capture import capturing
from headscope.interventions.position_kinds import rotate_pairs
from headscope.measures import circuits
from headscope.measures.positional_preference import PositionalPreference
from headscope.positions.attach import attached
from headscope.positions.model import Model
from probes.weights.run import TextObserver


def records(model: Model, ids: list[int]) -> dict[int, AttentionRecord]:
    kept: dict[int, AttentionRecord] = {}
    with torch.no_grad(), attached(model), capturing(model) as layers:
        layers.listen(lambda record: kept.update({record.layer: record}))
        model.module(torch.tensor([ids]), use_cache=False)
    return kept


def logits(record: AttentionRecord) -> torch.Tensor:
    """All logits [H, L, L] of a short text."""
    k = record.k.repeat_interleave(len(record.q) // len(record.k), 0)
    return record.scaling * record.q @ k.transpose(1, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-gqa", "qwen2", "qwen3", "gemma3", "phi", "phi3", "gpt_neox", "glm", "olmo2"])
@pytest.mark.parametrize("scheme", ["base", "yarn:factor=4"])
def test_first_layer_logits_of_a_text_equal_those_of_token_pairs(name: str, scheme: str) -> None:
    model = hs.load(families.SPECS[name].build()).with_scheme(scheme)
    ids = [3, 99, 14, 14, 70, 5, 21]
    expected = logits(records(model, ids)[0])
    queries, keys, distances = zip(*((i, j, i - j) for i in range(len(ids)) for j in range(i + 1)), strict=True)
    pairs = hs.token_pair_logits(model, [ids[i] for i in queries], [ids[j] for j in keys], range(len(ids)))
    for index, (i, j, distance) in enumerate(zip(queries, keys, distances, strict=True)):
        torch.testing.assert_close(pairs[:, index, distance].sum(-1), expected[:, i, j], atol=1e-4, rtol=1e-5)


@pytest.mark.model
@pytest.mark.parametrize("scheme", ["base", "yarn:factor=4", "adarope:adapter=smollm2-135m"])
def test_first_layer_logits_of_a_real_prompt_equal_those_of_token_pairs(smollm2: Model, scheme: str) -> None:
    model = smollm2.with_scheme(scheme)
    ids = model.tokenizer("The quick brown fox jumps over the lazy dog, and over the fox.").input_ids
    expected = logits(records(model, ids)[0])
    pairs = hs.token_pair_logits(model, [ids[-1]] * len(ids), ids, range(len(ids)))
    for j in range(len(ids)):
        ours = pairs[:, j, len(ids) - 1 - j].sum(-1)
        torch.testing.assert_close(ours, expected[:, -1, j], atol=1e-4, rtol=1e-5)


NARROW_CAP = replace(
    families.OTHERS["gemma2"], options=families.OTHERS["gemma2"].options | {"attn_logit_softcapping": 0.05}
)


@pytest.mark.parametrize("name", ["llama-gqa", "gemma3", "gpt_neox", "glm", "smollm3", "gemma2"])
def test_positional_logits_equal_the_mean_query_and_key_rotated_by_hand(name: str) -> None:
    family = NARROW_CAP if name == "gemma2" else families.SPECS[name]
    model = hs.load(family.build()).with_scheme("yarn:factor=4")
    ids = torch.randint(3, 128, (20,), generator=torch.Generator().manual_seed(0)).tolist()
    preference = PositionalPreference(model.geometry, len(ids), model.schedule.theta)
    kept = records(model, ids)
    for record in kept.values():
        preference.update(record)
    layer, distance = model.geometry.layers - 1, 7
    # The mean over all tokens a and b of the logit of a with b at one distance: rotate q of each row so that it is at
    # that distance from each key. By bilinearity this is the logit of the means.
    record, geometry = kept[layer], model.geometry.at_layer(layer)
    theta = model.schedule.theta(layer)[0]
    expected = torch.zeros(geometry.heads)
    for j in range(1, len(ids)):
        turned = record.q[None]
        if model.geometry.layer_rotates[layer]:
            shift = torch.tensor([j + distance - i for i in range(len(ids))])
            turned = rotate_pairs(turned, (shift[:, None] * theta).double()[None, None], geometry)
        k = record.k.repeat_interleave(geometry.heads // geometry.kv_groups, 0)[:, j]
        expected += record.scaling * torch.einsum("hid,hd->h", turned[0, :, 1:].float(), k)
    expected /= (len(ids) - 1) ** 2
    ours = preference.logits(layer, torch.tensor([distance]))[:, 0]
    torch.testing.assert_close(ours.float(), record.soft_cap(expected), atol=1e-4, rtol=1e-4)


def test_the_positional_curve_ends_where_the_keys_of_a_query_end() -> None:
    options = families.OTHERS["llama4"].options | {"attention_chunk_size": 8}
    model = hs.load(replace(families.OTHERS["llama4"], options=options).build())
    preference = PositionalPreference(model.geometry, 20, model.schedule.theta)
    for record in records(model, list(range(3, 23))).values():
        preference.update(record)
    curve, summary = preference.compute(), preference.summarise()
    for layer, visible in ((0, 8), (3, 20)):
        assert curve["distance"][curve["layer"] == layer].max() < visible
        assert summary["effective_length"][summary["layer"] == layer].max() < visible + 0.5


def test_chunks_of_queries_give_the_same_means() -> None:
    model = hs.load(families.SPECS["llama-gqa"].build())
    whole, chunked = (PositionalPreference(model.geometry, 12, model.schedule.theta) for _ in range(2))
    for record in records(model, list(range(3, 15))).values():
        whole.update(record)
        chunked.update(replace(record, q=record.q[:, :5], k=record.k[:, :5], v=record.v[:, :5]))
        chunked.update(replace(record, q=record.q[:, 5:]))
    for layer in range(model.geometry.layers):
        torch.testing.assert_close(whole.pair_products(layer), chunked.pair_products(layer))


def test_positional_effective_length_of_flat_and_peaked_logits() -> None:
    peaked = torch.full((1, 50), -100.0)
    peaked[0, 3] = 0
    assert float(circuits.positional_effective_length(torch.zeros(1, 50))) == pytest.approx(50)
    assert float(circuits.positional_effective_length(peaked)) == pytest.approx(1)


@pytest.mark.parametrize(
    ("named", "arguments"),
    [
        (("token 128", 0, 127), ([128], [3], [0])),
        (("token -1", 0, 127), ([-1], [3], [0])),
        (("query", 1, "key", 2), ([3], [3, 4], [0])),
        (("query", "key", 0), ([], [], [0])),
        (("distances", "[-1]"), ([3], [3], [-1])),
        (("distances", "[]"), ([3], [3], [])),
        (("layer 9", "0, 1, 2, 3"), ([3], [3], [0], 9)),
    ],
)
def test_bad_token_pairs_are_refused(named: tuple[object, ...], arguments: tuple[list[int], ...]) -> None:
    with refuses(BadInput, *named):
        hs.token_pair_logits(hs.load(families.SPECS["llama-gqa"].build()), *arguments)


@pytest.mark.parametrize("model_type", ["gpt2", "gpt_neo", "xglm", "biogpt", "ctrl", "gpt_bigcode"])
def test_logits_by_distance_are_refused_where_positions_are_embedded(model_type: str) -> None:
    model = hs.load(tiny(model_type))
    with refuses(UnsupportedModel, "embedding of every position", "rotary"):
        hs.token_pair_logits(model, [5], [7], [0, 1, 8])
    with refuses(UnsupportedModel, "positional logit curve", "does not rotate", "--parts"):
        TextObserver(model, torch.arange(3, 20)[None], {"distance"})
