"""The fused kernels of CUDA: what each is asked for and what is made of its answer, on a machine without one.

torch's FakeTensorMode computes shapes, dtypes, strides and devices as CUDA gives them, and no numbers. Numbers come of
stand-ins that do, on CPU, what torch documents of the kernels.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from support import eager_reference, families
from support.simulated_cuda import pretending
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import masking_utils

from headscope.attention import cuda, kernel
from headscope.attention.kernel import AttentionRule
from headscope.attention.record import AttentionRecord
from headscope.forward.capture import capturing
from headscope.forward.interventions import Unit, layer_output_edit, uniform_attention
from headscope.positions.attach import attached
from headscope.positions.model import load

MATH, FLASH, EFFICIENT, CUDNN = range(4)
"""What `torch._fused_sdp_choice` answers."""
HALVES = {torch.float16, torch.bfloat16}
LONG = 65_536


class _AlsoSpelled(TorchFunctionMode):
    """What else torch does only where it is built for CUDA."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.__setitem__ and args[0].is_cuda:
            tensor, index, value = args
            return torch.ops.aten.copy_(tensor[index], value)
        if function is Tensor.__invert__ and args[0].is_cuda:
            return torch.bitwise_not(*args)
        return function(*args, **(kwargs or {}))


@contextmanager
def numberless() -> Iterator[Counter[str]]:
    """Tensors on cuda without numbers, and what would be launched; gradients would want a card."""
    with pretending() as launches, _AlsoSpelled(), torch.no_grad():
        yield launches


def heads(asked: Any) -> tuple[torch.dtype, int, bool, int]:
    """What the choice of a kernel hangs on: dtype, head dimension, whether keys are grouped, width of the values."""
    q, k, v = asked
    return q.dtype, q.shape[-1], q.shape[1] != k.shape[1], v.shape[-1]


def flash_serves(*asked: Tensor) -> bool:
    dtype, dim, _, width = heads(asked)
    return dtype in HALVES and dim == width <= 256 and dim % 8 == 0


def efficient_serves(*asked: Tensor) -> bool:
    dtype, dim, grouped, width = heads(asked)
    return dtype != torch.float64 and not grouped and dim % 8 == width % 8 == 0


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets torch choose as on a card, which here it cannot: the kernel that is preferred, if it serves."""

    def prefer(preferred: int) -> None:
        def choice(q: Tensor, k: Tensor, v: Tensor, mask: Any, dropout: float, causal: bool, enable_gqa: bool) -> int:
            assert (mask, dropout, enable_gqa) == (None, 0.0, True)
            assert causal == (q.shape[2] > 1)
            if preferred == CUDNN and flash_serves(q, k, v):
                return CUDNN
            if preferred in (CUDNN, FLASH) and flash_serves(q, k, v):
                return FLASH
            return EFFICIENT if preferred != MATH and efficient_serves(q, k, v) else MATH

        def of(serves: Callable[..., bool]) -> Callable[[Any], bool]:
            return lambda asked: serves(asked.query, asked.key, asked.value)

        monkeypatch.setattr(torch, "_fused_sdp_choice", choice)
        can_flash, can_efficient = of(flash_serves), of(efficient_serves)
        monkeypatch.setattr(
            cuda,
            "can_use_flash_attention",
            lambda asked: preferred in (CUDNN, FLASH) and asked.attn_mask is None and can_flash(asked),
        )
        monkeypatch.setattr(
            cuda, "can_use_efficient_attention", lambda asked: preferred != MATH and can_efficient(asked)
        )

    return prefer


CASES = {
    "a pass": (300, 300, {}),
    "one query": (1, 300, {}),
    "cached keys": (40, 300, {}),
    "a window": (300, 300, {"window": 64}),
    "a window and cached keys": (40, 300, {"window": 64}),
    "chunks": (300, 300, {"chunk": 64}),
    "a cap": (300, 300, {"cap": 5.0}),
    "a sink": (300, 300, {"sink": 1.0}),
    "a sink and a window": (300, 300, {"sink": 1.0, "window": 64}),
}


def asked_of(
    case: str, device: str, dtype: torch.dtype, dims: tuple[int, int] = (64, 64), query_heads: int = 4, groups: int = 2
) -> tuple[Tensor, Tensor, Tensor, AttentionRule]:
    """q, k, v as a projection leaves them, [B, L, heads x d] seen as heads, and the rule."""
    queries, keys, told = CASES[case]
    generator = torch.Generator().manual_seed(0)

    def drawn(length: int, count: int, dim: int) -> Tensor:
        made = torch.randn(2, length, count * dim, generator=generator).to(device, dtype)
        return made.view(2, length, count, dim).transpose(1, 2)

    q, k, v = drawn(queries, query_heads, dims[0]), drawn(keys, groups, dims[0]), drawn(keys, groups, dims[1])
    rule = {**told, "sink": torch.full((query_heads,), told["sink"]).to(q)} if "sink" in told else told
    return q, k, v, AttentionRule(dims[0] ** -0.5, **rule)


@pytest.mark.parametrize("preferred", [MATH, FLASH, EFFICIENT, CUDNN])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_output_and_log_sum_exp_have_the_right_shape_dtype_and_device(
    card: Callable[[int], None], preferred: int, dtype: torch.dtype
) -> None:
    card(preferred)
    with numberless():
        for case in CASES:
            q, k, v, rule = asked_of(case, "cuda:1", dtype, (40, 20))
            out, lse = kernel.attend(q, k, v, None, rule, 0.0, True)
            assert lse is not None
            assert (out.shape, out.dtype, out.device) == ((*q.shape[:3], 20), dtype, q.device)
            assert (lse.shape, lse.dtype, lse.device) == (q.shape[:3], torch.float32, q.device)


KERNELS = {
    FLASH: "aten::_flash_attention_forward",
    EFFICIENT: "aten::_efficient_attention_forward",
    CUDNN: "aten::_scaled_dot_product_cudnn_attention",
}


@pytest.mark.parametrize("preferred", KERNELS)
@pytest.mark.parametrize(
    "case", ["a pass", "one query", "cached keys", "a window", "chunks", "a sink", "a sink and a window"]
)
def test_a_layer_of_65536_tokens_takes_one_launch_of_the_kernel_that_torch_picks_or_one_a_chunk(
    card: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, preferred: int, case: str
) -> None:
    """And few others, such as those that give every query head its keys."""
    queries, _, told = CASES[case]
    long = {"window": 4096, "chunk": 8192}
    told = {key: long.get(key, value) for key, value in told.items()}
    monkeypatch.setitem(CASES, case, (LONG if queries == 300 else queries, LONG, told))
    card(preferred)
    with numberless() as made:
        q, k, v, rule = asked_of(case, "cuda:0", torch.bfloat16)
        made.clear()
        kernel.attend(q, k, v, None, rule, 0.0, True)
    own = preferred if preferred != CUDNN or (queries in (1, 300) and "window" not in told) else FLASH
    chunks = LONG // told["chunk"] if "chunk" in told else 1
    assert made[KERNELS[own]] == chunks
    assert made.total() <= 10 * chunks, made


def on_cuda(module: nn.Module) -> None:
    """Its weights become tensors without numbers on a card."""
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                there = torch.empty(parameter.shape, dtype=parameter.dtype, device="cuda:0")
                each._parameters[name] = nn.Parameter(there)
        for name, buffer in each._buffers.items():
            if buffer is not None:
                each._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cuda:0")


def test_a_model_on_a_card_is_heard_edited_and_turned_there(
    card: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operation on tensors of the card and of the CPU would raise."""
    card(FLASH)
    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", lambda positions: None)  # which reads numbers
    model = load(families.SPECS["llama-gqa"].build().bfloat16())
    heard = []

    def listen(layer: AttentionRecord) -> None:
        heard.append({t.device.type for t in (layer.q, layer.k, layer.v, layer.z, layer.lse, layer.visible_counts)})

    turned_by = [model.with_scheme(scheme) for scheme in ("base", "yarn:factor=2", "logn:length=32")]
    assert [turned.schedule.scales_queries for turned in turned_by] == [False, False, True]  # known before
    with numberless() as made:
        on_cuda(model.module)
        ids = torch.zeros(1, 300, dtype=torch.int64, device="cuda:0")
        for turned in turned_by:
            made.clear()
            with attached(turned), capturing(turned) as layers:
                layers.listen(listen)
                layers.edit_qkv(1, lambda q, k, v, positions: (q * (1 + positions[:, None, :, None]).to(q.dtype), k, v))
                layers.edit_output(2, layer_output_edit(uniform_attention, [Unit(2, 0)], model.geometry))
                logits = turned.module(ids, use_cache=False).logits
            assert logits.device.type == "cuda"
            assert made[KERNELS[FLASH]] == 5  # of four layers, and the changed head once more
    assert heard == [{"cuda"}] * 12


# Numbers, by stand-ins ----------------------------------------------------------------------------------------------


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float, logits_mask: Tensor) -> tuple[Tensor, Tensor]:
    """Of [B, H, L, d], with a mask that is added to the logits; keys may be grouped."""
    each = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(each, 1), v.repeat_interleave(each, 1)
    logits = scale * q.double() @ k.double().mT + logits_mask
    return (logits.softmax(-1) @ v.double()).to(q.dtype), logits.logsumexp(-1).float()


def below(q: Tensor, k: Tensor, window: int | None, axis: int) -> Tensor:
    """The mask of queries that are the last of the keys."""
    keys = k.shape[axis]
    seen = eager_reference.visible(keys, window)[keys - q.shape[axis] :]
    return torch.zeros(seen.shape, dtype=torch.float64).masked_fill(~seen, -torch.inf)


def sound(*given: Tensor) -> None:
    """What the kernels refuse: head dimensions that are not even, or not next to each other in memory."""
    assert all(t.shape[-1] % 8 == 0 and t.stride(-1) == 1 for t in given)
    assert len({t.shape[-1] for t in given}) == 1


def flash(
    q: Tensor, k: Tensor, v: Tensor, cum_q: None, cum_k: None, max_q: int, max_k: int, dropout: float, causal: bool,
    debug: bool, *, scale: float, window_size_left: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    sound(q, k, v)
    assert (max_q, max_k, dropout, debug) == (q.shape[1], k.shape[1], 0.0, False)
    assert causal, "or it would see later keys"
    mask = below(q, k, None if window_size_left is None else window_size_left + 1, 1)
    out, lse = attention(*(t.transpose(1, 2) for t in (q, k, v)), scale, mask)
    return out.transpose(1, 2).contiguous(), lse, torch.empty(0)


def efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: None, cu_q: None, cu_k: None, max_q: None, max_k: None, dropout: float,
    mask_type: int, with_lse: bool, *, scale: float, window_size: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    sound(q, k, v)
    assert (dropout, with_lse, bias, cu_q, cu_k, max_q, max_k) == (0.0, True, None, None, None, None, None)
    assert mask_type == 2, "lower right"
    assert q.shape[2] == k.shape[2], "it knows no grouped keys"
    out, lse = attention(*(t.transpose(1, 2) for t in (q, k, v)), scale, below(q, k, window_size, 1))
    filled = math.ceil(lse.shape[-1] / 32) * 32
    return out.transpose(1, 2), torch.nn.functional.pad(lse, (0, filled - lse.shape[-1]), value=torch.inf)


def efficient_masked(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, with_lse: bool, dropout: float, causal: bool, *, scale: float
) -> tuple[Tensor, ...]:
    sound(q, k, v)
    assert (with_lse, dropout, causal) == (True, 0.0, False)
    assert q.shape[1] == k.shape[1], "it knows no grouped keys"
    assert bias.shape == (*q.shape[:3], k.shape[2])
    assert bias.dtype == q.dtype
    assert all(step % 16 == 0 for step in bias.stride()[:-1])
    assert bias.stride(-1) == 1
    out, lse = attention(q, k, v, scale, bias.double())
    filled = math.ceil(lse.shape[-1] / 32) * 32
    return out, torch.nn.functional.pad(lse, (0, filled - lse.shape[-1]), value=torch.inf)


def cudnn(
    q: Tensor, k: Tensor, v: Tensor, bias: None, with_lse: bool, dropout: float, causal: bool, debug: bool,
    *, scale: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    sound(q, k, v)
    assert (bias, with_lse, dropout, debug) == (None, True, 0.0, False)
    assert causal == (q.shape[2] > 1)
    assert q.shape[2] in (1, k.shape[2]), "its causal mask is upper left"
    out, lse = attention(q, k, v, scale, below(q, k, None, 2))
    return out, lse[..., None]


@pytest.mark.parametrize("dims", [(64, 64), (40, 24), (20, 20)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("preferred", [MATH, FLASH, EFFICIENT, CUDNN])
def test_what_comes_of_the_kernels_is_attention_under_the_rule_and_so_are_gradients(
    card: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, preferred: int, case: str, dims: tuple[int, int]
) -> None:
    """In float32, which no card gives to all of them, against float64."""
    card(preferred)
    monkeypatch.setattr(f"{__name__}.HALVES", {torch.float32})
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", flash)
    monkeypatch.setattr(torch.ops.aten, "_efficient_attention_forward", efficient)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_efficient_attention", efficient_masked)
    monkeypatch.setattr(torch.ops.aten, "_scaled_dot_product_cudnn_attention", cudnn)
    monkeypatch.setattr(kernel, "_is_on_cuda", lambda q: True)
    monkeypatch.setattr(kernel, "_fused_attention_cpu", kernel._fused_attention_non_cpu)
    *drawn, rule = asked_of(case, "cpu", torch.float32, dims)
    q, k, v = (t.requires_grad_() for t in drawn)
    out, lse = kernel.attend(q, k, v, None, rule, 0.0, True)
    assert lse is not None
    logits = rule.scaling * q.double() @ k.double().repeat_interleave(2, 1).mT
    logits = logits if rule.cap is None else rule.cap * torch.tanh(logits / rule.cap)
    seen = eager_reference.visible(k.shape[2], rule.window, rule.chunk)[k.shape[2] - q.shape[2] :]
    logits = logits.masked_fill(~seen, -torch.inf)
    if rule.sink is not None:
        logits = torch.cat((logits, rule.sink.double()[None, :, None, None].expand(2, -1, q.shape[2], 1)), -1)
    expected = logits.softmax(-1)[..., : k.shape[2]] @ v.double().repeat_interleave(2, 1)
    assert difference(out, expected) <= 1e-5
    assert difference(lse, logits.logsumexp(-1)) <= 1e-5
    with torch.no_grad():  # as where layers are heard
        heard, heard_lse = kernel.attend(q, k, v, None, rule, 0.0, True)
    assert heard_lse is not None
    assert difference(heard, expected) <= 1e-5
    assert difference(heard_lse, logits.logsumexp(-1)) <= 1e-5
    pull = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    found, wanted = (torch.autograd.grad((each * pull).sum(), (q, k, v)) for each in (out, expected))
    assert max(map(difference, found, wanted)) <= 1e-4


def test_queries_that_see_every_key_are_given_to_no_causal_kernel(
    card: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    card(FLASH)
    monkeypatch.setattr(kernel, "_is_on_cuda", lambda q: True)
    q, k, v, rule = asked_of("cached keys", "cpu", torch.float32)
    out, lse = kernel._fused_attention_non_cpu(q, k, v, rule.scaling, False, None)
    expected, exact = attention(q, k, v, rule.scaling, torch.zeros(q.shape[2], k.shape[2]))
    assert difference(out, expected) <= 1e-5
    assert difference(lse, exact) <= 1e-5


def difference(found: Tensor, expected: Tensor) -> float:
    return float((found.detach().double() - expected.detach().double()).abs().max())
