"""TransformerBridge: records and logits equal those of the wrapped model, and TransformerLens's hooks still fire."""

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support import families, tiny_studies
from support.refusals import refuses
from torch import Tensor
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.decomposition.head_circuits import TokenEmbeddings
from headscope.decomposition.head_weights import inspect_head_weights
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.capture import capturing
from headscope.interventions.ablation import ablated
from headscope.positions import AdaRoPE, attached, resolve_schedule
from headscope.positions.model import Model, load
from headscope.streaming import StreamingWindow
from probes.weights.run import circuit_rows

FAMILY = pytest.mark.parametrize("family", families.MEASURABLE)
LENGTH = 24
MATRIX_HOOKS = ("hook_attn_scores", "hook_pattern")
IDS = torch.randint(3, families.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(9))


def bridged(family: str) -> Model:
    module = families.MEASURABLE[family]()
    return load(build_bridge_from_module(module, type(module).__name__, hf_config=module.config))


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


def random_adapter(model: Model) -> AdaRoPE:
    generator = torch.Generator().manual_seed(7)
    adapter = AdaRoPE.from_schedule(model, resolve_schedule(model, "yarn:factor=4"), 16)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return adapter


@torch.no_grad()
def run(model: Model) -> tuple[Tensor, list[AttentionRecord]]:
    """Logits of the bridge or of the plain model, and the attention records of its layers."""
    records: list[AttentionRecord] = []
    with capturing(model) as layers:
        layers.listen(records.append)
        logits = model.bridge(IDS) if model.bridge is not None else model.module(IDS, use_cache=False).logits
    return logits, records


@pytest.mark.exhaustive(sample=5)
@FAMILY
def test_bridge_has_the_records_and_logits_of_its_model(family: str) -> None:
    plain, bridge = load(families.MEASURABLE[family]()), bridged(family)
    assert bridge.geometry == plain.geometry
    assert bridge.weights_sha256 == plain.weights_sha256
    expected_logits, expected_records = run(plain)
    logits, records = run(bridge)
    assert difference(logits, expected_logits) <= 1e-5
    for record, expected in zip(records, expected_records, strict=True):
        assert (record.layer, record.batch_index) == (expected.layer, expected.batch_index)
        for name in ("q", "k", "v", "z", "lse"):
            assert difference(getattr(record, name), getattr(expected, name)) <= 1e-4, name


@pytest.mark.exhaustive(sample=5)
@FAMILY
def test_rotary_and_output_hooks_fire_with_transformerlens_shapes(family: str) -> None:
    model, spec = bridged(family), families.SPECS[family]
    records: list[AttentionRecord] = []
    with torch.no_grad(), capturing(model) as layers:
        layers.listen(records.append)
        _, cache = model.bridge.run_with_cache(IDS, names_filter=lambda name: not name.endswith(MATRIX_HOOKS))
    for layer in range(families.LAYERS):
        q, k, z = (cache[f"blocks.{layer}.attn.{hook}"] for hook in ("hook_rot_q", "hook_rot_k", "hook_z"))
        assert q.shape == (2, LENGTH, families.HEADS, spec.head_dim)
        assert k.shape == (2, LENGTH, spec.groups, spec.head_dim)
        layer_records = [record for record in records if record.layer == layer]
        assert [record.batch_index for record in layer_records] == [0, 1]
        for record in layer_records:
            assert torch.equal(q[record.batch_index].transpose(0, 1), record.q)
            assert torch.equal(k[record.batch_index].transpose(0, 1), record.k)
            heads = z[record.batch_index].reshape(LENGTH, families.HEADS, spec.head_dim)
            assert torch.equal(heads.transpose(0, 1), record.z)
    assert [name for name, value in cache.items() if value.shape[-2:] == (LENGTH, LENGTH)] == []


@pytest.mark.exhaustive(sample=5)
@FAMILY
def test_scores_and_patterns_are_those_of_transformerlens(family: str) -> None:
    """Bit for bit, and only where a hook asks for them; the output is then computed from the pattern."""
    model = bridged(family)
    with torch.no_grad():
        expected_logits, expected = model.bridge.run_with_cache(IDS)
        with capturing(model):
            plain = model.bridge(IDS)
            logits, cache = model.bridge.run_with_cache(IDS)
            again = model.bridge(IDS)
    names = [name for name in expected if name.endswith(MATRIX_HOOKS)]
    assert len(names) == 2 * families.LAYERS
    assert all(torch.equal(cache[name], expected[name]) for name in names)
    assert torch.equal(again, plain)
    assert difference(logits, plain) <= 1e-4
    assert difference(logits, expected_logits) <= 1e-4


@pytest.mark.parametrize("hook", MATRIX_HOOKS)
def test_hook_that_edits_scores_or_patterns_has_the_effect_and_the_gradient_of_transformerlens(hook: str) -> None:
    """Also below an ablation, whose heads stay ablated."""

    def hide_first_key(matrix: Tensor, hook: Any) -> Tensor:
        matrix = matrix.clone()
        matrix[..., 1:, 0] = 0 if hook.name.endswith("pattern") else -1e9
        return matrix

    model, results = bridged("llama-gqa"), []
    gradients: list[Tensor] = []
    for context in (nullcontext, partial(capturing, model)):
        with context():
            model.bridge.add_hook(f"blocks.1.attn.{hook}", hide_first_key)
            model.bridge.add_hook(f"blocks.1.attn.{hook}", lambda grad, hook: gradients.append(grad), dir="bwd")
            logits = model.bridge(IDS)
            logits.logsumexp(-1).sum().backward()
            model.bridge.reset_hooks()
            results.append(logits.detach())
    assert difference(*results) <= 1e-4
    assert difference(*gradients) <= 1e-4
    with torch.no_grad():
        assert difference(results[0], model.bridge(IDS)) > 1e-2
        with ablated(model, "L1H2"), capturing(model):
            expected = model.bridge(IDS)
            hooked = model.bridge.run_with_hooks(IDS, fwd_hooks=[(f"blocks.1.attn.{hook}", keep)])
            assert difference(hooked, expected) <= 1e-4


def keep(value: Tensor, hook: Any) -> Tensor:
    return value


@pytest.mark.parametrize("hook", MATRIX_HOOKS)
def test_patterns_of_padded_batches_are_refused(hook: str) -> None:
    model = bridged("llama-gqa")
    mask = torch.ones_like(IDS)
    mask[0, :5] = 0
    hooks = [(f"blocks.1.attn.{hook}", keep)]
    with torch.no_grad(), capturing(model), refuses(BadInput, hook, "padded"):
        model.bridge.run_with_hooks(IDS, fwd_hooks=hooks, attention_mask=mask)


def test_patterns_of_edited_heads_are_those_that_the_heads_use() -> None:
    """A streaming KV group and a steered head: the hook gets the weights of listeners and changes no output."""
    model, records, patterns = bridged("llama-gqa"), list[AttentionRecord](), list[Tensor]()
    hooks = [("blocks.1.attn.hook_pattern", lambda pattern, hook: patterns.append(pattern))]
    with torch.no_grad(), hs.steered(model, "L1H3", range(2, 5), 0.1), capturing(model) as layers:
        layers.stream(1, [0], StreamingWindow(2, 4))
        layers.listen(records.append, [1])
        expected = model.bridge(IDS)
        assert difference(model.bridge.run_with_hooks(IDS, fwd_hooks=hooks), expected) <= 1e-4
    weights = torch.stack([record.weights(range(LENGTH)) for record in records[:2]])
    assert difference(patterns[0], weights) <= 1e-6
    distance = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    is_hidden = (distance >= 4) & (torch.arange(LENGTH) >= 2)
    assert (patterns[0][:, :2][..., is_hidden] == 0).all()
    assert (patterns[0][:, 2:][..., is_hidden] > 0).any()


def test_nested_contexts_run_a_hook_once() -> None:
    """In whatever order they end: a hook that doubles queries must not double them twice."""
    model = bridged("llama-gqa")
    hooks = [("blocks.1.attn.hook_rot_q", lambda q, hook: 2 * q)]
    first, second = ExitStack(), ExitStack()
    with torch.no_grad():
        with capturing(model):
            expected = model.bridge.run_with_hooks(IDS, fwd_hooks=hooks)
        for stack in (first, second):
            stack.enter_context(capturing(model))
        assert torch.equal(model.bridge.run_with_hooks(IDS, fwd_hooks=hooks), expected)
        first.close()
        assert torch.equal(model.bridge.run_with_hooks(IDS, fwd_hooks=hooks), expected)
        second.close()


@pytest.mark.exhaustive(sample=5)
@FAMILY
def test_hook_that_edits_queries_takes_effect(family: str) -> None:
    """Zero queries attend uniformly: the log-sum-exp of a row is the log of its number of visible keys."""
    model = bridged(family)
    records: list[AttentionRecord] = []
    hooks: list[tuple[str, Callable[..., Tensor]]] = [("blocks.2.attn.hook_rot_q", lambda q, hook: torch.zeros_like(q))]
    with torch.no_grad(), capturing(model) as layers:
        layers.listen(records.append, [2])
        plain = model.bridge(IDS)
        edited = model.bridge.run_with_hooks(IDS, fwd_hooks=hooks)
        again = model.bridge(IDS)
    assert difference(records[2].lse, records[2].visible_counts.log().expand(families.HEADS, -1)) <= 1e-5
    assert difference(edited, plain) > 1e-2
    assert torch.equal(again, plain)


@pytest.mark.exhaustive(sample=14)
@pytest.mark.slow
@FAMILY
@pytest.mark.parametrize("scheme", ["yarn:factor=4", "logn:length=4", "adapter"])
def test_scheme_changes_a_bridge_as_it_changes_its_model(family: str, scheme: str) -> None:
    outputs: list[Tensor] = []
    for model in (load(families.MEASURABLE[family]()), bridged(family)):
        with attached(model, random_adapter(model) if scheme == "adapter" else scheme), torch.no_grad():
            outputs.append(run(model)[0])
            logits = model.bridge(IDS) if model.bridge is not None else model.module(IDS, use_cache=False).logits
            assert difference(logits, outputs[-1]) <= 1e-4
    assert difference(*outputs) <= 1e-4  # TransformerLens computes some norms itself


@pytest.mark.parametrize("family", ["llama-gqa", "qwen2", "granite"])
def test_copying_scores_are_the_same_in_compatibility_mode(family: str) -> None:
    """It subtracts the mean of the unembedding and folds the gains of norms into weights; logits move by a constant."""
    plain, bridge = load(families.SPECS[family].build()), bridged(family).bridge
    bridge.enable_compatibility_mode(disable_warnings=True)
    columns = []
    for model in (plain, load(bridge)):
        columns.append(circuit_rows(TokenEmbeddings(model, inspect_head_weights(model))))
    expected, scores = columns
    assert scores["copying"] == pytest.approx(expected["copying"], abs=1e-5)


@pytest.mark.parametrize("family", ["phi3", "gpt_neox"])
def test_processed_copies_of_joint_projections_are_refused(family: str) -> None:
    """Logits inside `capturing` were 6 and 15 off: the wrapped model keeps the unprocessed joint projection."""
    model = bridged(family)
    model.bridge.enable_compatibility_mode(disable_warnings=True)
    named = ("TransformerBridge", "compatibility", model.module.config.model_type)
    with refuses(UnsupportedModel, *named):
        load(model.bridge)
    with refuses(UnsupportedModel, *named), capturing(model):
        pass


def test_a_run_records_compatibility_mode(tmp_path: Path) -> None:
    model = bridged("llama-gqa")
    entries, notes = [], []
    for enable in (lambda: None, partial(model.bridge.enable_compatibility_mode, disable_warnings=True)):
        enable()
        loaded = hs.load(model.bridge, tokenizer=tiny_studies.tokenizer())
        run = hs.weights(loaded, parts=["weights"], out=tmp_path, quiet=True)
        entries.append(run.manifest["models"][0]["bridge"])
        notes.append("models.compatibility_mode" in set(run.findings()["question"]))
    assert entries == ["TransformerBridge", "TransformerBridge in compatibility mode"]
    assert notes == [False, True]


@pytest.mark.exhaustive(sample=5)
@FAMILY
def test_leaving_restores_the_bridge(family: str) -> None:
    model = bridged(family)
    with torch.no_grad():
        before, names, expected = bridge_state(model), set(model.bridge.hook_dict), model.bridge(IDS)
        run(model)
        with pytest.raises(RuntimeError, match="inside"), attached(model, random_adapter(model)), capturing(model):
            raise RuntimeError("inside")
        assert bridge_state(model) == before
        assert set(model.bridge.hook_dict) == names
        assert torch.equal(model.bridge(IDS), expected)


def bridge_state(model: Model) -> tuple[Any, ...]:
    return (
        model.module.config._attn_implementation,
        ["forward" in block.attn.__dict__ for block in model.bridge.blocks],
        sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.module.modules()),
        [name for name, _ in model.bridge.named_modules()],
    )


@pytest.mark.model
def test_smollm2_bridge_has_the_logits_of_smollm2(smollm2: Model, tokens: Tensor) -> None:
    """On a copy, because a bridge modifies the model that it wraps."""
    ids = tokens[:, :64]
    copy = load("smollm2-135m", device="cpu")
    bridge = TransformerBridge.boot_transformers("smollm2", hf_model=copy.module, tokenizer=copy.tokenizer)
    model = load(bridge)
    assert model.tokenizer is not None
    assert model.geometry == smollm2.geometry
    assert model.weights_sha256 == smollm2.weights_sha256
    with torch.no_grad():
        expected = smollm2.module(ids, use_cache=False).logits
        with capturing(model):
            logits, cache = bridge.run_with_cache(ids, names_filter="blocks.17.attn.hook_rot_k")
    assert difference(logits, expected) <= 1e-4
    assert cache["blocks.17.attn.hook_rot_k"].shape == (1, 64, 3, 64)


def test_bridge_has_the_identity_of_its_model() -> None:
    model, plain = bridged("llama-gqa"), load(families.MEASURABLE["llama-gqa"]())
    comparison = plain.identity.compare(model.identity)
    assert (comparison.differences, comparison.unknown) == ((), ())
