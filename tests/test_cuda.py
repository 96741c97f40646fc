"""Calls of the fused CUDA kernels, tested without a GPU.

torch's FakeTensorMode computes shapes, dtypes, strides and devices as on CUDA, but no values. Values come from CPU
substitutes that follow torch's documentation of the kernels.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support import eager_reference, families
from support.simulated_cuda import Launches, simulating_cuda
from support.tiny_studies import save_texts, tokenizer
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import masking_utils

from headscope.attention import backend, cuda, kernel, masks
from headscope.attention.edits import InputsKind, TokenSet
from headscope.attention.kernel import AttentionVariant
from headscope.attention.record import AttentionRecord, LogitKind
from headscope.attention.streaming_kernel import StreamingKind
from headscope.decomposition.residual_decomposition import ResidualDecomposition
from headscope.forward.capture import capturing
from headscope.forward.logits import compute_loss_by_position, finite_hidden_states
from headscope.interventions.edits import edit_units, edited
from headscope.interventions.heads import Unit
from headscope.interventions.kinds import (
    DocumentMean,
    InputsFunction,
    OutputFunction,
    Replace,
    Resample,
    Scale,
    Steer,
    Suppress,
    Uniform,
    Zero,
)
from headscope.interventions.position_kinds import KVQuantization, PairUnrotation, PairZeroAblation, PositionReset
from headscope.models.checkpoint import evaluating
from headscope.positions.attach import attached
from headscope.positions.model import Model, load
from headscope.positions.schedule import Schedule
from headscope.study.cells import PassCell
from headscope.study.config import build_study
from headscope.study.context import StudyContext
from headscope.study.executor import JobExecutor
from probes.measure.run import MeasureObserver

MATH, FLASH, EFFICIENT, CUDNN = range(4)
"""Return values of `torch._fused_sdp_choice`."""
HALVES = {torch.float16, torch.bfloat16}
LONG = 65_536


class _CudaOnlyOperations(TorchFunctionMode):
    """Operations that torch supports only if it is built for CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__setitem__ and args[0].is_cuda:
            tensor, index, value = args
            return torch.ops.aten.copy_(tensor[index], value)
        if function is Tensor.__invert__ and args[0].is_cuda:
            return torch.bitwise_not(*args)
        return function(*args, **(kwargs or {}))


@contextmanager
def fake_cuda() -> Iterator[Launches]:
    """Fake CUDA tensors without values; yields a count of launches by kernel. Gradients would need a GPU."""
    with simulating_cuda() as launches, _CudaOnlyOperations(), torch.no_grad():
        yield launches


def head_properties(inputs: Any) -> tuple[torch.dtype, int, bool, int]:
    """Properties that determine the kernel: dtype, head dimension, whether keys are grouped, width of the values."""
    q, k, v = inputs
    return q.dtype, q.shape[-1], q.shape[1] != k.shape[1], v.shape[-1]


def flash_supports(*inputs: Tensor) -> bool:
    dtype, dim, _, width = head_properties(inputs)
    return dtype in HALVES and dim == width <= 256 and dim % 8 == 0


def efficient_supports(*inputs: Tensor) -> bool:
    dtype, dim, grouped, width = head_properties(inputs)
    return dtype != torch.float64 and not grouped and dim % 8 == width % 8 == 0


@pytest.fixture
def prefer_kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Simulate torch's kernel selection on a GPU: the preferred kernel if it supports the inputs."""

    def prefer(preferred: int) -> None:
        def choice(q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, causal: bool, enable_gqa: bool) -> int:
            assert (mask, dropout, enable_gqa) == (None, 0.0, True)
            assert causal == (q.shape[2] > 1)
            if preferred == CUDNN and flash_supports(q, k, v):
                return CUDNN
            if preferred in (CUDNN, FLASH) and flash_supports(q, k, v):
                return FLASH
            return EFFICIENT if preferred != MATH and efficient_supports(q, k, v) else MATH

        def check(supports: Callable[..., bool]) -> Callable[[Any], bool]:
            return lambda params: supports(params.query, params.key, params.value)

        monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
        can_flash, can_efficient = check(flash_supports), check(efficient_supports)
        monkeypatch.setattr(
            cuda,
            "can_use_flash_attention",
            lambda params: preferred in (CUDNN, FLASH) and params.attn_mask is None and can_flash(params),
        )
        monkeypatch.setattr(
            cuda, "can_use_efficient_attention", lambda params: preferred != MATH and can_efficient(params)
        )

    return prefer


CASES = {
    "a pass": (300, 300, {}),
    "one query": (1, 300, {}),
    "cached keys": (40, 300, {}),
    "a window": (300, 300, {"window": 64}),
    "a window and cached keys": (40, 300, {"window": 64}),
    "chunks": (300, 300, {"chunk_size": 64}),
    "a cap": (300, 300, {"softcap": 5.0}),
    "a sink": (300, 300, {"sink": 1.0}),
    "a sink and a window": (300, 300, {"sink": 1.0, "window": 64}),
}


def case_inputs(
    case: str, device: str, dtype: torch.dtype, dims: tuple[int, int] = (64, 64), query_heads: int = 4, groups: int = 2
) -> tuple[Tensor, Tensor, Tensor, AttentionVariant]:
    """q, k, v as views of projection outputs [B, L, heads x d], and the rule."""
    queries, keys, options = CASES[case]
    generator = torch.Generator().manual_seed(0)

    def random_heads(length: int, count: int, dim: int) -> Tensor:
        projected = torch.randn(2, length, count * dim, generator=generator).to(device, dtype)
        return projected.view(2, length, count, dim).transpose(1, 2)

    q = random_heads(queries, query_heads, dims[0])
    k, v = random_heads(keys, groups, dims[0]), random_heads(keys, groups, dims[1])
    rule = {**options, "sink": torch.full((query_heads,), options["sink"]).to(q)} if "sink" in options else options
    return q, k, v, AttentionVariant(dims[0] ** -0.5, **rule)


@pytest.mark.exhaustive(sample=3)
@pytest.mark.slow
@pytest.mark.parametrize("preferred", [MATH, FLASH, EFFICIENT, CUDNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_output_and_log_sum_exp_have_the_right_shape_dtype_and_device(
    prefer_kernel: Callable[[int], None], preferred: int, dtype: torch.dtype
) -> None:
    prefer_kernel(preferred)
    with fake_cuda():
        for case in CASES:
            q, k, v, rule = case_inputs(case, "cuda:1", dtype, (40, 20))
            out, lse = kernel.attend(q, k, v, None, rule, 0.0, True)
            assert lse is not None
            assert (out.shape, out.dtype, out.device) == ((*q.shape[:3], 20), dtype, q.device)
            assert (lse.shape, lse.dtype, lse.device) == (q.shape[:3], torch.float32, q.device)


KERNELS = {
    FLASH: "aten::_flash_attention_forward",
    EFFICIENT: "aten::_efficient_attention_forward",
    CUDNN: "aten::_scaled_dot_product_cudnn_attention",
}


@pytest.mark.exhaustive(sample=6)
@pytest.mark.parametrize("preferred", KERNELS)
@pytest.mark.parametrize(
    "case", ["a pass", "one query", "cached keys", "a window", "chunks", "a sink", "a sink and a window"]
)
def test_a_layer_of_65536_tokens_takes_one_launch_per_chunk_of_the_kernel_that_torch_selects(
    prefer_kernel: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, preferred: int, case: str
) -> None:
    """Other launches are few, such as repeating the keys for every query head."""
    queries, _, options = CASES[case]
    long = {"window": 4096, "chunk_size": 8192}
    options = {key: long.get(key, value) for key, value in options.items()}
    monkeypatch.setitem(CASES, case, (LONG if queries == 300 else queries, LONG, options))
    prefer_kernel(preferred)
    with fake_cuda() as launches:
        q, k, v, rule = case_inputs(case, "cuda:0", torch.bfloat16)
        launches.clear()
        kernel.attend(q, k, v, None, rule, 0.0, True)
    selected = preferred if preferred != CUDNN or (queries in (1, 300) and "window" not in options) else FLASH
    chunks = LONG // options["chunk_size"] if "chunk_size" in options else 1
    assert launches[KERNELS[selected]] == chunks
    assert launches.total() <= 10 * chunks, launches


def move_to_fake_cuda(module: nn.Module) -> None:
    """Replace weights and buffers by fake CUDA tensors."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                fake = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda:0")
                part._parameters[name] = nn.Parameter(fake)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda:0")


def test_capture_edits_and_schemes_use_no_cpu_tensors(
    prefer_kernel: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation on tensors of both GPU and CPU would raise."""
    prefer_kernel(FLASH)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)  # it reads values
    monkeypatch.setattr(backend, "all_finite", lambda values: True)  # it reads values
    model = load(families.SPECS["llama-gqa"].build().bfloat16())
    devices = []

    def listen(record: AttentionRecord) -> None:
        tensors = (record.q, record.k, record.v, record.z, record.lse, record.visible_counts)
        devices.append({t.device.type for t in tensors})

    models = [model.with_scheme(scheme) for scheme in ("base", "yarn:factor=2", "logn:length=32")]
    assert [schemed.schedule.scales_queries for schemed in models] == [False, False, True]  # before the fake tensors
    with fake_cuda() as launches:
        move_to_fake_cuda(model.module)
        ids = torch.zeros(1, 300, dtype=torch.int64, device="cuda:0")
        for schemed in models:
            launches.clear()
            with attached(schemed), edited(schemed, [edit_units(Uniform(), [Unit(2, 0)], model.geometry)]) as layers:
                layers.listen(listen)
                layers.edit_qkv(1, lambda q, k, v, positions: (q * (1 + positions[:, None, :, None]).to(q.dtype), k, v))
                logits = schemed.module(ids, use_cache=False).logits
            assert logits.device.type == "cuda"
            # In one of the four layers of the KV group without an edit, and of all for rows that keep their weights.
            assert launches[KERNELS[FLASH]] == 5
    assert devices == [{"cuda"}] * 12


def kinds_of_edits(model: Model, target: Schedule) -> list[Any]:
    """One of every kind of edit that needs no records of another run; resets have a target."""
    heads_by_layer = enumerate(model.geometry.layer_heads)
    values = {layer: torch.zeros(heads, 30, 16, device="cuda:0") for layer, heads in heads_by_layer}
    pairs = torch.ones(model.geometry.layers, model.geometry.pairs, dtype=torch.bool)
    return [
        *(Zero(), Scale(-2), DocumentMean(), Uniform(), StreamingKind(2, 20), KVQuantization(4)),
        *(Steer(TokenSet((3, 4)), 0.1), Suppress(TokenSet(slice(3, 9)))),
        *(Replace("mean:text", {n: z[:, :1] for n, z in values.items()}), Resample(values, 0)),
        Replace("patched", values, ("q",), 2, 30),
        *(PositionReset(component, model.schedule, target, model.geometry) for component in ("freq", "scale", "joint")),
        *(PairZeroAblation(pairs, model.geometry), PairUnrotation(pairs, model.schedule, model.geometry)),
        *(OutputFunction(torch.tanh), InputsFunction(lambda q, k, v, layer: (q, k, v.abs()))),
    ]


@pytest.mark.parametrize("unit", [Unit(2, 0), Unit(1, 1, 3)])
def test_edits_of_every_kind_use_no_cpu_tensors_and_wait_for_the_gpu_only_where_they_read_values(
    unit: Unit, prefer_kernel: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer_kernel(FLASH)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)  # it reads values
    monkeypatch.setattr(backend, "all_finite", lambda values: True)  # it reads values
    model = load(families.SPECS["llama-gqa"].build().bfloat16())
    target = model.with_scheme("yarn:factor=2").schedule
    assert model.schedule is not None  # before the fake tensors
    with fake_cuda() as launches:
        move_to_fake_cuda(model.module)
        ids = torch.zeros(2, 40, dtype=torch.int64, device="cuda:0")
        for kind in kinds_of_edits(model, target):
            devices = []
            with attached(model), edited(model, [edit_units(kind, [unit], model.geometry)]) as layers:
                layers.listen(lambda record: devices.append(record.z.device.type))  # noqa: B023
                launches.waits.clear()
                model.module(ids, use_cache=False)
            assert devices == ["cuda"] * 8, kind.name
            if not isinstance(kind, LogitKind | InputsKind):
                assert not launches.waits, (kind.name, launches.waits)


@pytest.mark.slow
@pytest.mark.parametrize("layers", [2, 5])
@pytest.mark.parametrize("rows", [64, None])
def test_a_pass_waits_for_the_gpu_three_times_whatever_the_number_of_layers(
    prefer_kernel: Callable[[int], None], layers: int, rows: int | None
) -> None:
    """For the largest token, for transformers' search for packed sequences, and for values that are not finite."""
    prefer_kernel(FLASH)
    model = load(families.build("llama", {"num_hidden_layers": layers}).bfloat16())
    ids = torch.zeros(1, 300, dtype=torch.int64)
    observer = MeasureObserver(model, ids, ["attention", "pairs", "distance", "nll"], rows, 0, {})
    assert model.schedule is not None  # before the fake tensors
    with fake_cuda() as launches:
        move_to_fake_cuda(model.module)
        ids = torch.zeros(1, 300, dtype=torch.int64, device="cuda:0")
        launches.clear()
        launches.waits.clear()
        with attached(model), evaluating(model), capturing(model) as captured:
            observer.listen(captured)
            hidden = finite_hidden_states(model, ids)
            compute_loss_by_position(model, ids, hidden)
    assert launches.waits.total() == 3, launches.waits
    assert launches["_row_sums"] == launches["_mean_abs_products"] == layers


def test_a_sliding_window_is_recognised_without_reading_the_gpu() -> None:
    """Tensors on device meta cannot be read."""
    function = masking_utils.sliding_window_causal_mask_function(8)
    assert masks._encode_window(function, 8, None, "meta") == 8 * masks.WINDOW_MULTIPLIER


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "olmo2"])
def test_no_probe_of_a_shared_pass_waits_for_the_gpu_once_per_layer(
    prefer_kernel: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, family: str
) -> None:
    """All probes that observe one pass together. The norms of OLMo 2 follow its attention, and are checked."""
    prefer_kernel(FLASH)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)  # it reads values
    waits = [_waits_of_all_observers(families.build(family, {"num_hidden_layers": n}), tmp_path) for n in (2, 5)]
    assert waits[0] == waits[1]
    assert waits[0].total() <= 2, waits  # for the largest token, and for values that are not finite


def on_fake_cuda(value: Any) -> Any:
    """A copy with fake CUDA tensors in its containers and dataclasses of the decomposition."""
    if isinstance(value, Tensor):
        return torch.empty(value.shape, dtype=value.dtype, device="cuda:0")
    if isinstance(value, (list, tuple)):
        return type(value)(map(on_fake_cuda, value))
    if isinstance(value, dict):
        return {key: on_fake_cuda(item) for key, item in value.items()}
    if type(value).__module__ == ResidualDecomposition.__module__:
        return replace(value, **{name: on_fake_cuda(item) for name, item in vars(value).items()})
    return value


def _waits_of_all_observers(module: Any, folder: Path) -> Counter[str]:
    """Waits in a pass that every probe of ordinary texts observes, from its start to its last hidden states."""
    folder = folder / str(module.config.num_hidden_layers)
    folder.mkdir()
    model = load(module.bfloat16(), tokenizer=tokenizer())
    content = {"models": {"m": "in-memory"}, "texts": {"source": save_texts(folder / "texts", 140), "docs": 1}}
    probes: dict[str, Any] = {name: {"lengths": [120]} for name in ("attribution", "patterns", "spans", "sparsity")}
    probes |= {"weights": {"lengths": [120], "parts": ["distance", "values"]}, "measure": {"lengths": [120]}}
    probes["sparsity"]["needles"] = 0
    probes["patterns"]["map"], probes["spans"]["classes"] = True, ["digit", "same"]
    executor = JobExecutor(StudyContext(build_study({**content, **probes}), {"m": model}))
    (job,) = (job for job in executor.plan() if isinstance(job.cell, PassCell))
    assert {name for name, _ in job.parts} == {*probes}
    assert model.schedule is not None  # before the fake tensors
    runners, cells = executor.runners, dict(job.parts)
    ids = torch.tensor(runners["measure"].token_ids(job.cell))[None]
    with attached(model):
        observers = {name: runners[name].observer(cells[name], model, ids) for name in probes}
    with fake_cuda() as launches:
        move_to_fake_cuda(model.module)
        observers["weights"].values._grams = on_fake_cuda(observers["weights"].values._grams)
        vars(observers["attribution"]).update(on_fake_cuda({**vars(observers["attribution"]), "bins": None}))
        ids = torch.zeros(ids.shape, dtype=torch.int64, device="cuda:0")
        with attached(model), evaluating(model), capturing(model) as captured:
            for observer in observers.values():
                observer.listen(captured)
            launches.waits.clear()
            finite_hidden_states(model, ids)
        return launches.waits


# Values, by CPU substitutes -----------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, logits_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention of [B, H, L, d] with a mask added to the logits; keys may be grouped."""
    heads_per_group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(heads_per_group, 1), v.repeat_interleave(heads_per_group, 1)
    logits = scale * q.double() @ k.double().mT + logits_mask
    return (logits.softmax(-1) @ v.double()).to(q.dtype), logits.logsumexp(-1).float()


def causal_mask(q: Tensor, k: Tensor, window: int | None, axis: int) -> Tensor:
    """Additive causal mask; the queries belong to the last keys."""
    keys = k.shape[axis]
    visible_mask = eager_reference.visible(keys, window)[keys - q.shape[axis] :]
    return torch.zeros(visible_mask.shape, dtype=torch.float64).masked_fill(~visible_mask, -torch.inf)


def check_inputs(*tensors: Tensor) -> None:
    """Assert what the kernels require: equal head dimensions, multiples of 8, contiguous in memory."""
    assert all(t.shape[-1] % 8 == 0 and t.stride(-1) == 1 for t in tensors)
    assert len({t.shape[-1] for t in tensors}) == 1


def flash(
    q: Tensor, k: Tensor, v: Tensor, cum_q: None, cum_k: None, max_q: int, max_k: int, dropout: float, causal: bool,
    debug: bool, *, scale: float, window_size_left: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    check_inputs(q, k, v)
    assert (max_q, max_k, dropout, debug) == (q.shape[1], k.shape[1], 0.0, False)
    assert causal
    mask = causal_mask(q, k, None if window_size_left is None else window_size_left + 1, 1)
    out, lse = attention(*(t.transpose(1, 2) for t in (q, k, v)), scale, mask)
    return out.transpose(1, 2).contiguous(), lse, torch.empty(0)


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: None, cu_q: None, cu_k: None, max_q: None, max_k: None, dropout: float,
    mask_type: int, with_lse: bool, *, scale: float, window_size: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    check_inputs(q, k, v)
    assert (dropout, with_lse, bias, cu_q, cu_k, max_q, max_k) == (0.0, True, None, None, None, None, None)
    assert mask_type == 2, "lower right"
    assert q.shape[2] == k.shape[2], "it does not support grouped keys"
    out, lse = attention(*(t.transpose(1, 2) for t in (q, k, v)), scale, causal_mask(q, k, window_size, 1))
    filled = math.ceil(lse.shape[-1] / 32) * 32
    return out.transpose(1, 2), torch.nn.functional.pad(lse, (0, filled - lse.shape[-1]), value=torch.inf)


def efficient_masked(
    q: Tensor, k: Tensor, v: Tensor, attn_bias: Tensor, with_lse: bool, dropout: float, causal: bool, *, scale: float
) -> tuple[Tensor, ...]:
    check_inputs(q, k, v)
    assert (with_lse, dropout, causal) == (True, 0.0, False)
    assert q.shape[1] == k.shape[1], "it does not support grouped keys"
    assert attn_bias.shape == (*q.shape[:3], k.shape[2])
    assert attn_bias.dtype == q.dtype
    assert all(step % 16 == 0 for step in attn_bias.stride()[:-1])
    assert attn_bias.stride(-1) == 1
    out, lse = attention(q, k, v, scale, attn_bias.double())
    filled = math.ceil(lse.shape[-1] / 32) * 32
    return out, torch.nn.functional.pad(lse, (0, filled - lse.shape[-1]), value=torch.inf)


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, attn_bias: None, with_lse: bool, dropout: float, causal: bool, debug: bool,
    *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    check_inputs(q, k, v)
    assert (attn_bias, with_lse, dropout, debug) == (None, True, 0.0, False)
    assert causal == (q.shape[2] > 1)
    assert q.shape[2] in (1, k.shape[2]), "its causal mask is upper left"
    out, lse = attention(q, k, v, scale, causal_mask(q, k, None, 2))
    return out, lse[..., None]


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(64, 64), (40, 24), (20, 20)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("preferred", [MATH, FLASH, EFFICIENT, CUDNN])
def test_kernel_results_and_gradients_equal_exact_attention(
    prefer_kernel: Callable[[int], None],
    monkeypatch: pytest.MonkeyPatch,
    preferred: int,
    case: str,
    dims: tuple[int, int],
) -> None:
    """float32, which real GPUs do not support in all kernels, compared with float64."""
    prefer_kernel(preferred)
    monkeypatch.setattr(f"{__name__}.HALVES", {torch.float32})
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", efficient)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", efficient_masked)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
    monkeypatch.setattr(kernel, "_is_on_cuda", lambda q: True)
    monkeypatch.setattr(kernel, "_fused_attention_cpu", kernel._fused_attention_non_cpu)
    *tensors, rule = case_inputs(case, "cpu", torch.float32, dims)
    q, k, v = (t.requires_grad_() for t in tensors)
    out, lse = kernel.attend(q, k, v, None, rule, 0.0, True)
    assert lse is not None
    logits = rule.scaling * q.double() @ k.double().repeat_interleave(2, 1).mT
    logits = logits if rule.softcap is None else rule.softcap * torch.tanh(logits / rule.softcap)
    visible_mask = eager_reference.visible(k.shape[2], rule.window, rule.chunk_size)[k.shape[2] - q.shape[2] :]
    logits = logits.masked_fill(~visible_mask, -torch.inf)
    if rule.sink is not None:
        logits = torch.cat((logits, rule.sink.double()[None, :, None, None].expand(2, -1, q.shape[2], 1)), -1)
    expected = logits.softmax(-1)[..., : k.shape[2]] @ v.double().repeat_interleave(2, 1)
    assert difference(out, expected) <= 1e-5
    assert difference(lse, logits.logsumexp(-1)) <= 1e-5
    with torch.no_grad():  # as with listeners
        inference_out, inference_lse = kernel.attend(q, k, v, None, rule, 0.0, True)
    assert inference_lse is not None
    assert difference(inference_out, expected) <= 1e-5
    assert difference(inference_lse, logits.logsumexp(-1)) <= 1e-5
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    gradients, exact = (torch.autograd.grad((result * pull).sum(), (q, k, v)) for result in (out, expected))
    assert max(map(difference, gradients, exact)) <= 1e-4


def test_queries_that_see_every_key_use_no_causal_kernel(
    prefer_kernel: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefer_kernel(FLASH)
    monkeypatch.setattr(kernel, "_is_on_cuda", lambda q: True)
    q, k, v, rule = case_inputs("cached keys", "cpu", torch.float32)
    out, lse = kernel._fused_attention_non_cpu(q, k, v, rule.scaling, False, None)
    expected, exact = attention(q, k, v, rule.scaling, torch.zeros(q.shape[2], k.shape[2]))
    assert difference(out, expected) <= 1e-5
    assert difference(lse, exact) <= 1e-5


def difference(actual: Tensor, expected: Tensor) -> float:
    return float((actual.detach().double() - expected.detach().double()).abs().max())
