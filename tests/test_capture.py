"""Attention records equal eager attention in full passes, padded batches, caches and chunks."""

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from support import eager_reference, families
from support.refusals import refuses
from torch import Tensor
from transformers import AttentionInterface, DynamicCache, StaticCache
from transformers.masking_utils import create_bidirectional_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from headscope.attention import backend, kernel
from headscope.attention.masks import DecodedMask, UnsupportedMask
from headscope.attention.record import AttentionRecord
from headscope.errors import BadInput, UnsupportedModel
from headscope.forward.capture import capturing
from headscope.positions.model import Model, load

SPECS = families.SPECS | families.OTHERS
MEASURABLE = pytest.mark.parametrize("family", families.MEASURABLE)
EVERY = pytest.mark.parametrize("family", SPECS)
ATTENDING = pytest.mark.parametrize("family", [*families.MEASURABLE, "gemma2", "gpt_oss", "llama4", "deepseek_v3"])
"""Families that cover every kind of attention."""
LENGTH = 24
"""Longer than the families' window of 8, so that windows bind."""
IDS = torch.randint(3, families.VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(3))


@cache
def tiny(family: str) -> Model:
    """A model of the family. Tests share it and must not change it."""
    return load(SPECS[family].build())


def difference(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a - b).abs().max().item()


@torch.no_grad()
def relative_difference(a: Tensor, b: Tensor) -> float:
    return difference(a, b) / max(1.0, float(b.abs().max()))


def run_captured(model: Model, ids: Tensor, **options: Any) -> tuple[Tensor, list[AttentionRecord]]:
    """Logits of one call and the records of its layers, in order."""
    records: list[AttentionRecord] = []
    with capturing(model) as layers:
        layers.listen(records.append)
        logits = model.module(ids, **options).logits
    return logits, records


def assert_records(
    records: list[AttentionRecord], expected: list[eager_reference.Layer], windows: tuple[int | None, ...]
) -> None:
    """Compare every field of the records with the formulas applied to the inputs of eager attention."""
    assert [record.layer for record in records] == list(range(len(expected)))
    for record, layer, window in zip(records, expected, windows, strict=True):
        assert (record.window, record.first_key, record.batch_index) == (window, 0, 0)
        assert record.scaling == pytest.approx(layer.scaling, rel=1e-12)
        for name in ("q", "k", "v"):
            assert difference(getattr(record, name), getattr(layer, name)) <= 1e-4, name
        logits = eager_reference.logits(layer.q, layer.k, layer.scaling, window, record.chunk_size, layer.softcap)
        logits = eager_reference.with_sink(logits, layer.sink)
        assert difference(record.lse.double(), logits.logsumexp(-1)) <= 1e-4
        rows = [0, LENGTH // 2, -1]
        assert difference(record.weights(rows).double(), logits.softmax(-1)[:, rows, : layer.k.shape[1]]) <= 1e-4
        assert torch.equal(record.weights(-1), record.weights([-1]))
        values = layer.v.repeat_interleave(len(layer.q) // len(layer.v), 0).double()
        assert difference(record.z.double(), logits.softmax(-1)[..., : len(values[0])] @ values) <= 1e-4
        assert record.lse.dtype == torch.float32
        assert torch.equal(record.visible_counts, layer.mask.sum(-1))


@EVERY
def test_records_equal_eager_attention(family: str) -> None:
    model = tiny(family)
    expected, layers = eager_reference.eager_qk(model.module, IDS[:1])
    logits, records = run_captured(model, IDS[:1], use_cache=False)
    assert difference(logits, expected) <= 1e-4
    assert_records(records, layers, SPECS[family].windows)


@pytest.mark.model
def test_records_of_the_real_checkpoint_equal_eager_attention(smollm2: Model, tokens: Tensor) -> None:
    ids = tokens[:, :256]
    expected, layers = eager_reference.eager_qk(smollm2.module, ids)
    logits, records = run_captured(smollm2, ids, use_cache=False)
    assert difference(logits, expected) <= 1e-3  # of logits up to 30, through 30 layers
    for record, layer in zip(records, layers, strict=True):
        assert difference(record.q, layer.q) <= 1e-3
        assert difference(record.k, layer.k) <= 1e-3
        lse = eager_reference.logits(layer.q, layer.k, layer.scaling).logsumexp(-1)
        assert difference(record.lse.double(), lse) <= 1e-3


@MEASURABLE
def test_the_backend_without_listeners_changes_nothing(family: str) -> None:
    model = tiny(family)
    with torch.no_grad():
        plain = model.module(IDS).logits
        with capturing(model):
            captured = model.module(IDS).logits
    # Windows are cut into blocks of rows instead of masked, so only those may round differently.
    assert difference(captured, plain) <= (1e-4 if any(families.SPECS[family].windows) else 0.0)


# Padding -----------------------------------------------------------------------------------------------------------


@ATTENDING
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sequence_in_a_padded_batch_has_the_records_of_the_sequence_alone(
    family: str, side: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    lengths = (LENGTH, 15, 9)
    masks = record_masks(monkeypatch)
    at = torch.arange(LENGTH)
    real = torch.stack([at < n if side == "right" else at >= LENGTH - n for n in lengths])
    ids = torch.where(real, IDS, 0)
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    logits, records = run_captured(model, ids, attention_mask=real.long(), position_ids=positions, use_cache=False)
    assert {tuple(m.shape) for m in masks if m is not None} == {(3, 1, 2, LENGTH)}
    for sequence, row in enumerate(real):
        alone, expected = run_captured(model, ids[sequence][row][None], use_cache=False)
        assert difference(logits[sequence][row], alone[0]) <= 1e-4
        own_records = [record for record in records if record.batch_index == sequence]
        assert [record.layer for record in own_records] == [record.layer for record in expected]
        for record, single in zip(own_records, expected, strict=True):
            for name in ("q", "k", "v", "z", "lse"):
                assert difference(getattr(record, name), getattr(single, name)) <= 1e-4, name
            assert torch.equal(record.visible_counts, single.visible_counts)


def record_masks(monkeypatch: pytest.MonkeyPatch) -> list[Tensor | None]:
    """Collect the masks passed to the attention function."""
    masks: list[Tensor | None] = []

    def spy(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **options: Any) -> Any:
        masks.append(mask)
        return backend.attention_forward(module, q, k, v, mask, **options)

    monkeypatch.setitem(AttentionInterface._global_mapping, backend.BACKEND_NAME, spy)
    return masks


@pytest.mark.parametrize("family", ["llama-gqa", "gemma3"])
def test_masks_of_long_unpadded_sequences_hold_two_numbers(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family)
    masks = record_masks(monkeypatch)
    run_captured(model, IDS.repeat(1, 12), use_cache=False)
    windows = [None if mask is None else mask.numel() for mask in masks]
    assert windows == [None if window is None else 2 for window in model.geometry.windows]


# Packed documents --------------------------------------------------------------------------------------------------


def dense_mask(lengths: Sequence[int], padding: int = 0) -> Tensor:
    """A mask [1, 1, L, L] of packed documents of these lengths, followed by padding."""
    blocks = [torch.ones(length, length, dtype=torch.bool).tril() for length in lengths]
    return torch.block_diag(*blocks, torch.zeros(padding, padding, dtype=torch.bool)).bool()[None, None]


def restarting(lengths: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths])[None]


def assert_documents(model: Model, ids: Tensor, lengths: Sequence[int], **inputs: Any) -> None:
    """Logits and records of packed documents are those of each document in a pass of its own."""
    logits, records = run_captured(model, ids, position_ids=restarting(lengths), use_cache=False, **inputs)
    ends = np.cumsum(lengths)
    for row in range(len(ids)):
        for number, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            alone, expected = run_captured(model, ids[row : row + 1, end - length : end], use_cache=False)
            assert relative_difference(logits[row, end - length : end], alone[0]) <= 1e-5
            own = [record for record in records if record.batch_index == row * len(lengths) + number]
            assert [record.layer for record in own] == [record.layer for record in expected]
            for record, single in zip(own, expected, strict=True):
                for name in ("q", "k", "v", "z", "lse"):
                    assert relative_difference(getattr(record, name), getattr(single, name)) <= 1e-5, name


@pytest.mark.parametrize("family", [*families.MEASURABLE, "gemma2", "llama4", "deepseek_v3"])
def test_records_of_documents_whose_positions_restart_are_those_of_each_document(family: str) -> None:
    assert_documents(tiny(family), IDS, [10, 14])


@ATTENDING
@pytest.mark.parametrize("kind", ["bool", "float", "batch"])
def test_records_of_documents_in_a_dense_mask_are_those_of_each_document(family: str, kind: str) -> None:
    """Documents within the window and chunks, which transformers does not apply to a dense mask."""
    mask = dense_mask([7, 8, 5, 4])
    if kind == "float":
        mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
    ids = IDS if kind == "batch" else IDS[:1]
    assert_documents(tiny(family), ids, [7, 8, 5, 4], attention_mask=mask)


@MEASURABLE
def test_a_dense_mask_of_one_document_and_padding_gives_the_records_of_the_text(family: str) -> None:
    logits, records = run_captured(tiny(family), IDS[:1], attention_mask=dense_mask([8], 16), use_cache=False)
    alone, expected = run_captured(tiny(family), IDS[:1, :8], use_cache=False)
    assert difference(logits[:, :8], alone) <= 1e-5
    for record, single in zip(records, expected, strict=True):
        assert difference(record.z, single.z) <= 1e-5


# Caches ------------------------------------------------------------------------------------------------------------

SPLITS = pytest.mark.parametrize("split", [[16] + [1] * 8, [10, 14], [3, 9, 1, 11]], ids=str)


@torch.no_grad()
def run_in_parts(model: Model, ids: Tensor, split: list[int], cache: Any) -> tuple[Tensor, list[list[AttentionRecord]]]:
    """Run ids [1, L] in parts with a cache; return the joined logits and the records of each part."""
    logits, parts = [], []
    for part in ids.split(split, dim=1):
        out, records = run_captured(model, part, past_key_values=cache, use_cache=True)
        logits.append(out)
        parts.append(records)
    return torch.cat(logits, 1), parts


def assert_parts(
    parts: list[list[AttentionRecord]], full_pass_records: list[AttentionRecord], split: list[int]
) -> None:
    stop = 0
    for records, length in zip(parts, split, strict=True):
        rows, stop = slice(stop, stop + length), stop + length
        assert [record.layer for record in records] == [record.layer for record in full_pass_records]
        for record, full in zip(records, full_pass_records, strict=True):
            keys = slice(record.first_key, stop)
            assert record.window is not None or record.chunk_size is not None or record.first_key == 0
            for name in ("q", "z"):
                assert difference(getattr(record, name), getattr(full, name)[:, rows]) <= 1e-3, name
            for name in ("k", "v"):
                assert difference(getattr(record, name), getattr(full, name)[:, keys]) <= 1e-3, name
            assert difference(record.lse, full.lse[:, rows]) <= 1e-3
            assert torch.equal(record.visible_counts, full.visible_counts[rows])
            assert torch.equal(record.query_key_index + record.first_key, torch.arange(rows.start, rows.stop))


@ATTENDING
@SPLITS
def test_records_of_a_cached_pass_are_rows_of_the_full_pass(family: str, split: list[int]) -> None:
    model = tiny(family)
    expected, full_pass_records = run_captured(model, IDS[:1], use_cache=False)
    logits, parts = run_in_parts(model, IDS[:1], split, DynamicCache(config=model.module.config))
    assert difference(logits, expected) <= 1e-3
    assert_parts(parts, full_pass_records, split)


@pytest.mark.parametrize("family", ["llama-gqa", "gpt_neox"])
@SPLITS
def test_records_leave_out_empty_slots_of_a_static_cache(family: str, split: list[int]) -> None:
    model = tiny(family)
    expected, full_pass_records = run_captured(model, IDS[:1], use_cache=False)
    logits, parts = run_in_parts(model, IDS[:1], split, StaticCache(config=model.module.config, max_cache_len=40))
    assert difference(logits, expected) <= 1e-3
    assert_parts(parts, full_pass_records, split)


# Refusals ----------------------------------------------------------------------------------------------------------


def between_documents(mask: Tensor) -> Tensor:
    return mask.index_fill(2, torch.tensor([20]), True).tril()


@MEASURABLE
@pytest.mark.parametrize(
    "change", [torch.ones_like, torch.zeros_like, between_documents, lambda mask: torch.where(mask, 0.5, -1e9)]
)
def test_a_dense_mask_that_is_not_causal_within_documents_is_refused(
    family: str, change: Callable[[Tensor], Tensor]
) -> None:
    with refuses(UnsupportedMask, "4-D", "2-D", "documents"):
        run_captured(tiny(family), IDS[:1], attention_mask=change(dense_mask([16, 8])), use_cache=False)


@MEASURABLE
def test_a_quantised_cache_is_refused(family: str) -> None:
    model = tiny(family)
    cache = DynamicCache(config=model.module.config)
    quantised = type("QuantoQuantizedLayer", (type(cache.layers[0]),), {})
    for layer in cache.layers:
        layer.__class__ = quantised
    with refuses(UnsupportedModel, "quantized", "cache"):
        run_captured(model, IDS[:1], past_key_values=cache, use_cache=True)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("indices", "indexer"),
        ("block_indices", "indexer"),
        ("position_bias", "bias"),
        ("sinks", "sink"),
        ("anything", "'anything'"),
    ],
)
def test_a_keyword_that_may_change_weights_is_refused_by_name(name: str, named: str) -> None:
    model = tiny("llama")
    q = torch.zeros(1, 4, 3, 16)
    with refuses(UnsupportedModel, "llama", named):
        backend.attention_forward(model.attention_modules[0], q, q, q, None, **{name: torch.zeros(1)})
    backend.attention_forward(model.attention_modules[0], q, q, q, None, **{name: None})


def test_attention_in_both_directions_is_refused() -> None:
    model = tiny("llama")
    q = torch.zeros(1, 4, 3, 16)
    with refuses(UnsupportedModel, "llama", "directions"):
        backend.attention_forward(model.attention_modules[0], q, q, q, None, is_causal=False)
    with backend.using_backend(model.module):
        mask = create_bidirectional_mask(model.module.config, torch.zeros(1, 3, 64), None)
    with refuses(UnsupportedModel, "mask", "causal"):
        DecodedMask.decode(mask)


@pytest.mark.parametrize("arguments", [(0.0,), (0.0, 0.25), (0.0, 0.25, None)], ids=["dropout", "scaling", "is_causal"])
def test_library_that_wraps_every_attention_function_may_pass_arguments_by_position(
    arguments: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As kvpress does at import, in the order of transformers' own registered functions."""
    functions = ALL_ATTENTION_FUNCTIONS

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(module: Any, q: Any, k: Any, v: Any, mask: Any, dropout: float, **kwargs: Any) -> Any:
            named = dict(zip(("scaling", "is_causal"), arguments[1:], strict=False))
            kwargs = {name: value for name, value in kwargs.items() if name not in named}
            return function(module, q, k, v, mask, dropout, *arguments[1:], **kwargs)

        return wrapper

    module = families.SPECS["llama"].build()
    expected = module(IDS[:1]).logits
    for name in list(functions):
        monkeypatch.setitem(functions, name, wrap(functions[name]))
    model = load(module)
    logits, records = run_captured(model, IDS[:1])
    assert difference(logits, expected) <= 1e-4
    assert {record.scaling for record in records} == {0.25}


def test_a_window_that_only_the_mask_contains_is_applied() -> None:
    """Phi-MoE and others do not pass `sliding_window` to attention functions."""
    module = families.build(
        "phimoe", {"sliding_window": families.WINDOW, "num_local_experts": 2, "rope_parameters": None}
    )
    model = load(module)
    assert model.geometry.windows == (families.WINDOW,) * families.LAYERS
    expected, layers = eager_reference.eager_qk(module, IDS[:1])
    logits, records = run_captured(model, IDS[:1], use_cache=False)
    assert difference(logits, expected) <= 1e-4
    assert_records(records, layers, model.geometry.windows)


@pytest.mark.parametrize("layer", [-1, families.LAYERS])
def test_an_unknown_layer_is_bad_input(layer: int) -> None:
    with capturing(tiny("llama")) as layers:
        with refuses(BadInput, layer, 0, 3):
            layers.listen(print, [layer])
        with refuses(BadInput, layer, 0, 3):
            layers.edit_qkv(layer, lambda q, k, v, positions: (q, k, v))


# Edits and restoration ---------------------------------------------------------------------------------------------


def test_an_edit_has_the_effect_of_a_manual_replacement() -> None:
    """Zero queries give uniform attention, so each head returns the running mean of its KV group's values."""
    model = tiny("llama-gqa")
    edit_positions: list[Tensor] = []

    def zero_queries(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        edit_positions.append(positions)
        return torch.zeros_like(q), k, v

    records: list[AttentionRecord] = []
    with torch.no_grad(), capturing(model) as layers:
        layers.edit_qkv(1, zero_queries)
        layers.listen(records.append, [1])
        edited = model.module(IDS[:1], use_cache=False).logits
    assert torch.equal(edit_positions[0], torch.arange(LENGTH)[None])
    assert not records[0].q.any()
    assert difference(records[0].lse, records[0].visible_counts.log().expand(families.HEADS, -1)) <= 1e-5

    def mean_of_values(module: Any, args: tuple[Tensor]) -> tuple[Tensor]:
        v = records[0].v.repeat_interleave(families.HEADS // 2, 0)
        means = v.cumsum(1) / torch.arange(1, LENGTH + 1)[:, None]
        return (means.transpose(0, 1).reshape(1, LENGTH, -1),)

    hook = model.module.model.layers[1].self_attn.o_proj.register_forward_pre_hook(mean_of_values)
    with torch.no_grad():
        replaced = model.module(IDS[:1], use_cache=False).logits
        hook.remove()
        plain = model.module(IDS[:1], use_cache=False).logits
    assert difference(edited, replaced) <= 1e-4
    assert difference(edited, plain) > 0.1


def test_edits_apply_in_registration_order_and_end_with_the_capture() -> None:
    model = tiny("qwen3")
    calls: list[str] = []

    def logging_edit(name: str) -> backend.QKVEdit:
        def edit(q: Tensor, k: Tensor, v: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            calls.append(name)
            return q, k, v

        return edit

    with torch.no_grad(), capturing(model) as layers:
        layers.edit_qkv(2, logging_edit("first"))
        layers.edit_qkv(2, logging_edit("second"))
        model.module(IDS)
    with torch.no_grad(), capturing(model):
        model.module(IDS)
    assert calls == ["first", "second"]


def test_listener_receives_only_its_layers() -> None:
    model = tiny("olmo3")
    layers_called: list[int] = []
    with torch.no_grad(), capturing(model) as layers:
        layers.listen(lambda record: layers_called.append(record.layer), [3, 1])
        model.module(IDS[:1])
    assert layers_called == [1, 3]


def hook_state(model: Model) -> tuple[Any, ...]:
    """State that a capture changes and must restore."""
    hooks = [backend._hooks_by_module.get(module) for module in model.attention_modules]
    return (
        model.module.config._attn_implementation,
        sum(len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.module.modules()),
        sum(
            len(module_hooks.qkv_edits) + len(module_hooks.listeners)
            for module_hooks in hooks
            if module_hooks is not None
        ),
    )


@MEASURABLE
def test_leaving_restores_the_model_bit_for_bit_even_by_an_exception(family: str) -> None:
    model = tiny(family)
    before = hook_state(model)
    with torch.no_grad():
        expected = model.module(IDS).logits
    records: list[AttentionRecord] = []

    def failing(record: AttentionRecord) -> None:
        records.append(record)
        raise RuntimeError("a listener failed")

    def run() -> None:
        with torch.no_grad(), capturing(model) as layers:
            layers.edit_qkv(0, lambda q, k, v, positions: (q * 0, k, v))
            layers.listen(failing)
            model.module(IDS)

    with pytest.raises(RuntimeError, match="a listener failed"):
        run()
    assert hook_state(model) == before
    with torch.no_grad():
        assert torch.equal(model.module(IDS).logits, expected)
    assert len(records) == 1


# The kernels -------------------------------------------------------------------------------------------------------


def causal(queries: int, keys: int, window: int | None) -> Tensor:
    return eager_reference.visible(keys, window)[keys - queries :]


@pytest.mark.parametrize("fused", [kernel.fused_attention, kernel._fused_attention_non_cpu])
@pytest.mark.parametrize(("queries", "keys", "window"), [(600, 600, None), (1, 600, None), (300, 600, 50), (9, 600, 7)])
def test_output_and_log_sum_exp_are_exact(
    fused: Callable[..., tuple[Tensor, Tensor]], queries: int, keys: int, window: int | None
) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, queries, 16, generator=generator)
    k, v = (torch.randn(2, 2, keys, 16, generator=generator) for _ in range(2))
    visible_mask = causal(queries, keys, window)
    logits = 0.5 * q.double() @ k.double().repeat_interleave(2, 1).mT
    logits = logits.masked_fill(~visible_mask, -torch.inf)
    plain = queries in (1, keys)
    out, lse = fused(q, k, v, 0.5, plain and queries > 1, None if plain else visible_mask)
    assert difference(lse.double(), logits.logsumexp(-1)) <= 1e-5
    assert difference(out.double(), logits.softmax(-1) @ v.double().repeat_interleave(2, 1)) <= 1e-5


@pytest.mark.parametrize("reach", [{}, {"window": 50}, {"chunk_size": 70}], ids=str)
@pytest.mark.parametrize("bound", [{}, {"softcap": 1.5}, {"sink": torch.tensor([-4.0, 0.0, 3.0, 9.0])}], ids=str)
@pytest.mark.parametrize(("queries", "values"), [(600, 16), (1, 24), (300, 8)])
def test_every_attention_variant_is_exact_with_exact_gradients(
    queries: int, values: int, bound: dict[str, Any], reach: dict[str, Any]
) -> None:
    """Compared with float64; values may have another width than keys."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, queries, 16, generator=generator)
    k, v = (torch.randn(2, 2, 600, dim, generator=generator) for dim in (16, values))
    pull = torch.randn(2, 4, queries, values, generator=generator)
    inputs = [t.requires_grad_() for t in (q, k, v)]
    out, lse = kernel.attend(*inputs, None, kernel.AttentionVariant(0.5, **reach, **bound), 0.0, True)
    gradients = torch.autograd.grad((out * pull).sum(), inputs)
    assert lse is not None
    exact = [t.detach().double().requires_grad_() for t in inputs]
    logits = 0.5 * exact[0] @ exact[1].repeat_interleave(2, 1).mT
    logits = bound["softcap"] * torch.tanh(logits / bound["softcap"]) if "softcap" in bound else logits
    visible_mask = eager_reference.visible(600, reach.get("window"), reach.get("chunk_size"))[600 - queries :]
    logits = logits.masked_fill(~visible_mask, -torch.inf)
    if "sink" in bound:
        logits = torch.cat((logits, bound["sink"].double()[None, :, None, None].expand(2, -1, queries, 1)), -1)
    expected = logits.softmax(-1)[..., :600] @ exact[2].repeat_interleave(2, 1)
    assert difference(out.double(), expected) <= 1e-5
    assert difference(lse.double(), logits.logsumexp(-1)) <= 1e-5
    for gradient, eager in zip(gradients, torch.autograd.grad((expected * pull).sum(), exact), strict=True):
        assert difference(gradient.double(), eager) <= 1e-4


def test_a_sink_in_bfloat16_is_as_exact_as_its_keys() -> None:
    """1 / scaling has more digits than bfloat16 holds."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 4, 60, 16, generator=generator).bfloat16() for _ in range(3))
    sink = torch.tensor([0.0, 2.5, -3.0, 7.0])
    _, lse = kernel.attend(q, k, v, None, kernel.AttentionVariant(0.0883883, sink=sink.bfloat16()), 0.0, True)
    assert lse is not None
    logits = eager_reference.with_sink(eager_reference.logits(q[0], k[0], 0.0883883), sink)
    assert difference(lse[0].double(), logits.logsumexp(-1)) <= 1e-3


@pytest.mark.parametrize("window", [None, 1, 300])
def test_blocks_of_rows_cover_each_visible_pair_once(window: int | None) -> None:
    count = torch.zeros(600, 1000, dtype=torch.int64)
    for rows, cols, visible_mask in kernel.causal_row_blocks(600, 1000, window):
        count[rows, cols] += visible_mask
        assert visible_mask.numel() <= kernel.ROWS_PER_BLOCK * 1000
    assert torch.equal(count.bool(), causal(600, 1000, window))
    assert count.max() == 1


@pytest.mark.parametrize(
    ("edit", "named"),
    [
        (lambda z, call: z * float("nan"), "not finite"),
        (lambda z, call: z[:, :1], "shape"),
        (lambda z, call: z.double(), "dtype"),
        (lambda z, call: None, "tensor"),
    ],
)
def test_an_edit_of_head_outputs_that_does_not_fit_is_refused(edit: Any, named: str) -> None:
    model = tiny("llama-gqa")
    with torch.no_grad(), capturing(model) as layers:
        layers.edit_output(1, edit)
        with refuses(BadInput, "layer 1", "z", named):
            model.module(IDS[:1], use_cache=False)
