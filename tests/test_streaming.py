"""Streaming attention equals dense attention under a boolean mask, in every family, and is what it is called."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import families
from support.refusals import refuses
from torch import Tensor

import headscope as hs
from headscope.attention.kernel import AttentionVariant, attend
from headscope.attention.record import AttentionRecord
from headscope.attention.streaming_kernel import StreamingKind, streaming_attention
from headscope.errors import BadInput
from headscope.interventions.edits import edit_units, edited
from headscope.interventions.heads import head_units, kv_group_units
from headscope.positions.model import Model
from headscope.streaming import StreamingWindow

IDS = torch.randint(3, families.VOCAB, (1, 40), generator=torch.Generator().manual_seed(0))


def dense(record: AttentionRecord, sink: int, recent: int) -> Tensor:
    """Head outputs [H, L, dv] from L x L weights, with a loop over the keys that a query sees."""
    q, k, v = record.q.double(), record.k.double(), record.v.double()
    size = len(q) // len(k)
    outputs = torch.zeros(len(q), q.shape[1], v.shape[-1], dtype=torch.float64)
    for head in range(len(q)):
        for row in range(q.shape[1]):
            i = row + k.shape[1] - q.shape[1]
            keys = [j for j in range(i + 1) if j + record.first_key < sink or i - j < recent]
            if record.window is not None:
                keys = [j for j in keys if i - j < record.window]
            if record.chunk_size is not None:
                chunk = (i + record.first_key) // record.chunk_size
                keys = [j for j in keys if (j + record.first_key) // record.chunk_size == chunk]
            logits = record.scaling * k[head // size, keys] @ q[head, row]
            if record.softcap is not None:
                logits = record.softcap * torch.tanh(logits / record.softcap)
            weights = logits.exp()
            total = weights.sum() + (0 if record.sink is None else record.sink[head].double().exp())
            outputs[head, row] = (weights / total) @ v[head // size, keys]
    return outputs


def streamed(model: Model, window: StreamingWindow, units: Any) -> tuple[dict[int, AttentionRecord], Tensor]:
    """The attention record of every layer, and the logits, with these units streaming."""
    records: dict[int, AttentionRecord] = {}
    edit = edit_units(StreamingKind(window.sink, window.recent), units, model.geometry)
    with edited(model, [edit] if units else []) as layers, torch.no_grad():
        layers.listen(lambda record: records.__setitem__(record.layer, record))
        logits = model.module(IDS, use_cache=False).logits
    return records, logits


@pytest.fixture(scope="module", params=families.MEASURABLE)
def model(request: pytest.FixtureRequest) -> Model:
    return hs.load(families.MEASURABLE[request.param]())


def test_streaming_heads_equal_dense_attention_under_a_mask_in_every_family(model: Model) -> None:
    records, _ = streamed(model, StreamingWindow(3, 5), head_units(model.geometry))
    for record in records.values():
        torch.testing.assert_close(record.z.double(), dense(record, 3, 5), rtol=1e-5, atol=1e-5)
        weights = record.weights(range(IDS.shape[1]))  # what listeners get
        values = record.v.repeat_interleave(len(weights) // len(record.v), 0)
        torch.testing.assert_close(weights @ values, record.z, rtol=1e-5, atol=1e-5)


def test_a_window_as_long_as_the_text_changes_nothing(model: Model) -> None:
    _, changed = streamed(model, StreamingWindow(0, IDS.shape[1]), kv_group_units(model.geometry))
    _, unchanged = streamed(model, StreamingWindow(0, 1), [])
    torch.testing.assert_close(changed, unchanged, rtol=1e-4, atol=1e-4)


def test_only_the_chosen_heads_stream(model: Model) -> None:
    unit = head_units(model.geometry)[1]
    records, _ = streamed(model, StreamingWindow(1, 2), [unit])
    plain, _ = streamed(model, StreamingWindow(1, 2), [])
    z, unchanged = records[unit.layer].z, plain[unit.layer].z
    others = [head for head in range(len(z)) if head != unit.head]
    torch.testing.assert_close(z[others], unchanged[others])
    assert not torch.allclose(z[unit.head], unchanged[unit.head])


@given(
    queries=st.integers(1, 600),
    cached=st.integers(0, 300),
    sink=st.integers(0, 40),
    recent=st.integers(1, 400),
    first_key=st.integers(0, 50),
)
def test_streaming_equals_dense_attention_at_any_size_and_after_cached_keys(
    queries: int, cached: int, sink: int, recent: int, first_key: int
) -> None:
    generator = torch.Generator().manual_seed(queries)
    q, k, v = (torch.randn(1, 2, length, 4, generator=generator) for length in (queries, *2 * [queries + cached]))
    actual, lse = streaming_attention(q, k, v, AttentionVariant(0.5), sink, recent, first_key)
    i, j = torch.arange(cached, cached + queries)[:, None], torch.arange(queries + cached)
    visible = (j <= i) & ((j + first_key < sink) | (i - j < recent))
    logits = (0.5 * q @ k.mT).masked_fill(~visible, -math.inf)
    torch.testing.assert_close(actual, logits.softmax(-1) @ v, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse, logits.logsumexp(-1), rtol=1e-5, atol=1e-5)


def test_gradients_of_streaming_attention_equal_those_of_dense_attention() -> None:
    q, k, v = (torch.randn(1, 2, 300, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    i, j = torch.arange(300)[:, None], torch.arange(300)
    visible = (j <= i) & ((j < 4) | (i - j < 20))
    expected = (0.5 * q @ k.mT).masked_fill(~visible, -math.inf).softmax(-1) @ v
    actual = streaming_attention(q, k, v, AttentionVariant(0.5), 4, 20)[0]
    weight = torch.randn_like(expected)
    for own, dense_gradient in zip(
        torch.autograd.grad((actual * weight).sum(), (q, k, v)),
        torch.autograd.grad((expected * weight).sum(), (q, k, v)),
        strict=True,
    ):
        torch.testing.assert_close(own, dense_gradient)


def test_all_keys_give_causal_attention() -> None:
    q, k, v = (torch.randn(1, 4, 700, 8) for _ in range(3))
    variant = AttentionVariant(0.3)
    expected, _ = attend(q, k, v, None, variant, 0.0, False)
    torch.testing.assert_close(streaming_attention(q, k, v, variant, 0, 700)[0], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_decoding_with_a_cache_streams_as_one_pass_does() -> None:
    model = hs.load(families.MEASURABLE["llama-gqa"]())
    with hs.ablated(model, ["L0H1", "L2H0", "L2H3"], "streaming:2+5"):
        whole = model.module(IDS, use_cache=False).logits
        cache, steps = None, []
        for token in IDS[0]:
            output = model.module(token.view(1, 1), past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            steps.append(output.logits[0])
    torch.testing.assert_close(torch.cat(steps), whole[0], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(whole, model.module(IDS, use_cache=False).logits, atol=1e-2)


def test_ablated_refuses_a_window_without_recent_tokens() -> None:
    model = hs.load(families.MEASURABLE["llama-gqa"]())
    with (
        refuses(BadInput, "streaming:64+0", "recent"),
        hs.ablated(model, ["L0H0"], "streaming:64+0"),
    ):
        pass


@pytest.mark.parametrize("text", ["streaming:", "streaming:64", "streaming:64+0", "streaming:0+0", "streaming:-1+5"])
def test_a_window_that_is_none_is_refused(text: str) -> None:
    with refuses(ValueError, text):
        StreamingWindow.parse(text)


def test_streaming_is_a_component_of_head_influence(tmp_path: Any) -> None:
    from support.tiny_studies import save_checkpoint, save_texts

    save_checkpoint(tmp_path / "tiny")
    source = save_texts(tmp_path / "texts", 70)
    components = ["streaming:2+6", "streaming:0+64"]
    options = {"components": components, "lengths": [64], "unit": "group", "curve": False}
    options |= {"verify_top": 3, "verify_random": 2}
    run = hs.influence(str(tmp_path / "tiny"), text=source, docs=2, out=tmp_path / "runs", quiet=True, **options)
    rows = run.influence.astype({"component": "str", "method": "str"})
    whole = rows[rows["component"] == "streaming:0+64"]
    assert whole["delta_nll"].abs().max() < 1e-5
    exact = rows[(rows["component"] == "streaming:2+6") & (rows["method"] == "exact")]
    assert exact["delta_nll"].abs().max() > 1e-4
    assert any(
        "streaming attention to the first 2 and last 6 tokens" in text.lower() for text in run.findings()["text"]
    )
