"""Sparse selections: rules and their statistics against sorted rows of eager attention, laws, planted heads."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import eager_reference, families
from support.dense_sparse_sets import dense_sets
from support.measure_laws import full_pass_record, geometry_of, weights
from support.refusals import refuses
from torch import Tensor

import headscope as hs
from headscope.attention.record import AttentionRecord
from headscope.forward.capture import capturing
from headscope.measures import sparse_rules
from headscope.measures.row_tile import RowTile
from headscope.measures.span_mass import row_weights
from headscope.measures.sparse_rows import SparseRows
from headscope.measures.sparse_rules import Rule, Top, parse_rule
from probes.sparsity.patterns import BlockSparse

LENGTH = 45
TINY = torch.finfo(torch.float32).tiny
"""In place of 0, since a row may keep no key."""
RULES = ("top:5", "group-top:5", "layer-top:5", "block:4:3", "block-mean:4:3", "block-bounds:4:3", "streaming:2:7",
         "vertical-slash:3:4", "top:1000")  # fmt: skip
ROWS = np.array([0, 3, 9, 17, 30, 31, 44])


def reference(alpha: Tensor, v: Tensor, chosen: Tensor, sink: Tensor) -> pd.DataFrame:
    """Statistics of each head over ROWS; `sink` [H, L] is the weight of a learned sink."""
    rows = []
    for h in range(len(alpha)):
        kept = torch.where(chosen[h], alpha[h], 0)[ROWS]
        recall = kept.sum(-1) / alpha[h][ROWS].sum(-1)
        z, sparse = alpha[h][ROWS] @ v[h], kept @ v[h] / (kept.sum(-1) + sink[h][ROWS]).clamp(min=TINY)[:, None]
        rows.append(
            {
                "recall": recall.mean(),
                "recall_q05": recall.quantile(0.05),
                "kl": -recall.clamp(min=TINY).log().mean(),
                "top1": chosen[h][ROWS].gather(-1, alpha[h][ROWS].argmax(-1, keepdim=True)).double().mean(),
                "error": ((sparse - z).norm(dim=-1) / z.norm(dim=-1)).mean(),
                "kept": chosen[h][ROWS].sum(-1).double().mean(),
            }
        )
    return pd.DataFrame(rows).astype(float)


def keys_needed(row: Tensor, share: float) -> int:
    return 1 + int((row.sort(descending=True).values.cumsum(0) < share * row.sum()).sum())


EIGHT = ("llama-gqa", "mistral-sliding", "phi", "gemma3", "smollm3", "gpt_neox", "gemma2", "gpt_oss")


@pytest.mark.exhaustive(sample=4)
@pytest.mark.slow
@pytest.mark.parametrize("logits_per_tile", [2**19, 1], ids=["all rows at once", "two rows at once"])
@pytest.mark.parametrize("family", EIGHT)
def test_every_rule_equals_sorted_rows_of_eager_attention(
    family: str, logits_per_tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headscope.measures.sparse_rows.LOGITS_PER_TILE", logits_per_tile)
    module = (families.MEASURABLE | {name: other.build for name, other in families.OTHERS.items()})[family]()
    ids = torch.randint(3, families.VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0))
    _, layers = eager_reference.eager_qk(module, ids)
    model, values = hs.load(module), {}
    rules = [*map(parse_rule, RULES), BlockSparse(4, 3)]
    sparse = SparseRows(model.geometry, rules, lambda *_: ROWS)
    with capturing(model) as captured, torch.no_grad():
        captured.listen(sparse.update)
        captured.listen(lambda record: values.update({record.layer: record.v}))
        model.module(ids)
    by_rule, by_head = map(pd.DataFrame, sparse.compute())
    for number, layer in zip(model.geometry.layer_numbers, layers, strict=True):
        alpha = eager_reference.layer_weights(layer)
        v = values[number].double().repeat_interleave(len(layer.q) // len(layer.k), 0)
        for n, rule in enumerate(map(str, rules)):
            stored = by_rule[(by_rule["layer"] == number) & (by_rule["rule"] == n)].sort_values("head")
            expected = reference(
                alpha, v, dense_sets(rule, alpha, layer.q.double(), layer.k.double()), 1 - alpha.sum(-1)
            )
            for name in expected:  # the two passes differ in rounding, which a quantile, log or ratio enlarges
                tolerance = 1e-6 if name in ("recall", "top1", "kept") else 1e-5
                np.testing.assert_allclose(stored[name], expected[name], tolerance, tolerance, err_msg=f"{rule} {name}")
        needed = by_head[by_head["layer"] == number].sort_values("head")
        for name, share in (("keys_90", 0.9), ("keys_95", 0.95), ("keys_99", 0.99)):
            counts = [np.mean([keys_needed(alpha[h, i], share) for i in ROWS]) for h in range(len(alpha))]
            np.testing.assert_allclose(needed[name], counts, atol=1e-6)


def random_record(seed: int, length: int = 24, **fields: Any) -> AttentionRecord:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(n, length, 8, generator=generator) * 2 for n in (4, 2, 2))
    return replace(full_pass_record(q, k, **fields), v=v)


def measured(records: list[AttentionRecord], rules: list[str], rows: np.ndarray | None = None) -> pd.DataFrame:
    """The statistics by layer, head and rule."""
    of_rows = np.arange(records[0].k.shape[1]) if rows is None else rows
    geometry = geometry_of(windows=(None,) * (1 + max(record.layer for record in records)))
    sparse = SparseRows(geometry, [*map(parse_rule, rules)], lambda *_: of_rows)
    for record in records:
        sparse.update(record)
    frame = pd.DataFrame(sparse.compute()[0])
    return frame.assign(rule=np.array(rules)[frame["rule"]]).set_index(["rule", "layer", "head"])


def test_a_rule_that_extends_another_by_its_choice_is_measured_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class FirstAndTop(Top):
        name: ClassVar[str] = "first-and-top"

        def select(self, tile: RowTile) -> Tensor:
            chosen = super().select(tile)
            return chosen | (torch.arange(chosen.shape[-1]) < 4)

    monkeypatch.setitem(sparse_rules.known_rules(), FirstAndTop.name, FirstAndTop)
    stored = measured([random_record(0)], ["top:3", "first-and-top:3"], np.array([20]))
    assert (stored.loc["top:3", "kept"] == 3).all()
    assert (stored.loc["first-and-top:3", "kept"] >= 4).all()


@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([None, 7]), st.booleans())
def test_laws(seed: int, size: int, window: int | None, has_sink: bool) -> None:
    """Recall grows with the size; no rule beats `top` at equal size; top >= group-top >= layer-top; blocks of one key
    are `top`; a rule that keeps everything has recall 1 and changes nothing."""
    sink = torch.ones(4) if has_sink else None
    rules = [f"{name}:{n}" for name in ("top", "group-top", "layer-top", "block:1", "block:4") for n in (size, 30)]
    others = [f"block:4:{size}", f"block-mean:4:{size}", f"block-bounds:4:{size}", f"streaming:1:{size}"]
    rules = [*dict.fromkeys([*rules, *others, f"top:{size + 1}", f"vertical-slash:{size}:{size}"])]
    record = random_record(seed, window=window, sink=sink)
    stored = measured([record], rules, np.arange(3, 24))
    recall = stored["recall"].unstack("rule")
    tolerance = 1e-6
    assert (recall[f"top:{size + 1}"] >= recall[f"top:{size}"] - tolerance).all()
    assert (recall[f"top:{size}"] >= recall[f"group-top:{size}"] - tolerance).all()
    if not has_sink:  # a set shared by heads is the best for the mean of their masses, not for each of them
        of_groups = recall.groupby(recall.index.get_level_values("head") // 2).mean()
        assert (of_groups[f"group-top:{size}"] >= of_groups[f"layer-top:{size}"] - tolerance).all()
    pd.testing.assert_frame_equal(stored.loc[f"block:1:{size}"], stored.loc[f"top:{size}"])
    for rule in ("top:30", "group-top:30", "layer-top:30", "block:1:30", "block:4:30"):
        assert (stored.loc[rule, ["recall", "recall_q05", "top1"]] == 1).all(axis=None)
        assert (stored.loc[rule, ["error", "kl"]] == 0).all(axis=None)
    tile = RowTile(record, np.array([23]), *row_weights(record, np.array([23])), {})
    for rule in map(parse_rule, others):
        chosen = rule.select(tile).expand_as(tile.weights)[:, 0]
        kept = torch.where(chosen, tile.weights[:, 0], 0)
        for head, count in enumerate((chosen & (tile.weights[:, 0] > 0)).sum(-1).tolist()):
            assert kept[head].sum() <= tile.weights[head, 0].sort(descending=True).values[:count].sum() + tolerance


def test_overlaps_are_those_of_the_query_before_and_of_the_layer_below() -> None:
    records = [replace(random_record(layer), layer=layer) for layer in range(2)]
    stored = measured(records, ["top:3", "streaming:1:2"], np.array([5, 20]))
    for layer, record in enumerate(records):
        sets = [dense_sets("top:3", weights(r), r.q, r.k) for r in records]

        def overlap(a: Tensor, b: Tensor) -> float:
            return float((a & b).sum() / (a | b).sum())

        for head in range(len(record.q)):
            mine = sets[layer][head]
            expected = np.mean([overlap(mine[i], mine[i - 1]) for i in (5, 20)])
            assert stored.loc[("top:3", layer, head), "overlap"] == pytest.approx(expected)
            below = [np.mean([overlap(mine[i], sets[0][h, i]) for i in (5, 20)]) for h in range(4)]
            value = stored.loc[("top:3", layer, head), "layer_overlap"]
            assert value == pytest.approx(max(below)) if layer else np.isnan(value)
    assert stored.loc["streaming:1:2", "overlap"].to_numpy() == pytest.approx(2 / 4)
    assert stored.loc[("streaming:1:2", 1), "layer_overlap"].to_numpy() == pytest.approx(1)


def test_layers_of_other_windows_are_compared_in_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in gemma2, whose layers alternate. Rows that are only compared are in no mean."""
    monkeypatch.setattr("headscope.measures.sparse_rows.LOGITS_PER_TILE", 1)
    model, records = hs.load(families.FAMILIES["gemma2"](), device="cpu"), list[AttentionRecord]()
    with capturing(model) as captured, torch.no_grad():
        captured.listen(records.append)
        model.module(torch.randint(3, families.VOCAB, (1, LENGTH), generator=torch.Generator().manual_seed(0)))
    selected = {records[0].window: np.array([9, 30, 31]), None: ROWS}
    sparse = SparseRows(model.geometry, [parse_rule("top:3")], lambda window, _: selected[window])
    for record in records:
        sparse.update(record)
    stored = pd.DataFrame(sparse.compute()[0]).set_index(["layer", "head"])
    sets = [dense_sets("top:3", weights(record), record.q, record.k) for record in records]
    for layer, record in enumerate(records):
        assert stored.loc[layer, "kept"].to_numpy() == pytest.approx(np.minimum(3, selected[record.window] + 1).mean())
    for layer in range(1, len(records)):
        for head, mine in enumerate(sets[layer]):
            below = [
                np.mean([float((mine[i] & other[i]).sum() / (mine[i] | other[i]).sum()) for i in (3, 9, 30, 44)])
                for other in sets[layer - 1]
            ]
            assert stored.loc[(layer, head), "layer_overlap"] == pytest.approx(max(below))


def test_a_text_in_chunks_has_the_statistics_of_one_pass() -> None:
    record, rules = random_record(0, 48), ["top:3", "group-top:4", "block:4:2", "streaming:2:3"]
    chunks = [
        replace(record, **{name: getattr(record, name)[:, cut] for name in ("q", "z", "lse")},
                k=record.k[:, : cut.stop], v=record.v[:, : cut.stop])
        for cut in (slice(0, 16), slice(16, 32), slice(32, 48))
    ]  # fmt: skip
    rows = np.arange(48)
    pd.testing.assert_frame_equal(measured(chunks, rules, rows), measured([record], rules, rows), rtol=1e-6)


@pytest.mark.parametrize("layout", [{"window": 9}, {"chunk_size": 12}])
def test_hidden_blocks_do_not_compete_so_statistics_do_not_depend_on_the_tiles(
    layout: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    record, rules = random_record(1, 48, **layout), ["block:4:2", "block-mean:4:2", "block-bounds:4:2", "top:3"]
    one_tile = measured([record], rules)
    monkeypatch.setattr("headscope.measures.sparse_rows.LOGITS_PER_TILE", 1)
    pd.testing.assert_frame_equal(measured([record], rules), one_tile, rtol=1e-6)


def test_a_head_that_copies_one_far_key_needs_one_key_and_a_uniform_head_needs_95_percent_of_them() -> None:
    length = 100
    q, k = torch.zeros(2, length, 8), torch.zeros(2, length, 8)
    q[0, :, 0], k[0, 7, 0] = 100.0, 1.0
    record = replace(full_pass_record(q, k), v=torch.randn(2, length, 8))
    rows = np.array([19, 59, 99])
    sparse = SparseRows(geometry_of(2, 2, windows=(None,)), [parse_rule("top:1")], lambda *_: rows)
    sparse.update(record)
    by_rule, by_head = sparse.compute()
    np.testing.assert_allclose(by_head["keys_95"], [1, np.mean([19, 57, 95])])
    np.testing.assert_allclose(by_head["keys_99"], [1, np.mean([20, 60, 99])])
    np.testing.assert_allclose(by_rule["recall"], [1, np.mean(1 / (rows + 1))], atol=1e-6)
    np.testing.assert_allclose(by_rule["top1"], 1)  # all keys of a uniform row are its heaviest


@pytest.mark.parametrize("text", ["tops:3", "top", "top:0", "top:-1", "top:3:4", "block:64", "top:x", "top:99999999"])
def test_other_rules_are_refused(text: str) -> None:
    with refuses(ValueError, f"'{text}'"):
        parse_rule(text)


@dataclass(frozen=True)
class EveryNth(Rule):
    step: int
    name: ClassVar[str] = "every"
    meaning: ClassVar[str] = "the own key and every n-th before it"

    def select(self, tile: RowTile) -> Tensor:
        return (tile.distance % self.step == 0)[None]


@dataclass(frozen=True)
class OtherTop(EveryNth):
    name: ClassVar[str] = "top"


@pytest.fixture
def third_party_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A rule of another package, one that cannot be imported, and others with the name of a rule or no rule."""
    values = {"broken": "no_such_module:RULE", "top": f"{__name__}:OtherTop", "every": f"{__name__}:EveryNth",
              "number": f"{__name__}:LENGTH"}  # fmt: skip
    entries = [EntryPoint(name, value, sparse_rules.GROUP) for name, value in values.items()]
    monkeypatch.setattr(sparse_rules, "entry_points", lambda group: entries)
    sparse_rules.known_rules.cache_clear()
    yield
    sparse_rules.known_rules.cache_clear()


@pytest.mark.usefixtures("third_party_rules")
def test_a_broken_rule_of_another_package_is_reported_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    assert parse_rule("every:3") == EveryNth(3)
    assert EveryNth.needs_dense_weights
    assert type(parse_rule("top:3")) is sparse_rules.Top
    with refuses(ValueError, "'broken:3'", "every"):
        parse_rule("broken:3")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split("'")[1] for line in lines] == ["broken", "top", "number"]
    assert not any("\n" in line for line in lines)
