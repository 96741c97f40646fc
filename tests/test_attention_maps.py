"""Pooled attention maps: equal to eager weights averaged over blocks, and stored within their stated error."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import families
from support.measure_laws import geometry_of, random_record, weights
from support.tiny_studies import save_checkpoint, save_texts
from torch import Tensor

import headscope
from headscope.attention.record import AttentionRecord
from headscope.base import bins
from headscope.measures.pooled_map import PooledMaps
from headscope.rendering import assembly
from headscope.runs.arrow import decode_map, encode_map
from headscope.runs.run import Run, combine_runs
from headscope.runs.run_tables import validate
from probes.patterns import PROBE, lens, results, similarity, view


def eager_map(alpha: Tensor, size: int) -> Tensor:
    """Weights [H, L, L] averaged over blocks of query rows and summed over blocks of keys, one block at a time."""
    length = alpha.shape[1]
    starts = range(0, length, size)
    rows = [alpha[:, start : start + size].mean(1) for start in starts]
    return torch.stack([torch.stack([row[:, s : s + size].sum(-1) for s in starts], -1) for row in rows], 1)


def pooled(record: AttentionRecord, *more: AttentionRecord, length: int) -> Tensor:
    view = PooledMaps(geometry_of(windows=(None,)), length)
    for part in (record, *more):
        view.update(part)
    return view.compute()[0]


@pytest.mark.parametrize(
    "rule",
    [{}, {"window": 9}, {"chunk_size": 37}, {"softcap": 2.0}, {"sink": torch.tensor([2.0, -1.0, 0.0, 1.0])}],
    ids=["full", "window", "chunks", "soft cap", "learned sink"],
)
def test_a_pooled_map_is_the_eager_pattern_averaged_over_blocks(
    rule: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bins, "MAX_MAP_BLOCKS", 8)
    monkeypatch.setattr("headscope.measures.pooled_map.LOGITS_PER_TILE", 4 * 93 * 7)  # tiles of 7 rows, blocks of 12
    record = random_record(geometry_of(windows=(rule.pop("window", None),)), 93, 0, **rule)
    alpha = weights(record)
    actual = pooled(record, length=93)
    torch.testing.assert_close(actual, eager_map(alpha, 12).float(), atol=1e-6, rtol=1e-5)
    assert (actual >= 0).all()
    assert (actual.triu(1) == 0).all()
    sink = torch.zeros(4, 93) if record.sink_weight is None else record.sink_weight
    sink_share = torch.stack([part.mean(1) for part in sink.split(12, 1)], -1)
    torch.testing.assert_close(actual.sum(-1), 1 - sink_share, atol=1e-5, rtol=0)


def test_a_map_of_at_most_128_tokens_is_the_attention_pattern() -> None:
    record = random_record(geometry_of(windows=(None,)), 40, 1)
    torch.testing.assert_close(pooled(record, length=40), weights(record).float(), atol=1e-6, rtol=1e-5)


def test_chunks_of_queries_give_the_map_of_one_pass() -> None:
    whole = random_record(geometry_of(windows=(None,)), 150, 2)
    first, second = (
        AttentionRecord(0, 0, whole.q[:, rows], whole.k[:, : rows.stop], *whole_part(whole, rows))
        for rows in (slice(0, 77), slice(77, 150))
    )
    torch.testing.assert_close(pooled(first, second, length=150), pooled(whole, length=150), atol=1e-6, rtol=0)


def whole_part(record: AttentionRecord, rows: slice) -> tuple[Any, ...]:
    return record.v[:, : rows.stop], record.z[:, rows], record.lse[:, rows], record.scaling, record.window


def test_stored_weights_are_within_three_per_cent_and_small_ones_are_zero() -> None:
    rng = np.random.default_rng(0)
    exact = np.tril(10 ** rng.uniform(-9, 0, (90, 90)))
    stored = encode_map(exact)
    assert [len(row) for row in stored] == [*range(1, 91)]
    decoded = decode_map(stored)
    visible = exact > 1e-4
    assert (np.abs(decoded[visible] / exact[visible] - 1) < 0.03).all()
    assert (decoded[exact < 9.9e-5] == 0).all()
    assert encode_map(np.ones((1, 1))) == [b"\xff"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("maps")
    save_checkpoint(folder / "tiny")
    save_texts(folder / "texts")
    return headscope.patterns(
        {"base": str(folder / "tiny"), "yarn": f"{folder / 'tiny'}@yarn:factor=4"},
        text=f"file:{folder}/texts/*.txt",
        docs=2,
        lengths=[24, 48],
        rows=12,
        map=True,
        out=folder,
        quiet=True,
    )


def test_the_option_map_stores_every_head_over_the_first_document_at_the_longest_length(run: Run) -> None:
    view = run.table("attention_maps")
    assert view["context_length"].unique().tolist() == [48]
    assert view["doc"].nunique() == 1
    assert view.groupby(["model", "layer", "head"], observed=True).ngroups == 2 * families.LAYERS * families.HEADS
    assert validate(run) == []
    assert (run.table("attention_maps")["weights"].map(len) == view["query_block"] + 1).all()


def test_a_map_of_single_tokens_has_the_weights_of_the_stored_rows(run: Run) -> None:
    doc = run.table("attention_maps")["doc"].iloc[0]
    top = run.top_keys[(run.top_keys["doc"] == doc) & (run.top_keys["context_length"] == 48)]
    top = top.query("model == 'yarn' and layer == 2 and head == 1")
    rows = run.table("attention_maps").query("model == 'yarn' and layer == 2 and head == 1")
    decoded = decode_map(rows.sort_values("query_block")["weights"].tolist())
    np.testing.assert_allclose(decoded[top["query"], top["key"]], top["weight"], rtol=0.03, atol=1e-4)
    np.testing.assert_allclose(decoded.sum(1), 1, rtol=0.03)


def test_a_text_has_a_map_with_the_option_only_and_a_prompt_always(run: Run, tmp_path: Path) -> None:
    spec = run.manifest["models"][0]["spec"]
    text = {"text": run.manifest["config"]["texts"]["source"], "docs": 1, "lengths": [40]}
    assert "attention_maps" not in headscope.patterns(spec, **text, out=tmp_path, quiet=True).tables
    with_map = headscope.patterns(spec, prompt="w1 w2 w3", out=tmp_path, quiet=True)
    assert with_map.table("attention_maps")["query_block"].max() == 2


def test_the_map_of_a_short_prompt_names_its_tokens_and_that_of_a_text_some_positions(run: Run, tmp_path: Path) -> None:
    spec = run.manifest["models"][0]["spec"]
    short = headscope.patterns(spec, prompt="w1 w2 w3 w2", out=tmp_path, quiet=True)
    chart = view.head_map_chart(short, "base", 2, 1)
    assert chart is not None
    for axis in (chart.figure.layout.xaxis, chart.figure.layout.yaxis):
        assert axis.showticklabels
        assert [*axis.ticktext] == ["0: w1", "1: w2", "2: w3", "3: w2"]
    text = view.head_map_chart(run, "yarn", 2, 1)
    assert text is not None
    assert not text.figure.layout.xaxis.showticklabels
    positions = [one.text.strip() for one in text.figure.layout.annotations if one.name == "tick"]
    assert {*positions} == {"0", "12", "24", "35", "47"}


def test_a_run_of_maps_alone_is_combined_with_shorter_rows_of_the_same_models(run: Run, tmp_path: Path) -> None:
    specs = {entry["label"]: entry["spec"] for entry in run.manifest["models"]}
    text = {"text": run.manifest["config"]["texts"]["source"], "out": tmp_path, "quiet": True}
    rows = headscope.patterns(specs, **text, docs=2, lengths=[40], rows=12)
    alone = headscope.patterns(specs, **text, docs=1, lengths=[48], rows=0, map=True)
    assert {"top_keys", "far_keys"}.isdisjoint(alone.tables)
    assert alone.table("attention_maps").equals(run.table("attention_maps"))
    page = lens.lens_page(assembly.render_context(alone), {})
    assert page.sections[""][0].command == lens.PROBE.command_line
    assert view.head_map_chart(alone, "yarn", 2, 1) is not None
    count = families.LAYERS * families.HEADS
    counts = [{"model": label, "attention maps": count} for label in ("base", "yarn")]
    assert results.overview(alone).data.to_dict("records") == counts
    assert [(result.model, result.value) for result in PROBE.results(alone)] == [("base", count), ("yarn", count)]
    gallery, *_ = [chart for group in view.charts(assembly.render_context(alone)) for chart in group.charts]
    assert gallery.figure.layout.title.text.endswith("base")
    combined = combine_runs([rows, alone])
    assert combined.models == run.models
    assert combined.conflicting_row_counts == {}
    assert combined.heads["far_weight"].equals(rows.heads["far_weight"])
    doc = str(alone.pattern_texts["doc"][0])
    assert len(results.document_text(combined, "yarn", doc).token_texts) == 48
    chart = view.head_map_chart(combined, "yarn", 2, 1)
    assert chart is not None
    assert len([trace for trace in chart.figure.data if trace.type == "heatmap"]) == 3, "two models, their difference"
    assert not chart.cell_links
    assert "Lens" not in chart.caption
    nearest, expected = (similarity.row_distances(part, "yarn", 2, 1) for part in (combined, rows))
    assert nearest.equals(expected)
