"""Contexts change their own model only, in every thread, and restore everything in whatever order they end."""

import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import families
from support.refusals import refuses
from support.tiny_studies import save_texts, tokenizer
from torch import Tensor, nn
from transformer_lens.model_bridge.sources._bridge_builder import build_bridge_from_module
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedConfig
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from zoo.build import tiny

import headscope as hs
from headscope.attention import backend
from headscope.errors import BadInput
from headscope.forward.logits import logits_and_targets, replacing_forward
from headscope.models.interception import ROTATION_FUNCTIONS
from headscope.models.rotation import preserving_frequencies
from headscope.positions.adarope import AdaRoPE
from headscope.positions.attach import resolve_schedule
from headscope.positions.model import Model

SPECS = families.SPECS | families.OTHERS
LENGTH = 24
IDS = torch.randint(3, families.VOCAB, (2, LENGTH), generator=torch.Generator().manual_seed(3))
FAMILIES = {
    "llama": (SPECS["llama-gqa"].build, "yarn:factor=4", "adapter"),
    "complex tables": (SPECS["llama4"].build, "yarn:factor=4", "nope"),
    "tensor argument": (partial(tiny, "gptj"), "nope", "abf:theta=5e5"),
    "two rotaries": (SPECS["gemma3"].build, "adapter", "nope"),
    "override with a hidden mask": (partial(tiny, "doge"), "nope", "logn:length=4"),
    "bridge": (lambda: bridged("llama-gqa"), "nope", "adapter"),
}
"""By property: how to build a model, and two schemes that change its logits."""


def bridged(family: str) -> Any:
    module = SPECS[family].build()
    return build_bridge_from_module(module, type(module).__name__, hf_config=module.config)


def scheme_of(model: Model, name: str) -> Any:
    """The scheme of this name; "adapter" has frequencies that differ by KV group."""
    if name != "adapter":
        return name
    adapter = AdaRoPE.from_schedule(model, resolve_schedule(model, "yarn:factor=4"), 16)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in adapter.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return adapter


@torch.no_grad()
def logits(model: Model) -> Tensor:
    output = model.module(IDS, use_cache=False) if model.bridge is None else model.bridge(IDS)
    values: Tensor = output if isinstance(output, Tensor) else output.logits
    return values


@contextmanager
def frequent_thread_switches() -> Iterator[None]:
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def run_threads(*functions: Callable[[], Any]) -> list[Any]:
    """The results of the functions, each called in a thread of its own; the first error is raised."""
    results: list[Any] = [None] * len(functions)
    errors: list[BaseException] = []
    start = threading.Barrier(len(functions))

    def run(index: int) -> None:
        start.wait()
        try:
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(functions))]
    with frequent_thread_switches():
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return results


# Several models in several threads ---------------------------------------------------------------------------------


@pytest.mark.exhaustive(sample=2)
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_concurrent_passes_of_attached_and_untouched_models_are_bit_equal_to_single_threaded_ones(family: str) -> None:
    """Two models under different schemes and one without a context, entered and left again in each thread."""
    build, *names = FAMILIES[family]
    models = [hs.load(build()) for _ in range(3)]
    schemes = [scheme_of(model, name) for model, name in zip(models, names, strict=False)]
    expected = [logits(models[2])]
    for model, scheme in zip(models, schemes, strict=False):
        with hs.attached(model, scheme):
            expected.append(logits(model))
    assert not any(torch.equal(first, second) for first, second in itertools.combinations(expected, 2))
    passes = 280 if family == "llama" else 20

    def count_equal(model: Model, wanted: Tensor, scheme: Any = None) -> int:
        count = 0
        for _ in range(passes // 10):
            with ExitStack() as stack:
                if scheme is not None:
                    stack.enter_context(hs.attached(model, scheme))
                count += sum(torch.equal(logits(model), wanted) for _ in range(10))
        return count

    attached = (partial(count_equal, *arguments) for arguments in zip(models[:2], expected[1:], schemes, strict=True))
    assert run_threads(partial(count_equal, models[2], expected[0]), *attached) == [passes] * 3


def test_two_captures_in_two_threads_record_their_own_model() -> None:
    models = [hs.load(SPECS[family].build()) for family in ("llama-gqa", "llama-mqa")]

    def record(model: Model, passes: int) -> list[Tensor]:
        outputs: list[Tensor] = []
        with torch.no_grad(), hs.capturing(model) as layers:
            layers.listen(lambda record: outputs.append(record.z))
            for _ in range(passes):
                model.module(IDS, use_cache=False)
        return outputs

    expected = [record(model, 1) for model in models]
    for recorded, wanted in zip(run_threads(*(partial(record, m, 20) for m in models)), expected, strict=True):
        assert len(recorded) == 20 * len(wanted)
        assert all(torch.equal(z, wanted[number % len(wanted)]) for number, z in enumerate(recorded))


def test_probes_in_two_threads_store_the_tables_of_one_thread(tmp_path: Path) -> None:
    text = save_texts(tmp_path / "texts")
    modules = [SPECS[family].build() for family in ("llama-gqa", "llama-mqa")]
    models = [
        hs.load(module, tokenizer=tokenizer()).with_scheme(scheme)
        for module, scheme in zip(modules, ("yarn:factor=4", "logn:length=10"), strict=True)
    ]

    def measure(number: int, out: str) -> hs.Run:
        return hs.measure(models[number], text=text, lengths=[32], docs=2, out=str(tmp_path / out), quiet=True)

    expected = [measure(number, f"one-{number}") for number in range(2)]
    runs = run_threads(*(partial(measure, number, f"two-{number}") for number in range(2)))
    for run, run_alone in zip(runs, expected, strict=True):
        assert run.attention.equals(run_alone.attention)
        assert run.nll.equals(run_alone.nll)


def test_context_leaves_a_model_with_the_same_config_object_alone() -> None:
    """The attention implementation and, while a model is opened, its windows are not written into the shared config."""
    config = LlamaConfig(**(families.COMMON | SPECS["llama-gqa"].options))
    models = [LlamaForCausalLM(config).eval() for _ in range(2)]
    captured, other = hs.load(models[0]), models[1]
    implementation, expected = config._attn_implementation, other(IDS).logits
    with hs.capturing(captured):
        assert config._attn_implementation == implementation
        assert other.config is config
        assert captured.module.config._attn_implementation == backend.BACKEND_NAME
        assert torch.equal(other(IDS).logits, expected)
    assert captured.module.config is config


def test_interrupted_pass_leaves_other_models_alone_while_its_context_is_open() -> None:
    """Ctrl-C skips the hooks that torch calls after a module."""
    model, other = (hs.load(SPECS["llama-gqa"].build()) for _ in range(2))
    expected = logits(other)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    with hs.attached(model, "yarn:factor=4"):
        handle = model.module.model.layers[1].self_attn.o_proj.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            logits(model)
        handle.remove()
        assert torch.equal(logits(other), expected)


# One model in several threads --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_scheme_applies_in_every_thread_that_runs_the_model(family: str) -> None:
    build, name, _ = FAMILIES[family]
    model = hs.load(build())
    plain = logits(model)
    with hs.attached(model, scheme_of(model, name)):
        expected = logits(model)
        results = run_threads(*[partial(logits, model)] * 2)
    assert not torch.equal(expected, plain)
    assert all(torch.equal(result, expected) for result in results)


@pytest.mark.parametrize(
    "enter",
    [
        lambda model: hs.attached(model, "yarn:factor=4"),
        hs.capturing,
        lambda model: hs.ablated(model, "L1H1"),
        lambda model: backend.using_backend(model.module),
    ],
    ids=["attached", "capturing", "ablated", "using_backend"],
)
def test_second_thread_cannot_enter_a_context_of_a_model_while_another_one_has_one(
    enter: Callable[[Model], AbstractContextManager[Any]],
) -> None:
    model = hs.load(SPECS["llama-gqa"].build())

    def enter_and_leave() -> None:
        with enter(model):
            pass

    with hs.attached(model), refuses(BadInput, "'MainThread'", "llama"):
        run_threads(enter_and_leave)
    with hs.attached(model), refuses(BadInput, "'MainThread'", "llama"):
        run_threads(partial(hs.load, model.module))
    run_threads(enter_and_leave)
    enter_and_leave()


def test_capture_refuses_passes_of_a_second_thread() -> None:
    """Otherwise its listeners would count them."""
    model = hs.load(SPECS["llama-gqa"].build())
    with hs.capturing(model):
        run_threads(partial(logits, model))
        run_threads(partial(logits, model))  # the first one has ended
        logits(model)
        with refuses(BadInput, "'in-memory llama'", "'MainThread'"):
            run_threads(partial(logits, model))
        logits(model)


def test_losses_are_computed_in_one_thread_while_another_one_runs_the_model() -> None:
    """The backbone is replaced while the head runs; the other thread's passes must run the real one."""
    model = hs.load(SPECS["llama-gqa"].build())
    expected = logits(model)
    hidden = torch.zeros(1, LENGTH - 1, 64)
    head_logits, _ = logits_and_targets(model, IDS[:1], hidden, slice(0, LENGTH - 1))

    def losses() -> bool:
        computed = (logits_and_targets(model, IDS[:1], hidden, slice(0, LENGTH - 1))[0] for _ in range(30))
        return all(torch.equal(values, head_logits) for values in computed)

    def passes() -> bool:
        return all(torch.equal(logits(model), expected) for _ in range(30))

    assert run_threads(losses, passes) == [True, True]
    with replacing_forward(model.module.model, lambda *_, **__: None):
        assert torch.equal(run_threads(partial(logits, model))[0], expected)


@pytest.mark.parametrize("family", ["llama-gqa", "llama4"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_are_those_of_the_scheme_if_another_thread_recomputes_the_layers(
    family: str, reentrant: bool
) -> None:
    """On a GPU, autograd has threads of its own, in which gradient checkpointing runs the layers again."""
    gradients: list[list[Tensor]] = []
    for checkpointing in (False, True):
        model = hs.load(SPECS[family].build())
        if checkpointing:
            model.module.gradient_checkpointing_enable({"use_reentrant": reentrant})
            model.module.train()
        with hs.attached(model, "yarn:factor=4"), hs.capturing(model):
            loss = model.module(IDS, use_cache=False, labels=IDS).loss
            run_threads(loss.backward)
        gradients.append([p.grad for p in model.module.parameters() if p.grad is not None])
    assert all(torch.allclose(*pair, atol=1e-6) for pair in zip(*gradients, strict=True))


# Contexts that end in any order ------------------------------------------------------------------------------------

# Nested choices of keys intersect; a second zero ablation of one head would be refused.
CONTEXTS: dict[str, Callable[[Model], AbstractContextManager[Any]]] = {
    "yarn": lambda model: hs.attached(model, "yarn:factor=4"),
    "logn": lambda model: hs.attached(model, "logn:length=4"),
    "alibi": lambda model: hs.attached(model, "alibi"),
    "ablated": lambda model: hs.ablated(model, "L1H1,L3H0", "streaming:1+3"),
    "capturing": hs.capturing,
    "using_backend": lambda model: backend.using_backend(model.module),
    "eager": lambda model: backend.using_attention_implementation(model.module, "eager"),
}


def state(model: Model) -> dict[str, Any]:
    """Everything by identity that a context could change: attributes, hooks, and functions of transformers."""
    modules = [*(model.module if model.bridge is None else model.bridge).modules()]
    attributes = {
        (index, name): [*value.values()] if isinstance(value, dict) else value
        for index, module in enumerate(modules)
        for name, value in vars(module).items()
    }
    namespaces = {type(module).__module__ for module in modules}
    names = (*ROTATION_FUNCTIONS, "create_causal_mask")
    functions = {(space, name): getattr(sys.modules[space], name, None) for space in namespaces for name in names}
    configs = [config for config in attributes.values() if isinstance(config, PreTrainedConfig)]
    hooks = [vars(hooks) for module in modules if (hooks := backend._hooks_by_module.get(module)) is not None]
    return {
        "attributes": attributes,
        "functions": functions,
        "configs": [(config.to_dict(), config._attn_implementation_internal) for config in configs],
        "hooks": [registered for by_kind in hooks for registered in by_kind.values() if registered],
        "interfaces": [dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_MASK_ATTENTION_FUNCTIONS)],
    }


def assert_same_state(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert before.keys() == after.keys()
    for name in ("attributes", "functions"):
        assert before[name].keys() == after[name].keys()
        for key, value in before[name].items():
            other = after[name][key]
            values, others = (value, other) if isinstance(value, list) else ([value], [other])
            assert len(values) == len(others), key
            assert all(
                first is second or (not isinstance(first, Tensor | nn.Module | PreTrainedConfig) and first == second)
                for first, second in zip(values, others, strict=True)
            ), key
    for name in ("configs", "hooks", "interfaces"):
        assert before[name] == after[name], name


@cache
def pair_of_models(family: str) -> tuple[Model, Model]:
    first, second = (hs.load(FAMILIES[family][0]()) for _ in range(2))
    return first, second


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "override with a hidden mask", "bridge"])
@settings(max_examples=8)
@given(data=st.data())
def test_contexts_that_end_in_any_order_restore_everything(family: str, data: st.DataObject) -> None:
    """Enter and leave up to six contexts on two models in a random order, with passes in between."""
    models = pair_of_models(family)
    before, expected = [state(model) for model in models], [logits(model) for model in models]
    names = [name for name in CONTEXTS if family == "llama" or name not in ("eager", "yarn")]
    choices = st.lists(st.tuples(st.sampled_from([0, 1]), st.sampled_from(names)), min_size=2, max_size=6)
    opened: list[ExitStack] = []
    for index, name in data.draw(choices):
        opened.append(ExitStack())
        opened[-1].enter_context(CONTEXTS[name](models[index]))
        if data.draw(st.booleans()):
            logits(models[index])
        if data.draw(st.booleans()):
            opened.pop(data.draw(st.integers(0, len(opened) - 1))).close()
    while opened:
        opened.pop(data.draw(st.integers(0, len(opened) - 1))).close()
    for model, state_before, logits_before in zip(models, before, expected, strict=True):
        assert_same_state(state_before, state(model))
        assert torch.equal(logits(model), logits_before)


@pytest.mark.parametrize("family", FAMILIES)
def test_scheme_stays_attached_if_an_earlier_context_ends_before_it(family: str) -> None:
    build, first, second = FAMILIES[family]
    model, other = hs.load(build()), hs.load(build())
    with hs.attached(model, scheme_of(model, second)):
        expected = logits(model)
    earlier = [ExitStack(), ExitStack()]
    for stack, context in zip(earlier, (hs.attached(other, scheme_of(other, first)), hs.capturing(other)), strict=True):
        stack.enter_context(context)
    with hs.attached(model, scheme_of(model, second)):
        for stack in earlier:
            stack.close()
        assert torch.equal(logits(model), expected)
    assert torch.equal(logits(model), logits(other))


def test_edit_of_two_contexts_keeps_its_place_if_the_later_one_ends() -> None:
    """Edits do not commute: (k + 1) * 2 is not k * 2 + 1."""
    module = nn.Identity()
    add, double = (lambda q, k, v, _: (q, k + 1, v)), (lambda q, k, v, _: (q, 2 * k, v))
    with backend.editing_qkv(module, add), backend.editing_qkv(module, double):
        with backend.editing_qkv(module, add):
            pass
        assert [*backend._hooks_by_module[module].qkv_edits.values()] == [add, double]


def test_frequencies_of_before_the_first_context_return_if_contexts_end_in_another_order() -> None:
    rotary = nn.Module()
    rotary.register_buffer("inv_freq", torch.ones(3))
    first, second = ExitStack(), ExitStack()
    first.enter_context(preserving_frequencies([rotary]))
    rotary.inv_freq = torch.full((3,), 2.0)  # as for a long text
    second.enter_context(preserving_frequencies([rotary]))
    first.close()
    second.close()
    assert torch.equal(rotary.inv_freq, torch.ones(3))
