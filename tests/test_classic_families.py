"""Families with attention code of their own: GPT-J, GPT-Neo, CodeGen, GPT-NeoX Japanese, Bloom, MPT, Falcon, XGLM.

The reference is the untouched model: its attention weights and logits by `output_attentions`, without headscope.
"""

from contextlib import ExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from support import eager_reference
from support.model_state import model_state
from support.prompt_pairs import random_pair
from support.refusals import refuses
from support.whole_model import loss_without_head, output_projection, total_loss
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    CodeGenConfig,
    GPT2Config,
    GPTJConfig,
    OPTConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from zoo.build import tiny

import headscope as hs
from headscope.attention import backend, listeners
from headscope.attention.kernel import AttentionVariant
from headscope.attention.record import AttentionRecord
from headscope.decomposition.logit_attribution import attribute_logits
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.logits import last_hidden_states
from headscope.interventions.edits import edit_units
from headscope.interventions.heads import head_units
from headscope.interventions.kinds import Zero
from headscope.interventions.metrics import PairTokens
from headscope.interventions.pair_runs import PairRuns
from headscope.interventions.path_patching import RECEIVER_INPUTS, Norms, Path, PathPatching, inspect_paths
from headscope.interventions.replay import Replay
from headscope.measures.attention_rows import ROW_STATISTICS
from headscope.positions.model import Model
from headscope.positions.schemes import alibi_slopes
from probes.influence.sweep import estimate_effects
from probes.measure.run import measure_tokens

pytestmark = pytest.mark.slow  # many models

LENGTH, WINDOW, MAX_ERROR = 48, 8, 1e-5
IDS = torch.randint(3, 120, (2, LENGTH), generator=torch.Generator().manual_seed(2))
ALIBI_FALCON = {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True}
NEW_FALCON = {"new_decoder_architecture": True, "num_kv_heads": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gptj": ("gptj", {}),
    "codegen": ("codegen", {}),
    "gpt_neo": ("gpt_neo", {}),
    "gpt_neox_japanese": ("gpt_neox_japanese", {}),
    "bloom": ("bloom", {}),
    "bloom, six heads": ("bloom", {"n_head": 6, "hidden_size": 96}),
    "mpt": ("mpt", {}),
    "mpt, six heads": ("mpt", {"n_heads": 6, "d_model": 96}),
    "falcon": ("falcon", {}),
    "falcon, two key heads": ("falcon", NEW_FALCON),
    "falcon, ALiBi": ("falcon", ALIBI_FALCON),
    "xglm": ("xglm", {}),
}
WITH_ALIBI = ("bloom", "bloom, six heads", "mpt", "mpt, six heads", "falcon, ALiBi")
RESIDUAL_ADDED_ELSEWHERE = {
    "gpt_neox_japanese": ("attention.dense", "final_layer_norm"),
    "bloom": ("self_attention.dense", "ln_f"),
    "mpt, six heads": ("attn.out_proj", "norm_f"),
}
"""Families whose modules add the residual stream, or whose layers add a bias: output projection and final norm."""


def untouched(family: str) -> PreTrainedModel:
    """A tiny random model, on the attention that transformers gives it by default."""
    module = tiny(*FAMILIES[family])
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if family.startswith("gpt_neo") and name.endswith("q_proj.weight"):
                weight.mul_(0.3)  # GPT-Neo does not scale its logits
    if family == "falcon, ALiBi":  # eager attention of transformers adds ALiBi twice
        module.config._attn_implementation_internal = "sdpa"
    return module


@cache
def loaded(family: str) -> Model:
    return hs.load(untouched(family))


def forward_logits(module: PreTrainedModel, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = module(input_ids=ids, use_cache=False, **inputs).logits
    return logits


def own_weights(family: str, ids: Tensor) -> list[Tensor]:
    """The untouched model's attention weights [H, L, L] by layer."""
    module = untouched(family)
    if family == "falcon, ALiBi":
        return falcon_alibi_weights(module, ids)
    with torch.no_grad():
        return [layer[0] for layer in module(input_ids=ids, use_cache=False, output_attentions=True).attentions]


def falcon_alibi_weights(module: Any, ids: Tensor) -> list[Tensor]:
    """By the formula: (q . k + slope x key) / sqrt(d), slopes and products rounded to bfloat16 as in the model."""
    weights: list[Tensor] = []

    def record(attention: Any, projection: nn.Module, args: Any, fused: Tensor) -> None:
        q, k, _ = fused[0].unflatten(-1, (attention.num_heads, 3, -1)).permute(2, 1, 0, 3)
        bias = alibi_slopes(len(q)).bfloat16()[:, None, None] * torch.arange(len(q[0]))
        logits = (q @ k.mT + bias.float()) / q.shape[-1] ** 0.5
        hidden = torch.ones_like(logits, dtype=torch.bool).triu(1)
        weights.append(logits.masked_fill(hidden, -torch.inf).softmax(-1))

    for layer in module.transformer.h:
        projection = layer.self_attention.query_key_value
        projection.register_forward_hook(partial(record, layer.self_attention))
    forward_logits(module, ids)
    return weights


def relative(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("family", FAMILIES)
def test_attention_statistics_equal_the_untouched_models(family: str) -> None:
    measured = measure_tokens(loaded(family), IDS[0], ["attention"], None)["attention"]
    for layer, alpha in enumerate(own_weights(family, IDS[:1])):
        window = loaded(family).geometry.windows[layer]
        for edge, expected in eager_reference.binned(eager_reference.row_statistics(alpha), window).items():
            rows = (measured["layer"] == layer) & (measured["visible"] == edge)
            assert rows.sum() == len(alpha)
            for name in ROW_STATISTICS:
                torch.testing.assert_close(
                    torch.from_numpy(measured[name][rows]).double(), expected[name], rtol=MAX_ERROR, atol=MAX_ERROR
                )


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_logits_equal_the_untouched_models(family: str) -> None:
    expected = forward_logits(untouched(family), IDS)
    with hs.capturing(loaded(family)):
        assert relative(forward_logits(loaded(family).module, IDS), expected) <= MAX_ERROR
    measured = measure_tokens(loaded(family), IDS[0], ["nll"], None)["nll"]
    losses = eager_reference.nll_reference(untouched(family), IDS[:1])
    starts = [0, *measured["position"][:-1]]
    for start, end, nll in zip(starts, measured["position"], measured["nll"], strict=True):
        assert nll == pytest.approx(float(losses[start:end].mean()), rel=MAX_ERROR)


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_decoding_equals_a_full_pass_of_the_untouched_model(family: str) -> None:
    model, records = loaded(family), list[AttentionRecord]()
    with hs.capturing(model) as layers, torch.no_grad():
        layers.listen(records.append)
        output = model.module(input_ids=IDS[:1, :30], use_cache=True)
        logits = [output.logits]
        for token in IDS[:1, 30:].split(1, 1):
            output = model.module(input_ids=token, past_key_values=output.past_key_values, use_cache=True)
            logits.append(output.logits)
    assert relative(torch.cat(logits, 1), forward_logits(untouched(family), IDS[:1])) <= MAX_ERROR
    last = {record.layer: record for record in records}
    for layer, alpha in enumerate(own_weights(family, IDS[:1])):
        record = last[layer]
        k = record.k.repeat_interleave(len(record.q) // len(record.k), 0)
        weights = (record.scaling * record.q @ k.mT - record.lse[..., None]).exp()[:, 0]
        weights = weights * (torch.arange(LENGTH) >= LENGTH - (record.window or LENGTH))
        torch.testing.assert_close(weights, alpha[:, -1], rtol=0, atol=MAX_ERROR)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_padded_batch_equals_single_sequences(family: str) -> None:
    model, pads = loaded(family), 9
    batch = torch.cat((IDS[:1], torch.nn.functional.pad(IDS[1:, pads:], (pads, 0))))
    mask = torch.ones_like(batch)
    mask[1, :pads] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    takes_positions = FAMILIES[family][0] not in ("bloom", "mpt")
    inputs = {"attention_mask": mask} | ({"position_ids": positions} if takes_positions else {})
    with hs.capturing(model):
        logits = forward_logits(model.module, batch, **inputs)
    assert relative(logits[:1], forward_logits(untouched(family), IDS[:1])) <= MAX_ERROR
    assert relative(logits[1:, pads:], forward_logits(untouched(family), IDS[1:, pads:])) <= MAX_ERROR


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_left_as_it_was_after_opening_measuring_and_an_exception(family: str) -> None:
    module = untouched(family)
    before, logits = model_state(module), forward_logits(module, IDS)
    model = hs.load(module)
    assert model_state(module) == before
    measure_tokens(model, IDS[0], ["attention", "nll"], None)
    assert model_state(module) == before
    with pytest.raises(ZeroDivisionError):
        fail_while_measuring(model)
    assert model_state(module) == before
    assert torch.equal(forward_logits(module, IDS), logits)


def fail_while_measuring(model: Model) -> None:
    with hs.attached(model), hs.capturing(model) as layers:
        layers.listen(lambda record: 1 // 0)
        forward_logits(model.module, IDS)


def test_another_model_of_a_family_runs_on_its_own_attention_meanwhile() -> None:
    for family in ("mpt", "falcon", "bloom"):
        expected, other = forward_logits(untouched(family), IDS), untouched(family)
        with hs.capturing(loaded(family)), hs.capturing(loaded(family)):
            assert torch.equal(forward_logits(other, IDS), expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_direct_logit_attribution_sums_to_the_logits(family: str) -> None:
    model = loaded(family)
    terms = attribute_logits(model, IDS[0])
    assert terms.relative_error < MAX_ERROR
    assert float(terms.head_terms.abs().mean(-1).min()) > 1e-3, "every head adds to the logits"


@pytest.mark.parametrize("family", RESIDUAL_ADDED_ELSEWHERE)
def test_attribution_equals_an_explicit_sum_where_modules_add_the_residual_stream(family: str) -> None:
    model, (projection, final_norm) = loaded(family), RESIDUAL_ADDED_ELSEWHERE[family]
    terms, inputs = attribute_logits(model, IDS[0]), {}
    modules = {n: m for n, m in model.module.named_modules() if n.endswith((projection, final_norm))}
    with ExitStack() as stack, torch.no_grad():
        for name, module in modules.items():
            hook = module.register_forward_hook(lambda _, args, out, name=name: inputs.update({name: args[0][0, :-1]}))
            stack.callback(hook.remove)
        logits = model.module(IDS[:1]).logits[0, :-1].double()
    logit = logits.gather(1, IDS[0, 1:, None])[:, 0] - logits.mean(-1)
    parts = [part for (name, _), part in terms.part_terms.items() if name != "logit"]
    assert float((sum(parts) - logit).abs().max() / logit.abs().max()) < MAX_ERROR
    *projections, norm_name = modules
    norm, states = modules[norm_name], inputs[norm_name].double()
    unembedding = model.module.get_output_embeddings().weight.double()
    direction = (unembedding[IDS[0, 1:]] - unembedding.mean(0)) * norm.weight.double()
    direction = direction / (states.var(-1, unbiased=False) + norm.eps).sqrt()[:, None]
    for layer, name in enumerate(projections):
        z, weight = inputs[name].double(), modules[name].weight.double()
        for head, dims in enumerate(torch.arange(z.shape[1]).chunk(model.geometry.heads)):
            added = z[:, dims] @ weight[:, dims].T
            expected = ((added - added.mean(-1, keepdim=True)) * direction).sum(-1)
            assert float((terms.head_terms[layer, head] - expected).abs().max() / logit.abs().max()) < MAX_ERROR


@pytest.mark.parametrize("family", FAMILIES)
def test_influence_equals_ablation_and_slope_in_the_untouched_model(family: str) -> None:
    model = loaded(family)
    replay, units = Replay(model, model.schedule, IDS[:1], memory_bytes=1e9), head_units(model.geometry)
    ablations = [[edit_units(Zero(), [unit], model.geometry)] for unit in units]
    chosen = (0, len(units) // 2, len(units) - 1)
    with replay.capturing():
        replay.record_streams()
        replayed = dict(replay.losses([ablations[number] for number in chosen]))
        estimates = estimate_effects(replay, ablations, draws=0, seed=0)
    for at, number in enumerate(chosen):
        loss = float(replayed[at].double().sum())
        assert loss == pytest.approx(loss_without_head(model, units[number], IDS[:1]), rel=MAX_ERROR)
    expected = -untouched_slopes(model) / (LENGTH - 1)
    estimated = torch.tensor([estimate.first_order for estimate in estimates]).view_as(expected)
    torch.testing.assert_close(estimated, expected, rtol=1e-3, atol=1e-5)


def untouched_slopes(model: Model) -> Tensor:
    """Derivative [T, H] of the untouched model's loss by a factor on each head's output."""
    factors = [torch.ones(model.geometry.heads, requires_grad=True) for _ in model.attention_modules]

    def scale_heads(factor: Tensor, module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return ((args[0].unflatten(-1, (len(factor), -1)) * factor[:, None]).flatten(-2), *args[1:])

    with ExitStack() as stack:
        for layer, factor in enumerate(factors):
            hook = output_projection(model, layer).register_forward_pre_hook(partial(scale_heads, factor))
            stack.callback(hook.remove)
        return torch.stack(torch.autograd.grad(total_loss(model, IDS[:1]), factors))


FUSED_PROJECTIONS = {
    "mpt": ("blocks", "norm_1", "attn.Wqkv", "attn.out_proj"),
    "gpt_neox_japanese": ("layers", "input_layernorm", "attention.query_key_value", "attention.dense"),
}
"""Family -> names of its blocks, and in a block of its first norm, projection to q, k and v, and output projection."""


@pytest.mark.parametrize("norms", ["frozen", "recomputed"])
@pytest.mark.parametrize("family", FUSED_PROJECTIONS)
def test_exact_paths_equal_a_change_of_the_fused_projection_in_the_untouched_model(family: str, norms: Norms) -> None:
    pair, sender, receiver = random_pair(), (0, 2), (2, 1)
    paths = [Path(sender, (receiver,), end) for end in RECEIVER_INPUTS]
    runs = PairRuns(loaded(family), pair, "logit_diff", memory_bytes=1e9)
    with runs.capturing():
        patching = PathPatching(runs, inspect_paths(loaded(family), pair.clean), "denoising", norms)
        values = dict(patching.patch(paths))
    for path in paths:
        expected = logits_with_changed_projection(family, pair, path, norms)[pair.answer[0]].item()
        expected -= logits_with_changed_projection(family, pair, path, norms)[pair.wrong[0]].item()
        assert values[path] == pytest.approx(expected, rel=MAX_ERROR, abs=MAX_ERROR)
        assert abs(values[path] - runs.corrupted_value) > 1e-3


@torch.no_grad()
def logits_with_changed_projection(family: str, pair: PairTokens, path: Path, norms: Norms) -> Tensor:
    """Last logits of the corrupted prompt if one head's q, k or v follows what the sender sends in the clean run."""
    module, (blocks, *names) = untouched(family), FUSED_PROJECTIONS[family]
    heads, inputs = loaded(family).geometry.heads, dict[str, Tensor]()
    (sender_layer, sender), (layer, head) = path.sender, path.receivers[0]
    stack = module.base_model.get_submodule(blocks)
    output = stack[sender_layer].get_submodule(names[2])
    norm, fused = (stack[layer].get_submodule(name) for name in names[:2])
    hooks = [
        hooked.register_forward_hook(lambda _, args, out, name=name: inputs.update({name: args[0]}))
        for name, hooked in (("z", output), ("x", norm))
    ]
    forward_logits(module, pair.clean[:, :-1])
    clean_z = inputs["z"]
    forward_logits(module, pair.corrupted[:, :-1])
    for hook in hooks:
        hook.remove()
    dims = torch.arange(clean_z.shape[-1]).chunk(heads)[sender]
    change, x = (clean_z - inputs["z"])[..., dims] @ output.weight[:, dims].T, inputs["x"]
    if norms == "recomputed":
        normed = norm(x + change) - norm(x)
    else:
        centred = change - change.mean(-1, keepdim=True)
        normed = norm.weight * centred / (x.var(-1, unbiased=False, keepdim=True) + norm.eps).sqrt()

    def add_change(_: nn.Module, args: Any, qkv: Tensor) -> Tensor:
        parts = torch.arange(qkv.shape[-1])
        parts = parts.view(3, heads, -1) if family == "mpt" else parts.view(heads, 3, -1).transpose(0, 1)
        index = parts[RECEIVER_INPUTS.index(path.end), head]
        qkv[..., index] += (normed @ fused.weight.T)[..., index]
        return qkv

    fused.register_forward_hook(add_change)
    return forward_logits(module, pair.corrupted[:, :-1])[0, -1]


def test_paths_of_bloom_are_refused_since_its_attention_adds_the_residual_stream() -> None:
    with refuses(UnsupportedModel, "BloomBlock", "norm"):
        inspect_paths(loaded("bloom"), random_pair().clean)


@pytest.mark.parametrize("family", WITH_ALIBI)
def test_alibi_slopes_are_in_the_measured_weights(family: str) -> None:
    """Without q . k, the weights of a head fall by exp(-slope) for each token of distance."""
    module = untouched(family)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if "query_key_value" in name or "Wqkv" in name:
                parameter.zero_()
    model, records = hs.load(module), list[AttentionRecord]()
    with hs.capturing(model) as layers:
        layers.listen(records.append)
        forward_logits(module, IDS[:1])
    heads = model.geometry.heads
    slopes = mpt_slopes(heads) if family.startswith("mpt") else alibi_slopes(heads)
    if family.startswith("falcon"):
        slopes = slopes.bfloat16().float() / model.geometry.head_dim**0.5
    for record in records:
        weights = (record.scaling * record.q[:, -1:] @ record.k.mT - record.lse[:, -1:, None]).exp()[:, 0]
        measured = (weights[:, -1] / weights[:, -9]).log() / 8
        torch.testing.assert_close(measured, slopes, rtol=5e-3 if family.startswith("falcon") else 1e-5, atol=1e-6)


def mpt_slopes(heads: int) -> Tensor:
    """MPT: 2^(-8n / p) for the next power of two p; for fewer heads, those of even n, then those of odd n."""
    power = 1 << (heads - 1).bit_length()
    slopes = 2.0 ** (-8 * torch.arange(1, power + 1) / power)
    return slopes if power == heads else torch.cat((slopes[1::2], slopes[::2]))[:heads]


@pytest.mark.parametrize("family", WITH_ALIBI)
def test_a_model_is_refused_if_its_alibi_is_lost(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "append_key_bias", lambda q, k, bias, scaling: (q, k))
    with refuses(UnsupportedModel, "layer 0", "eager"):
        hs.load(untouched(family))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_refused_if_its_scaling_is_wrong(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    original = listeners.attend

    def wrong(q: Tensor, k: Tensor, v: Tensor, module: nn.Module, variant: AttentionVariant, *rest: Any) -> Any:
        return original(q, k, v, module, replace(variant, scaling=0.11), *rest)

    monkeypatch.setattr(listeners, "attend", wrong)
    with refuses(UnsupportedModel, "layer 0", "eager"):
        hs.load(untouched(family))


def test_local_layers_of_gpt_neo_have_a_window() -> None:
    geometry = loaded("gpt_neo").geometry
    kinds = loaded("gpt_neo").module.config.attention_layers
    assert geometry.windows == tuple(WINDOW if kind == "local" else None for kind in kinds)
    assert set(kinds) == {"local", "global"}


def test_falcon_has_the_kv_groups_of_its_config() -> None:
    groups = {"falcon": 1, "falcon, two key heads": 2, "falcon, ALiBi": 4}
    assert {family: loaded(family).geometry.kv_groups for family in groups} == groups


@pytest.mark.parametrize("family", ["gptj", "codegen"])
def test_pairs_of_tables_are_interleaved_with_base_10000(family: str) -> None:
    model = loaded(family)
    assert (model.geometry.pairs, model.geometry.rotary_layout) == (4, "interleaved")
    expected = 10_000.0 ** (-torch.arange(4) / 4)
    torch.testing.assert_close(model.rotation.theta, expected.expand(model.geometry.layers, -1), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("scheme", ["nope", "alibi", "yarn:factor=4", "prope", "ntk:factor=2"])
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bloom", "ALiBi"),
        ("falcon, ALiBi", "ALiBi"),
        ("gpt_neo", "rotate"),
        ("xglm", "rotate"),
    ],
)
def test_a_scheme_is_refused_by_its_own_name(family: str, reason: str, scheme: str) -> None:
    model, name = loaded(family), scheme.partition(":")[0]
    with refuses(UnsupportedModel, name, f"'{model.name}'", model.module.config.model_type, reason):
        model.with_scheme(scheme).schedule  # noqa: B018


def test_log_n_needs_a_length_where_the_config_has_none() -> None:
    with refuses(UnsupportedModel, "bloom", "logn:length=TOKENS"):
        loaded("bloom").with_scheme("logn").schedule  # noqa: B018


@pytest.mark.parametrize("family", FAMILIES)
def test_dropout_of_attention_weights_is_applied_or_refused(family: str) -> None:
    model = hs.load(untouched(family))
    for attention in model.attention_modules:
        activate_weight_dropout(attention)
    with hs.capturing(model) as layers:
        if family in ("falcon", "falcon, two key heads"):  # it drops no weights where it rotates
            assert torch.equal(forward_logits(model.module, IDS), forward_logits(model.module, IDS))
            return
        if family not in WITH_ALIBI and family != "gpt_neo":
            assert not torch.equal(forward_logits(model.module, IDS), forward_logits(model.module, IDS))
            layers.listen(lambda record: None)
        with refuses(UnsupportedModel, "dropout", 0.5, "eval()"):
            forward_logits(model.module, IDS)


def activate_weight_dropout(attention: nn.Module) -> None:
    """Drop half of an attention module's weights, and nothing else."""
    attention.training = True
    if hasattr(attention, "hidden_dropout"):
        attention.hidden_dropout = 0.0
    for name in ("attn_dropout", "attention_dropout", "attn_dropout_p", "dropout"):
        dropout = getattr(attention, name, None)
        if isinstance(dropout, nn.Dropout):
            dropout.p, dropout.training = 0.5, True
        elif dropout is not None:
            setattr(attention, name, 0.5)


def test_calls_that_an_attention_override_cannot_measure_are_refused_with_the_reason() -> None:
    with refuses(UnsupportedModel, "falcon", "ALiBi"):
        hs.load(tiny("falcon", {"alibi": True}))
    with refuses(UnsupportedModel, "bloom", "slow_but_exact"):
        hs.load(tiny("bloom", {"pretraining_tp": 2, "slow_but_exact": True}))
    long = torch.randint(3, 120, (1, loaded("mpt").module.config.max_seq_len + 1))
    with hs.capturing(loaded("mpt")), refuses(UnsupportedModel, 65, "max_seq_len", 64):
        forward_logits(loaded("mpt").module, long)


def test_falcon_with_alibi_is_compared_with_sdpa_since_its_eager_attention_adds_alibi_twice() -> None:
    """If this fails, transformers has corrected its eager attention: compare with that, as for all other families."""
    module = untouched("falcon, ALiBi")
    default = forward_logits(module, IDS)
    module.config._attn_implementation_internal = "eager"
    assert relative(forward_logits(module, IDS), default) > 1e-2


@pytest.mark.parametrize(
    "config",
    [
        GPT2Config(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=100),
        GPTJConfig(n_embd=32, n_layer=2, n_head=2, n_positions=64, vocab_size=100, rotary_dim=8),
        CodeGenConfig(n_embd=64, n_layer=2, n_head=4, n_positions=64, vocab_size=100, rotary_dim=8),
        OPTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            ffn_dim=32,
            max_position_embeddings=64,
            vocab_size=100,
            word_embed_proj_dim=32,
        ),
    ],
    ids=lambda config: config.model_type,
)
def test_texts_beyond_the_table_of_positions_are_refused_with_the_reason(config: PretrainedConfig) -> None:
    model = hs.load(AutoModelForCausalLM.from_config(config).eval())
    last_hidden_states(model, torch.zeros(1, 64, dtype=torch.long))
    with refuses(BadInput, f"'{model.name}'", 64, 65):
        last_hidden_states(model, torch.zeros(1, 65, dtype=torch.long))
