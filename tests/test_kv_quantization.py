"""Quantised keys and values: laws of the rounding, and heads attend to what a quantised cache would hold."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support import families
from support.tiny_studies import save_checkpoint, save_texts

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.interventions.edits import edit_units, edited
from headscope.interventions.heads import kv_group_units
from headscope.interventions.position_kinds import KVQuantization, fake_quantize

IDS = torch.randint(3, families.VOCAB, (1, 70), generator=torch.Generator().manual_seed(0))


def rounded(values: torch.Tensor, bits: int) -> torch.Tensor:
    """One vector, rounded number by number."""
    low, high = float(values.min()), float(values.max())
    levels = [low + (high - low) * n / (2**bits - 1) for n in range(2**bits)]
    return torch.tensor([min(levels, key=lambda level: abs(level - float(value))) for value in values])


@given(st.integers(0, 1000), st.sampled_from([2, 4, 8]), st.floats(1e-3, 1e3))
def test_rounding_is_to_the_nearest_level_and_keeps_minimum_and_maximum(seed: int, bits: int, scale: float) -> None:
    values = scale * torch.randn(1, 1, 9, 5, generator=torch.Generator().manual_seed(seed))
    quantised = fake_quantize(values, bits, dim=2)
    step = (values.amax(2, keepdim=True) - values.amin(2, keepdim=True)) / (2**bits - 1)
    assert ((quantised - values).abs() <= 0.5001 * step + 1e-5 * scale).all()
    for extreme in (torch.amin, torch.amax):
        torch.testing.assert_close(extreme(quantised, 2), extreme(values, 2), rtol=1e-4, atol=1e-5 * scale)
    torch.testing.assert_close(quantised[0, 0, :, 0], rounded(values[0, 0, :, 0], bits), rtol=1e-4, atol=1e-5 * scale)


def test_equal_numbers_are_unchanged() -> None:
    assert (fake_quantize(torch.full((1, 1, 4, 2), 3.5), 4, dim=2) == 3.5).all()


@pytest.mark.parametrize(
    "family", ["llama-gqa", "gemma3", "qwen3", "phi3", "gpt_neox", "granite", "cohere", "mistral-sliding"]
)
def test_heads_attend_to_quantised_keys_and_values(family: str) -> None:
    model = hs.load(families.MEASURABLE[family]())
    geometry = model.geometry
    edit = edit_units(KVQuantization(4), [unit for unit in kv_group_units(geometry) if unit.layer == 0], geometry)
    records: list[AttentionRecord] = []
    for edits in ((), (edit,)):
        with edited(model, edits) as layers, torch.no_grad():
            layers.listen(records.append, [0])
            model.module(IDS, use_cache=False)
    record, quantised = records
    keys = record.k.clone()
    for group in range(len(keys)):
        for channel in range(geometry.head_dim):
            for start in (0, 32, 64):
                keys[group, start : start + 32, channel] = rounded(record.k[group, start : start + 32, channel], 4)
    values = torch.stack([torch.stack([rounded(token, 4) for token in group]) for group in record.v])
    size = len(record.q) // len(keys)
    logits = record.soft_cap(record.scaling * record.q @ keys.repeat_interleave(size, 0).mT)
    i, j = torch.arange(70)[:, None], torch.arange(70)
    visible = (j <= i) & (i - j < (record.window or 70))
    weights = logits.masked_fill(~visible, -torch.inf).exp()
    sink = 0 if record.sink is None else record.sink.exp()[:, None]
    expected = (weights / (weights.sum(-1) + sink)[..., None]) @ values.repeat_interleave(size, 0)
    torch.testing.assert_close(quantised.z, expected, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(quantised.k, keys, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(quantised.v, values, rtol=1e-4, atol=1e-5)


def test_fewer_bits_change_the_loss_more(tmp_path: Any) -> None:
    save_checkpoint(tmp_path / "tiny")
    source = save_texts(tmp_path / "texts", 70)
    options = {"components": ["kv-int8", "kv-int4"], "lengths": [64], "method": "exact", "curve": True, "draws": 0}
    run = hs.influence(str(tmp_path / "tiny"), text=source, docs=2, out=tmp_path / "runs", quiet=True, **options)
    rows = run.influence.astype({"component": "str"})
    assert (rows["head"] == -1).all(), "keys and values belong to KV groups"
    change = rows["delta_nll"].abs().groupby(rows["component"]).mean()
    assert 0 < change["kv-int8"] < 0.25 * change["kv-int4"]
    assert {"influence_kv-int8", "influence_kv-int4"} <= {*run.heads}
    conditions = set(run.findings()["where"])
    assert any("intervention=kv-int4" in where for where in conditions)
