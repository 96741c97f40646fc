"""The sparsity probe: tables against the measure, statistics, results, checks, charts, needles and pattern files."""

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from support import eager_reference, families
from support.measure_laws import geometry_of
from support.refusals import refuses
from support.tiny_studies import save_checkpoint, save_texts, tokenizer

import headscope as hs
from headscope.errors import BadInput
from headscope.measures.row_sampling import select_last_octave
from headscope.measures.sparse_rules import RESERVED_NAMES
from headscope.prompts.texts import load_token_documents
from headscope.rendering import assembly
from headscope.results.check_file import parse_checks
from headscope.results.checks import run_checks
from headscope.results.words import sentence
from headscope.run import Run
from headscope.scores.minference import read_patterns
from probes.sparsity import results
from probes.sparsity.analysis import (
    best_families,
    costs_by_head,
    recall_at_equal_cost,
    recall_curves,
    rule_family,
    shared_pair,
    shown_rules,
)
from probes.sparsity.declaration import BEST, DENSE, INDEXER, TEXT, SparsityOptions
from probes.sparsity.declaration import PUBLISHED as PUBLISHED_RULE
from probes.sparsity.patterns import head_patterns
from probes.sparsity.results import FEW_KEYS, keys_result
from probes.sparsity.run import SparsityRunner
from probes.sparsity.view import charts, head_charts

LENGTH, DOCS, ROWS = 40, 3, 8
FAMILIES = ("top", "group-top", "layer-top", "block-mean:4", "streaming:1", "vertical-slash")
RULES = [
    *(f"{name}:{size}" for name in ("top", "group-top", "layer-top") for size in (4, 8)),
    *(
        "block-mean:4:1",
        "block-mean:4:3",
        "streaming:1:3",
        "streaming:1:15",
        "vertical-slash:2:2",
        "vertical-slash:8:8",
    ),
]
PUBLISHED = [
    {str(head): ["vertical_and_slash", 2 + head, 3, 0.9] for head in range(families.HEADS)}
    for _ in range(families.LAYERS)
]
"""The sizes of the heads of the tiny model, in the published form."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint, texts and a pattern file."""
    folder = tmp_path_factory.mktemp("sparsity")
    save_checkpoint(folder / "tiny")
    save_texts(folder / "texts")
    (folder / "pattern.json").write_text(json.dumps(PUBLISHED))
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Run:
    models = {"base": str(folder / "tiny"), "yarn": f"{folder / 'tiny'}@yarn:factor=4"}
    return hs.sparsity(
        models, text=f"file:{folder}/texts/*.txt", docs=DOCS, lengths=[LENGTH], rows=ROWS, rules=RULES,
        patterns=str(folder / "pattern.json"), out=folder / "runs", quiet=True,
    )  # fmt: skip


def test_recall_of_top_and_needed_keys_equal_sorted_rows_of_eager_attention(folder: Path, run: Run) -> None:
    module = hs.load(str(folder / "tiny"), device="cpu").module
    recall = run.rows("sparse_rows", model="base", rule="top:4").set_index(["doc", "layer", "head"])["recall"]
    keys = run.rows("sparse_keys", model="base").set_index(["doc", "layer", "head"])["keys_95"]
    documents = load_token_documents(f"file:{folder}/texts/*.txt", tokenizer(), DOCS, LENGTH)
    for number, document in enumerate(documents):
        doc, rows = document.name, select_last_octave(LENGTH, ROWS, number)
        _, layers = eager_reference.eager_qk(module, torch.tensor(document.ids[:LENGTH])[None])
        for layer, eager in enumerate(layers):
            ordered = eager_reference.layer_weights(eager)[:, rows].sort(descending=True).values
            np.testing.assert_allclose(recall[doc, layer], ordered[..., :4].sum(-1).mean(-1), atol=1e-6)
            needed = 1 + (ordered.cumsum(-1) < 0.95).sum(-1).double().mean(-1)
            np.testing.assert_allclose(keys[doc, layer], needed, atol=1e-6)


def test_the_head_table_has_means_with_intervals_over_documents(run: Run) -> None:
    heads = run.heads[run.heads["model"] == "yarn"].set_index(["layer", "head"])
    stored = run.rows("sparse_keys", model="yarn").astype({"keys_95": float}).groupby(["layer", "head"])["keys_95"]
    np.testing.assert_allclose(heads["sparse_keys"], stored.mean(), rtol=1e-6)
    assert (heads["sparse_recall_low"] < heads["sparse_recall_high"]).all()
    recall = run.rows("sparse_rows", model="yarn").astype({"recall": float, "rule": str})
    means = recall.groupby(["rule", "layer", "head"])["recall"].mean()
    np.testing.assert_allclose(heads["sparse_recall"], means["top:8"], rtol=1e-6)
    np.testing.assert_allclose(heads["sparse_shared_loss"], means["top:8"] - means["layer-top:8"], atol=1e-6)


def test_a_rule_that_is_given_twice_is_measured_once() -> None:
    options = SparsityOptions(rules=["top:4", "block:4:2", "top:04", "group-top:4"])
    assert [*map(str, SparsityRunner(options, None).rules)] == ["top:4", "block:4:2", "group-top:4"]


def test_the_shown_size_is_the_middle_one_in_any_order() -> None:
    rules = [f"{name}:{size}" for size in (1024, 64, 256) for name in ("top", "layer-top", "block:64")]
    run = SimpleNamespace(table=lambda name: pd.DataFrame({"rule": [*rules, "minference"]}))
    assert shown_rules(run) == ["top:256", "layer-top:256", "block:64:256", "minference"]
    assert shared_pair(run) == ("top:256", "layer-top:256")


def test_the_best_rule_has_the_largest_recall_at_the_cost_of_the_shown_rule(run: Run) -> None:
    recall, best = recall_at_equal_cost(run, "base"), best_families(run, "base")
    assert {*recall} >= {*FAMILIES}
    allowed = recall[[*FAMILIES[3:]]]
    np.testing.assert_allclose([recall.loc[head, best[head]] for head in best.index], allowed.max(axis=1)[best.index])
    usable = run.rows("sparse_rows", model="base", needs_dense=False)["rule"].unique()
    assert {*map(rule_family, usable)} == {*FAMILIES[3:], "minference"}
    curve = recall_curves(run, "base", 0, 0).query("family == 'streaming:1'")
    assert [*curve["kept"]] == [4, 16]
    between = np.interp(np.log(8), np.log([4, 16]), curve["recall"])
    assert recall.loc[(0, 0), "streaming:1"] == pytest.approx(between, abs=1e-6)
    assert [rule_family(rule) for rule in ("top:4", "block:64:2", "vertical-slash:3:4", "minference")] == [
        "top", "block:64", "vertical-slash", "minference"]  # fmt: skip


def test_windowed_heads_are_compared_at_their_own_cost() -> None:
    """The second head sees 6 keys, fewer than the mean cost of both."""
    recall = {"top": 0.9, "streaming:1": 0.5, "vertical-slash": 0.6}
    rules = [f"top:{size}" for size in (4, 8, 16)] + ["streaming:1:3", "streaming:1:15", "vertical-slash:9:9"]
    rows = [
        {"model": "base", "context_length": 32, "doc": "a", "rows_of": TEXT, "layer": 0, "head": head, "rule": rule,
         "needs_dense": rule.startswith("top"), "recall": recall[rule_family(rule)],
         "kept": float(min(sum(map(int, re.findall("[0-9]+", rule))), keys))}
        for head, keys in ((0, 32), (1, 6)) for rule in rules
    ]  # fmt: skip
    run = SimpleNamespace(table=lambda name: pd.DataFrame(rows))
    assert costs_by_head(run, "base").to_list() == [8, 6]
    assert best_families(run, "base").to_list() == ["streaming:1", "vertical-slash"]  # the first keeps 18 keys with it
    assert recall_at_equal_cost(run, "base", 7)["top"].isna().to_list() == [False, True]


@pytest.mark.slow
def test_results_name_the_worst_head_and_checks_bound_it_by_layer(run: Run) -> None:
    answers = [result for result in results.results(run) if result.model == "base"]
    worst = next(r for r in answers if r.question == "sparsity.worst_head" and r.where["rule"] == "streaming:1:15")
    rows = run.rows("sparse_rows", model="base", rule="streaming:1:15").astype({"recall": float})
    means = rows.groupby(["layer", "head"])["recall"].mean()
    assert (worst.layer, worst.head) == means.idxmin()
    assert worst.value == pytest.approx(means.min())
    assert worst.low < worst.value < worst.high
    of_layer = means[0].min()
    low, high = next((part.low, part.high) for part in worst.parts if part.where["in_layer"] == 0)
    assert 0 < low < of_layer < high < 1
    for bound, outcome in ((low - 0.01, "passes"), (of_layer, "undecided"), (high + 0.01, "fails")):
        entry = {"result": "sparsity.worst_in_layer", "model": "base", "at_least": bound}
        entry |= {"where": {"rule": "streaming:1:15", "in_layer": 0}}
        checks = parse_checks([entry], "checks.yaml")
        (checked,) = run_checks(run, checks)
        assert checked.value == pytest.approx(of_layer)
        assert checked.outcome == outcome
    assert {r.question for r in answers} == {f"sparsity.{name}" for name in
            ("keys", "shared_set", "best_rule", "worst_head", "patterns")}  # fmt: skip
    for result in (*answers, *results.head_results(run, "base", 1, 2)):
        assert "{" not in sentence(result)


@pytest.mark.parametrize(("pattern", "rule"), [("vertical_and_slash", "vertical-slash"), ("stream_llm", "streaming")])
def test_a_pattern_file_in_the_published_form_gives_each_head_its_own_sizes(
    run: Run, folder: Path, pattern: str, rule: str
) -> None:
    """With the sizes of one rule for every head, the file measures the same as the rule."""
    stored = run.rows("sparse_rows", model="base", rule="minference")
    assert len(stored) == DOCS * families.LAYERS * families.HEADS
    same = [{head: [pattern, 8, 8, 1.0] for head in layer} for layer in PUBLISHED]
    (folder / "same.json").write_text(json.dumps(same))
    again = hs.sparsity(
        str(folder / "tiny"), text=f"file:{folder}/texts/*.txt", docs=1, lengths=[LENGTH], rows=ROWS,
        rules=[f"{rule}:8:8"], patterns=str(folder / "same.json"), out=folder / "runs", quiet=True,
    )  # fmt: skip
    columns = ["layer", "head", "recall", "kl", "error", "kept"]
    ours, theirs = (again.rows("sparse_rows", rule=rule)[columns] for rule in (f"{rule}:8:8", "minference"))
    pd.testing.assert_frame_equal(ours.reset_index(drop=True), theirs.reset_index(drop=True))


def test_an_exported_file_is_read_as_minference_reads_it(run: Run, folder: Path) -> None:
    """`init_minference_parameters` takes the layer's object; its head's entry is unpacked into four values."""
    path = run.export("minference", folder / "out.json", model="base")
    layers = json.loads(path.read_text())
    recall = run.rows("sparse_rows", model="base").astype({"rule": str, "recall": float})
    recall = recall[recall["rule"].str.startswith("vertical-slash")].groupby(["layer", "head", "rule"])["recall"].mean()
    for layer_idx in range(families.LAYERS):
        best_pattern = {int(ii): jj for ii, jj in layers[layer_idx].items()}
        for head in range(families.HEADS):
            ty, vertical_size, slash_size, score = best_pattern.get(head, ("vertical_and_slash", 1000, 6096, 1))
            assert ty == "vertical_and_slash"
            assert score == pytest.approx(recall[layer_idx, head].max(), abs=6e-4)
            assert recall[layer_idx, head].idxmax() == f"vertical-slash:{vertical_size}:{slash_size}"
    assert json.loads((folder / "out.json.headscope.json").read_text())["model"] == "base"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (PUBLISHED[:2], ("8 heads", "(1, 3)")),
        ([{"0": ["dilated1", 1, 1, 1]}], ("p.json", "L0H0", "'dilated1'", "vertical_and_slash", "block_sparse")),
        ([{"0": ["vertical_and_slash", 4.9, 3, 1]}], ("p.json", "L0H0", 4.9)),
        ([{"0": ["vertical_and_slash", 4, True, 1]}], ("p.json", "L0H0", "True")),
        ([{"0": PUBLISHED[0]["0"], "00": PUBLISHED[0]["0"]}], ("p.json", "'00'")),
        ([{}], ("p.json", "no head")),
        ({"0-1": [0.3]}, ("p.json", "[vertical_and_slash, vertical, slash, score]")),
        ([{"0": ["vertical_and_slash", -1, 3, 1]}], ("p.json", "L0H0", -1)),
        ([{"0": ["vertical_and_slash", 10**30, 3, 1]}], ("p.json", "L0H0", 10**30)),
        ([{"0": ["stream_llm", 0, 0, 1]}], ("p.json", "L0H0", "no key")),
        ([{"0": ["vertical_and_slash", 4, 3, "x"]}], ("p.json", "L0H0", "'x'")),
        ([{"0": ["vertical_and_slash", 4, 3, 1, 2]}], ("p.json", "L0H0", "[pattern, vertical, slash, score]")),
        ([{"0": [4, 3]}], ("p.json", "L0H0", "[pattern, vertical, slash, score]")),
    ],
)
def test_other_pattern_files_are_refused(folder: Path, tmp_path: Path, content: Any, named: tuple[str, ...]) -> None:
    (tmp_path / "p.json").write_text(json.dumps(content))
    options: dict[str, Any] = {"text": f"file:{folder}/texts/*.txt", "docs": 1, "lengths": [LENGTH], "quiet": True}
    with refuses(BadInput, *named) as raised:
        hs.sparsity(str(folder / "tiny"), patterns=str(tmp_path / "p.json"), out=tmp_path, **options)
    assert "\n" not in str(raised.value)


def test_charts_of_models_and_heads_have_data(run: Run) -> None:
    figures = [chart.figure for group in charts(assembly.render_context(run)) for chart in group.charts]
    assert len(figures) == 7  # matrices, layers, comparison, curves, bands, matrices, shared sets: two models in each
    assert all(figure.data for figure in figures)
    (chart,) = head_charts(run, "base", 1, 1)
    assert {trace.name for trace in chart.figure.data} == {*FAMILIES, "minference"}


def test_names_of_the_column_that_are_no_rules_are_reserved() -> None:
    assert {BEST, DENSE, INDEXER, PUBLISHED_RULE} == RESERVED_NAMES


def test_entries_of_a_published_file_are_read(tmp_path: Path) -> None:
    """The first heads of MInference's file of Qwen3-0.6B, as published, and its two other patterns."""
    entries = (
        '[{"0": ["vertical_and_slash", 3500, 100, 0.675], "1": ["vertical_and_slash", 1000, 6096, 0.981]}, '
        '{"0": ["stream_llm", 100, 800, 1.0], "1": ["block_sparse", 8, 1, 0.668]}]'
    )
    (tmp_path / "p.json").write_text(entries)
    columns = "vertical_and_slash"
    patterns = {(0, 0): (columns, 3500, 100), (0, 1): (columns, 1000, 6096)}
    patterns |= {(1, 0): ("stream_llm", 100, 800), (1, 1): ("block_sparse", 8, 1)}
    assert read_patterns(str(tmp_path / "p.json")) == patterns


def test_each_head_of_a_pattern_file_has_the_rule_of_its_pattern() -> None:
    patterns = {(0, 0): ("stream_llm", 2, 3), (0, 1): ("block_sparse", 8, 1), (0, 2): ("vertical_and_slash", 4, 5)}
    rule = head_patterns({**patterns, (0, 3): ("stream_llm", 2, 3)}, geometry_of(4, 2, 8, 4, windows=[None]), "base")
    names = [str(rule.rules[number]) for number in rule.numbers_by_layer[0]]
    assert names == ["streaming:2:3", "block-sparse:64:100", "vertical-slash:4:5", "streaming:2:3"]


def test_a_head_that_needs_as_many_keys_as_the_limit_needs_few_whatever_the_rounding() -> None:
    keys = [FEW_KEYS, FEW_KEYS * (1 + 1e-7), FEW_KEYS + 1]
    rows = pd.DataFrame({"layer": 0, "head": range(3), "doc": "a", "context_length": 512, "keys_95": keys})
    assert keys_result("base", rows).details["below"] == 2
