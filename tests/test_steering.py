"""`hs.steered`: heads whose weights outside a span are scaled and renormalised, in passes and in generation."""

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import families
from support.refusals import refuses
from support.tiny_studies import save_texts, tokenizer
from torch import Tensor

import headscope as hs
from headscope.attention.edits import TokenSet
from headscope.attention.record import AttentionRecord
from headscope.base.head_set import HeadSet
from headscope.base.model_identity import WeightDigests
from headscope.errors import BadInput
from headscope.forward import chunked_pass
from headscope.forward.observe import observe
from headscope.interventions.edits import edit, edited
from headscope.interventions.kinds import Steer, Suppress
from headscope.positions.model import Model
from headscope.results.model_notes import model_notes

IDS = torch.randint(3, families.VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))
SPAN, ALPHA = range(2, 5), 0.01
FAMILIES = ("llama", "llama-gqa", "llama-mqa", "qwen2", "qwen3", "phi", "gpt_neox", "smollm3", "granite", "cohere")
SOFT_CAP_OR_SINK = ("gemma2", "gpt_oss")
"""A bias acts after the soft cap, and a learned sink keeps its logit: eager attention adds its mask in this place."""


@pytest.fixture(scope="module")
def model() -> Model:
    return hs.load(families.MEASURABLE["llama-gqa"]())


@torch.no_grad()
def logits(model: Model, ids: Tensor = IDS) -> Tensor:
    return model.module(ids, use_cache=False).logits


@torch.no_grad()
def eager_logits(family: str, heads: Iterable[int], span: Iterable[int], alpha: float) -> Tensor:
    """Logits of eager attention with ln(alpha) in the masks of these heads of all layers, outside the span."""
    module = (families.SPECS | families.OTHERS)[family].build()
    module.set_attn_implementation("eager")
    length = IDS.shape[1]
    bias = torch.zeros(1, families.HEADS, length, length)
    outside = [key for key in range(length) if key not in {*span}]
    for head in heads:
        bias[:, head, :, outside] = math.log(alpha)
    full = torch.full_like(bias, -math.inf).triu(1)
    sliding = full + torch.full_like(bias, -math.inf).tril(-families.WINDOW)
    full, sliding = ((bias + mask).clamp(min=torch.finfo(torch.float32).min) for mask in (full, sliding))
    has_kinds = family in SOFT_CAP_OR_SINK
    mask: Any = {"full_attention": full, "sliding_attention": sliding} if has_kinds else full
    return module(IDS, attention_mask=mask, use_cache=False).logits


@pytest.mark.parametrize("family", [*FAMILIES, *SOFT_CAP_OR_SINK])
def test_steering_equals_eager_attention_with_scaled_and_renormalised_weights(family: str) -> None:
    model = hs.load((families.SPECS | families.OTHERS)[family].build())
    with hs.steered(model, {layer: [1, 3] for layer in range(families.LAYERS)}, SPAN, ALPHA):
        steered = logits(model)
    expected = eager_logits(family, [1, 3], SPAN, ALPHA)
    assert (steered - expected).abs().max() < 1e-5 * expected.abs().max()
    assert (steered - logits(model)).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["mistral-sliding", "deepseek_v3", "qwen3_next"])
def test_other_attention_is_steered_by_the_definition_and_listeners_get_the_weights_that_it_uses(family: str) -> None:
    """The output of a head, from weights that are scaled by hand: windows, latent attention, gated heads."""
    model = hs.load((families.SPECS | families.OTHERS)[family].build())
    layer, head, records = 1, 2, []
    number = model.geometry.layer_numbers[layer]
    with torch.no_grad(), hs.capturing(model) as layers:
        layers.listen(records.append, [layer])
        model.module(IDS[:1], use_cache=False)
    weights = records[0].weights(range(IDS.shape[1]))[head]
    scale = torch.full((IDS.shape[1],), ALPHA)
    scale[[*SPAN]] = 1
    scaled = weights * scale
    group = head // (records[0].q.shape[0] // records[0].k.shape[0])
    scaled /= scaled.sum(-1, keepdim=True)
    with torch.no_grad(), hs.steered(model, [(number, head)], SPAN, ALPHA), hs.capturing(model) as layers:
        layers.listen(records.append, [layer])
        model.module(IDS[:1], use_cache=False)
    torch.testing.assert_close(records[1].z[head], scaled @ records[0].v[group], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(records[1].weights(range(IDS.shape[1]))[head], scaled, atol=1e-6, rtol=1e-5)


def test_nested_steering_multiplies_the_weights_by_both_factors_in_either_order(model: Model) -> None:
    spans = ({"span": range(2, 5), "alpha": 0.1}, {"span": range(4, 8), "alpha": 0.05})

    def steered_logits(order: list[int]) -> Tensor:
        with hs.steered(model, "L1H2", **spans[order[0]]), hs.steered(model, "L1H2", **spans[order[1]]):
            return logits(model)

    records: list[AttentionRecord] = []
    for contexts in (spans[:0], spans):
        with ExitStack() as stack, torch.no_grad():
            for arguments in contexts:
                stack.enter_context(hs.steered(model, "L1H2", **arguments))
            stack.enter_context(hs.capturing(model)).listen(records.append, [1])
            logits(model, IDS[:1])
    plain, used = (record.weights(range(IDS.shape[1]))[2] for record in records)
    factors = torch.tensor([0.1 * 0.05, 0.05, 1, 0.1])[[0, 0, 1, 1, 2, 3, 3, 3, 0, 0, 0, 0]]
    torch.testing.assert_close(used, plain * factors / (plain * factors).sum(-1, keepdim=True), atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(steered_logits([0, 1]), steered_logits([1, 0]), atol=1e-5, rtol=1e-5)


def test_alpha_of_1_changes_no_bit_and_leaving_restores_the_model(model: Model) -> None:
    before = logits(model)
    with hs.steered(model, "L0H0,L2H3", SPAN, 1):
        assert torch.equal(logits(model), before)
    with hs.steered(model, "L0H0,L2H3", SPAN, ALPHA):
        assert not torch.equal(logits(model), before)
    assert torch.equal(logits(model), before)


def test_rows_that_see_no_key_of_the_span_keep_their_output(model: Model) -> None:
    with hs.steered(model, {layer: range(4) for layer in range(4)}, range(6, 8), ALPHA):
        torch.testing.assert_close(logits(model)[:, :6], logits(model)[:, :6], atol=1e-5, rtol=1e-5)
        steered = logits(model)
    torch.testing.assert_close(steered[:, :6], logits(model)[:, :6], atol=1e-5, rtol=1e-5)


def test_generation_equals_decoding_without_a_cache(model: Model) -> None:
    everything = {layer: range(4) for layer in range(4)}
    with hs.steered(model, everything, SPAN, ALPHA):
        generated = model.module.generate(IDS[:1], max_new_tokens=6, do_sample=False, pad_token_id=0)
        step_by_step = IDS[:1]
        for _ in range(6):
            step_by_step = torch.cat([step_by_step, logits(model, step_by_step)[:, -1:].argmax(-1)], 1)
    assert torch.equal(generated, step_by_step)


@pytest.mark.parametrize("kind", [lambda span: Steer(span, ALPHA), Suppress], ids=["steer", "suppress"])
def test_a_span_from_the_end_is_that_of_every_prompt_of_a_padded_batch_while_it_generates(
    model: Model, kind: Callable[[TokenSet], Any]
) -> None:
    short, long = IDS[:1, :7], IDS[1:]
    padded = torch.cat([torch.nn.functional.pad(short, (5, 0)), long])
    mask = torch.ones_like(padded)
    mask[0, :5] = 0

    def scores(ids: Tensor, mask: Tensor) -> Tensor:
        with edited(model, [edit(model, kind(TokenSet(slice(-3, None))), "all")]):
            output = model.module.generate(
                ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0, eos_token_id=None,
                output_logits=True, return_dict_in_generate=True,
            )  # fmt: skip
        return torch.stack(output.logits, 1)

    batch = scores(padded, mask)
    for number, ids in enumerate((short, long)):
        alone = scores(ids, torch.ones_like(ids))[0]
        assert float((batch[number] - alone).abs().max()) <= 1e-5 * float(alone.abs().max())


def test_a_run_measured_inside_the_context_names_it(model: Model, tmp_path: Path) -> None:
    texts = save_texts(tmp_path / "texts", words=40)
    named = hs.load(families.MEASURABLE["llama-gqa"](), tokenizer=tokenizer())
    for heads, name in ((["L1H2"], "L1H2"), ({layer: range(4) for layer in range(4)}, "all heads")):
        with hs.steered(named, heads, [7, 2, 3, 4], ALPHA):
            run = hs.measure(named, text=texts, lengths=[32], docs=1, out=tmp_path, quiet=True)
        contexts = [note.details["contexts"] for note in model_notes(run) if note.question == "models.contexts"]
        assert contexts == [[f"hs.steered({name}: tokens 2-4,7, alpha 0.01)"]]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"span": []}, "span=[]"),
        ({"span": [-1]}, "span=[-1]"),
        *(({"span": span}, f"span={span!r}") for span in (3, None, [[1, 2]], [1.5], 1.5, slice(1, 3))),
        ({"span": np.float32(1.5)}, "span=1.5"),
        ({"span": "context"}, "span='context'"),
        ({"span": ["context"]}, "span=['context']"),
        ({"alpha": 0}, "alpha=0"),
        ({"alpha": 1.5}, "alpha=1.5"),
        ({"alpha": True}, "alpha=True"),
        ({"heads": "L9H0"}, "L9H0"),
        ({"heads": HeadSet(((0, 0),), model_digests=WeightDigests("b" * 64))}, "b" * 12),
    ],
)
def test_bad_input_is_refused(model: Model, arguments: Any, named: str) -> None:
    with refuses(BadInput, named), hs.steered(model, **{"heads": "L0H0", "span": SPAN, **arguments}):
        pass


@pytest.mark.parametrize("context", [hs.steered, hs.ablated])
@pytest.mark.parametrize("weights", ["other", None])
def test_another_word_for_the_accepted_weights_is_refused(model: Model, context: Any, weights: Any) -> None:
    others = {"span": SPAN} if context is hs.steered else {}
    with refuses(BadInput, f"weights={weights!r}", "same", "any"), context(model, "L0H1", weights=weights, **others):
        pass


@pytest.mark.parametrize("context", [hs.steered, hs.ablated])
@pytest.mark.parametrize("heads", [None, 3, np.float32(1.1), {"L0H1": 1}, [1.5], [(0, 1.5)], [(0, 1, 2)], [[[0, 1]]]])
def test_values_that_name_no_heads_are_refused(model: Model, context: Any, heads: Any) -> None:
    others = {"span": SPAN} if context is hs.steered else {}
    with refuses(BadInput, "head"), context(model, heads, **others):
        pass


def test_arrays_and_numbers_of_numpy_mean_the_heads_positions_and_factor_that_they_hold(model: Model) -> None:
    with hs.steered(model, [(1, 2), (2, 0)], [2, 3], 0.5):
        expected = logits(model)
    with hs.steered(model, np.array([[1, 2], [2, 0]]), np.arange(2, 4), np.float32(0.5)):
        assert logits(model).equal(expected)


def test_a_span_by_name_steers_its_tokens_and_returns_the_ids_of_the_prompt() -> None:
    named = hs.load(families.MEASURABLE["llama-gqa"](), tokenizer=tokenizer())
    prompt = "w1 w2 [[rule]]w3 w4[[/rule]] w5 w6"
    with hs.steered(named, "L1H2,L2H0", "rule", ALPHA, prompt=prompt) as ids:
        assert ids is not None
        by_name = logits(named, ids)
    segments = {"segments": [{"text": "w1 w2 "}, {"name": "rule", "text": "w3 w4"}, {"text": " w5 w6"}]}
    with hs.steered(named, "L1H2,L2H0", range(2, 4), ALPHA):
        assert torch.equal(logits(named, ids), by_name)
    with hs.steered(named, "L1H2,L2H0", "rule", ALPHA, prompt=segments) as same_ids:
        assert same_ids is not None
        assert torch.equal(same_ids, ids)
    refusals: Any = (({"span": "role", "prompt": prompt}, "'rule'"), ({"span": "rule"}, "[[rule]]...[[/rule]]"))
    for arguments, name in refusals:
        with refuses(BadInput, f"'{arguments['span']}'", name), hs.steered(named, "L1H2", **arguments):
            pass
    with refuses(BadInput, "prompt", "span=[2, 3]"), hs.steered(named, "L1H2", range(2, 4), prompt=prompt):
        pass


def test_a_span_beyond_the_prompt_is_refused_in_passes_and_in_generation(model: Model) -> None:
    beyond = range(11, 14)
    with refuses(BadInput, "11-13", 12), hs.steered(model, "L1H2", beyond, ALPHA):
        logits(model)
    with refuses(BadInput, "11-13", 12), hs.steered(model, "L1H2", beyond, ALPHA):
        model.module.generate(IDS[:1], max_new_tokens=6, do_sample=False, pad_token_id=0)


def test_a_text_read_in_chunks_may_reach_the_span_in_a_later_chunk(model: Model) -> None:
    with torch.no_grad(), hs.steered(model, "L1H2", range(9, 11), ALPHA):
        cache = model.module(IDS[:1, :4], use_cache=True).past_key_values
        last = model.module(IDS[:1, 4:], past_key_values=cache).logits[:, -1]
        torch.testing.assert_close(last, logits(model, IDS[:1])[:, -1], atol=1e-5, rtol=1e-5)


def test_a_prompt_read_token_by_token_may_reach_the_span(model: Model) -> None:
    with torch.no_grad(), hs.steered(model, "L1H2", range(9, 11), ALPHA):
        cache = None
        for token in IDS[:1].T[..., None]:
            output = model.module(token, past_key_values=cache, use_cache=True)
            cache = output.past_key_values
        torch.testing.assert_close(output.logits[:, -1], logits(model, IDS[:1])[:, -1], atol=1e-5, rtol=1e-5)


def test_a_refused_text_does_not_refuse_the_next_one(model: Model) -> None:
    with hs.steered(model, "L1H2", range(11, 14), ALPHA):
        logits(model, IDS[:1, :5])
        with refuses(BadInput, "11-13", 5):
            logits(model, IDS.view(1, -1))
        logits(model, IDS.view(1, -1))


@pytest.mark.parametrize("tokens_per_chunk", [16, 79])
def test_a_long_text_is_measured_in_chunks_though_its_first_tokens_end_before_the_span(
    model: Model, monkeypatch: pytest.MonkeyPatch, tokens_per_chunk: int
) -> None:
    """The last of 80 tokens ends the span; the trial of reading in chunks has 48 tokens."""
    ids, sizes = torch.randint(3, families.VOCAB, (80,), generator=torch.Generator().manual_seed(1)), []

    class Observer:
        needs_whole_text = False

        def listen(self, layers: Any) -> None:
            layers.listen(lambda record: sizes.append(record.q.shape[1]), [1])

        def tables(self, finished_pass: Any) -> dict[str, Any]:
            return {"hidden": finished_pass.hidden}

    monkeypatch.setattr(chunked_pass, "tokens_per_chunk", lambda model: tokens_per_chunk)
    with torch.no_grad(), hs.steered(model, "L1H2", range(70, 80), ALPHA):
        (whole,) = observe(model, ids, [lambda _: Observer()])
        monkeypatch.setattr(chunked_pass, "fits_one_pass", lambda *_: False)
        (chunked,) = observe(model, ids, [lambda _: Observer()])
    assert sizes == [80, *(len(chunk) for chunk in ids.split(tokens_per_chunk))]
    torch.testing.assert_close(chunked["hidden"], whole["hidden"], atol=1e-5, rtol=1e-5)


def test_checks_of_the_model_on_a_few_tokens_are_not_refused(tmp_path: Path) -> None:
    """A replay checks each model once, on 4 tokens, and an analysis of the residual stream reads 16."""
    named = hs.load(families.MEASURABLE["llama-gqa"](), tokenizer=tokenizer())
    prompt = " ".join(f"w{number}" for number in range(40))
    with hs.steered(named, "L1H2", range(30, 35), ALPHA):
        run = hs.attribution(named, prompt=prompt, answer=" w1", wrong=" w2", out=tmp_path, quiet=True)
        hs.ablate(named, prompt=prompt, answer=" w1", kinds=["zero"], out=tmp_path, quiet=True)
    assert not run.table("attribution_answer_parts").empty
