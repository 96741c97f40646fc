"""`hs.ablated`: heads without their output in passes and in generation, and the model as before afterwards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import families
from support.refusals import assert_names, refuses
from support.tiny_studies import save_texts, tokenizer
from torch import Tensor

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.base.head_set import HeadSet
from headscope.errors import BadInput
from headscope.interventions.ablation import REFERENCE_TOKENS
from headscope.interventions.heads import heads_by_layer
from headscope.models import open_contexts
from headscope.positions.model import Model
from headscope.prompts.texts import load_token_documents

IDS = torch.randint(3, families.VOCAB, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def model() -> Model:
    return hs.load(families.MEASURABLE["llama-gqa"](), tokenizer=tokenizer())


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_texts(tmp_path_factory.mktemp("reference") / "texts", words=REFERENCE_TOKENS)


@torch.no_grad()
def logits(model: Model, ids: Tensor = IDS) -> Tensor:
    return model.module(ids, use_cache=False).logits


def replaced_columns(model: Model, layer: int, head: int, new: Any) -> Callable[[], None]:
    """Replace the head's columns of the input of o_proj by hand; returns a function that undoes it."""

    def replace(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        z = args[0].clone()
        z[..., 16 * head : 16 * (head + 1)] = new
        return (z,)

    return model.module.model.layers[layer].self_attn.o_proj.register_forward_pre_hook(replace).remove


def test_zero_ablation_equals_zeros_at_the_input_of_o_proj(model: Model) -> None:
    with hs.ablated(model, ["L1H2", "L3H0"]):
        actual = logits(model)
    undo = [replaced_columns(model, 1, 2, 0.0), replaced_columns(model, 3, 0, 0.0)]
    expected = logits(model)
    for remove in undo:
        remove()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert (expected - logits(model)).abs().max() > 0.1


@torch.no_grad()
def test_mean_ablation_equals_the_mean_over_the_reference_text_at_the_input_of_o_proj(model: Model, text: str) -> None:
    recorded: list[Tensor] = []
    o_proj = model.module.model.layers[2].self_attn.o_proj
    hook = o_proj.register_forward_pre_hook(lambda module, args: recorded.append(args[0]))
    (document,) = load_token_documents(text, tokenizer(), 1, 256)  # the model's context
    model.module(torch.tensor([document.ids]), use_cache=False)
    hook.remove()
    mean = recorded[0][0, :, 16:32].double().mean(0).float()
    with hs.ablated(model, {2: [1]}, "mean", text=text):
        actual = logits(model)
    undo = replaced_columns(model, 2, 1, mean)
    expected = logits(model)
    undo()
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)


def test_scaled_outputs_and_the_mean_of_the_document_equal_changes_at_the_input_of_o_proj(model: Model) -> None:
    o_proj = model.module.model.layers[2].self_attn.o_proj
    for kind in ("scale:-1.5", "mean:document"):

        def replace(module: Any, args: tuple[Tensor], kind: str = kind) -> tuple[Tensor]:
            z = args[0].clone()
            own = z[..., 16:32]
            own[:] = -1.5 * own if kind.startswith("scale") else own.mean(1, keepdim=True)
            return (z,)

        with hs.ablated(model, "L2H1", kind):
            actual = logits(model)
        hook = o_proj.register_forward_pre_hook(replace)
        expected = logits(model)
        hook.remove()
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        assert (actual - logits(model)).abs().max() > 1e-2


def test_uniform_attention_has_equal_weights_on_all_visible_keys(model: Model) -> None:
    records: list[AttentionRecord] = []
    with hs.ablated(model, "L2H1", "uniform"), hs.capturing(model) as layers:
        layers.listen(records.append, [2])
        logits(model, IDS[:1])
    expected = torch.ones(12, 12).tril() / torch.arange(1, 13)[:, None]
    torch.testing.assert_close(records[0].weights(range(12))[1], expected)
    torch.testing.assert_close(records[0].z[1], expected @ records[0].v[0])


def test_noise_has_the_size_of_the_head_and_is_seeded(model: Model) -> None:
    def outputs(kind: str, seed: int) -> Tensor:
        records: list[AttentionRecord] = []
        with hs.ablated(model, "L2H1", kind, seed=seed), hs.capturing(model) as layers:
            layers.listen(records.append, [2])
            logits(model, IDS.view(1, -1))
        return records[0].z[1]

    plain = outputs("scale:1", 0)
    noise = (outputs("noise:0.5", 0) - plain) / plain.std(0, correction=0)
    assert noise.std() == pytest.approx(0.5, rel=0.15)
    assert torch.equal(outputs("noise:0.5", 0), outputs("noise:0.5", 0))
    assert not torch.equal(outputs("noise:0.5", 0), outputs("noise:0.5", 1))


@torch.no_grad()
@pytest.mark.parametrize("kind", ["mean:document", "noise:0.1"])
def test_kinds_that_need_the_whole_text_refuse_tokens_after_a_cache(model: Model, kind: str) -> None:
    with hs.ablated(model, "L2H1", kind):
        cache = model.module(IDS[:, :8], use_cache=True).past_key_values
        with refuses(BadInput, kind, "L2H1", 4, 12, "use_cache=False"):
            model.module(IDS[:, 8:], past_key_values=cache)


@torch.no_grad()
def test_resample_ablation_draws_the_same_tokens_in_one_pass_and_with_a_cache(model: Model, text: str) -> None:
    with hs.ablated(model, "L2H1", "resample", text=text):
        whole = logits(model)
        cache = model.module(IDS[:, :8], use_cache=True).past_key_values
        rest = model.module(IDS[:, 8:], past_key_values=cache).logits
    torch.testing.assert_close(rest, whole[:, 8:], atol=1e-5, rtol=1e-5)


def test_the_label_of_a_context_names_its_heads_or_says_all_heads(model: Model) -> None:
    every_head = {layer: range(4) for layer in range(4)}
    for heads, name in (("L3H1,L1H2", "L1H2,L3H1"), (every_head, "all heads"), ("all", "all heads")):
        with hs.ablated(model, heads, "scale:0.5", positions="2:4"):
            logits(model)
            labels = [context.description for context in open_contexts.contexts_of(model.module)]
        assert labels == [f"hs.ablated({name}: scale:0.5 at 2:4)"], labels


def test_resample_ablation_takes_outputs_of_the_reference_text_and_is_seeded(model: Model, text: str) -> None:
    def run(seed: int) -> Tensor:
        with hs.ablated(model, ["L2H1"], "resample", text=text, seed=seed):
            return logits(model)

    assert torch.equal(run(0), run(0))
    assert not torch.equal(run(0), run(1))
    assert (run(0) - logits(model)).abs().max() > 0.01


def test_a_head_set_a_mapping_pairs_and_names_ablate_the_same_heads(model: Model) -> None:
    expected = {1: [0, 2], 3: [1]}
    for heads in (
        HeadSet(((3, 1), (1, 2), (1, 0))),
        {1: [2, 0], 3: [1]},
        ["L3H1", "1.2", "L1H0"],
        "L3H1, L1H2,L1H0",
        [(3, 1), (1, 2), (1, 0), (1, 0)],
    ):
        assert heads_by_layer(model, heads) == expected


def test_generation_runs_without_the_ablated_heads_and_with_them_afterwards(model: Model) -> None:
    def generate() -> Tensor:
        return model.module.generate(IDS[:1], max_new_tokens=6, do_sample=False, pad_token_id=0)

    before, everything = generate(), {layer: range(4) for layer in range(4)}
    with hs.ablated(model, everything):
        ablated = generate()
        step_by_step = IDS[:1]
        for _ in range(6):
            step_by_step = torch.cat([step_by_step, logits(model, step_by_step)[:, -1:].argmax(-1)], 1)
    assert torch.equal(ablated, step_by_step)
    assert not torch.equal(ablated, before)
    assert torch.equal(generate(), before)


def test_leaving_restores_the_model_bit_for_bit(model: Model) -> None:
    before, implementation = logits(model), model.module.config._attn_implementation
    with pytest.raises(RuntimeError, match="inside"), hs.ablated(model, ["L0H0"]):
        raise RuntimeError("inside")
    assert torch.equal(logits(model), before)
    assert model.module.config._attn_implementation == implementation


@pytest.mark.parametrize(
    ("heads", "kind", "named"),
    [
        (["L9H0"], "zero", ("L9H0", "layers", 0, 3)),
        ([(0, 4)], "zero", ("L0H4", "heads", 0, 3, "layer 0")),
        (["2.g0"], "zero", ("'2.g0'", "L2H0")),
        (["head"], "zero", ("'head'",)),
        ("capital", "zero", ("'capital'",)),
        ([], "zero", ("heads", "L18H6")),
        (["L0H0"], "maen", ("'maen'", "'mean'", "zero", "mean:text", "resample")),
        (["L0H0"], "zero:1", ("'zero:1'", "'zero'", "zero", "mean:text", "resample")),
        (["L0H0"], "streaming", ("'streaming'", "streaming:4+64")),
        (["L0H0"], "Top:4", ("'Top:4'", "top:64", "top", "group-top")),
        (["L0H0"], "top:x", ("'top:x'", "top:KEYS")),
        (["L0H0"], "scale:nan", ("'scale:nan'", "scale:0.5")),
        (["L0H0"], "noise", ("'noise'", "noise:0.1")),
        (["L0H0"], "noise:-1", ("'noise:-1'", "noise:1")),
    ],
)
def test_heads_that_do_not_exist_and_unknown_kinds_are_refused(
    model: Model, heads: Any, kind: Any, named: tuple[object, ...]
) -> None:
    with refuses(BadInput, *named), hs.ablated(model, heads, kind):
        pass


@pytest.mark.parametrize("kind", ["mean", "resample"])
def test_reference_text_is_as_long_as_the_context_of_a_model_with_fewer_positions(
    text: str, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """GPT-2 cannot read more tokens than its table has positions."""
    short = hs.load(families.build("gpt2", {"n_positions": 48, "max_position_embeddings": 48}), tokenizer=tokenizer())
    before = logits(short)
    with hs.ablated(short, ["L1H2"], kind, text=text):
        assert (logits(short) - before).abs().max() > 1e-3
    (warning,) = (message for message in caplog.messages if "512" in message)
    assert_names(warning, f"'{short.name}'", 48, 512)


@pytest.mark.parametrize("kind", ["mean", "resample"])
def test_ablation_with_a_reference_text_refuses_a_model_without_tokenizer(kind: str) -> None:
    silent = hs.load(families.MEASURABLE["llama-gqa"]())
    with refuses(BadInput, "hs.load(model, tokenizer=...)"):
        hs.ablated(silent, ["L1H2"], kind).__enter__()
    with hs.ablated(silent, ["L1H2"]):
        pass


def test_patterns_refuse_a_model_without_tokenizer(tmp_path: Any) -> None:
    silent = hs.load(families.MEASURABLE["llama-gqa"]())
    with refuses(BadInput, "'base'", "hs.load(model, tokenizer=...)"):
        hs.patterns(silent, prompt="w1 w2", out=tmp_path, quiet=True)
