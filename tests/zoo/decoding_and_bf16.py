"""As checkpoints are used: decoding with a cache, and in bfloat16. One family of each kind of attention."""

from collections.abc import Callable

import torch
from torch import Tensor
from transformers import PreTrainedModel

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.measures.attention_rows import ROW_STATISTICS, row_statistics
from headscope.positions.model import Model
from probes.measure.run import measure_tokens

from . import checks, sizes
from .eager import Truth, binned, eager, statistics, tokens

KINDS = {
    "llama": "plain",
    "gemma3_text": "windows in some layers, two bases",
    "qwen3_moe": "a mixture of experts",
    "qwen3_next": "hybrid",
    "gpt2": "no rotation",
    "gptj": "attention code of its own, interleaved rotation",
    "gpt_neo": "attention code of its own, windows in some layers",
    "bloom": "ALiBi",
    "falcon": "attention code of its own, one key head",
    "doge": "a learned bias on each key",
    "gpt_oss": "sinks",
    "gemma2": "soft-capped logits",
    "deepseek_v3": "latent attention",
    "llama4_text": "chunks",
    "qwen2_5_vl": "the text part of a vision-language model",
}
PREFIX = sizes.LENGTH - 12
"""Tokens that are read at once before the rest follow one by one: the last windows lie behind the prefix."""
CACHE_TOLERANCE = 3e-4
"""What decoding with a cache may differ from one eager pass, relative, in float32."""
MAX_BF16_RATIO = 1.5
"""How many times further from float32 than the family's own bfloat16 a measurement in bfloat16 may be."""


def check_cached_decoding(make: Callable[[], PreTrainedModel]) -> checks.Verdict:
    """Is decoding with a cache right?"""
    module = make()
    ids = tokens(module)
    truth = eager(module, ids)
    errors = decoding_errors(hs.load(module), ids, truth)
    wrong = {name: error for name, error in errors.items() if not error <= CACHE_TOLERANCE}
    return _verdict(errors, [f"{name} {error:.1e}" for name, error in wrong.items()])


def check_bfloat16(make: Callable[[], PreTrainedModel]) -> checks.Verdict:
    """Is a measurement in bfloat16 as good as the family's own attention in bfloat16?"""
    errors = bfloat16_errors(make())
    wrong = [
        f"{name} off by {error:.1e}, its own attention by {eager_error:.1e}"
        for name, (error, eager_error) in errors.items()
        if not error <= MAX_BF16_RATIO * eager_error
    ]
    return _verdict({name: error for name, (error, _) in errors.items()}, wrong)


def _verdict(errors: dict[str, float], wrong: list[str]) -> checks.Verdict:
    return checks.Verdict("WRONG" if wrong else "right", ", ".join(wrong), errors)


@torch.no_grad()
def decoding_errors(model: Model, ids: Tensor, truth: Truth) -> dict[str, float]:
    """Largest relative errors of logits and row statistics, against the same rows of one eager pass without cache."""
    records: list[AttentionRecord] = []
    with hs.capturing(model) as layers:
        layers.listen(records.append)
        cached_logits = decoded_logits(model.module, ids)
    return {"logits": checks.relative(cached_logits, truth.logits[0])} | _row_errors(model, records, truth)


@torch.no_grad()
def decoded_logits(module: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits [L, V] of ids [1, L], of which PREFIX tokens are read at once and the rest one by one."""
    out = module(input_ids=ids[:, :PREFIX], use_cache=True)
    logits = [out.logits[0]]
    for token in ids[:, PREFIX:].split(1, 1):
        out = module(input_ids=token, past_key_values=out.past_key_values, use_cache=True)
        logits.append(out.logits[0])
    return torch.cat(logits).float()


def _row_errors(model: Model, records: list[AttentionRecord], truth: Truth) -> dict[str, float]:
    calls = checks.by_layer(model, truth)
    assert calls is not None
    expected = [statistics(call) for call in calls.values()]
    row = [0] * len(calls)
    worst: dict[str, float] = {}
    for record in records:
        rows = record.q.shape[1]
        measured = row_statistics(record, torch.arange(rows))
        own_rows = slice(row[record.layer], row[record.layer] + rows)
        row[record.layer] += rows
        for name, values in zip(ROW_STATISTICS, measured, strict=True):
            error = checks.statistic_error(name, values.numpy(), expected[record.layer][name][:, own_rows].numpy())
            worst[name] = max(worst.get(name, 0.0), error)
    assert set(row) == {truth.logits.shape[1]}
    return worst


def bfloat16_errors(module: PreTrainedModel) -> dict[str, tuple[float, float]]:
    """Mean errors in bfloat16 against float32, of headscope and of the family's own eager attention."""
    ids = tokens(module)
    exact = eager(module, ids)
    module = module.to(torch.bfloat16)
    eager_bfloat16 = eager(module, ids)
    model = hs.load(module)
    measured = measure_tokens(model, ids[0], ["attention", "nll"], None)
    truth, rounded = (_ess(model, truth_of_dtype) for truth_of_dtype in (exact, eager_bfloat16))
    ess = torch.from_numpy(measured["attention"]["log_ess2"])
    with hs.capturing(model), torch.no_grad():
        logits = model.module(input_ids=ids, use_cache=False).logits.float()
    return {
        "logits": (_distance(logits, exact.logits), _distance(eager_bfloat16.logits, exact.logits)),
        "ln ESS": (_distance(ess, truth), _distance(rounded, truth)),
    }


def _ess(model: Model, truth: Truth) -> Tensor:
    """Mean ln ESS in the order of the attention table: layer, visible, head."""
    calls = checks.by_layer(model, truth)
    assert calls is not None
    return torch.cat([columns["log_ess2"] for call in calls.values() for _, columns in sorted(binned(call).items())])


def _distance(measured: Tensor, expected: Tensor) -> float:
    return float((measured - expected).abs().mean())
